"""What the drafter section asks for and gives: its signature's inputs and outputs, each with its meaning.

Meanings come from the walk of the graph (which cache feeds which layer) and, for the five inputs that are no
caches, from the names that the runtime itself looks up (:mod:`mtp_extract.graph.flat`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_extract.bundle import Shard
from mtp_extract.errors import UnsupportedError, escape, few
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR, FlatGraph, flatten
from mtp_extract.litertlm.tflite import Tensor, TensorType

_DTYPES: dict[TensorType, type[np.integer[Any]]] = {TensorType.INT8: np.int8, TensorType.INT16: np.int16}


@dataclass(frozen=True)
class Codes:
    """How numbers are stored in integers: ``real = scale · (code − zero_point)``, codes of ``dtype``."""

    scale: float
    zero_point: int
    dtype: type[np.integer[Any]]

    @property
    def largest(self) -> float:
        """The largest number that fits."""
        return self.scale * (int(np.iinfo(self.dtype).max) - self.zero_point)

    def encode(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Nearest codes, ties to even, clipped."""
        codes = np.rint(values / np.float32(self.scale)) + self.zero_point
        limits = np.iinfo(self.dtype)
        stored: NDArray[Any] = np.clip(codes, limits.min, limits.max).astype(self.dtype)
        return stored

    def decode(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = (codes.astype(np.float32) - np.float32(self.zero_point)) * np.float32(self.scale)
        return values


@dataclass(frozen=True)
class Cache:
    name: str  # of the signature input
    shape: tuple[int, ...]  # as declared; ``[1, KV heads, slots, head_dim]``, or with the last two exchanged
    transposed: bool  # whether the last two are exchanged
    codes: Codes | None  # None for float


@dataclass(frozen=True)
class Interface:
    caches: Mapping[str, tuple[Cache, Cache]]  # layer type → K, V
    slots: int  # length of the caches
    window: int | None  # slots a sliding layer sees; None without sliding layers
    activations: Codes | None  # how the input of that name is stored; None for float
    activations_largest: float | None  # the largest number that survives the first quantization; None where it is float
    others: frozenset[str]  # the inputs that are no caches


def codes_of(tensor: Tensor) -> Codes | None:
    """How a tensor's numbers are stored; None for floats, and for integers without a scale."""
    if tensor.type not in _DTYPES or tensor.quantization is None or not tensor.quantization.scale_count:
        return None
    zero_point = tensor.quantization.zero_point
    return Codes(
        float(tensor.quantization.scale[0]),
        int(zero_point[0]) if zero_point.size else 0,
        _DTYPES[tensor.type],
    )


def read_interface(source: Shard) -> Interface:
    """The interface of ``source``.

    Raises:
        UnsupportedError: an input this release does not know, or an integer cache without a scale.
    """
    graph = flatten(source.model, source.signature)
    caches: dict[str, tuple[Cache, Cache]] = {}
    for layer, kind in zip(source.walk.layers, source.config.layer_types, strict=True):
        key = _cache(graph, source, layer.key, transposed=False)
        shape = source.walk.caches[layer.value].shape
        # Where a square cache leaves it open, V is transposed, as in every published file.
        transposed = shape != key.shape or shape[2] == shape[3]
        caches[kind] = (key, _cache(graph, source, layer.value, transposed=transposed))
    named = {cache.name for pair in caches.values() for cache in pair}
    others = set(source.signature.inputs) - named
    if unknown := sorted(others - {ACTIVATIONS, INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR}):
        raise UnsupportedError(
            f"{source.model.region.source.name}: expected the inputs of a known drafter, found also "
            f"{few(unknown)}, which this release cannot fill. Look for a newer release."
        )
    first = next(role.input for role in source.walk.roles if role.role == "pre_projection")
    largest = first.scale * int(np.iinfo(first.type).max) if first else None
    return Interface(
        caches=caches,
        slots=max(key.shape[2] for key, _ in caches.values()),
        window=source.config.sliding_window,
        activations=codes_of(graph.inputs[ACTIVATIONS].tensor),
        activations_largest=largest,
        others=frozenset(others),
    )


def _cache(graph: FlatGraph, source: Shard, name: str, *, transposed: bool) -> Cache:
    tensor = source.walk.caches[name]
    codes = codes_of(tensor)
    if tensor.type in _DTYPES and codes is None:
        scale = source.walk.cache_scales.get(name)
        if scale is None:
            raise UnsupportedError(
                f"{source.model.region.source.name}: the cache {escape(name)} holds integers, and neither its "
                "quantization nor a multiplication in the graph says by what scale."
            )
        codes = Codes(scale, 0, _DTYPES[tensor.type])
    elif tensor.type not in (*_DTYPES, TensorType.FLOAT32):
        raise UnsupportedError(
            f"{source.model.region.source.name}: the cache {escape(name)} is {tensor.type_name}; "
            "this release fills FLOAT32, INT8 and INT16."
        )
    return Cache(name, tensor.shape, transposed, codes)
