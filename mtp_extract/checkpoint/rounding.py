"""Rounding: numbers to shorter floats, and a matrix of floats to integers, which makes codes where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.packing import BLOCK, BLOCK_TYPES, Codes
from mtp_extract.checkpoint.weight import Steps, Weight, row_codes, row_ranges
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

    return Weight(weight.shape, floats, origin=weight.origin)


@dataclass(frozen=True)
class Rule:
    """A way from floats to codes.

    Attributes:
        block: neighbouring elements of a row that share a step; 0 for the whole row.
    """

    name: str
    bits: int
    block: int

    def fits(self, weight: Weight) -> bool:
        """Whether ``weight`` is a matrix whose rows are whole blocks."""
        return len(weight.shape) == 2 and weight.columns % (self.block or 1) == 0

    def rounded(self, original: Weight) -> Weight:
        """A matrix of floats as codes: made whenever they are asked for, never all in memory.

        Raises:
            UnsupportedError: when it is read: numbers that are not finite, or steps beyond the type of the rule's.
        """
        block = self.block or original.columns

        def codes(first: int, last: int) -> Codes:
            return self._round(original.floats(first, last).reshape(-1, block))[0].reshape(last - first, -1)

        def steps() -> Steps:
            parts = [self._round(original.floats(*rows).reshape(-1, block))[1] for rows in row_ranges(original)]
            return Steps.around_zero(block, np.concatenate(parts).reshape(original.rows, -1))

        packing = Packing(self.bits, signed=True)
        return Weight(original.shape, codes, packing, steps, origin=original.origin, rule=self.name)

    def _round(self, blocks: Floats) -> tuple[Codes, Floats]:
        """Codes of ``blocks``, ``[blocks, block]``, and a step each: ai-edge-quantizer's rule, symmetric, with F32
        steps of rows; or ggml's, with FP16 steps of blocks, as the ``gguf`` package has it."""
        if not np.isfinite(blocks).all():
            raise UnsupportedError("Numbers that are not finite cannot be rounded to integers.")
        if not self.block:
            storage = Storage(TensorType[f"INT{self.bits}"], blocks.shape, "per_channel")
            scale, _, found = storage.quantized(blocks)
            return found.astype(np.int8), scale
        from gguf import quants

        kind = BLOCK_TYPES[self.bits]
        with np.errstate(over="ignore"):
            stored = getattr(quants, kind.name).quantize_blocks(blocks)
        steps = kind.steps(stored).reshape(-1)
        if not np.isfinite(steps).all():
            raise UnsupportedError("The steps of this rule are FP16, and weights this large leave its range.")
        return kind.codes(stored), steps


_RULES = (Rule("q4_0", 4, BLOCK), Rule("q8_0", 8, BLOCK), Rule("int4", 4, 0), Rule("int8", 8, 0))
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _RULES})
"""Every rule by name."""


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
        elif step in ROUNDED_TO:
            tensor = narrowed(tensor, step)
        else:
            tensor = _with_scales(tensor, step)
    return tensor


def _with_scales(tensor: Weight, step: str) -> Weight:
    """The codes of ``tensor`` around 0, their scales rounded as ``step`` says."""
    try:
        kind, codes = {f"FP16{SCALES}": np.float16, f"F32{SCALES}": np.float32}[step], row_codes(tensor)
    except (KeyError, NoCodesError) as error:
        raise CheckpointError(
            f"{escape(step)} cannot be done again: it is no step of this release, or the weight has no codes with "
            "scales by row."
        ) from error
    grid = Steps.around_zero(codes.steps.block, codes.steps.size.astype(kind).astype(np.float32))
    return Weight(codes.shape, codes.codes, Packing(codes.bits, signed=True), grid, origin=codes.origin)
