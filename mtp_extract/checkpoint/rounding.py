"""Rounding: numbers to shorter floats, and a matrix of floats to integers, which makes codes where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.architecture.roles import MATRIX, shapes_of
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.integers import in_rows, row_codes
from mtp_extract.checkpoint.lazy import FloatsOnly, LazyTensor, Steps, rows_of
from mtp_extract.checkpoint.packing import Codes
from mtp_extract.checkpoint.stored import CodesOfRows
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, escape
from mtp_extract.litertlm.storage import Floats, Integers, Storage
from mtp_extract.litertlm.tflite import TensorType

SCALES = " scales"
"""Ends the word for what was rounded to where that was the scales of codes."""


@dataclass(frozen=True)
class NarrowedTensor(FloatsOnly):
    """The numbers of ``tensor``, rounded.

    Attributes:
        rounded_to: as a :class:`~mtp_extract.checkpoint.checkpoint.Holding` says it; empty for not at all.
    """

    tensor: LazyTensor
    rounded_to: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def origin(self) -> object:
        return self.tensor.origin

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        dtype = DTYPES[next(name for name, word in ROUNDED_TO.items() if word == self.rounded_to)]
        for chunk in self.tensor.floats(first, last):
            yield dtype.widen(dtype.narrow(chunk, "a tensor").tobytes())


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
        storage, chunks = Storage(type_, rows.shape, "per_channel"), [rows.reshape(-1)]
        scale, zero_point = storage.measure(chunks)
        return np.concatenate([*storage.encode(chunks, scale, zero_point)]).reshape(rows.shape), scale

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


@dataclass(frozen=True)
class RoundedTensor(CodesOfRows):
    """A matrix of floats as the codes that a rule makes of it: made whenever they are asked for, never all in memory.

    Attributes:
        name: of the rule, in :data:`RULES`.
    """

    shape: tuple[int, ...]
    bits: int
    signed: bool
    tensor: LazyTensor
    name: str

    @classmethod
    def of(cls, tensor: LazyTensor, name: str) -> RoundedTensor:
        """``tensor`` rounded by the rule of that name."""
        return cls(tensor.shape, RULES[name].bits, True, tensor, name)

    @property
    def origin(self) -> object:
        return self.tensor.origin

    @property
    def steps(self) -> Steps:
        return self._measured[0]

    @property
    def error(self) -> dict[str, Any]:
        """For the record: the rule, and the root mean square and the largest error as shares of the range."""
        return dict(self._measured[1])

    def row_blocks(self, first: int, last: int) -> Iterator[tuple[int, Integers]]:
        for begin, _, codes, _ in self._rounded(first, last):
            yield begin, codes

    @cached_property
    def _measured(self) -> tuple[Steps, dict[str, Any]]:
        rows, columns = rows_of(self.shape)
        block = RULES[self.name].block or columns
        sizes = np.empty((rows, columns // block), np.float32)
        squares, largest, low, high = 0.0, 0.0, math.inf, -math.inf
        for begin, values, codes, found in self._rounded(0, rows):
            sizes[begin : begin + len(values)] = found
            made = codes.reshape(*found.shape, block).astype(np.float32) * found[..., None]
            errors = (made.reshape(values.shape) - values).astype(np.float64)
            squares += float((errors**2).sum())
            largest = max(largest, float(np.abs(errors).max()))
            low, high = min(low, float(values.min())), max(high, float(values.max()))
        spread = high - low
        return Steps.around_zero(block, sizes), {
            "rule": self.name,
            "rms": _three_digits(math.sqrt(squares / (rows * columns)) / spread) if spread else 0.0,
            "largest": _three_digits(largest / spread) if spread else 0.0,
        }

    def _rounded(self, first: int, last: int) -> Iterator[tuple[int, Floats, Codes, Floats]]:
        """(first row, numbers, their codes, their steps) of some rows after the other."""
        columns, rule = self.shape[1], RULES[self.name]
        for values in in_rows(self.tensor.floats(first, last), columns):
            if not np.isfinite(values).all():
                raise UnsupportedError("Numbers that are not finite cannot be rounded to integers.")
            codes, steps = rule.round(values.reshape(-1, rule.block or columns))
            yield first, values, codes.reshape(values.shape), steps.reshape(len(values), -1)
            first += len(values)


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
    rounded: dict[int, LazyTensor] = {}
    tensors = dict(checkpoint.tensors)
    matrices = [role.name for role in shapes_of(checkpoint.config) if role.kind == MATRIX and role.name not in leave]
    plain = [name for name in matrices if name in tensors and tensors[name].scheme is None]
    for name in plain:
        tensor = tensors[name]
        if not block or tensor.shape[1] % block == 0:
            tensors[name] = rounded.setdefault(id(tensor), RoundedTensor.of(tensor, rule))
    if not rounded:
        why = f"no row is a whole number of blocks of {block}" if plain else "every matrix has its codes"
        raise UnsupportedError(f"There is nothing to round by {rule}: {why}. Leave it out.", remedies=("quantize",))
    return replace(checkpoint, tensors=MappingProxyType(tensors))


_STEP_TYPES: Mapping[str, type[np.floating[Any]]] = MappingProxyType(
    {f"FP16{SCALES}": np.float16, f"F32{SCALES}": np.float32}
)


def rounded_again(tensor: LazyTensor, steps: Sequence[str]) -> LazyTensor:
    """``tensor`` after ``steps``, as a record's ``rounded_before`` names them.

    Raises:
        CheckpointError: one of them is none that this package takes, or nothing that ``tensor`` admits of.
    """
    for step in steps:
        if step in RULES and len(tensor.shape) == 2 and tensor.shape[1] % (RULES[step].block or 1) == 0:
            # Rules are for matrices of floats: codes that there were had been left behind by then.
            tensor = RoundedTensor.of(NarrowedTensor(tensor, ROUNDED_TO["f32"]), step)
        elif step in ROUNDED_TO.values():
            tensor = NarrowedTensor(tensor, step)
        else:
            tensor = _with_rounded_steps(tensor, step)
    return tensor


def _with_rounded_steps(tensor: LazyTensor, step: str) -> LazyTensor:
    """The codes of ``tensor``, with their steps rounded, to FP16 or, after a folded factor was divided out, to F32."""
    try:
        kind, codes = _STEP_TYPES[step], row_codes(tensor)
    except (KeyError, NoCodesError) as error:
        raise CheckpointError(
            f"The record says that {escape(step)} was done to it, which cannot be done again."
        ) from error
    sizes = codes.steps.size.astype(kind).astype(np.float32)
    return replace(codes, grid=Steps.around_zero(codes.steps.block, sizes))


_ONE_STEP = ((), ("BF16",), ("FP16",), (f"FP16{SCALES}",), (f"F32{SCALES}",))


def how_rounded(original: LazyTensor, found: LazyTensor) -> tuple[str, ...] | None:
    """The one rounding, or none, that makes the numbers of ``found`` of those of ``original``, to the bit.

    Returns:
        As :func:`rounded_again` takes it; None where no single rounding does.
    """
    return next((steps for steps in _ONE_STEP if _makes(original, steps, found)), None)


def _makes(original: LazyTensor, steps: Sequence[str], found: LazyTensor) -> bool:
    try:
        return same_floats(rounded_again(original, steps), found)
    except (CheckpointError, UnsupportedError):
        # It admits of no such rounding: it has no codes, or numbers beyond FP16.
        return False


def same_floats(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether both hold the same numbers, to the bit."""
    if one.shape != other.shape:
        return False
    columns = rows_of(one.shape)[1]
    pairs = zip(*(in_rows(tensor.floats(), columns) for tensor in (one, other)), strict=True)
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)
