"""How far a stored constant is from the weight that it may hold.

A weight in codes is compared three ways, the strongest answer first: what is stored, rounded to the weight's type, is
the weight; the weight, quantized by the rule of :mod:`mtp_extract.litertlm.storage`, gives the stored codes and
scales; every number lies within half a step of what is stored, so that it may have been rounded to it. Rows are
streamed: no tensor is in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.lazy import ConstantTensor, LazyTensor, rows_of
from mtp_extract.checkpoint.stored import StoredColumns, StoredWeight
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, Floats, gathered, rechunked

EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT = "equal", "equal codes", "within half a step", "different"
_WORST_LAST = (EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT)

Values = npt.NDArray[np.float64]

# Rounding of float32 along the way, in steps: the largest code is 127.
_HALF = 0.5 + 1e-4
_SCALES_ALIKE = 1e-6


@dataclass(frozen=True)
class Distance:
    """What a comparison gave.

    Attributes:
        verdict: :data:`EQUAL`, :data:`EQUAL_CODES`, :data:`HALF_STEP` or :data:`DIFFERENT`.
        error: root mean square of the difference, as a share of the weight's.
        steps: the largest difference in steps of the codes; None for floats.
        codes_apart: codes that quantizing the weight gives otherwise; None where there are none.
        why: of a verdict that is not equality, in words.
    """

    verdict: str
    error: float
    steps: float | None
    codes_apart: int | None
    why: str = ""

    def worse(self, other: Distance) -> Distance:
        """What holds of both."""
        worse = max((self, other), key=lambda c: (_WORST_LAST.index(c.verdict), c.error))
        return Distance(
            worse.verdict,
            max(self.error, other.error),
            None if self.steps is None or other.steps is None else max(self.steps, other.steps),
            None if self.codes_apart is None or other.codes_apart is None else self.codes_apart + other.codes_apart,
            worse.why,
        )


def measure_distance(stored: LazyTensor, new: LazyTensor) -> Distance:
    """How far ``stored``, a constant of a bundle, is from ``new``; they have one shape."""
    dtype = new.dtype if isinstance(new, StoredWeight | StoredColumns) else DTYPES["f32"]
    in_codes = isinstance(stored, ConstantTensor) and stored.source.packing is not None and not stored.offset
    same, most, outside = True, 0.0, 0
    squares = reference = 0.0
    for held, given, step in _rows(stored, new):
        if not np.isfinite(given).all():
            return Distance(DIFFERENT, math.inf, None, None, "the checkpoint holds values that are not finite")
        difference = given.astype(np.float64) - held
        squares += float(np.square(difference).sum())
        reference += float(np.square(given, dtype=np.float64).sum())
        same = same and bool((dtype.widen(dtype.narrow(held.reshape(-1), "").tobytes()) == given.reshape(-1)).all())
        if in_codes:
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(difference == 0, 0.0, np.abs(difference) / step)
                # What was rounded to the checkpoint's type may have lain closer before.
                slack = _HALF + np.where(given == 0, 0.0, dtype.roundoff * np.abs(given) / step)
            most = max(most, float(steps.max(initial=0.0)))
            outside += int((steps > slack).sum())
    error = math.sqrt(squares / reference) if reference else (0.0 if not squares else math.inf)
    if not in_codes:
        why = "" if same else f"apart by {error:.3g} of its size"
        return Distance(EQUAL if same else DIFFERENT, error, None, None, why)
    assert isinstance(stored, ConstantTensor)
    codes_apart, scales_alike = _requantized(stored, new)
    if same:
        verdict, why = EQUAL, ""
    elif codes_apart == 0 and scales_alike:
        verdict, why = EQUAL_CODES, ""
    elif not outside:
        verdict = HALF_STEP
        why = f"{codes_apart} codes differ" if codes_apart else "scales differ"
    else:
        verdict, why = DIFFERENT, f"{outside} weights lie up to {most:.3g} steps apart, {error:.3g} of its size"
    return Distance(verdict, error, most, codes_apart, why)


def _rows(stored: LazyTensor, new: LazyTensor) -> Iterator[tuple[Floats, Floats, Values]]:
    """Both, a few rows at a time, with the step of the codes at every weight."""
    rows, columns = rows_of(stored.shape)
    steps = _steps(stored)
    # A matrix that is stored the other way round is turned as a whole.
    count = (
        rows if isinstance(stored, ConstantTensor) and stored.transposed else max(8, CHUNK_ELEMENTS // columns // 8 * 8)
    )
    for first in range(0, rows, count):
        last = min(first + count, rows)
        shape = (last - first, columns)
        yield gathered(stored.floats(first, last), shape), gathered(new.floats(first, last), shape), steps(first, last)


def _steps(stored: LazyTensor) -> Callable[[int, int], Values]:
    """The distance between neighbouring codes, to broadcast over rows ``[first, last)``."""
    steps = stored.steps
    if steps is None:
        return lambda first, last: np.ones((1, 1))
    return lambda first, last: np.repeat(
        np.abs(steps.size[first:last].astype(np.float64) / steps.factor), steps.block, axis=1
    )


def _requantized(stored: ConstantTensor, new: LazyTensor) -> tuple[int | None, bool]:
    """How many codes quantizing ``new`` gives otherwise, and whether it gives the stored scales."""
    if stored.transposed or stored.folded:
        return None, False
    storage = stored.source.storage

    def chunks() -> Iterator[Floats]:
        for chunk in new.floats():
            yield (chunk.astype(np.float64) * stored.factor).astype(np.float32) if stored.factor != 1 else chunk

    scale, zero_point = storage.measure(chunks())
    alike = np.allclose(scale.reshape(-1), stored.scale.reshape(-1), rtol=_SCALES_ALIKE, atol=0)
    made, held_codes = storage.encode(chunks(), scale, zero_point), stored.source.code_chunks()
    pairs = zip(rechunked(made, 1), rechunked(held_codes, 1), strict=True)
    different = sum(int((codes != held).sum()) for codes, held in pairs)
    return different, bool(alike and (zero_point.reshape(-1) == stored.zero_point.reshape(-1)).all())
