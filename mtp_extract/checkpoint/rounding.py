"""Rounding: numbers to shorter floats, and a matrix of floats to integers, which makes codes where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.architecture.roles import MATRIX, shapes_of
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.packing import Codes
from mtp_extract.checkpoint.weight import Steps, Weight, of_codes, row_codes, row_ranges
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, escape
from mtp_extract.litertlm.storage import Floats, Packing, Storage
from mtp_extract.litertlm.tflite import TensorType

SCALES = " scales"
"""Ends the word for what was rounded to where that was the scales of codes."""


def narrowed(weight: Weight, rounded_to: str) -> Weight:
    """The numbers of ``weight``, without its codes, rounded to "BF16" or "FP16", as a record calls them, or not at all
    where that is empty.
    """
    dtype = DTYPES[next(name for name, word in ROUNDED_TO.items() if word == rounded_to)]

    def floats(first: int, last: int) -> Floats:
        values = weight.floats(first, last)
        return dtype.widen(dtype.narrow(values.reshape(-1), "a tensor").tobytes()).reshape(values.shape)

    return Weight(weight.shape, floats, origin=weight.origin, whole=weight.whole)


@dataclass(frozen=True)
class Rule:
    """A way from floats to codes."""

    bits: int
    block: int
    """Neighbouring elements of a row that share a step; 0 for the whole row."""
    round: Callable[[Floats], tuple[Codes, Floats]]
    """float32 ``[blocks, block]`` as codes of that shape and a step each, float32 ``[blocks]``."""


def _q4_0(blocks: Floats) -> tuple[Codes, Floats]:
    """ggml's: the number of the largest magnitude becomes −8; the step is rounded to FP16 after the codes are made."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    steps = largest / np.float32(-8)
    codes = np.trunc(blocks * _inverse(steps) + np.float32(8.5)).astype(np.uint8).clip(0, 15).astype(np.int8)
    return codes - np.int8(8), _as_half(steps)


def _q8_0(blocks: Floats) -> tuple[Codes, Floats]:
    """ggml's: the largest magnitude becomes 127, halves go away from zero."""
    steps = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(steps)
    whole = np.floor(np.abs(scaled))
    whole += np.floor(2 * (np.abs(scaled) - whole))
    return (np.sign(scaled) * whole).astype(np.int8), _as_half(steps)


def _inverse(steps: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        inverse: Floats = np.where(steps == 0, np.float32(0), np.float32(1) / steps)
    return inverse


def _as_half(steps: Floats) -> Floats:
    with np.errstate(over="ignore"):
        rounded = steps.reshape(-1).astype(np.float16).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise UnsupportedError("The steps of this rule are FP16, and weights this large leave its range.")
    return rounded


def _per_channel(type_: TensorType) -> Callable[[Floats], tuple[Codes, Floats]]:
    """ai-edge-quantizer's, symmetric."""

    def rounded(rows: Floats) -> tuple[Codes, Floats]:
        scale, _, codes = Storage(type_, rows.shape, "per_channel").quantized(rows)
        return codes.astype(np.int8), scale

    return rounded


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "q4_0": Rule(4, 32, _q4_0),
        "q8_0": Rule(8, 32, _q8_0),
        "int4": Rule(4, 0, _per_channel(TensorType.INT4)),
        "int8": Rule(8, 0, _per_channel(TensorType.INT8)),
    }
)
"""Every rule by name: ggml's with FP16 steps of blocks, ai-edge-quantizer's with F32 steps of rows."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """A matrix of floats, ``original``, as the codes that the rule ``name`` of :data:`RULES` makes of it: made whenever
    they are asked for, never all in memory.
    """

    original: Weight
    name: str

    def weight(self) -> Weight:
        """It as a weight, whose steps are measured when they are asked for.

        Raises:
            UnsupportedError: when it is read: numbers that are not finite, or steps beyond the type of the rule's.
        """
        of, scheme = self.original, Packing(RULES[self.name].bits, signed=True)
        return of_codes(of.shape, scheme, self._codes, self._steps, origin=of.origin, source=self, whole=of.whole)

    @property
    def error(self) -> dict[str, Any]:
        """For the record: the rule, and the root mean square and the largest error as shares of the range."""
        return dict(self._measured[1])

    def _rounded(self, first: int, last: int) -> tuple[Floats, Codes, Floats]:
        """Numbers of rows ``[first, last)``, their codes, and their steps ``[rows, blocks]``."""
        values, rule = self.original.floats(first, last), RULES[self.name]
        if not np.isfinite(values).all():
            raise UnsupportedError("Numbers that are not finite cannot be rounded to integers.")
        codes, steps = rule.round(values.reshape(-1, rule.block or values.shape[1]))
        return values, codes.reshape(values.shape), steps.reshape(len(values), -1)

    def _codes(self, first: int, last: int) -> Codes:
        return self._rounded(first, last)[1]

    def _steps(self) -> Steps:
        return self._measured[0]

    @cached_property
    def _measured(self) -> tuple[Steps, dict[str, Any]]:
        rows, columns = self.original.shape
        block = RULES[self.name].block or columns
        steps = Steps.around_zero(block, np.empty((rows, columns // block), np.float32))
        squares, largest, low, high = 0.0, 0.0, math.inf, -math.inf
        for first, last in row_ranges(self.original):
            values, codes, steps.size[first:last] = self._rounded(first, last)
            errors = (steps.floats(codes, first) - values).astype(np.float64)
            squares += float((errors**2).sum())
            largest = max(largest, float(np.abs(errors).max()))
            low, high = min(low, float(values.min())), max(high, float(values.max()))
        spread = high - low
        return steps, {
            "rule": self.name,
            "rms": _three_digits(math.sqrt(squares / (rows * columns)) / spread) if spread else 0.0,
            "largest": _three_digits(largest / spread) if spread else 0.0,
        }


def rounding_of(weight: Weight) -> Rounding | None:
    """How the codes of ``weight`` were made of floats; None where they were not made here."""
    return weight.source if isinstance(weight.source, Rounding) else None


def _three_digits(share: float) -> float:
    # Later digits depend on the order in which a processor adds.
    return float(f"{share:.3g}")


def round_matrices(checkpoint: Checkpoint, rule: str, leave: Container[str] = ()) -> Checkpoint:
    """``checkpoint`` with every matrix that has no codes rounded by ``rule``, a name in :data:`RULES`.

    A matrix whose rows the rule's blocks do not divide stays as it is, and so do the roles in ``leave``. Roles that
    share a weight share its codes.

    Raises:
        UnsupportedError: nothing is left to round.
    """
    block = RULES[rule].block
    rounded: dict[int, Weight] = {}
    tensors = dict(checkpoint.tensors)
    matrices = [role.name for role in shapes_of(checkpoint.config) if role.kind == MATRIX and role.name not in leave]
    plain = [name for name in matrices if name in tensors and tensors[name].scheme is None]
    for name in plain:
        tensor = tensors[name]
        if not block or tensor.shape[1] % block == 0:
            tensors[name] = rounded.setdefault(id(tensor), Rounding(tensor, rule).weight())
    if not rounded:
        why = f"no row is a whole number of blocks of {block}" if plain else "every matrix has its codes"
        raise UnsupportedError(f"There is nothing to round by {rule}: {why}. Leave it out.", remedies=("quantize",))
    return replace(checkpoint, tensors=MappingProxyType(tensors))


_STEP_TYPES: Mapping[str, type[np.floating[Any]]] = MappingProxyType(
    {f"FP16{SCALES}": np.float16, f"F32{SCALES}": np.float32}
)


def rounded_again(tensor: Weight, steps: Sequence[str]) -> Weight:
    """``tensor`` after ``steps``: names of rules, of short types, and of these for the scales of codes.

    Raises:
        CheckpointError: one of them is none that this package takes, or nothing that ``tensor`` admits of.
    """
    for step in steps:
        if step in RULES and len(tensor.shape) == 2 and tensor.shape[1] % (RULES[step].block or 1) == 0:
            # Rules are for matrices of floats: codes that there were had been left behind by then.
            tensor = Rounding(narrowed(tensor, ROUNDED_TO["f32"]), step).weight()
        elif step in ROUNDED_TO.values():
            tensor = narrowed(tensor, step)
        else:
            tensor = _with_rounded_steps(tensor, step)
    return tensor


def _with_rounded_steps(tensor: Weight, step: str) -> Weight:
    """The codes of ``tensor``, with their steps rounded, to FP16 or, after a folded factor was divided out, to F32."""
    try:
        kind, codes = _STEP_TYPES[step], row_codes(tensor)
    except (KeyError, NoCodesError) as error:
        raise CheckpointError(
            f"{escape(step)} cannot be done again: it is no step of this release, or the weight has no codes with "
            "scales by row."
        ) from error
    assert codes.scheme is not None
    steps = Steps.around_zero(codes.steps.block, codes.steps.size.astype(kind).astype(np.float32))
    return of_codes(codes.shape, codes.scheme, codes.codes, lambda: steps, origin=codes.origin, whole=codes.whole)
