"""Read a TFLite graph: flatten it, then find the drafter's roles and geometry."""
