"""Rounding: numbers to shorter floats, and a matrix of floats to integers, which makes codes where there are none."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from mtp_extract.architecture.roles import MATRIX, shapes_of
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.ggml_blocks import BLOCK, BLOCK_TYPES, steps_of, unpacked
from mtp_extract.checkpoint.packing import Codes
from mtp_extract.checkpoint.weight import RowCodes, Steps, Weight, row_codes, row_ranges
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, escape
from mtp_extract.litertlm.storage import Floats, Packing, Storage
from mtp_extract.litertlm.tflite import TensorType

SCALES = " scales"
"""Ends the word for what was rounded to where that was the scales of codes."""


def narrowed(weight: Weight, rounded_to: str) -> Weight:
    """The numbers of ``weight``, without its codes, rounded to a key of
    :data:`~mtp_extract.checkpoint.dtypes.ROUNDED_TO`."""
    dtype = ROUNDED_TO[rounded_to]

    def floats(first: int, last: int) -> Floats:
        values = weight.floats(first, last)
        return dtype.widen(dtype.narrow(values.reshape(-1), "a tensor").tobytes()).reshape(values.shape)

    return Weight(weight.shape, floats, weight.origin)


@dataclass(frozen=True)
class Rule:
    """A way from floats to codes.

    Attributes:
        block: neighbouring elements of a row that share a step; 0 for the whole row.
        round: float32 ``[blocks, block]`` as codes of that shape and a step each, float32 ``[blocks]``.
    """

    name: str
    bits: int
    block: int
    round: Callable[[Floats], tuple[Codes, Floats]]

    def fits(self, weight: Weight) -> bool:
        """Whether ``weight`` is a matrix whose rows are whole blocks."""
        return len(weight.shape) == 2 and weight.columns % (self.block or 1) == 0

    def rounded(self, original: Weight) -> RowCodes:
        """A matrix of floats as codes: made whenever they are asked for, never all in memory.

        Raises:
            UnsupportedError: when it is read: numbers that are not finite, or steps beyond the type of the rule's.
        """
        block = self.block or original.columns

        def made(first: int, last: int) -> tuple[Codes, Floats]:
            values = original.floats(first, last)
            if not np.isfinite(values).all():
                raise UnsupportedError("Numbers that are not finite cannot be rounded to integers.")
            codes, steps = self.round(values.reshape(-1, block))
            return codes.reshape(values.shape), steps.reshape(len(values), -1)

        return RowCodes(
            original.shape,
            Packing(self.bits, signed=True),
            lambda first, last: made(first, last)[0],
            lambda: Steps.around_zero(block, np.concatenate([made(*rows)[1] for rows in row_ranges(original)])),
            original.origin,
            self.name,
        )


def _ggml(bits: int) -> Rule:
    """ggml's, with FP16 steps of blocks, as the ``gguf`` package has it."""
    kind = BLOCK_TYPES[bits]

    def rounded(blocks: Floats) -> tuple[Codes, Floats]:
        from gguf import quants

        with np.errstate(over="ignore"):
            stored = getattr(quants, kind.name).quantize_blocks(blocks)
        steps = steps_of(kind, stored).reshape(-1)
        if not np.isfinite(steps).all():
            raise UnsupportedError("The steps of this rule are FP16, and weights this large leave its range.")
        return unpacked(kind, stored), steps

    return Rule(kind.name.lower(), bits, BLOCK, rounded)


def _per_channel(bits: int) -> Rule:
    """ai-edge-quantizer's, symmetric, with F32 steps of rows."""

    def rounded(rows: Floats) -> tuple[Codes, Floats]:
        scale, _, codes = Storage(TensorType[f"INT{bits}"], rows.shape, "per_channel").quantized(rows)
        return codes.astype(np.int8), scale

    return Rule(f"int{bits}", bits, 0, rounded)


RULES: Mapping[str, Rule] = MappingProxyType(
    {rule.name: rule for rule in (_ggml(4), _ggml(8), _per_channel(4), _per_channel(8))}
)
"""Every rule by name."""


def made_here(checkpoint: Checkpoint) -> dict[str, str]:
    """Role → the rule by which its codes were made here of floats."""
    weights = checkpoint.tensors.items()
    return {role: weight.rule for role, weight in weights if isinstance(weight, RowCodes) and weight.rule}


def round_matrices(checkpoint: Checkpoint, rule: str, leave: Container[str] = ()) -> Checkpoint:
    """``checkpoint`` with every matrix that has no codes rounded by ``rule``, a name in :data:`RULES`.

    A matrix whose rows the rule's blocks do not divide stays as it is, and so do the roles in ``leave``. Roles that
    share a weight share its codes.

    Raises:
        UnsupportedError: nothing is left to round.
    """
    tensors, rounded = dict(checkpoint.tensors), dict[int, Weight]()
    matrices = [role.name for role in shapes_of(checkpoint.config) if role.kind == MATRIX and role.name not in leave]
    plain = [name for name in matrices if name in tensors and tensors[name].scheme is None]
    for name in plain:
        if RULES[rule].fits(tensor := tensors[name]):
            tensors[name] = rounded.setdefault(id(tensor), RULES[rule].rounded(tensor))
    if not rounded:
        why = f"no row is a whole number of blocks of {RULES[rule].block}" if plain else "every matrix has its codes"
        raise UnsupportedError(f"There is nothing to round by {rule}: {why}. Leave it out.", remedies=("quantize",))
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def rounded_again(tensor: Weight, steps: Sequence[str]) -> Weight:
    """``tensor`` after ``steps``: names of rules, of short types, and of these for the scales of codes (to FP16, or to
    F32 after a folded factor was divided out).

    Raises:
        CheckpointError: one of them is none that this package takes, or nothing that ``tensor`` admits of.
    """
    for step in steps:
        if step in RULES and RULES[step].fits(tensor):
            # Rules are for matrices of floats: codes that there were had been left behind by then.
            tensor = RULES[step].rounded(narrowed(tensor, ""))
            continue
        if step in ROUNDED_TO:
            tensor = narrowed(tensor, step)
            continue
        try:
            kind, codes = {f"FP16{SCALES}": np.float16, f"F32{SCALES}": np.float32}[step], row_codes(tensor)
        except (KeyError, NoCodesError) as error:
            raise CheckpointError(
                f"{escape(step)} cannot be done again: it is no step of this release, or the weight has no codes with "
                "scales by row."
            ) from error
        grid = Steps.around_zero(codes.steps.block, codes.steps.size.astype(kind).astype(np.float32))
        packing = Packing(codes.bits, signed=True)
        tensor = RowCodes(codes.shape, packing, codes.codes, lambda grid=grid: grid, codes.origin)  # type: ignore[misc]
    return tensor
