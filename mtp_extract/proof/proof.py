"""Prove that the checkpoint computes what the graph computes, for every input.

:mod:`mtp_extract.graph.reading` has given every value of the graph a form that a drafter's values have, or refused the
file. This module checks what that leaves open: the rotation of queries at every position, the visible slots with every
content of the masks, the config's numbers, and every number of every tensor. docs/proof.md has the whole argument.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.checkpoint.weight import BundleWeight, Weight, build_constant_weight, split_rows, unfold_factor
from mtp_extract.errors import CheckpointError, ProofError, UnsupportedError, escape
from mtp_extract.graph.call import convert_errors, find_representable_range
from mtp_extract.graph.drafter import DrafterStructure
from mtp_extract.graph.expressions import LARGEST_FACTOR
from mtp_extract.graph.flat import FlatGraph
from mtp_extract.graph.masks import Masks
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TfliteModel
from mtp_extract.proof.attentions import SlotCheck, check_rotations
from mtp_extract.proof.grids import describe_rounding, list_rounded_tensors

Read = Callable[[str], Weight]
"""Role → its tensor as it would be written."""

Proof = Mapping[str, Any]
"""What was checked, as ``mtp-inspect --graph --json`` prints it; a record has :func:`describe_proof` of it."""

_SCALE_TOLERANCE, _NUMBER_TOLERANCE = 1e-5, 1e-6
_LARGEST_KEY_RMS = 16.0
"""Bound on the root mean square of a row of K, if its cache holds floats: K is a normalized row times a weight, and
published weights are below 1.
"""
_LARGEST_SCORE = 1e30
_CACHE_NAME = re.compile(r"kv_cache_([kv])_([0-9]+)")


@convert_errors("The graph")
def prove(graph: FlatGraph, structure: DrafterStructure, config: DrafterConfig, read: Read) -> Proof:
    """Compare the checkpoint, before it is rounded to the stored type, with ``graph``.

    Raises:
        ProofError: they differ; the message names the first role that does.
        UnsupportedError: the graph cannot be compared for every input.
        CheckpointError: a tensor does not have the size that the config says.
    """
    positions = structure.reading.positions
    _check_cache_names(structure)
    _check_config(structure, config)
    cache_axes = _list_cache_axes(structure)
    largest_scores = [_compute_largest_score(graph, structure, index) for index in range(len(structure.layers))]
    rows, alike = _check_slots(graph, structure, config, largest_scores)
    coarse_tables = check_rotations(graph, structure, config)
    _check_tensors(graph.model, structure, config, read)
    return {
        "positions": positions.slots,
        "position_values": len(positions.rotating),
        "mask_rows": {"computed": rows, "of": positions.slots, "alike": alike},
        "largest_scores": [float(f"{score:.4g}") for score in largest_scores],
        "cache_axes": cache_axes,
        "rounded_activations": list_rounded_tensors(graph, structure),
        "coarse_tables": coarse_tables,
    }


def _check_cache_names(structure: DrafterStructure) -> None:
    """Raise UnsupportedError unless names tell K from V: the runtime fills caches by their names."""
    for index, layer in enumerate(structure.layers):
        key, value = (_CACHE_NAME.fullmatch(name) for name in (layer.key, layer.value))
        if not key or not value or key[1] != "k" or value[1] != "v" or key[2] != value[2]:
            raise UnsupportedError(
                f"layers.{index}: the input {escape(layer.key)!r} is used as K and {escape(layer.value)!r} as V; "
                "expected kv_cache_k_N and kv_cache_v_N, because the runtime fills caches by their names."
            )


def _check_slots(
    graph: FlatGraph, structure: DrafterStructure, config: DrafterConfig, largest: Sequence[float]
) -> tuple[int, bool]:
    """Check masks and score scale of every layer; return how many rows were computed, and if all others are alike."""
    masks = Masks(graph, structure.reading.positions)
    rows_of_layer = []
    for index, layer in enumerate(structure.layers):
        scale = layer.rotation.amplitude / layer.query_factor
        rows_of_layer.append(SlotCheck(index, layer, config, masks, largest[index] * abs(scale)).check())
        if not abs(scale / config.attention_scale - 1) <= _SCALE_TOLERANCE:
            raise ProofError(
                f"layers.{index}.attention: scores are {scale:.6g} times q · K; the config has "
                f"{config.attention_scale:g}."
            )
    return max(rows for rows, _ in rows_of_layer), all(alike for _, alike in rows_of_layer)


def _list_cache_axes(structure: DrafterStructure) -> dict[str, list[int]]:
    """Return each cache input's axes of KV heads, slots and dimensions; ProofError if layers differ in them."""
    axes_of_cache: dict[str, list[int]] = {}
    for index, layer in enumerate(structure.layers):
        for name, axes in ((layer.key, layer.attention.scores.axes), (layer.value, layer.attention.axes)):
            head, slot, dimension = axes
            named_axes = [({0, 1, 2, 3} - {slot, dimension}).pop() if head is None else head, slot, dimension]
            if axes_of_cache.setdefault(name, named_axes) != named_axes:
                raise ProofError(f"layers.{index}.attention: {name} is read in two ways.")
    return axes_of_cache


def _compute_largest_score(graph: FlatGraph, structure: DrafterStructure, index: int) -> float:
    """Bound |q · K| of a layer: |q| ≤ √n · largest weight of its norm; |K| by its cache's range, or its RMS bound."""
    layer = structure.layers[index]
    role = next(role for role in structure.roles if role.role == f"layers.{index}.q_norm")
    weight = 1.0 if role.tensor is None else float(abs(read_floats(graph.model, role.tensor)).max())
    row = math.sqrt(layer.head_dim)
    ends = find_representable_range(graph.inputs[layer.key].tensor)
    key = _LARGEST_KEY_RMS if ends is None else max(map(abs, ends))
    return min((row * weight * (1 + 1e-5) or 1.0) * row * key, _LARGEST_SCORE)


# Numbers of the checkpoint against those of the graph.


def _check_config(structure: DrafterStructure, config: DrafterConfig) -> None:
    heads = [(layer.heads, layer.head_dim, layer.kv_heads) for layer in structure.layers]
    written = [(config.num_heads, layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    for name, of_graph, of_config in (
        ("rms_norm_eps", structure.rms_norm_eps, config.rms_norm_eps),
        ("final_logit_softcap", structure.soft_cap, config.final_logit_softcap),
        ("hidden_activation", structure.hidden_activation, config.hidden_activation),
        ("heads", heads, written),
    ):
        if of_graph != of_config:
            raise ProofError(f"{name}: the graph has {of_graph}, the config {of_config}.")


def _check_tensors(model: TfliteModel, structure: DrafterStructure, config: DrafterConfig, read: Read) -> None:
    """Compare every tensor with the constant of its role; a role without a constant is ones."""
    roles = {role.role: role for role in structure.roles if role.tensor is not None}
    for role, shape in list_shapes(config).items():
        weight = read(role.name)
        constant = BundleWeight(model, roles[role.name]) if role.name in roles else build_constant_weight(shape)
        if math.prod(weight.shape) != math.prod(shape):
            raise CheckpointError(f"{role.name}: expected {math.prod(shape)} numbers, found {math.prod(weight.shape)}.")
        if not _reads_codes_of(weight, constant):
            _check_numbers(role.name, weight, constant)


def _check_numbers(name: str, weight: Weight, constant: Weight) -> None:
    for first, last in split_rows(weight):
        written = weight.floats(first, last).reshape(-1)
        begin = first * weight.columns
        stored = _read_numbers(constant, begin, begin + written.size)
        size = np.abs(stored)
        wrong = ~((np.abs(stored - written) <= np.float32(_NUMBER_TOLERANCE) * size) & (size < LARGEST_FACTOR))
        if wrong.any():
            at = int(wrong.argmax())
            is_huge = size[at] >= LARGEST_FACTOR
            why = "larger than any number of a drafter" if is_huge else f"{written[at]:.6g} in the checkpoint"
            raise ProofError(f"{name}: number {begin + at} is {stored[at]:.6g} in the graph, {why}.")


def _read_numbers(constant: Weight, begin: int, end: int) -> Floats:
    """Return elements ``[begin, end)`` of the flattened constant, F32, dequantized by the scales of its file."""
    if isinstance(constant, BundleWeight) and not constant.folded:
        return unfold_factor(constant.source.floats(begin, end), constant.factor)
    return constant.floats().reshape(-1)[begin:end]


def _reads_codes_of(weight: Weight, constant: Weight) -> bool:
    """Whether ``weight`` is read from the codes of ``constant``, with the same scales, and holds no huge number."""
    if (
        not (isinstance(weight, BundleWeight) and isinstance(constant, BundleWeight))
        or weight.scheme is None
        or weight.folded
    ):
        return False
    if weight.source.tensor is not constant.source.tensor or weight.steps.factor != constant.factor:
        return False
    source, steps = constant.source, weight.steps
    storage = source.storage
    if storage.groups > 1 and storage.columns % steps.block:
        return False
    first_elements = np.arange(weight.rows)[:, None] * weight.columns + np.arange(0, weight.columns, steps.block)
    groups = first_elements // storage.columns % storage.groups
    scales = source.scale.reshape(-1)
    zero_points = source.zero_point.reshape(-1)[groups]
    same = np.array_equal(steps.size, scales[groups]) and np.array_equal(steps.zero_point, zero_points)
    return same and float(scales.max()) * (1 << weight.bits) < LARGEST_FACTOR


def describe_proof(proof: Mapping[str, Any]) -> list[str]:
    """Describe ``proof`` in sentences, as a record keeps it: what was checked, and what only the bundle rounds."""
    rows = proof["mask_rows"]
    masks = f"all {rows['of']} rows" + ("" if rows["computed"] == rows["of"] else " (equal up to a shift)")
    sentences = [
        f"every operator was recognized; RoPE at all {proof['positions']} positions, masks in {masks} and every number "
        "of every tensor are the bundle's"
    ]
    sentences += [
        f"but for the file's own RoPE table of layer {table['layer']}, held in {escape(table['held_in'])}; the exact "
        "theta is written"
        for table in proof["coarse_tables"]
    ]
    if rounded := describe_rounding(proof["rounded_activations"], ranges=True):
        sentences.append(
            f"in real numbers: {rounded}; that rounding is the runtime's, and a checkpoint of floats has none"
        )
    return sentences
