"""Read products with a constant matrix: FULLY_CONNECTED, whose weight is stored ``[out, in]``."""

from __future__ import annotations

import numpy as np

from mtp_extract.errors import AnotherKindError
from mtp_extract.graph.call import CONVERSIONS, keeps_numbers
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType

PRODUCT = "FULLY_CONNECTED"
_MOST_ROTATED = 1 << 20


def find_weight(graph: FlatGraph, node: Node) -> Value:
    """Return the constant matrix that ``node`` multiplies by, before conversions that keep its numbers.

    Raises:
        UnreadableError: it is no constant matrix, or LiteRT's kernel would read its codes differently.
        AnotherKindError: it is a Hadamard rotation.
    """
    value = node.get_operand(1)
    maker = value.producer
    while maker is not None and maker.kind in CONVERSIONS and keeps_numbers(maker) and maker.kind != "QUANTIZE":
        value = maker.get_operand(0)
        maker = value.producer
    tensor = value.tensor
    if not value.constant or len(tensor.shape) != 2:
        raise UnreadableError("multiplies by a value that is no constant matrix")
    if tensor.type not in FLOAT_TYPES and value is node.get_operand(1):
        _check_codes(QuantizedTensor.of(graph.model, tensor))
    is_square = tensor.shape[0] == tensor.shape[1] > 1 and tensor.elements <= _MOST_ROTATED
    if is_square and np.allclose(np.abs(graph.read_small_floats(value)), tensor.shape[0] ** -0.5, rtol=1e-2):
        raise AnotherKindError(
            f"{node.op.label} is a Hadamard rotation: the weights beside it are stored rotated. They are not the "
            "weights of the model, and this release does not rotate them back."
        )
    return value


def _check_codes(source: QuantizedTensor) -> None:
    # LiteRT's kernels take integer weights as signed, with one scale or a scale for each output, without zero points.
    label, storage = source.tensor.label, source.storage
    if source.tensor.type is TensorType.INT16:
        raise UnreadableError(f"reads {label}, of a type that LiteRT does not multiply")
    if source.packing is not None and not source.packing.signed:
        raise UnreadableError(f"reads {label}, whose unsigned codes LiteRT reads as signed")
    if storage.kind == "per_channel" and storage.axis != 0:
        raise UnreadableError(
            f"reads {label}, whose scales run along axis {storage.axis}: LiteRT applies them along axis 0"
        )
    if not storage.symmetric:
        raise UnreadableError(f"reads {label}, whose zero points are not 0: LiteRT ignores them")


def compute_product_shape(graph: FlatGraph, node: Node, matrix: Value, read: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the product of ``matrix`` and an operand of shape ``read``. Raise UnreadableError if the
    operator has a bias or a fused activation, or if the shapes do not fit.
    """
    options, (rows, columns) = node.op.options, matrix.tensor.shape
    if node.op.activation or (options and options.integer(1, "b")):
        raise UnreadableError("has a fused activation, or a weight that is stored shuffled")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and (bias.depends or bias.producer is not None or np.any(graph.read_small_floats(bias))):
        raise UnreadableError("has a bias, which a drafter's checkpoint has no place for")
    keeps_axes = bool(options and options.scalar(2, "?", False))
    count, rest = divmod(int(np.prod(read)), columns)
    if rest or (keeps_axes and read[-1:] != (columns,)):
        raise UnreadableError(f"multiplies {list(read)} numbers by a matrix of {columns} columns")
    return (*read[:-1], rows) if keeps_axes else (count, rows)
