"""What ``tuning.py`` tunes on: prompts, and a base that moved."""
