"""The proof: what the graph was read as is what the checkpoint computes, for every input.

Reading (:mod:`mtp_extract.graph.reading`) gives every value of the graph the form of one in a drafter, or refuses it.
What that leaves open is held here: how queries are rotated, at every position; which slots are seen, with every content
of the masks; the config's numbers; every number of every tensor. docs/proof.md is the whole argument.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.errors import ProofError, UnsupportedError, escape
from mtp_extract.graph.call import code_range, computing, grid_of
from mtp_extract.graph.drafter import LOGITS, PROJECTED, Walk
from mtp_extract.graph.evaluate import inputs_of
from mtp_extract.graph.flat import FlatGraph
from mtp_extract.graph.masks import Masks
from mtp_extract.litertlm.storage import read_floats
from mtp_extract.proof.grids import CoarseActivations, hold_grids
from mtp_extract.proof.numbers import Read, hold_config, hold_tensors
from mtp_extract.proof.rotations import CoarseTable, hold_rotations
from mtp_extract.proof.slots import SlotsOfLayer

_SAME = 1e-5
_KEY_SIZE = 16.0
"""The largest root mean square of a row of K that is reckoned with where its cache is of floats: K is a normalized row
times a weight, and published weights are below 1.
"""
_LARGEST_SCORE = 1e30
_CACHE_NAME = re.compile(r"kv_cache_([kv])_([0-9]+)")


@dataclass(frozen=True)
class Proof:
    """What was held.

    Attributes:
        positions: how many the caches have; rotations were held at each.
        tables: how many values of the graph rotate queries.
        rows, alike: rows of masks that were computed, and whether all others are the same as these up to a shift.
        largest_scores: by layer, the largest |q · K| that is reckoned with.
        layouts: cache input → its axes of KV heads, slots and dimensions.
        activations: what of the activations the file holds in few bits.
        coarse: RoPE tables of the file that are coarser than the config's.
        rounded: largest share by which a number that was rounded differs; None where nothing was.
    """

    positions: int
    tables: int
    rows: int
    alike: bool
    largest_scores: tuple[float, ...]
    layouts: Mapping[str, tuple[int, int, int]]
    activations: CoarseActivations
    coarse: tuple[CoarseTable, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``extraction.json``."""
        codes = self.activations.fewest_codes
        return {
            "positions": self.positions,
            "position_values": self.tables,
            "mask_rows": {"computed": self.rows, "of": self.positions, "alike": self.alike},
            "largest_scores": [float(f"{score:.4g}") for score in self.largest_scores],
            "cache_axes": {name: list(axes) for name, axes in self.layouts.items()},
            "activations_held_in": dict(self.activations.types),
            "fewest_codes": None if codes is None else float(f"{codes:.2g}"),
            "largest_share_cut_off": float(f"{self.activations.cut_off:.1g}"),
            "coarse_tables": [{"layer": table.layer, "held_in": table.kind} for table in self.coarse],
        }


@computing("The graph")
def prove(
    graph: FlatGraph,
    walk: Walk,
    config: DrafterConfig,
    read: Read,
) -> Proof:
    """Hold the checkpoint of ``config`` and ``read`` against ``graph``.

    Args:
        graph: the drafter's operators.
        walk: what was read in them.
        config: as written.
        read: role → the tensor as written, before it is rounded to the stored type.

    Raises:
        ProofError: they part; the message names the first role at which they do.
        UnsupportedError: the graph does what cannot be told for every input.
        CheckpointError: a tensor does not have the size that the config says.
    """
    _check_names(walk)
    hold_config(walk, config)
    layouts, largest = _layouts(walk), tuple(_largest_score(graph, walk, i) for i in range(len(walk.layers)))
    rows, alike = _hold_slots(graph, walk, config, largest)
    coarse = hold_rotations(graph, walk, config)
    activations = hold_grids(graph, walk)
    hold_tensors(graph.model, walk, config, read)
    positions = walk.reading.inside.positions
    return Proof(positions.slots, len(positions.rotating), rows, alike, largest, layouts, activations, coarse)


def _check_names(walk: Walk) -> None:
    """The runtime fills caches by their names: what a cache is used for must be what it is called.

    Raises:
        UnsupportedError: it is not.
    """
    for index, layer in enumerate(walk.layers):
        if layer.key == layer.value:
            raise UnsupportedError(
                f"layers.{index}: K and V are the same input, {escape(layer.key)!r}; no engine hands them over so."
            )
        key, value = (_CACHE_NAME.fullmatch(name) for name in (layer.key, layer.value))
        if not key or not value or key[1] != "k" or value[1] != "v" or key[2] != value[2]:
            raise UnsupportedError(
                f"layers.{index}: the input {escape(layer.key)!r} is used as K and {escape(layer.value)!r} as V; the "
                "runtime fills them by their names, so the file is not what it seems."
            )


def _hold_slots(graph: FlatGraph, walk: Walk, config: DrafterConfig, largest: tuple[float, ...]) -> tuple[int, bool]:
    """Hold what every layer sees; how many rows were computed, and whether all others are like these."""
    inputs = inputs_of([graph.outputs[LOGITS], graph.outputs[PROJECTED]])
    masks, found = Masks(graph, walk.reading.inside.positions), []
    for index, layer in enumerate(walk.layers):
        amplitude = layer.rotation.amplitude / layer.query_factor
        slots = SlotsOfLayer(index, layer, config, masks, inputs, largest[index] * abs(amplitude))
        found.append(slots.hold())
        _check_scale(index, amplitude, config)
    return max(rows for rows, _ in found), all(alike for _, alike in found)


def _check_scale(index: int, scale: float, config: DrafterConfig) -> None:
    if not abs(scale / config.attention_scale - 1) <= _SAME:
        raise ProofError(
            f"layers.{index}.attention: scores are {scale:.6g} times q · K, where the config has "
            f"{config.attention_scale:g}. Nothing is written. Please report the file."
        )


def _layouts(walk: Walk) -> dict[str, tuple[int, int, int]]:
    """Cache input → its axes of KV heads, slots and dimensions, which all layers must agree on."""
    found: dict[str, tuple[int, int, int]] = {}
    for index, layer in enumerate(walk.layers):
        for name, axes in ((layer.key, layer.attention.scores.axes), (layer.value, layer.attention.axes)):
            head, slot, dimension = axes
            own = ({0, 1, 2, 3} - {slot, dimension}).pop() if head is None else head, slot, dimension
            if found.setdefault(name, own) != own:
                raise ProofError(f"layers.{index}.attention: {name} is read in two ways. Nothing is written.")
    return found


def _largest_score(graph: FlatGraph, walk: Walk, index: int) -> float:
    """|q| ≤ √n · the largest weight of its norm; |k| likewise, or as the grid of its cache has it."""
    layer = walk.layers[index]
    role = next(role for role in walk.roles if role.role == f"layers.{index}.q_norm")
    weight = 1.0 if role.tensor is None else float(abs(read_floats(graph.model, role.tensor)).max())
    tensor = graph.inputs[layer.key].tensor
    grid, row, key = grid_of(tensor), math.sqrt(layer.head_dim), _KEY_SIZE
    if tensor.type is not None and layer.key in walk.cache_scales:
        grid = abs(walk.cache_scales[layer.key]), 0
    if grid is not None and tensor.type is not None:
        key = max(abs(end - grid[1]) * grid[0] for end in code_range(tensor.type))
    return min((row * weight * (1 + 1e-5) or 1.0) * row * key, _LARGEST_SCORE)
