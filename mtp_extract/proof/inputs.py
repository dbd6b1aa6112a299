"""What the proof feeds to the graph, and what the same means to a checkpoint.

Numbers are continuous and drawn anew for every file, from a seed that the file itself gives. Caches are integers with a
scale whatever the type of the input, shared by all samples: 32 003 slots of them are small, and read once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, UnsupportedError, escape
from mtp_extract.graph.arrays import Array, Bools, Coded, Numbers
from mtp_extract.graph.call import DTYPES, grid_of
from mtp_extract.graph.drafter import ACTIVATIONS, Walk
from mtp_extract.graph.evaluate import Samples, Stacked
from mtp_extract.graph.fill import fill_mask
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR, FlatGraph
from mtp_extract.graph.patterns import scale_downstream
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.proof.forward import Cache

if TYPE_CHECKING:
    from mtp_extract.architecture.config import DrafterConfig

_LARGEST_CODE = {TensorType.INT8: 127, TensorType.INT16: 32767}
_HOLES = 51
"""Of 256 slots, how many are hidden."""
# Numbers drawn for a head of a cache; its rows overlap.
_DRAWN = 1 << 18
_MOST_READINGS = 32
_CACHE_NAME = re.compile(r"kv_cache_([kv])_(\d+)")


@dataclass(frozen=True)
class Layouts:
    """Cache input → the axes of its shape that are KV heads, slots and head_dim."""

    axes: Mapping[str, tuple[int, int, int]]

    def placed(self, name: str, numbers: Array) -> Array:
        """``numbers`` ``[KV heads, slots, head_dim]`` in the shape of the input ``name``; a view."""
        axes = self.axes[name]
        rest = ({0, 1, 2, 3} - set(axes)).pop()
        return np.transpose(numbers[None], np.argsort((rest, *axes)))


@dataclass(frozen=True)
class SignatureInputs:
    """The inputs of a drafter's signature, as the proof sees them.

    Attributes:
        slots: of the caches.
        queries: of a step.
        needed: names of the inputs that anything depends on.
        told: whether the runtime tells the graph the range of slots to read, too: then layers with a window need not
            look at the mask.
    """

    graph: FlatGraph
    walk: Walk
    config: DrafterConfig
    slots: int
    queries: int
    needed: frozenset[str]
    told: bool

    @property
    def last(self) -> int:
        """The last position of a first query."""
        return self.slots - self.queries

    @property
    def window(self) -> int | None:
        """Slots that sliding layers see; None where no layer slides."""
        return next((la.sliding_window for la in self.config.layers if la.sliding_window is not None), None)

    def layouts(self) -> Iterator[Layouts]:
        """Every way to read the caches that their shapes allow, the published one first.

        Raises:
            UnsupportedError: none fits.
        """
        names: dict[str, list[tuple[int, int, int]]] = {}
        for layer, found in zip(self.config.layers, self.walk.layers, strict=True):
            for name, published in ((found.key, (1, 2, 3)), (found.value, (1, 3, 2))):
                shape = self.graph.inputs[name].tensor.shape
                ways = _ways(shape, layer.num_kv_heads, layer.head_dim, self.slots, published)
                if not ways:
                    raise UnsupportedError(
                        f"The cache {escape(name)} has the shape {list(shape)}; expected {layer.num_kv_heads} heads of "
                        f"{layer.head_dim}, and {self.slots} slots, in any order."
                    )
                names.setdefault(name, ways)
        for axes in islice(product(*names.values()), _MOST_READINGS):
            yield Layouts(dict(zip(names, axes, strict=True)))

    def masks(self, shown: Mapping[str, Bools], additive: bool) -> dict[str, Samples]:
        """The mask inputs that show ``shown`` (bool ``[samples, queries, slots]`` by name)."""
        return {
            name: Stacked(np.asarray(fill_mask(self.graph.inputs[name].tensor, shown[name], additive)))
            for name in (MASK, MASK_LOCAL)
            if name in self.needed
        }

    def drawn_masks(self, positions: npt.NDArray[np.int64], random: np.random.Generator) -> dict[str, Bools]:
        """Masks as runtimes make them, but for holes: every query sees its own slot, and none a later one."""
        at = positions[:, None] + np.arange(self.queries)
        slots = np.arange(self.slots)
        shown = slots <= at[..., None]
        near = slots > at[..., None] - (self.window or self.slots)
        made = {}
        for name, whole in ((MASK, shown), (MASK_LOCAL, shown & near)):
            if name not in self.needed:
                continue
            holed = whole & (np.frombuffer(random.bytes(whole.size), np.uint8).reshape(whole.shape) >= _HOLES)
            np.put_along_axis(holed, at[..., None], True, -1)
            made[name] = holed
        return made

    def runtime_masks(self, positions: npt.NDArray[np.int64]) -> dict[str, Bools]:
        """Masks as runtimes make them."""
        at, slots = (positions[:, None] + np.arange(self.queries))[..., None], np.arange(self.slots)
        shown = {MASK: slots <= at, MASK_LOCAL: (slots <= at) & (slots > at - (self.window or self.slots))}
        return {name: whole for name, whole in shown.items() if name in self.needed}

    def seen(self, layer: int, positions: npt.NDArray[np.int64], shown: Mapping[str, Bools]) -> Bools:
        """The slots that queries of ``layer`` see by the config, ``[samples, queries, slots]``."""
        window = self.config.layers[layer].sliding_window
        at, slots = (positions[:, None] + np.arange(self.queries))[..., None], np.arange(self.slots)
        if window is None:
            return shown[MASK] if MASK in self.needed else slots <= at
        seen = (slots <= at) & (slots > at - window)
        if MASK in self.needed and self.masked(layer):
            seen &= shown[MASK]
        return seen & shown[MASK_LOCAL] if MASK_LOCAL in self.needed else seen

    def masked(self, layer: int) -> bool:
        """Whether ``layer``, which has a window, sees the mask input too; by the window alone if not."""
        return not self.told or MASK in self.walk.layers[layer].masks

    def grid(self, name: str) -> tuple[float, int]:
        """Scale and zero point of the integers that stand for the cache ``name``; 1 where it is one of floats."""
        value = self.graph.inputs[name]
        grid = grid_of(value.tensor)
        if grid is not None:
            return grid
        return (1.0, 0) if value.tensor.type in FLOAT_TYPES else (scale_downstream(self.graph, value) or 1.0, 0)

    def largest_code(self, name: str) -> int:
        """The largest integer of the cache ``name``, from its zero point.

        Raises:
            UnsupportedError: a cache of another type than floats or INT8 or INT16.
        """
        tensor = self.graph.inputs[name].tensor
        if tensor.type not in FLOAT_TYPES and tensor.type not in _LARGEST_CODE:
            raise UnsupportedError(f"The cache {tensor.label} is {tensor.type_name}, which this release cannot fill.")
        return (127 if tensor.type is None else _LARGEST_CODE.get(tensor.type, 127)) - abs(self.grid(name)[1])

    def cache(self, name: str, layouts: Layouts, codes: Array, scale: float) -> tuple[Numbers, Cache]:
        """The cache ``name``, for the graph and for a checkpoint.

        Args:
            codes: integers from the zero point, ``[KV heads, slots, head_dim]``.
            scale: used where the cache is one of floats.
        """
        tensor = self.graph.inputs[name].tensor
        (own, zero_point), floats = self.grid(name), tensor.type in FLOAT_TYPES
        if zero_point:
            codes = codes + np.asarray(zero_point, codes.dtype)
        placed, used = layouts.placed(name, codes), scale if floats else own
        numbers = Coded(placed, used, zero_point) if floats or grid_of(tensor) is not None else placed
        return numbers, Cache(codes, used, zero_point)


def signature_inputs(graph: FlatGraph, walk: Walk, config: DrafterConfig, needed: frozenset[str]) -> SignatureInputs:
    """What the inputs of ``graph`` are.

    Raises:
        UnsupportedError: one that this release does not know how to fill.
    """
    _check_names(walk)
    caches = {name for layer in walk.layers for name in (layer.key, layer.value)}
    unknown = needed - caches - {ACTIVATIONS, INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR}
    if unknown:
        raise UnsupportedError(
            f"Expected the inputs of a known drafter, found also {', '.join(sorted(map(escape, unknown)))}, which this "
            "release cannot fill. Look for a newer release."
        )
    tensor = graph.inputs[ACTIVATIONS].tensor
    if DTYPES.get(tensor.type or TensorType.FLOAT32) is None or (
        tensor.type not in FLOAT_TYPES and grid_of(tensor) is None
    ):
        raise UnsupportedError(f"The input {tensor.label} is {tensor.type_name}, which this release cannot fill.")
    slots = set()
    for layer, shape in zip(walk.layers, config.layers, strict=True):
        for name in (layer.key, layer.value):
            slots.add(graph.inputs[name].tensor.elements // (shape.num_kv_heads * shape.head_dim))
    if len(slots) != 1 or 0 in slots:
        raise UnsupportedError(f"The caches have different numbers of slots: {sorted(slots)}.")
    # As the published ones are.
    told = PARAM_TENSOR in needed or MASK_LOCAL in needed
    queries = max(1, tensor.elements // (2 * config.backbone_hidden_size))
    if tensor.elements != queries * 2 * config.backbone_hidden_size:
        raise UnsupportedError(
            f"The input {tensor.label} has {tensor.elements} elements; expected {2 * config.backbone_hidden_size} a "
            "query: an embedding and a state."
        )
    for index, (found, shape) in enumerate(zip(walk.layers, config.layers, strict=True)):
        if found.query.tensor.elements != queries * config.num_heads * shape.head_dim:
            raise FormatError(
                f"layers.{index}.q_norm: its result is {found.query.label}, and its heads have "
                f"{queries * config.num_heads * shape.head_dim} elements: the file is damaged."
            )
    return SignatureInputs(graph, walk, config, slots.pop(), queries, needed, told)


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


def _ways(
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


def drawn_codes(heads: int, slots: int, width: int, reach: int, random: np.random.Generator) -> Array:
    """Codes up to ``reach`` either way, ``[heads, slots, width]``.

    The rows of a large cache overlap: each begins some numbers after the one before it and shares the rest. They are
    all different, take a hundredth of the memory, and stay in the processor's cache.
    """
    step = min(width, max(1, _DRAWN // slots))
    length = (slots - 1) * step + width
    kind = np.dtype(np.int8 if reach < 128 else np.int16)
    numbers = random.integers(-reach, reach, (heads, length), kind.type, endpoint=True)
    size = kind.itemsize
    return np.lib.stride_tricks.as_strided(
        numbers, (heads, slots, width), (length * size, step * size, size), writeable=False
    )


def reach_of(spread: float, scale: float, largest: int) -> int:
    """The largest code of numbers drawn evenly, so that they have the standard deviation ``spread``."""
    return min(max(round(spread * math.sqrt(3) / scale), 2), largest)
