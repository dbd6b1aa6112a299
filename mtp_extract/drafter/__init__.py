"""The reference drafters: the networks that checkpoints hold, in PyTorch, and their interface to the draft loop."""
