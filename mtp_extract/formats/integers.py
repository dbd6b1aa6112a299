"""The formats that pack a matrix's codes: their tensors, and their entry in ``config.json``.

compressed-tensors (``pack-quantized``) is what vLLM, SGLang and transformers load; a row or a group of a row has a
scale. MLX's affine quantization is what mlx-vlm loads: ``scale · unsigned code + bias``, with the bias at minus half
the range of the codes. ``gemma`` is transformers' own (``quant_method: gemma``): a scale per row, and static scales of
each matrix's input and output activations.

A packed head is a module of its own except in MLX, and the embedding is not stored: a drafter never reads it, and
engines share the base's. A packed head has an eighth of the bytes of floats, and reading it is most of what a draft
costs. SGLang has no packed head and would leave it uninitialized without a word: for SGLang the head stays in floats,
tied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mtp_extract.formats.directory import EMBEDDING, HEAD, DirectoryFormat, PackedMatrices

GROUPS = (128, 64, 32)
"""Group sizes for which engines have kernels."""


def _build_mlx_entry(packed: PackedMatrices, floats: Sequence[str]) -> dict[str, Any]:
    entries = {name: {"group_size": m.group, "bits": m.bits, "mode": "affine"} for name, m in packed.items()}
    # At the top level stands the default for modules without an entry; every packed module has one.
    return {**next(iter(entries.values())), **entries}


def _complete_mlx_entry(entry: Mapping[str, Any], packed: Sequence[str]) -> dict[str, Any]:
    """Give every packed module an entry of its own: what it has, else the default; the default mode is affine."""
    default = {key: entry.get(key) for key in ("group_size", "bits")} | {"mode": entry.get("mode") or "affine"}
    entries = {module: entry[module] for module in packed if isinstance(entry.get(module), Mapping)}
    modules = {module: {**default, **entries.get(module, {})} for module in packed}
    return {**entry, **next(iter(modules.values())), **modules}


MLX = DirectoryFormat(
    name="mlx",
    entry_key="quantization",
    codes=(".weight", "U32"),
    build_arrays=lambda matrix, scales: {".scales": scales, ".biases": scales * np.float32(-(1 << matrix.bits - 1))},
    build_entry=_build_mlx_entry,
    group_sizes=GROUPS,
    unfit_reason="its steps are shared by {block} elements, where MLX has groups of 32, 64 or 128; the "
    "compressed-tensors format keeps whole rows of any length",
    unties_head=False,
    tensor_format="mlx",
    complete_entry=_complete_mlx_entry,
    offsets_suffix=".biases",
)


def _build_compressed_entry(packed: PackedMatrices, floats: Sequence[str]) -> dict[str, Any]:
    groups: dict[tuple[int, int | None], list[str]] = {}
    for module, matrix in packed.items():
        size = None if matrix.group == matrix.shape[1] else matrix.group
        up = packed.get(module.replace(_GATE, _UP))
        is_fused = up is not None and (up.bits, up.group) == (matrix.bits, matrix.group)
        groups.setdefault((matrix.bits, size), []).append(_build_target_pattern(module, is_fused))
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


def _build_target_pattern(module: str, is_fused: bool) -> str:
    """Return a target that finds ``module`` under any prefix, such as vLLM's ``draft_model``.

    It also matches the names of fused modules: vLLM and SGLang fuse gate and up if both are packed alike
    (``is_fused``), SGLang fuses query, key and value.
    """
    name = module.removeprefix("model.").replace(_QUERY, "self_attn.(q|k|v|qkv)_proj")
    if is_fused:
        name = name.replace(_GATE, "mlp.(gate|gate_up)_proj")
    escaped = name.replace(".", r"\.")
    return f"re:.*{escaped}$"


COMPRESSED_TENSORS = DirectoryFormat(
    name="compressed-tensors",
    entry_key="quantization_config",
    codes=(".weight_packed", "I32"),
    build_arrays=lambda matrix, scales: {".weight_scale": scales, ".weight_shape": np.array(matrix.shape, np.int64)},
    build_entry=_build_compressed_entry,
    group_sizes=(None, *GROUPS),
    unfit_reason="its blocks of {block} are none that engines have kernels for; the litert format has its floats",
)

COMPRESSED_FOR_SGLANG = replace(COMPRESSED_TENSORS, name="compressed-tensors-sglang", floats_head_for="SGLang")


def _build_gemma_entry(packed: PackedMatrices, floats: Sequence[str]) -> dict[str, Any]:
    bits = {module: matrix.bits for module, matrix in packed.items()}
    if HEAD in packed:
        bits[EMBEDDING] = 2  # no embedding is stored: transformers then allocates the smallest one
    return {
        "quant_method": "gemma",
        "num_bits": next(iter(packed.values())).bits,
        "quantize_embeddings": HEAD in packed,
        "module_quant_configs": {f"^{re.escape(module)}$": {"num_bits": n} for module, n in bits.items()},
        # Written even if empty: without it transformers does not treat the head as packed. A head tied to an embedding
        # of floats is listed under both names.
        "modules_to_not_convert": [*floats, *([HEAD] if EMBEDDING in floats else [])],
    }


GEMMA = DirectoryFormat(
    name="gemma",
    entry_key="quantization_config",
    codes=(".weight", "U8"),
    build_arrays=lambda matrix, scales: {".weight_scale": scales},
    activation_suffixes=(".input_activation_scale", ".output_activation_scale"),
    build_entry=_build_gemma_entry,
    group_sizes=(None,),
    unfit_reason="its blocks of {block} have scales of their own, where this format has one a row; the "
    "compressed-tensors format keeps blocks of 32, 64 and 128",
)
