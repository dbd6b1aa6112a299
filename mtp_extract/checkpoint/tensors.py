"""What a checkpoint's tensors are made of: one :class:`PlannedTensor` each, written in independent segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, UnsupportedError
from mtp_extract.litertlm.quantized import Floats, QuantizedTensor

__all__ = ["DTYPES", "PlannedTensor", "Segment", "plan_array", "plan_codes", "plan_values"]

SEGMENT_ELEMENTS = 1 << 22
"""Elements of a segment, the unit of work of a thread: 16 MiB of float32."""

Chunks = Iterator["npt.NDArray[np.generic]"]


@dataclass(frozen=True)
class Segment:
    """``length`` bytes at ``offset`` of a tensor's data; ``produce`` yields them in order."""

    offset: int
    length: int
    produce: Callable[[], Chunks]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: ``dtype`` by its safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Bytes of data."""
        return sum(segment.length for segment in self.segments)


def _to_f32(values: Floats, name: str) -> npt.NDArray[np.generic]:
    return values


def _to_bf16(values: Floats, name: str) -> npt.NDArray[np.generic]:
    """Round to the nearest bfloat16, ties to even; as uint16. Values are finite.

    The sum cannot wrap: the largest finite magnitude, with the sign bit, is 0xFF7FFFFF.
    """
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    result: npt.NDArray[np.uint16] = np.ascontiguousarray(rounded.view(np.uint16)[1::2])
    if ((result & np.uint16(0x7FFF)) == np.uint16(0x7F80)).any():
        raise UnsupportedError(f"{name} holds values beyond bfloat16's range. Choose f32.", remedies=("dtype=f32",))
    return result


def _to_f16(values: Floats, name: str) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    if not np.isfinite(result).all():
        raise UnsupportedError(
            f"{name} holds values beyond float16's range. Choose bf16 or f32.", remedies=("dtype=bf16", "dtype=f32")
        )
    return result


@dataclass(frozen=True)
class Dtype:
    """A floating-point output type: safetensors name, transformers name, bytes, and the conversion from float32."""

    safetensors: str
    transformers: str
    size: int
    convert: Callable[[Floats, str], npt.NDArray[np.generic]]


DTYPES = MappingProxyType(
    {
        "f32": Dtype("F32", "float32", 4, _to_f32),
        "bf16": Dtype("BF16", "bfloat16", 2, _to_bf16),
        "f16": Dtype("F16", "float16", 2, _to_f16),
    }
)
"""Output types by their name on the command line."""


def plan_values(
    name: str, shape: tuple[int, ...], dtype: Dtype, source: QuantizedTensor | None, factor: float = 1.0
) -> PlannedTensor:
    """The real numbers of ``source`` divided by ``factor``; ones when there is no source.

    A source of one element fills the whole shape: converters fold equal weights into one number.
    """
    elements = math.prod(shape)
    if source is None or source.tensor.elements != elements:
        value = np.float32(1.0) if source is None else np.float32(source.dequantize().reshape(-1)[0])
        filled = np.full(elements, value, np.float32)
        return PlannedTensor(
            name,
            dtype.safetensors,
            shape,
            (Segment(0, elements * dtype.size, lambda: iter([dtype.convert(_divided(filled, factor), name)])),),
        )
    grid = source.grid

    def produce(first: int, last: int) -> Callable[[], Chunks]:
        return lambda: (dtype.convert(_divided(c, factor), name) for c in source.chunks(first, last))

    segments = tuple(
        Segment(
            first * grid.columns * dtype.size,
            (last - first) * grid.columns * dtype.size,
            produce(first, last),
        )
        for first, last in _row_ranges(source)
    )
    return PlannedTensor(name, dtype.safetensors, shape, segments)


def _divided(values: Floats, factor: float) -> Floats:
    if factor == 1.0:
        return values
    # The stored value, as LiteRT sees it, is a float32; it is divided in float64 and rounded once.
    with np.errstate(over="ignore"):
        result = (values.astype(np.float64) / factor).astype(np.float32)
    if not np.isfinite(result).all():
        raise FormatError(f"Values divided by the folded factor {factor:g} leave float32: the file is damaged.")
    return result


def _row_ranges(source: QuantizedTensor) -> Iterator[tuple[int, int]]:
    grid = source.grid
    per_segment = max(1, SEGMENT_ELEMENTS // max(grid.step * grid.columns, 1)) * grid.step
    for first in range(0, grid.rows, per_segment):
        yield first, min(first + per_segment, grid.rows)


def plan_codes(name: str, source: QuantizedTensor) -> PlannedTensor:
    """The codes of ``source`` as stored, one to a byte."""
    assert source.packing is not None
    columns = source.grid.columns

    def produce(first: int, last: int) -> Callable[[], Chunks]:
        return lambda: iter(source.code_chunks(first, last))

    segments = tuple(
        Segment(first * columns, (last - first) * columns, produce(first, last)) for first, last in _row_ranges(source)
    )
    return PlannedTensor(name, "I8" if source.packing.signed else "U8", source.tensor.shape, segments)


_ARRAY_DTYPES = MappingProxyType({"float32": "F32", "int64": "I64"})


def plan_array(name: str, array: npt.NDArray[np.generic]) -> PlannedTensor:
    """A small array as it is."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return PlannedTensor(
        name, _ARRAY_DTYPES[array.dtype.name], array.shape, (Segment(0, flat.nbytes, lambda: iter([flat])),)
    )
