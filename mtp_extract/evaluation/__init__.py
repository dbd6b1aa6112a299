"""What tuning and validating both need: the base model, prompts, its own text, agreement with it, intervals."""
