"""A constant of a model with its checked quantization, whose codes and numbers are read in parts.

The element type decides, never the presence of metadata: an F32 tensor is read as floats, whatever scales it has
(dequantizing the norms of published drafters zeroes them). Any range of elements that begins on a byte can be read
alone; 1 MiB of float32 at a time stays in the cache of a core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, UnsupportedError, format_count
from mtp_extract.io.source import Region
from mtp_extract.litertlm.storage import (
    CHUNK_ELEMENTS,
    CODE_TYPES,
    FLOAT_TYPES,
    LARGEST_SCALE,
    Floats,
    Integers,
    Packing,
    Storage,
    widen_floats,
)
from mtp_extract.litertlm.tflite import ELEMENT_BITS, Blockwise, Quantization, Tensor, TensorType, TfliteModel


@dataclass(frozen=True)
class QuantizedTensor:
    """A constant with its scales; its data is read later."""

    tensor: Tensor
    location: Region
    storage: Storage
    # [1], [channels] or […, blocks], blockwise FP16 scales widened; empty for floats.
    scale: Floats
    zero_point: npt.NDArray[np.int64]  # shaped like ``scale``, zeros when none are stored

    @classmethod
    def of(cls, model: TfliteModel, tensor: Tensor) -> QuantizedTensor:
        """Read and check the quantization of ``tensor``.

        Raises:
            UnsupportedError: sparse data, multi-axis or custom quantization, or an element type that is no number.
            FormatError: scales that do not fit the shape, are negative, or not finite.
        """
        if tensor.sparse:
            raise UnsupportedError(f"{tensor.label} is stored sparse, which this release cannot read.")
        location = model.locate(tensor)
        type_ = TensorType(tensor.type_id)
        quantization = tensor.quantization
        if type_ in FLOAT_TYPES:
            plain = Storage(type_, tensor.shape, "none")
            return cls(tensor, location, plain, np.empty(0, np.float32), np.empty(0, np.int64))
        if type_ not in CODE_TYPES:
            raise UnsupportedError(f"{tensor.label}: weights of type {tensor.type_name} are not supported.")
        if quantization is None:
            raise FormatError(f"{tensor.label} holds integers and no scale to read them with.")
        if quantization.details not in ("none", "blockwise"):
            raise UnsupportedError(
                f"{tensor.label} has {quantization.details} quantization, which this release cannot read."
            )
        blockwise = quantization.blockwise
        stored = (
            _read_block_scales(model, tensor, blockwise) if blockwise else _read_channel_scales(tensor, quantization)
        )
        scale, zero_point = _check_scales(tensor, CODE_TYPES[type_], *stored)
        storage = _describe_storage(type_, tensor.shape, quantization, symmetric=not zero_point.any())
        return cls(tensor, location, storage, scale, zero_point)

    @property
    def packing(self) -> Packing | None:
        """:attr:`Storage.packing`; None for floats."""
        return self.storage.packing

    def codes(self, begin: int = 0, end: int | None = None) -> Integers:
        """Read the codes of elements ``[begin, end)``, flat, without subtracting zero points.

        Args:
            begin: an element that begins on a byte, such as a multiple of 8.

        Raises:
            UnsupportedError: the tensor holds floats.
        """
        if self.packing is None:
            raise UnsupportedError(f"{self.tensor.label} holds real numbers, not codes.")
        end = self.tensor.elements if end is None else end
        return self.packing.unpack(self._read_bytes(begin, end))[: end - begin]

    def floats(self, begin: int = 0, end: int | None = None) -> Floats:
        """Read the numbers of elements ``[begin, end)``, float32, flat; ``begin`` as for :meth:`codes`.

        Raises:
            FormatError: a float is not finite.
        """
        end = self.tensor.elements if end is None else end
        result = np.empty(end - begin, np.float32)
        # Chunks of whole rows where these are short, so that a row is multiplied by its scale at once.
        row = math.lcm(max(self.storage.columns, 1), 8)
        step = CHUNK_ELEMENTS // row * row or CHUNK_ELEMENTS
        for at in range(begin, end, step):
            part = result[at - begin : at - begin + step]
            if self.packing is None:
                np.copyto(part, widen_floats(self._read_bytes(at, at + part.size), self.storage.type))
                if not np.isfinite(part).all():
                    raise FormatError(f"{self.tensor.label} holds values that are not finite: the file is damaged.")
            else:
                np.copyto(part, self.codes(at, at + part.size))
                self.storage.dequantize_inplace(part, self.scale.reshape(-1), self.zero_point.reshape(-1), at)
        return result

    def dequantize(self) -> Floats:
        """Read all numbers, float32, in the tensor's shape."""
        return self.floats().reshape(self.tensor.shape)

    def _read_bytes(self, begin: int, end: int) -> bytes:
        bits = ELEMENT_BITS[self.storage.type]
        return self.location.read(begin * bits // 8, -(-end * bits // 8) - begin * bits // 8)


def _describe_storage(
    type_: TensorType, shape: tuple[int, ...], quantization: Quantization, *, symmetric: bool
) -> Storage:
    if quantization.blockwise is not None:
        return Storage(type_, shape, "blockwise", 0, quantization.blockwise.block_size, symmetric)
    if quantization.scales.count == 1:
        return Storage(type_, shape, "per_tensor", symmetric=symmetric)
    return Storage(type_, shape, "per_channel", quantization.axis, symmetric=symmetric)


def _read_channel_scales(tensor: Tensor, quantization: Quantization) -> tuple[Floats, npt.NDArray[np.int64]]:
    # Counts are checked before anything is read: a vector may claim the rest of the file.
    scales = quantization.scales.count
    zeros = quantization.zero_points.count
    axis = quantization.axis
    if scales != 1 and not (0 <= axis < len(tensor.shape) and scales == tensor.shape[axis] and scales > 0):
        raise FormatError(f"{tensor.label} has {scales} scales along axis {axis}; expected 1, or one per channel.")
    if zeros not in (0, 1, scales):
        counts = f"{format_count(zeros, 'zero point')} for {format_count(scales, 'scale')}"
        raise FormatError(
            f"{tensor.label} has {counts}; expected none, 1, or one per scale. The file is damaged: fetch it again."
        )
    return quantization.scale, quantization.zero_point


def _read_block_scales(model: TfliteModel, tensor: Tensor, details: Blockwise) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Read scales and zero points of blocks, ``[…, blocks]``, from the tensors that ``details`` names."""
    size = details.block_size
    if size <= 0 or not tensor.shape or tensor.shape[-1] % size:
        raise FormatError(f"{tensor.label} has blocks of {size} along an axis of {tensor.shape[-1:]}.")
    tensors = model.subgraphs[tensor.subgraph].tensors
    for index, lowest in ((details.scales, 0), (details.zero_points, -1)):
        if not lowest <= index < len(tensors):
            raise FormatError(f"{tensor.label} names tensor {index} for its blocks; there are {len(tensors)}.")
    blocks = (*tensor.shape[:-1], tensor.shape[-1] // size)
    scales = tensors[details.scales]
    # Only floats: quantized scales could refer to themselves.
    if scales.type not in FLOAT_TYPES or scales.elements != math.prod(blocks):
        raise FormatError(f"{tensor.label} has {scales.label} for its block scales; expected floats {list(blocks)}.")
    scale = read_floats(model, scales).reshape(blocks)
    if details.zero_points < 0:
        return scale, np.empty(0, np.int64)
    zero_points = tensors[details.zero_points]
    if zero_points.elements not in (1, scale.size):
        raise FormatError(f"{tensor.label} has {scale.size} block scales and {zero_points.elements} zero points.")
    return scale, _read_integers(model, zero_points)


def _check_scales(
    tensor: Tensor, packing: Packing, scale: Floats, zero_point: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Check scales and zero points, and return them with one zero point for each scale."""
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise FormatError(f"{tensor.label} has scales that are negative or not finite: the file is damaged.")
    if scale.size and scale.max() > LARGEST_SCALE:
        raise FormatError(f"{tensor.label} has a scale of {scale.max():g}: the file is damaged.")
    if packing.bits > 8 and (scale.size != 1 or zero_point.any()):
        raise UnsupportedError(f"{tensor.label}: INT16 with several scales or a zero point is not supported.")
    outside = (zero_point < packing.lowest) | (zero_point > packing.highest)
    if outside.any():
        codes = f"{packing.lowest}…{packing.highest}"
        raise FormatError(f"{tensor.label} has zero points outside the range of its codes, {codes}.")
    if zero_point.size != scale.size:
        zero_point = np.broadcast_to(zero_point[0] if zero_point.size else np.int64(0), scale.shape)
    return scale, zero_point.reshape(scale.shape)


def _read_integers(model: TfliteModel, tensor: Tensor) -> npt.NDArray[np.int64]:
    stored, type_ = model.locate(tensor).read(), TensorType(tensor.type_id)
    if type_ in CODE_TYPES:
        return CODE_TYPES[type_].unpack(stored)[: tensor.elements].astype(np.int64)
    if type_ not in (TensorType.INT32, TensorType.INT64):
        raise UnsupportedError(f"{tensor.label} should hold zero points, which are integers.")
    return np.frombuffer(stored, f"<i{ELEMENT_BITS[type_] // 8}").astype(np.int64)


def read_floats(model: TfliteModel, tensor: Tensor) -> Floats:
    """Read a small constant as float32 in its shape, dequantized if it holds codes."""
    return QuantizedTensor.of(model, tensor).dequantize()
