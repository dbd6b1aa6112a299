"""Compare config and every tensor of a checkpoint with the graph that it was read from."""
