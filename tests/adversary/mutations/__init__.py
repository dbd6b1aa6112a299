"""Changes to what a drafter's graph computes, by family. Each is data: a name, and what is done to the graph.

A few of them make another *drafter* (another window, another soft cap, another theta), which a checkpoint can express:
then what is written must compute that. Most make something that is no drafter. The rule is the same: refused, or the
same function as the changed file.
"""

from __future__ import annotations

from adversary.edits import Case, Change
from adversary.mutations.along import ALONG
from adversary.mutations.composites import COMPOSITES, NAMES, RUNTIME
from adversary.mutations.declared import DECLARED
from adversary.mutations.gelu import GELU
from adversary.mutations.grids import GRIDS
from adversary.mutations.heads import HEADS
from adversary.mutations.inputs import INPUTS
from adversary.mutations.interfaces import INTERFACES
from adversary.mutations.kinds import KINDS
from adversary.mutations.loudness import LOUDNESS
from adversary.mutations.masks import MASKS
from adversary.mutations.mistakes import MISTAKES
from adversary.mutations.norms import NORMS
from adversary.mutations.number_types import NUMBER_TYPES
from adversary.mutations.operators import OPERATORS, UNKNOWN
from adversary.mutations.order import ORDER
from adversary.mutations.outputs import OUTPUTS
from adversary.mutations.positions import POSITIONS
from adversary.mutations.residuals import RESIDUALS
from adversary.mutations.rope import ROPE
from adversary.mutations.scores import SCORES
from adversary.mutations.second import SECOND
from adversary.mutations.smooth import SMOOTH
from adversary.mutations.subtle import SUBTLE
from adversary.mutations.tables import TABLES
from adversary.mutations.third_files import THIRD_FILES
from adversary.mutations.third_numbers import THIRD_NUMBERS
from adversary.mutations.third_readers import THIRD_READERS
from adversary.mutations.third_slots import THIRD_SLOTS
from adversary.mutations.third_weights import THIRD_WEIGHTS
from adversary.mutations.weights import NOT_SEEN, WEIGHTS
from adversary.mutations.windows import WINDOWS

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
)
