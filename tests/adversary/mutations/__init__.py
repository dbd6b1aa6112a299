"""Changes to what a drafter's graph computes, by subject. Each is data: a name, and what is done to the graph.

A few of them make another *drafter* (another window, another soft cap, another theta), which a checkpoint can express:
then what is written must compute that. Most make something that is no drafter. The rule is the same: refused, or the
same function as the changed file. Families called second, third and fourth came with later attacks.
"""

from __future__ import annotations

from adversary.mutations import attention, blocks, files, kernels, numbers, positions, quiet

_MODULES = (attention, blocks, files, kernels, numbers, positions, quiet)
MUTATIONS = tuple(case for module in _MODULES for case in module.CASES)
