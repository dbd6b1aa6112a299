"""Rounding: numbers to shorter floats, and a matrix of floats to integers, which makes codes where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mtp_extract.checkpoint.dtypes import BLOCK, BLOCK_TYPES, ROUNDED_TO, Codes
from mtp_extract.checkpoint.weight import Steps, Weight, row_codes, row_ranges
from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.storage import Floats, Packing, Storage
from mtp_extract.litertlm.tflite import TensorType

SCALES = " scales"
"""Ends the word for what was rounded to where that was the scales of codes."""

SCALE_TYPES = MappingProxyType({f"FP16{SCALES}": np.float16, f"F32{SCALES}": np.float32})
"""What scales are rounded to; to F32 where a folded factor was divided out of them."""


def round_weight(weight: Weight, rounded_to: str) -> Weight:
    """The numbers of ``weight``, without its codes, rounded to a key of
    :data:`~mtp_extract.checkpoint.dtypes.ROUNDED_TO`."""
    dtype = ROUNDED_TO[rounded_to]

    def floats(first: int, last: int) -> Floats:
        values = weight.floats(first, last)
        return dtype.widen(dtype.narrow(values.reshape(-1), "a tensor").tobytes()).reshape(values.shape)

    return Weight(weight.shape, floats, origin=weight.origin)


@dataclass(frozen=True)
class Rule:
    """A way from floats to codes."""

    name: str
    bits: int
    block: int  # neighbouring elements of a row that share a step; 0 for the whole row

    def fits(self, weight: Weight) -> bool:
        """Whether ``weight`` is a matrix whose rows are whole blocks."""
        return len(weight.shape) == 2 and weight.columns % (self.block or 1) == 0

    def rounded(self, original: Weight) -> Weight:
        """A matrix of floats as codes: made whenever they are asked for, never all in memory.

        Raises:
            UnsupportedError: it does not fit; or, when it is read, its numbers or their steps leave the rule's types.
        """
        if not self.fits(original):
            raise UnsupportedError(f"{self.name} is for matrices with rows of whole blocks of {self.block} alone.")
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
            scale, _, codes = storage.quantized(blocks)
            return codes.astype(np.int8), scale
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
    """``tensor`` after ``steps``: keys of :data:`RULES`, of short types, and of :data:`SCALE_TYPES`.

    Raises:
        UnsupportedError: ``tensor`` does not admit of one of them.
    """
    for step in steps:
        if step in RULES:
            # Rules are for matrices of floats: codes that there were had been left behind by then.
            tensor = RULES[step].rounded(round_weight(tensor, ""))
        elif step in ROUNDED_TO:
            tensor = round_weight(tensor, step)
        else:
            codes = row_codes(tensor)
            size = codes.steps.size.astype(SCALE_TYPES[step]).astype(np.float32)
            grid = Steps.around_zero(codes.steps.block, size)
            tensor = Weight(codes.shape, codes.codes, codes.scheme, grid, origin=codes.origin)
    return tensor
