"""The reference drafter: the function a checkpoint stands for, in PyTorch, and what any drafter is to the loop."""
