"""A bundle's drafter or base held against a checkpoint: compared, or replaced."""
