"""The formats that pack a matrix's codes: the tensors that hold it, and what the configuration says of it.

compressed-tensors (``pack-quantized``) is what vLLM, SGLang and transformers load; a row or a group of a row has a
scale. MLX's affine quantization is what mlx-vlm loads: ``stored · scale + bias``, the bias being half the range of the
codes below 0. ``gemma`` is transformers' own (``quant_method: gemma``): a scale a row, and static scales of what goes
into a matrix and comes out.

Where the head is packed it is a module of its own, but in MLX, and the embedding is not stored: a drafter never reads
it, and engines share the base's. Packed, the head is an eighth of what it is in floats, and reading it is most of what
a draft costs. SGLang has no packed head and would leave it as it was made, without a word: for it the head stays in
floats, tied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mtp_extract.formats.directory import EMBEDDING, HEAD, DirectoryFormat, PackedMatrix

GROUPS = (128, 64, 32)
"""Neighbouring elements of a row that may share a scale, in the kernels of engines."""


def _build_mlx_entry(packed: Mapping[str, PackedMatrix], floats: Sequence[str]) -> dict[str, Any]:
    entries = {module: {"group_size": how.group, "bits": how.bits, "mode": "affine"} for module, how in packed.items()}
    # What counts for modules without an entry of their own, of which there are none.
    return {**next(iter(entries.values())), **entries}


def _complete_mlx_entry(entry: Mapping[str, Any], packed: Sequence[str]) -> dict[str, Any]:
    """What the entry says of every packed module: its own, or what counts for those without one; affine by default."""
    default = {key: entry.get(key) for key in ("group_size", "bits")} | {"mode": entry.get("mode") or "affine"}
    entries = {module: entry[module] for module in packed if isinstance(entry.get(module), Mapping)}
    modules = {module: {**default, **entries.get(module, {})} for module in packed}
    return {**entry, **next(iter(modules.values())), **modules}


MLX = DirectoryFormat(
    name="mlx",
    key="quantization",
    codes=(".weight", "U32"),
    arrays=lambda how, scales: {".scales": scales, ".biases": scales * np.float32(-(1 << how.bits - 1))},
    document=_build_mlx_entry,
    groups=GROUPS,
    unfit="its steps are shared by {block} elements, where MLX has groups of 32, 64 or 128; the compressed-tensors "
    "format keeps whole rows of any length",
    unties=False,
    header="mlx",
    in_full=_complete_mlx_entry,
    offsets=".biases",
)


def _build_compressed_entry(packed: Mapping[str, PackedMatrix], floats: Sequence[str]) -> dict[str, Any]:
    groups: dict[tuple[int, int | None], list[str]] = {}
    for module, how in packed.items():
        size = None if how.group == how.shape[1] else how.group
        other = packed.get(module.replace(_GATE, _UP))
        fused = other is not None and (other.bits, other.group) == (how.bits, how.group)
        groups.setdefault((how.bits, size), []).append(_build_target_pattern(module, fused=fused))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": targets,
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "channel" if size is None else "group",
                    "group_size": size,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for index, ((bits, size), targets) in enumerate(groups.items())
        },
        "ignore": [],
    }


_QUERY = "self_attn.q_proj"
_GATE = "mlp.gate_proj"
_UP = "mlp.up_proj"


def _build_target_pattern(module: str, fused: bool) -> str:
    """What finds ``module`` whatever stands before it, as in vLLM, where it is below ``draft_model``; by the names too
    under which engines fuse it with others: vLLM and SGLang gate and up, if ``fused``; SGLang query, key and value.
    """
    name = module.removeprefix("model.").replace(_QUERY, "self_attn.(q|k|v|qkv)_proj")
    if fused:
        name = name.replace(_GATE, "mlp.(gate|gate_up)_proj")
    escaped = name.replace(".", r"\.")
    return f"re:.*{escaped}$"


COMPRESSED_TENSORS = DirectoryFormat(
    name="compressed-tensors",
    key="quantization_config",
    codes=(".weight_packed", "I32"),
    arrays=lambda how, scales: {".weight_scale": scales, ".weight_shape": np.array(how.shape, np.int64)},
    document=_build_compressed_entry,
    groups=(None, *GROUPS),
    unfit="its blocks of {block} are none that engines have kernels for; the litert format has its floats",
)

COMPRESSED_FOR_SGLANG = replace(COMPRESSED_TENSORS, name="compressed-tensors-sglang", floats_head_for="SGLang")


def _build_gemma_entry(packed: Mapping[str, PackedMatrix], floats: Sequence[str]) -> dict[str, Any]:
    bits = {module: how.bits for module, how in packed.items()}
    if HEAD in packed:
        bits[EMBEDDING] = 2  # it is missing, and transformers makes the smallest there is
    return {
        "quant_method": "gemma",
        "num_bits": next(iter(packed.values())).bits,
        "quantize_embeddings": HEAD in packed,
        "module_quant_configs": {f"^{re.escape(module)}$": {"num_bits": n} for module, n in bits.items()},
        # Always written: without it the head is not taken for a packed one. One tied to an embedding of floats is one
        # in name too.
        "modules_to_not_convert": [*floats, *([HEAD] if EMBEDDING in floats else [])],
    }


GEMMA = DirectoryFormat(
    name="gemma",
    key="quantization_config",
    codes=(".weight", "U8"),
    arrays=lambda how, scales: {".weight_scale": scales},
    static=(".input_activation_scale", ".output_activation_scale"),
    document=_build_gemma_entry,
    groups=(None,),
    unfit="its blocks of {block} have scales of their own, where this format has one a row; the compressed-tensors "
    "format keeps blocks of 32, 64 and 128",
)
