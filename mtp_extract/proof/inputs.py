"""Inputs that tell functions apart: what the proof feeds to the graph, and what the same means to a checkpoint.

Positions lie below, at and beyond the window and at the end of the cache; masks have holes; slots past a query's
position hold stale numbers; K is quiet where it may be seen, so that every slot of a window counts, and loud where it
may not, so that a slot that leaks is heard. K, V, heads and layer types all hold different numbers. All samples share
the caches, which are integers with a scale whatever the type of the input: 32 003 slots of them are small, and read
once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.graph.arrays import Coded, Numbers
from mtp_extract.graph.call import DTYPES, grid_of
from mtp_extract.graph.drafter import ACTIVATIONS, Walk
from mtp_extract.graph.evaluate import Samples
from mtp_extract.graph.fill import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR, fill_mask, fill_param, fill_position
from mtp_extract.graph.flat import FlatGraph, Value
from mtp_extract.litertlm.tflite import Tensor, TensorType
from mtp_extract.proof.forward import Cache, Step

if TYPE_CHECKING:
    from mtp_extract.architecture.config import DrafterConfig

__all__ = ["Inputs", "Reading", "draw"]

_FLOATS = frozenset({TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16})
_LARGEST_CODE = {TensorType.INT16: 32767}
_HOLES = 0.2
# Scores of a standard deviation of about one: every slot of a window has a say.
_QUIET_SCORES = 1.2
_QUIET_CODE = 10
# V of floats: small, so that the epsilon of the norm behind the attention shows.
_SMALL_VALUES = 0.01
_LOUDER = 12
_QUIET_SLOTS = 8
_LOUD_VALUES = 200
_LOUD_ACTIVATIONS = 20
_LOUD_SLOTS = 512
# Numbers drawn for a head of a cache, and how many fewer slots in a row may be loud for it.
_DRAWN = 1 << 18
_MOST_READINGS = 32
_PASSED = frozenset(
    {"CAST", "RESHAPE", "SLICE", "STRIDED_SLICE", "TRANSPOSE", "DEQUANTIZE", "QUANTIZE", "EXPAND_DIMS", "SQUEEZE"}
)


@dataclass(frozen=True)
class Reading:
    """One way to read the inputs, where shapes and types leave more than one.

    Attributes:
        layouts: cache input → the axes of its shape that are KV heads, slots and head_dim.
        sliding_masked: whether sliding layers see ``mask`` too, or the window alone.
    """

    layouts: Mapping[str, tuple[int, int, int]]
    sliding_masked: bool


@dataclass(frozen=True)
class Inputs:
    """The drawn inputs of all samples.

    Attributes:
        positions: of the first query of each sample.
        graph: what the graph is fed, by name of the input.
        activations: float32 ``[samples, queries, 2 · backbone width]``.
        mask, local: bool ``[samples, queries, slots]``: the slots the mask inputs show; None where there is no such
            input.
    """

    config: DrafterConfig
    walk: Walk
    seed: int
    positions: tuple[int, ...]
    queries: int
    slots: int
    graph: Mapping[str, Samples]
    activations: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_] | None
    local: npt.NDArray[np.bool_] | None
    scales: Mapping[str, tuple[float, int]]

    def readings(self) -> Iterator[Reading]:
        """Every way to read the inputs that their shapes allow, the published one first."""
        names: dict[str, list[tuple[int, int, int]]] = {}
        for layer, found in zip(self.config.layers, self.walk.layers, strict=True):
            for name, published in ((found.key, (1, 2, 3)), (found.value, (1, 3, 2))):
                shape = self._codes(name).shape
                ways = _layouts(shape, layer.num_kv_heads, layer.head_dim, self.slots, published)
                if not ways:
                    raise UnsupportedError(
                        f"The cache {escape(name)} has the shape {list(shape)}; expected {layer.num_kv_heads} heads of "
                        f"{layer.head_dim}, and {self.slots} slots, in any order."
                    )
                names.setdefault(name, ways)
        sliding = [i for i, layer in enumerate(self.config.layers) if layer.sliding_window is not None]
        # A graph that is told the range of slots to read, as the published ones are, need not look at the mask too.
        masked = [True]
        if sliding and self.mask is not None and (PARAM_TENSOR in self.graph or self.local is not None):
            reads = any(MASK in self.walk.layers[i].masks for i in sliding)
            masked = [reads, not reads]
        for flag, axes in islice(product(masked, product(*names.values())), _MOST_READINGS):
            yield Reading(dict(zip(names, axes, strict=True)), flag)

    def step(self, reading: Reading, trace: dict[str, Any] | None = None) -> Step:
        """The same inputs as a checkpoint sees them."""
        positions = np.array(self.positions)[:, None] + np.arange(self.queries)
        return Step(
            self.activations,
            positions,
            [(self._cache(found.key, reading), self._cache(found.value, reading)) for found in self.walk.layers],
            [self._seen(layer.sliding_window, positions, reading) for layer in self.config.layers],
            trace,
        )

    def _codes(self, name: str) -> Coded | np.ndarray:
        numbers = self.graph[name][0]
        assert isinstance(numbers, (Coded, np.ndarray))
        return numbers

    def _cache(self, name: str, reading: Reading) -> Cache:
        numbers = self._codes(name)
        codes = numbers.codes if isinstance(numbers, Coded) else numbers
        rest = ({0, 1, 2, 3} - set(reading.layouts[name])).pop()
        return Cache(np.transpose(codes, (rest, *reading.layouts[name]))[0], *self.scales[name])

    def _seen(self, window: int | None, positions: npt.NDArray[Any], reading: Reading) -> npt.NDArray[np.bool_]:
        slots = np.arange(self.slots)
        seen = slots <= positions[..., None]
        if window is None:
            return seen if self.mask is None else self.mask
        seen = seen & (slots > positions[..., None] - window)
        if self.mask is not None and reading.sliding_masked:
            seen = seen & self.mask
        return seen if self.local is None else seen & self.local


def _layouts(
    shape: Sequence[int], heads: int, width: int, slots: int, published: tuple[int, int, int]
) -> list[tuple[int, int, int]]:
    if len(shape) != 4:
        return []
    ways = []
    for rest, *axes in permutations(range(4)):
        if shape[rest] == 1 and [shape[a] for a in axes] == [heads, slots, width]:
            ways.append((axes[0], axes[1], axes[2]))
    # With one head, which of two axes of one element is the heads' makes no difference.
    different = {tuple(a for a in way if shape[a] > 1): way for way in reversed(ways)}
    different.update({tuple(a for a in way if shape[a] > 1): way for way in ways if way == published})
    return sorted(different.values(), key=lambda way: (way != published, way))


def draw(
    graph: FlatGraph,
    walk: Walk,
    config: DrafterConfig,
    needed: frozenset[str],
    query_norms: Sequence[float],
    spread: float,
    seed: int,
    additive: bool = True,
) -> Inputs:
    """Inputs for ``graph``; the same for the same arguments.

    Args:
        graph, walk: the graph, and which of its inputs are caches.
        config: geometry and window of the checkpoint.
        needed: names of the inputs that the outputs depend on.
        query_norms: per layer, the length of a normalized query.
        spread: of the activations of the first sample, so small that the norms' epsilon shows.
        seed: of the random numbers.
        additive: whether a mask of floats is 0 and a large negative number, or 1 and 0.

    Raises:
        UnsupportedError: an input that this release does not know how to fill.
    """
    random = np.random.default_rng(seed)
    _check_names(walk)
    caches = {name for layer in walk.layers for name in (layer.key, layer.value)}
    unknown = needed - caches - {ACTIVATIONS, INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR}
    if unknown:
        raise UnsupportedError(
            f"Expected the inputs of a known drafter, found also {', '.join(sorted(map(escape, unknown)))}, which this "
            "release cannot fill. Look for a newer release."
        )
    slots = _slots(graph, walk, config)
    queries = max(1, graph.inputs[ACTIVATIONS].tensor.elements // (2 * config.backbone_hidden_size))
    window = next((la.sliding_window for la in config.layers if la.sliding_window is not None), None)
    positions, loud = _positions(slots, window, queries)
    count = len(positions)
    all_positions = np.array(positions)[:, None] + np.arange(queries)
    at = np.arange(slots)
    mask = (at <= all_positions[..., None]) & (random.random((count, 1, slots)) >= _HOLES)
    mask[..., loud] = False
    near = at > all_positions[..., None] - (window or slots)
    local = (at <= all_positions[..., None]) & near & (random.random((count, 1, slots)) >= _HOLES)
    for sample, query in np.ndindex(count, queries):
        mask[sample, query, all_positions[sample, query]] = local[sample, query, all_positions[sample, query]] = True
    activations = random.standard_normal((count, queries, 2 * config.backbone_hidden_size)).astype(np.float32)
    activations[0] *= np.float32(spread)
    activations[-1] *= np.float32(_LOUD_ACTIVATIONS)
    fed: dict[str, Samples] = {}
    scales: dict[str, tuple[float, int]] = {}
    for name in sorted(caches):
        value = graph.inputs[name]
        norms = [n for n, layer in zip(query_norms, walk.layers, strict=True) if layer.key == name]
        numbers, scales[name] = _fill_cache(graph, value, slots, max(norms, default=None), loud, random)
        fed[name] = (numbers,)
    fed[ACTIVATIONS], activations = _fill_activations(graph.inputs[ACTIVATIONS].tensor, activations)
    if INPUT_POS in needed:
        fed[INPUT_POS] = tuple(fill_position(graph.inputs[INPUT_POS].tensor, p) for p in all_positions)
    if PARAM_TENSOR in needed:
        fed[PARAM_TENSOR] = tuple(fill_param(graph.inputs[PARAM_TENSOR].tensor, p) for p in all_positions)
    for name, shown in ((MASK, mask), (MASK_LOCAL, local)):
        if name in needed:
            fed[name] = tuple(fill_mask(graph.inputs[name].tensor, m, additive) for m in shown)
    return Inputs(
        config,
        walk,
        seed,
        positions,
        queries,
        slots,
        fed,
        activations,
        mask if MASK in needed else None,
        local if MASK_LOCAL in needed else None,
        scales,
    )


_CACHE_NAME = re.compile(r"kv_cache_([kv])_(\d+)")


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
        if key and value and (key[1] != "k" or value[1] != "v" or key[2] != value[2]):
            raise UnsupportedError(
                f"layers.{index}: the input {escape(layer.key)!r} is used as K and {escape(layer.value)!r} as V; the "
                "runtime fills them by their names, so the file is not what it seems."
            )


def _slots(graph: FlatGraph, walk: Walk, config: DrafterConfig) -> int:
    """The number of slots of the caches: what is left of a cache's elements, heads and head_dim taken out."""
    found = set()
    for layer, shape in zip(walk.layers, config.layers, strict=True):
        for name in (layer.key, layer.value):
            elements = graph.inputs[name].tensor.elements
            found.add(elements // (shape.num_kv_heads * shape.head_dim))
    if len(found) != 1 or 0 in found:
        raise UnsupportedError(f"The caches have different numbers of slots: {sorted(found)}.")
    return found.pop()


def _positions(slots: int, window: int | None, queries: int) -> tuple[tuple[int, ...], slice]:
    """Positions of the samples' first queries, and the slots that hold loud numbers, which no query may see."""
    last = slots - queries
    edge = min(window or slots // 4, last)
    middle = edge + (last - edge) * 2 // 5
    wanted = {1, edge // 2, edge - 1, edge, middle, last}
    positions = tuple(sorted(p for p in wanted if 0 <= p <= last)) or (0,)
    first = middle + queries + 1
    stop = min(first + _LOUD_SLOTS, last - (window or 1))
    return positions, slice(first, max(first, stop))


def _fill_cache(
    graph: FlatGraph, value: Value, slots: int, norm: float | None, loud: slice, random: np.random.Generator
) -> tuple[Numbers, tuple[float, int]]:
    """A cache, quiet where it is K (``norm`` is the length of the query that meets it); its scale and zero point."""
    tensor = value.tensor
    kind = DTYPES.get(tensor.type) if tensor.type is not None else None
    if kind is None or tensor.type not in _FLOATS | {TensorType.INT8, TensorType.INT16}:
        raise UnsupportedError(f"The cache {tensor.label} is {tensor.type_name}, which this release cannot fill.")
    largest = _LARGEST_CODE.get(tensor.type, 127) if tensor.type is not None else 127
    grid = grid_of(tensor)
    target = _QUIET_SCORES / norm if norm else _SMALL_VALUES
    if tensor.type in _FLOATS:
        scale, zero_point = 2.0 ** round(math.log2(target / _QUIET_CODE)), 0
    elif grid is not None:
        scale, zero_point = grid
    else:
        scale, zero_point = _scale_downstream(graph, value) or 1.0, 0
    reach = largest
    if norm is not None:
        reach = min(max(round(target * math.sqrt(3) / scale), 2), largest)
    louder, factor = (loud, _LOUDER) if norm is not None else (slice(0, 0), 1)
    stored: np.dtype[Any] = np.dtype(kind if tensor.type not in _FLOATS else np.int8)
    if norm is None and tensor.type in _FLOATS:
        # What bounds a value shows where there are large ones; the first query, which sees few slots, sees small ones.
        louder, factor, stored = slice(_QUIET_SLOTS, slots), _LOUD_VALUES, np.dtype(np.int16)
    codes = _draw_codes(tensor.shape, slots, reach, louder, factor, zero_point, stored, random)
    if tensor.type in _FLOATS or grid is not None:
        return Coded(codes, scale, zero_point), (scale, zero_point)
    return codes, (scale, zero_point)


def _draw_codes(
    shape: tuple[int, ...],
    slots: int,
    reach: int,
    loud: slice,
    factor: int,
    zero_point: int,
    kind: np.dtype[Any],
    random: np.random.Generator,
) -> npt.NDArray[Any]:
    """Codes up to ``reach`` either way, ``[…, rows, columns]``, louder in the slots ``loud``.

    The rows of a large cache overlap: each begins some numbers after the one before it and shares the rest. They are
    all different, take a hundredth of the memory, and stay in the processor's cache.
    """
    rows, columns = shape[-2:]
    step = min(columns, max(1, _DRAWN // max(rows, 1)))
    heads = math.prod(shape[:-2])
    length = (rows - 1) * step + columns
    numbers = random.integers(-reach, reach, (heads, length), np.int16, endpoint=True).astype(np.int32)
    if step == columns or rows == slots:
        first = loud.start + -(-(columns - step) // step)
        if rows == slots:
            numbers[:, first * step : max(first, loud.stop) * step] *= factor
        else:
            numbers.reshape(heads, rows, columns)[..., loud] *= factor
    limits = np.iinfo(kind)
    codes = np.clip(numbers + zero_point, limits.min + 1, limits.max).astype(kind)
    size = kind.itemsize
    view = np.lib.stride_tricks.as_strided(
        codes, (heads, rows, columns), (length * size, step * size, size), writeable=False
    )
    strides = [view.strides[0] * math.prod(shape[i + 1 : -2]) for i in range(len(shape) - 2)]
    return np.lib.stride_tricks.as_strided(view, shape, (*strides, *view.strides[1:]), writeable=False)


def _scale_downstream(graph: FlatGraph, value: Value) -> float | None:
    """The number an integer cache without a scale of its own is multiplied by once it is cast to float."""
    for node, position in value.consumers:
        if node.kind == "MUL" and node.binary:
            other = node.operand(1 - position)
            return float(graph.floats(other)[0]) if other.constant and other.tensor.elements == 1 else None
        if node.kind in _PASSED and position == 0 and node.outputs:
            found = _scale_downstream(graph, node.outputs[0])
            if found is not None:
                return found
    return None


def _fill_activations(tensor: Tensor, values: npt.NDArray[np.float32]) -> tuple[Samples, npt.NDArray[np.float32]]:
    grid = grid_of(tensor)
    if tensor.type in _FLOATS:
        return tuple(v.reshape(tensor.shape) for v in values), values
    if grid is None or tensor.type not in (TensorType.INT8, TensorType.INT16):
        raise UnsupportedError(f"The input {tensor.label} is {tensor.type_name}, which this release cannot fill.")
    # Real numbers all the same: on the grid, most of them would leave the calibrated range.
    return tuple(v.reshape(tensor.shape) for v in values), values
