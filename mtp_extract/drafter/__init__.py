"""The reference drafter: the function a checkpoint stands for, in PyTorch.

>>> drafter = load_drafter("DIR")                                     # doctest: +SKIP
>>> logits, projected = drafter(inputs, shared_kv, position_ids)      # doctest: +SKIP

``protocol`` says what any drafter is to the loop, ``mtp`` and ``eagle3`` are the networks, ``network`` has what both
share, ``masks`` says what a query may see, ``load`` reads checkpoints strictly.
"""
