"""How a directory's weight came of the bundle's: the shortest chain of rounding, rule, rounding that gives its bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

import numpy as np

from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.rounding import RULES, SCALES, rounded_again
from mtp_extract.checkpoint.weight import ROW_STEP, Weight, has_exact_steps, same_weight
from mtp_extract.errors import CheckpointError, UnsupportedError

Chain = tuple[str, ...]
"""What was done to a weight, step by step, as :func:`~mtp_extract.checkpoint.rounding.rounded_again` takes it."""

_EXACT_SCALES = f"F32{SCALES}"
_FLOATS = [word for word in ROUNDED_TO if word]

# Of scales, then of numbers: each at most once, or numbers to both short types.
_ROUNDINGS: list[Chain] = [
    *(tuple(filter(None, words)) for words in product(("", f"FP16{SCALES}", _EXACT_SCALES), ("", *_FLOATS))),
    *permutations(_FLOATS, 2),
]
CHAINS: Sequence[Chain] = sorted(
    [*_ROUNDINGS, *((*before, rule, *after) for before, rule, after in product(_ROUNDINGS, RULES, _ROUNDINGS))], key=len
)
"""Every chain that is tried, the shortest first."""


def how_derived(original: Weight, found: Weight) -> Chain | None:
    """The shortest chain that makes ``found`` of ``original``, to the bit; None where none does.

    Of a weight with codes, the codes and their scales are compared; of any other the numbers.
    """
    if original.shape != found.shape:
        return None
    # The first rows of a matrix alone refute almost every chain.
    pairs = [(_first_rows(original), _first_rows(found)), (original, found)]
    for chain in CHAINS:
        if all(_gives(one, chain, other) for one, other in pairs):
            # Scales that a factor was divided out of were rounded to F32, unless the factor is kept beside them.
            folded = found.scheme is not None and not has_exact_steps(original) and has_exact_steps(found)
            return chain or ((_EXACT_SCALES,) if folded else ())
    return None


def _gives(original: Weight, chain: Chain, found: Weight) -> bool:
    try:
        with np.errstate(all="ignore"):
            return same_weight(rounded_again(original, chain), found)
    except (CheckpointError, UnsupportedError):
        # It admits of no such step: it has no codes, or numbers beyond FP16.
        return False


def _first_rows(weight: Weight) -> Weight:
    """The first rows of a matrix, as a weight."""
    if len(weight.shape) != 2:
        return weight
    shape = min(weight.rows, ROW_STEP), weight.columns
    if weight.scheme is None:
        return Weight(shape, weight.floats)
    steps, rows = weight.steps, slice(ROW_STEP)
    first = replace(steps, size=steps.size[rows], zero_point=steps.zero_point[rows])
    return Weight(shape, weight.codes, weight.scheme, first)


def in_words(chain: Chain) -> str:
    """What was done to a weight, in words."""
    rules = {rule: f"integers by {rule}" for rule in RULES}
    return ", then ".join("to " + rules.get(step, step.replace(SCALES, " in their scales")) for step in chain)
