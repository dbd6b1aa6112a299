"""Changes to what a drafter's graph computes, by family. Each is data: a name, and what is done to the graph.

A few of them make another *drafter* (another window, another soft cap, another theta), which a checkpoint can express:
then what is written must compute that. Most make something that is no drafter. The rule is the same: refused, or the
same function as the changed file.
"""

from __future__ import annotations

from adversary.mutations import (
    attention,
    blocks,
    files,
    fourth,
    numbers,
    positions,
    quiet,
    second,
    third_files,
    third_numbers,
    third_slots,
    third_weights,
)

_FIRST = (attention, blocks, files, numbers, positions, quiet)
_LATER = (second, third_weights, third_slots, third_numbers, third_files, fourth)

MUTATIONS = tuple(case for module in (*_FIRST, *_LATER) for case in module.CASES)
