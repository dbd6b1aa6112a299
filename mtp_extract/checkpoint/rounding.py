"""Rounds floats to shorter floats, and matrices of floats to codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mtp_extract.checkpoint.dtypes import BLOCK, BLOCK_TYPES, ROUNDED_TO, Codes
from mtp_extract.checkpoint.weight import Steps, Weight, center_codes, split_rows
from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.storage import Floats, Packing, Storage
from mtp_extract.litertlm.tflite import TensorType

SCALES = " scales"
"""Suffix of a rounding's name in a record if it applies to the scales of codes."""

SCALE_TYPES = MappingProxyType({f"FP16{SCALES}": np.float16, f"F32{SCALES}": np.float32})
"""Types to which scales are rounded. They are rounded to F32 where a folded factor was divided out of them."""


def round_weight(weight: Weight, rounded_to: str) -> Weight:
    """Return the floats of ``weight``, without codes, rounded to a key of
    :data:`~mtp_extract.checkpoint.dtypes.ROUNDED_TO`."""
    dtype = ROUNDED_TO[rounded_to]

    def read(first: int, last: int) -> Floats:
        values = weight.floats(first, last)
        return dtype.widen(dtype.narrow(values.reshape(-1), "a tensor").tobytes()).reshape(values.shape)

    return Weight(weight.shape, read, origin=weight.origin)


@dataclass(frozen=True)
class Rule:
    """A rule that rounds a matrix of floats to codes."""

    name: str
    bits: int
    block: int  # elements of a row that share a step; 0 for the entire row

    def fits(self, weight: Weight) -> bool:
        """Whether ``weight`` is a matrix whose rows are whole blocks."""
        return len(weight.shape) == 2 and weight.columns % (self.block or 1) == 0

    def round_matrix(self, original: Weight) -> Weight:
        """Return a matrix of floats as codes, which are computed when they are read, a few rows at a time.

        Raises:
            UnsupportedError: its rows are not whole blocks; or, on reading, a number or a step is out of range.
        """
        if not self.fits(original):
            raise UnsupportedError(f"{self.name} is for matrices with rows of whole blocks of {self.block} alone.")
        block = self.block or original.columns

        def read_codes(first: int, last: int) -> Codes:
            return self._round(original.floats(first, last).reshape(-1, block))[0].reshape(last - first, -1)

        def compute_steps() -> Steps:
            parts = [self._round(original.floats(*rows).reshape(-1, block))[1] for rows in split_rows(original)]
            return Steps.around_zero(block, np.concatenate(parts).reshape(original.rows, -1))

        packing = Packing(self.bits, signed=True)
        return Weight(original.shape, read_codes, packing, compute_steps, origin=original.origin, rule=self.name)

    def _round(self, blocks: Floats) -> tuple[Codes, Floats]:
        """Return the codes of ``blocks``, ``[count, block]``, and their steps, ``[count]``.

        Rules of rows are ai-edge-quantizer's (symmetric, F32 steps), rules of blocks ggml's (FP16 steps).
        """
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
"""Name → rule."""


def repeat_roundings(tensor: Weight, steps: Sequence[str]) -> Weight:
    """Round ``tensor`` by each of ``steps``: a key of :data:`RULES`, of ``ROUNDED_TO`` or of :data:`SCALE_TYPES`.

    Raises:
        UnsupportedError: a step cannot be applied to ``tensor``.
    """
    for step in steps:
        if step in RULES:
            # Rules take floats: earlier codes were dropped before this step.
            tensor = RULES[step].round_matrix(round_weight(tensor, ""))
        elif step in ROUNDED_TO:
            tensor = round_weight(tensor, step)
        else:
            codes = center_codes(tensor)
            size = codes.steps.size.astype(SCALE_TYPES[step]).astype(np.float32)
            grid = Steps.around_zero(codes.steps.block, size)
            tensor = Weight(codes.shape, codes.codes, codes.scheme, grid, origin=codes.origin)
    return tensor
