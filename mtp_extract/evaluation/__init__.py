"""The base model, prompts, the base's text, agreement with it, and intervals: shared by tuning and validation."""
