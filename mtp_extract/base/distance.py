"""How far a stored constant is from the weight that it may hold.

A weight in codes is compared three ways, the strongest answer first: what is stored, rounded to the weight's type, is
the weight; the weight, quantized by the rule of :mod:`mtp_extract.litertlm.storage`, gives the stored codes and
scales; every number lies within half a step of what is stored, so that it may have been rounded to it. Rows are
streamed: no tensor is in memory as a whole. Where each row has a scale of its own, as almost all matrices have it, one
pass over both answers everything, a few rows in each thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.constant import Constant, constant_of
from mtp_extract.checkpoint.dtypes import DTYPES, Dtype
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import ROW_STEP as _FIRST
from mtp_extract.checkpoint.weight import Weight, row_ranges
from mtp_extract.litertlm.storage import Floats

EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT = "equal", "equal codes", "within half a step", "different"
_WORST_LAST = (EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT)

Values = npt.NDArray[np.float64]

# Rounding of float32 along the way, in steps: the largest code is 127.
_HALF = 0.5 + 1e-4
_SCALES_ALIKE = 1e-6
# A difference in float32 is as far off: nothing below _NEAR steps lies more than _HALF apart.
_NEAR, _SINGLE = 0.5, 1e-4
# Of a matrix: what is looked at together, which stays in a core's own cache, and what a thread does at a time.
_BLOCK, _PART = 1 << 17, 1 << 22


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


@dataclass(frozen=True)
class _Sums:
    """What some rows have shown."""

    finite: bool = True
    same: bool = True
    squares: float = 0.0
    reference: float = 0.0
    most: float = 0.0
    outside: int = 0
    codes_apart: int = 0
    scales_alike: bool = True

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.finite and other.finite,
            self.same and other.same,
            self.squares + other.squares,
            self.reference + other.reference,
            max(self.most, other.most),
            self.outside + other.outside,
            self.codes_apart + other.codes_apart,
            self.scales_alike and other.scales_alike,
        )


def measure_distance(stored: Weight, new: Weight, pool: Executor | None = None) -> Distance:
    """How far ``stored``, a constant of a bundle, is from ``new``; they have one shape.

    Args:
        pool: its threads share the rows of large matrices. The result is the same without.
    """
    constant = constant_of(stored)
    coded = constant if constant is not None and stored.scheme is not None else None
    if coded is not None and coded.by_rows:
        return measure_columns([(coded, new)], pool)[0]
    found = _as_floats(stored, new, _dtype_of(new), coded is not None)
    if coded is None:
        return _told(found, False, None, False)
    return _told(found, True, *(_requantized(coded, new) if found.finite else (None, False)))


def differs_at_once(stored: Weight, new: Weight) -> bool:
    """Whether the first rows say already that :func:`measure_distance` finds the two different; False says nothing."""
    constant = constant_of(stored)
    if constant is None or not constant.by_rows:
        return False
    found = _of_rows(constant, new, _dtype_of(new), 0, min(_FIRST, stored.rows), True)
    return _told(found, True, found.codes_apart, found.scales_alike).verdict == DIFFERENT


def measure_columns(tables: Sequence[tuple[Constant, Weight]], pool: Executor | None = None) -> list[Distance]:
    """The same of several constants that hold columns of one matrix, each with its columns, in one pass over its rows.

    The rows of every constant have scales of their own (:attr:`Constant.by_rows`).
    """
    new = tables[0][1]
    dtype = _dtype_of(new)
    # Rounding to the checkpoint's type is the dearest, and weights that are not equal show it in their first rows.
    ask = [_of_rows(held, own, dtype, 0, min(_FIRST, own.rows), True).same for held, own in tables]

    def part(rows: tuple[int, int]) -> list[_Sums]:
        return [_of_rows(held, own, dtype, *rows, asked) for (held, own), asked in zip(tables, ask, strict=True)]

    ranges = row_ranges(new, elements=_PART if len(tables) == 1 else _BLOCK)
    parts = (pool.map if pool is not None else map)(part, ranges)
    sums = [reduce(_Sums.__add__, own) for own in zip(*parts, strict=True)]
    return [_told(found, True, found.codes_apart, found.scales_alike) for found in sums]


def _dtype_of(new: Weight) -> Dtype:
    stored = stored_of(new)
    return stored.dtype if stored is not None else DTYPES["f32"]


def _told(found: _Sums, in_codes: bool, codes_apart: int | None, scales_alike: bool) -> Distance:
    if not found.finite:
        return Distance(DIFFERENT, math.inf, None, None, "the checkpoint holds values that are not finite")
    squares, reference = found.squares, found.reference
    error = math.sqrt(squares / reference) if reference else (0.0 if not squares else math.inf)
    if not in_codes:
        why = "" if found.same else f"apart by {error:.3g} of its size"
        return Distance(EQUAL if found.same else DIFFERENT, error, None, None, why)
    if found.same:
        verdict, why = EQUAL, ""
    elif codes_apart == 0 and scales_alike:
        verdict, why = EQUAL_CODES, ""
    elif not found.outside:
        verdict = HALF_STEP
        why = f"{codes_apart} codes differ" if codes_apart else "scales differ"
    else:
        verdict = DIFFERENT
        why = f"{found.outside} weights lie up to {found.most:.3g} steps apart, {error:.3g} of its size"
    return Distance(verdict, error, found.most, codes_apart, why)


def _as_floats(stored: Weight, new: Weight, dtype: Dtype, in_codes: bool) -> _Sums:
    """Everything but what quantizing shows, number by number."""
    steps, found = stored.steps, _Sums()
    for first, last in row_ranges(stored, new):
        held, given, step = stored.floats(first, last), new.floats(first, last), None
        if not np.isfinite(given).all():
            return _Sums(finite=False)
        if in_codes:
            own = np.ones((1, 1)) if steps is None else np.repeat(steps.size[first:last], steps.block, axis=1)
            step = np.abs(own.astype(np.float64) / (1.0 if steps is None else steps.factor))
        found += _Sums(same=found.same and _is_same(held, given, dtype))
        found += _apart(held, given, step, dtype)
    return found


def _is_same(held: Floats, given: Floats, dtype: Dtype) -> bool:
    """Whether ``held``, rounded to ``dtype``, is ``given``."""
    return bool((dtype.widen(dtype.narrow(held.reshape(-1), "").tobytes()) == given.reshape(-1)).all())


def _apart(held: Floats, given: Floats, step: Values | None, dtype: Dtype) -> _Sums:
    """By how much the two differ; ``step`` is that of the codes at every weight, None for floats."""
    difference = given.astype(np.float64) - held
    squares = float(np.square(difference).sum())
    reference = float(np.square(given, dtype=np.float64).sum())
    if step is None:
        return _Sums(squares=squares, reference=reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(difference == 0, 0.0, np.abs(difference) / step)
        # What was rounded to the checkpoint's type may have lain closer before.
        slack = _HALF + np.where(given == 0, 0.0, dtype.roundoff * np.abs(given) / step)
    outside = int((steps > slack).sum())
    return _Sums(squares=squares, reference=reference, most=float(steps.max(initial=0.0)), outside=outside)


def _of_rows(stored: Constant, new: Weight, dtype: Dtype, first: int, last: int, ask: bool) -> _Sums:
    """Of rows ``[first, last)``; whether they are equal only if that is to be asked."""
    count, found = max(_FIRST, _BLOCK // new.columns // _FIRST * _FIRST), _Sums(same=ask)
    for begin in range(first, last, count):
        end = min(begin + count, last)
        found += _block(stored, new.floats(begin, end), dtype, begin, end, found.same)
        if not found.finite:
            break
    return found


def _block(stored: Constant, given: Floats, dtype: Dtype, first: int, last: int, ask: bool) -> _Sums:
    storage, factor = stored.source.storage, stored.factor
    shape = (-1, storage.columns)
    own = slice(*(row * given.shape[1] // storage.columns for row in (first, last)))
    held_scale, held_zero = (part.reshape(-1)[own] for part in (stored.source.scale, stored.source.zero_point))
    given = given.reshape(shape)
    wanted = given if factor == 1 else (given.astype(np.float64) * factor).astype(np.float32)
    with np.errstate(invalid="ignore"):
        low, high = given.min(), given.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return _Sums(finite=False, same=False)
    codes = stored.weight.codes(first, last).astype(np.float32).reshape(shape)
    scale, zero_point, made = storage.quantized(wanted)
    alike = np.allclose(scale, held_scale, rtol=_SCALES_ALIKE, atol=0) and bool((zero_point == held_zero).all())
    apart = int(np.count_nonzero(made != codes))
    if held_zero.any():
        codes -= held_zero.astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # In steps: neither overflows nor vanishes where the weights do.
        steps = np.divide(wanted, held_scale[:, None], dtype=np.float32)
        steps -= codes
        most = max(float(steps.max()), -float(steps.min()))
        by_row = np.einsum("ij,ij->i", steps, steps).astype(np.float64)
    held = stored.weight.floats(first, last).reshape(shape) if ask or not most <= _NEAR else None
    same = held is not None and ask and _is_same(held, given, dtype)
    step = np.abs(held_scale.astype(np.float64) / factor)[:, None]
    if held is not None and not np.isfinite(by_row).all():
        sums = _apart(held, given, step, dtype)
    else:
        wide = given.astype(np.float64).reshape(-1)
        squares = float(np.dot(by_row, np.square(step[:, 0])))
        sums = _Sums(squares=squares, reference=float(np.dot(wide, wide)), most=most)
        if held is not None and not most <= _NEAR:
            sums = replace(sums, outside=_outside(steps, held, given, step, dtype))
    return replace(sums, same=same, codes_apart=apart, scales_alike=bool(alike))


def _outside(steps: Floats, held: Floats, given: Floats, step: Values, dtype: Dtype) -> int:
    """How many of ``steps``, the differences in float32, are more than rounding explains; what is close is measured."""
    within = np.abs(given)
    within *= (dtype.roundoff / step).astype(np.float32)
    within += np.float32(_HALF)
    beyond = np.abs(steps) - within
    within *= np.float32(_SINGLE)
    clear = int(np.count_nonzero(beyond > within))
    close = np.abs(beyond) <= within
    if not close.any():
        return clear
    exact = _apart(held[close], given[close], np.broadcast_to(step, given.shape)[close], dtype)
    return clear + exact.outside


def _requantized(stored: Constant, new: Weight) -> tuple[int | None, bool]:
    """How many codes quantizing ``new`` gives otherwise, and whether it gives the stored scales."""
    if stored.transposed or stored.folded:
        return None, False
    source, wanted = stored.source, new.array()
    if stored.factor != 1:
        wanted = (wanted.astype(np.float64) * stored.factor).astype(np.float32)
    scale, zero_point, codes = source.storage.quantized(wanted)
    alike = np.allclose(scale, source.scale.reshape(-1), rtol=_SCALES_ALIKE, atol=0)
    different = int(np.count_nonzero(codes.reshape(-1) != source.codes()))
    return different, bool(alike and (zero_point == source.zero_point.reshape(-1)).all())
