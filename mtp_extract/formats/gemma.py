"""transformers' own quantized Gemma (``quant_method: gemma``): codes of 2, 4 or 8 bits, a scale a row, static scales of
of what goes into a matrix and comes out.

The head is a packed matrix and nothing stores the embedding, which a drafter never reads: transformers says that it is
missing, and makes the smallest there is. ``modules_to_not_convert`` is always written: without it the head is not
taken for a packed one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.packing import row_bytes
from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.formats.packed import EMBEDDING, HEAD, PackedFormat
from mtp_extract.formats.parts import INPUT, OUTPUT, Packed, Part, static_scale

_EMBEDDING_BITS = 2


class GemmaFormat(PackedFormat):
    """``config.json`` with ``quantization_config``, ``generation_config.json`` and ``model.safetensors``."""

    name = "gemma"
    key = "quantization_config"
    rows = True
    unfit = (
        "its blocks of {block} have scales of their own, where this format has one a row; the compressed-tensors "
        "format keeps blocks of 32, 64 and 128"
    )
    unties = True

    def parts(self, packed: Packed) -> Sequence[Part]:
        columns = row_bytes(packed.shape[1], packed.bits)
        return (
            Part(".weight", "codes", "I8" if packed.bits == 8 else "U8", (packed.shape[0], columns)),
            Part(".weight_scale", "scales", "F32", packed.scales),
            Part(".input_activation_scale", INPUT, "F32", ()),
            Part(".output_activation_scale", OUTPUT, "F32", ()),
        )

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        weights, *documents = super().plan(checkpoint, dtype)
        packed = {tensor.role for tensor in weights.tensors if tensor.part == INPUT}
        static = {role: [a for a in pair if a] for role, pair in checkpoint.activations.items() if any(pair)}
        lost = [role for role, pair in static.items() if role not in packed or not all(map(static_scale, pair))]
        notes = []
        if len(lost) < len(static):
            notes.append("Static scales of activations are held, and transformers rounds by them as the graph does.")
        if lost:
            notes.append(
                f"Activations of {', '.join(lost)} are not rounded: the format has static scales for INT8 around 0 "
                "alone, and for matrices of integers."
            )
        return [replace(weights, notes=tuple(notes)), *documents]

    def document(self, packed: Mapping[str, Packed], floats: Sequence[str]) -> dict[str, Any]:
        bits = {_pattern(module): {"num_bits": how.bits} for module, how in packed.items()}
        if HEAD in packed:
            bits[_pattern(EMBEDDING)] = {"num_bits": _EMBEDDING_BITS}
        return {
            "quant_method": "gemma",
            "num_bits": next(iter(packed.values())).bits,
            "quantize_embeddings": HEAD in packed,
            "module_quant_configs": bits,
            "modules_to_not_convert": _skipped(floats),
        }


FORMAT = GemmaFormat()


def _skipped(floats: Sequence[str]) -> list[str]:
    """Modules that stay as they are: a head that is tied to an embedding of floats is one in name too."""
    return [*floats, *([HEAD] if EMBEDDING in floats else [])]


def _pattern(module: str) -> str:
    return f"^{re.escape(module)}$"
