"""Scales of static activations, for weights whose activations have other ranges than the file was calibrated for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mtp_extract.bundle import Shard
from mtp_extract.graph.flat import Value
from mtp_extract.io.laid import Piece, made
from mtp_extract.litertlm.tflite import Tensor, TensorType

_LIMITS = {TensorType.INT8: (-128, 127), TensorType.INT16: (-32768, 32767)}
# The operators between floats and a quantized matrix product.
_ENTERS, _LEAVES = "QUANTIZE", "DEQUANTIZE"


@dataclass(frozen=True)
class Range:
    """The least and the largest value that was seen."""

    low: float
    high: float


Ranges = Mapping[str, tuple[Range, Range]]
"""Role of a matrix → what went into it and what came out."""


def recalibrated(drafter: Shard, ranges: Ranges) -> tuple[list[Piece], list[str]]:
    """New scales over those of ``drafter``, and the roles that keep an old one because other operators share it."""
    pieces: dict[int, Piece] = {}
    kept: list[str] = []
    for role in drafter.walk.roles:
        node = role.result.producer if role.result is not None else None
        if role.input is None or node is None or role.role not in ranges:
            continue
        for value, bounds in zip((node.operand(0), node.outputs[0]), ranges[role.role], strict=True):
            if not _own(value):
                kept.append(role.role)
                continue
            for piece in _pieces(drafter, value.tensors[-1], bounds):
                # What several roles read has one range.
                pieces[piece.at] = piece
    return list(pieces.values()), list(dict.fromkeys(kept))


def _own(value: Value) -> bool:
    """Whether ``value`` lies between floats and one kind of matrix only."""
    tensor, maker = value.tensors[-1], value.producer
    if tensor.type not in _LIMITS or maker is None:
        return False
    readers = {node.kind for node, _ in value.consumers}
    entering = maker.kind == _ENTERS and readers <= {"FULLY_CONNECTED", "BATCH_MATMUL"}
    return entering or (maker.kind in ("FULLY_CONNECTED", "BATCH_MATMUL") and readers <= {_LEAVES})


def _pieces(drafter: Shard, tensor: Tensor, bounds: Range) -> Iterator[Piece]:
    quantization, type_ = tensor.quantization, tensor.type
    assert quantization is not None
    assert type_ is not None
    lowest, highest = _LIMITS[type_]
    low, high = min(bounds.low, 0.0), max(bounds.high, 0.0)
    begin = drafter.model.region.begin
    symmetric = not quantization.zero_point.any()
    # As weights are quantized; a range of nothing keeps its scale.
    span, steps = (max(-low, high), highest) if symmetric else (high - low, highest - lowest)
    scale = np.float32(span) / np.float32(steps)
    if not 0 < scale < np.inf:
        return
    yield made(begin + quantization.scales.start, np.array([scale], "<f4").tobytes())
    if not symmetric:
        zero_point = np.rint(np.float32(lowest) - np.float32(low) / scale)
        yield made(begin + quantization.zero_points.start, np.array([zero_point], "<i8").tobytes())
