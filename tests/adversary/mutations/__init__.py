"""Changes to what a drafter's graph computes, by family. Each is data: a name, and what is done to the graph.

A few of them make another *drafter* (another window, another soft cap, another theta), which a checkpoint can express:
then what is written must compute that. Most make something that is no drafter. The rule is the same: refused, or the
same function as the changed file.
"""

from __future__ import annotations

from adversary.edits import Case, Change
from adversary.mutations.attention import ALONG, HEADS, MASKS, ORDER, SCORES, WINDOWS
from adversary.mutations.blocks import GELU, NORMS, OUTPUTS, RESIDUALS
from adversary.mutations.files import COMPOSITES, DECLARED, INPUTS, INTERFACES, NAMES, RUNTIME
from adversary.mutations.fourth import FOURTH
from adversary.mutations.numbers import GRIDS, NOT_SEEN, NUMBER_TYPES, OPERATORS, UNKNOWN, WEIGHTS
from adversary.mutations.positions import KINDS, POSITIONS, ROPE, TABLES
from adversary.mutations.quiet import LOUDNESS, MISTAKES, SMOOTH, SUBTLE
from adversary.mutations.second import SECOND
from adversary.mutations.third_files import THIRD_FILES, THIRD_READERS
from adversary.mutations.third_numbers import THIRD_NUMBERS
from adversary.mutations.third_slots import THIRD_SLOTS
from adversary.mutations.third_weights import THIRD_WEIGHTS

__all__ = ["MUTATIONS"]

_FAMILIES: dict[str, dict[str, Change]] = {
    "masks": MASKS,
    "rope": ROPE,
    "scores": SCORES,
    "heads and caches": HEADS,
    "order": ORDER,
    "casts and grids": GRIDS,
    "norms": NORMS,
    "residuals": RESIDUALS,
    "outputs": OUTPUTS,
    "gelu": GELU,
    "weights": WEIGHTS,
    "inputs": INPUTS,
    "operators": OPERATORS,
    "subtle": SUBTLE,
    "composites": COMPOSITES,
    "names": NAMES,
}

_WHY = {"weights": NOT_SEEN, "names": dict.fromkeys(NAMES, RUNTIME), "operators": UNKNOWN}

MUTATIONS: tuple[Case, ...] = (
    *(
        Case(family, name, change, why=_WHY.get(family, {}).get(name, ""))
        for family, changes in _FAMILIES.items()
        for name, change in changes.items()
    ),
    *POSITIONS,
    *KINDS,
    *LOUDNESS,
    *NUMBER_TYPES,
    *TABLES,
    *MISTAKES,
    *INTERFACES,
    *SMOOTH,
    *DECLARED,
    *SECOND,
    *THIRD_WEIGHTS,
    *THIRD_SLOTS,
    *THIRD_NUMBERS,
    *THIRD_FILES,
    *THIRD_READERS,
    *WINDOWS,
    *ALONG,
    *FOURTH,
)
