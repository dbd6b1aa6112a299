"""Other ways of writing the same function, as exporters and optimizers do.

A rewrite may be refused, and must not be extracted into something else. ``ACCEPTED`` in the tests lists those that are
read today; what leaves it is listed in docs/proof.md.
"""

from __future__ import annotations

from adversary.edits import Case, Change
from adversary.mutations.attention import windowed
from adversary.rewrites.second import INTERFACES, SECOND, THIRD
from adversary.rewrites.spelled import (
    ABSORBED,
    BLOCKS,
    CACHES,
    DETOURS,
    MASKS,
    NORMS,
    SCORES,
    SPELLED,
    WEIGHTS,
    layer_twice,
)

__all__ = ["REWRITES"]

_FAMILIES: dict[str, dict[str, Change]] = {
    "masks": MASKS,
    "caches": CACHES,
    "scores and rope": SCORES,
    "norms": NORMS,
    "blocks": BLOCKS,
    "detours": DETOURS,
    "weights": WEIGHTS,
    "absorbed": ABSORBED,
    "interfaces": INTERFACES,
}
_OTHERS = {"fp16_cast", "fp16_dequantized", "fp16_norms", "shared_by_layers"}

REWRITES: tuple[Case, ...] = (
    *(
        Case(f"same: {family}", name, change, rounds=name in _OTHERS)
        for family, changes in _FAMILIES.items()
        for name, change in changes.items()
    ),
    Case("same: weights", "layer_twice", layer_twice, layers=(0, 1, 3), rounds=True),
    *SPELLED,
    *SECOND,
    *THIRD,
    Case("same: windows of slots", "scored_and_weighed", windowed(32, 32)),
)
