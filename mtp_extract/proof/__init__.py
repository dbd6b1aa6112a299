"""What is written computes what the file computes: graph and checkpoint, executed side by side."""
