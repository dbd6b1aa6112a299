"""The proof: what the graph was read as is what the checkpoint computes, for every input.

Reading (:mod:`mtp_extract.graph.reading`) gives every value of the graph the form of one in a drafter, or refuses it.
What that leaves open is held here: how queries are rotated, at every position; which slots are seen, with every content
of the masks; the config's numbers; every number of every tensor. docs/proof.md is the whole argument.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mtp_extract.architecture import shapes_of
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.checkpoint.weight import Constant, Weight, constant_weight, row_ranges, unfold_factor
from mtp_extract.errors import CheckpointError, ProofError, UnsupportedError, escape
from mtp_extract.graph.call import computing, range_of_codes
from mtp_extract.graph.drafter import Walk
from mtp_extract.graph.expressions import LARGEST_FACTOR
from mtp_extract.graph.flat import FlatGraph
from mtp_extract.graph.masks import Masks
from mtp_extract.litertlm.quantized import QuantizedTensor, read_floats
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TfliteModel
from mtp_extract.proof.attentions import SlotCheck, check_rotations
from mtp_extract.proof.grids import list_rounded, rounding_in_words

Read = Callable[[str], Weight]
"""Role → its tensor as written."""

Proof = Mapping[str, Any]
"""What was held, as ``mtp-inspect --graph --json`` prints it; a record keeps what :func:`in_words` says of it."""

_SCALE_TOLERANCE, _NUMBER_TOLERANCE = 1e-5, 1e-6
_LARGEST_KEY_RMS = 16.0
"""The largest root mean square of a row of K that is reckoned with where its cache is of floats: K is a normalized row
times a weight, and published weights are below 1.
"""
_LARGEST_SCORE = 1e30
_CACHE_NAME = re.compile(r"kv_cache_([kv])_([0-9]+)")


@computing("The graph")
def prove(graph: FlatGraph, walk: Walk, config: DrafterConfig, read: Read) -> Proof:
    """Compare the checkpoint of ``config`` and ``read``, before it is rounded to the stored type, with ``graph``.

    Raises:
        ProofError: they part; the message names the first role at which they do.
        UnsupportedError: the graph does what cannot be told for every input.
        CheckpointError: a tensor does not have the size that the config says.
    """
    positions = walk.reading.positions
    _check_cache_names(walk)
    _check_config(walk, config)
    layouts, largest = _list_cache_axes(walk), [_compute_largest_score(graph, walk, i) for i in range(len(walk.layers))]
    rows, alike = _check_slots(graph, walk, config, largest)
    coarse = check_rotations(graph, walk, config)
    _check_tensors(graph.model, walk, config, read)
    return {
        "positions": positions.slots,
        "position_values": len(positions.rotating),
        "mask_rows": {"computed": rows, "of": positions.slots, "alike": alike},
        "largest_scores": [float(f"{score:.4g}") for score in largest],
        "cache_axes": layouts,
        "rounded_activations": list_rounded(graph, walk),
        "coarse_tables": coarse,
    }


def _check_cache_names(walk: Walk) -> None:
    """The runtime fills caches by their names: what a cache is used for must be what it is called."""
    for index, layer in enumerate(walk.layers):
        key, value = (_CACHE_NAME.fullmatch(name) for name in (layer.key, layer.value))
        if not key or not value or key[1] != "k" or value[1] != "v" or key[2] != value[2]:
            raise UnsupportedError(
                f"layers.{index}: the input {escape(layer.key)!r} is used as K and {escape(layer.value)!r} as V; the "
                "runtime fills them by their names, so the file is not what it seems."
            )


def _check_slots(graph: FlatGraph, walk: Walk, config: DrafterConfig, largest: Sequence[float]) -> tuple[int, bool]:
    """Check what every layer sees; how many rows were computed, and whether all others are like these."""
    masks = Masks(graph, walk.reading.positions)
    rows_of_layer = []
    for index, layer in enumerate(walk.layers):
        scale = layer.rotation.amplitude / layer.query_factor
        rows_of_layer.append(SlotCheck(index, layer, config, masks, largest[index] * abs(scale)).check())
        if not abs(scale / config.attention_scale - 1) <= _SCALE_TOLERANCE:
            raise ProofError(
                f"layers.{index}.attention: scores are {scale:.6g} times q · K, where the config has "
                f"{config.attention_scale:g}."
            )
    return max(rows for rows, _ in rows_of_layer), all(alike for _, alike in rows_of_layer)


def _list_cache_axes(walk: Walk) -> dict[str, list[int]]:
    """Cache input → its axes of KV heads, slots and dimensions, which all layers must agree on."""
    layouts: dict[str, list[int]] = {}
    for index, layer in enumerate(walk.layers):
        for name, axes in ((layer.key, layer.attention.scores.axes), (layer.value, layer.attention.axes)):
            head, slot, dimension = axes
            layout = [({0, 1, 2, 3} - {slot, dimension}).pop() if head is None else head, slot, dimension]
            if layouts.setdefault(name, layout) != layout:
                raise ProofError(f"layers.{index}.attention: {name} is read in two ways.")
    return layouts


def _compute_largest_score(graph: FlatGraph, walk: Walk, index: int) -> float:
    """|q| ≤ √n · the largest weight of its norm; |k| likewise, or as the grid of its cache has it."""
    layer = walk.layers[index]
    role = next(role for role in walk.roles if role.role == f"layers.{index}.q_norm")
    weight = 1.0 if role.tensor is None else float(abs(read_floats(graph.model, role.tensor)).max())
    row = math.sqrt(layer.head_dim)
    ends = range_of_codes(graph.inputs[layer.key].tensor)
    key = _LARGEST_KEY_RMS if ends is None else max(map(abs, ends))
    return min((row * weight * (1 + 1e-5) or 1.0) * row * key, _LARGEST_SCORE)


# What is written, number by number, against what the graph holds.


def _check_config(walk: Walk, config: DrafterConfig) -> None:
    """Check the numbers of ``config`` that no attention has."""
    heads = [(layer.heads, layer.head_dim, layer.kv_heads) for layer in walk.layers]
    written = [(config.num_heads, layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    for name, expected, other in (
        ("rms_norm_eps", walk.rms_norm_eps, config.rms_norm_eps),
        ("final_logit_softcap", walk.soft_cap, config.final_logit_softcap),
        ("hidden_activation", walk.hidden_activation, config.hidden_activation),
        ("heads", heads, written),
    ):
        if expected != other:
            raise ProofError(f"{name}: the graph has {expected}, the config {other}.")


def _check_tensors(model: TfliteModel, walk: Walk, config: DrafterConfig, read: Read) -> None:
    """Compare every tensor with the constant that plays its role, some rows at a time."""
    roles = {role.role: role for role in walk.roles if role.tensor is not None}
    for role, shape in shapes_of(config).items():
        weight = read(role.name)
        constant = Constant(model, roles[role.name]) if role.name in roles else constant_weight(shape)
        if math.prod(weight.shape) != math.prod(shape):
            raise CheckpointError(f"{role.name}: expected {math.prod(shape)} numbers, found {math.prod(weight.shape)}.")
        if not _reads_codes_of(weight, constant):
            _check_numbers(role.name, weight, constant)


def _check_numbers(name: str, weight: Weight, constant: Weight) -> None:
    """Compare every number of ``weight``, the tensor ``name``, with that of ``constant``."""
    for first, last in row_ranges(weight):
        written = weight.floats(first, last).reshape(-1)
        begin = first * weight.columns
        stored = _read_numbers(constant, begin, begin + written.size)
        size = np.abs(stored)
        wrong = ~((np.abs(stored - written) <= np.float32(_NUMBER_TOLERANCE) * size) & (size < LARGEST_FACTOR))
        if wrong.any():
            at = int(wrong.argmax())
            is_huge = size[at] >= LARGEST_FACTOR
            why = "larger than any of a drafter" if is_huge else f"{written[at]:.6g} in the checkpoint"
            raise ProofError(f"{name}: number {begin + at} is {stored[at]:.6g} in the graph, {why}.")


def _read_numbers(constant: Weight, begin: int, end: int) -> Floats:
    """Elements ``[begin, end)`` of a constant, flat, as its file stores their scales."""
    if isinstance(constant, Constant) and not constant.folded:
        return unfold_factor(constant.source.floats(begin, end), constant.factor)
    return constant.floats().reshape(-1)[begin:end]


def _reads_codes_of(weight: Weight, constant: Weight) -> bool:
    """Whether ``weight`` is the codes of ``constant`` themselves, each with its own scale, and none of them huge."""
    if not (isinstance(weight, Constant) and isinstance(constant, Constant)) or weight.scheme is None or weight.folded:
        return False
    if weight.source.tensor is not constant.source.tensor or weight.steps.factor != constant.factor:
        return False
    return _has_steps_of(weight, constant.source)


def _has_steps_of(weight: Weight, source: QuantizedTensor) -> bool:
    """Whether the steps of ``weight`` are the scales and zero points of ``source``, and none of its codes is huge."""
    storage = source.storage
    steps = weight.steps
    if storage.groups > 1 and storage.columns % steps.block:
        return False
    first_elements = np.arange(weight.rows)[:, None] * weight.columns + np.arange(0, weight.columns, steps.block)
    groups = first_elements // storage.columns % storage.groups
    scales = source.scale.reshape(-1)
    zero_points = source.zero_point.reshape(-1)[groups]
    same = np.array_equal(steps.size, scales[groups]) and np.array_equal(steps.zero_point, zero_points)
    return same and float(scales.max()) * (1 << weight.bits) < LARGEST_FACTOR


def in_words(proof: Mapping[str, Any]) -> list[str]:
    """``proof`` in sentences, as a record keeps it: what was held, and what is not the checkpoint's."""
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
    if rounded := rounding_in_words(proof["rounded_activations"], ranges=True):
        sentences.append(
            f"in real numbers: {rounded}; that rounding is the runtime's, and a checkpoint of floats has none"
        )
    return sentences
