"""Products with a matrix of constants: which constant, and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.litertlm.storage import FLOAT_TYPES, QuantizedTensor
from mtp_extract.litertlm.tflite import TensorType

MATRICES = frozenset({"FULLY_CONNECTED", "BATCH_MATMUL"})
LARGEST = 1e6
"""No number of a drafter is this many times larger or smaller than one of ordinary size."""

_MOST_ROTATED = 1 << 20
_RESHAPES = frozenset({"RESHAPE", "EXPAND_DIMS", "SQUEEZE"})


@dataclass(frozen=True)
class Matrix:
    """The second operand of a product.

    Attributes:
        value: the constant.
        transposed: whether it is stored ``[in, out]``.
        by_kernel: whether the operator itself reads its codes, and no operator before makes floats of them.
    """

    value: Value
    transposed: bool
    by_kernel: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """``[out, in]``."""
        stored = self.value.tensor.shape
        sizes = tuple(size for size in stored if size != 1 or len(stored) == 2)
        return sizes[::-1] if self.transposed else sizes


def weight_of(graph: FlatGraph, node: Node) -> Matrix:
    """The constant matrix that ``node`` multiplies by.

    Raises:
        UnreadableError: it is computed otherwise than by a transposition or a conversion to floats.
    """
    transposed = node.kind == "BATCH_MATMUL" and not _option(node, 1)
    value, by_kernel = node.operand(1), True
    while (maker := value.producer) is not None:
        if maker.kind == "TRANSPOSE" and graph.integers(maker.operand(1)).tolist() == [1, 0]:
            transposed = not transposed
        elif _makes_floats(maker):
            by_kernel = False
        elif maker.kind not in _RESHAPES:
            raise UnreadableError("multiplies by a weight that is computed")
        value = maker.operand(0)
    found = Matrix(value, transposed, by_kernel)
    if not value.constant or len(found.shape) != 2:
        raise UnreadableError("multiplies by no matrix of constants")
    _check(graph, node, found)
    return found


def _makes_floats(maker: Node) -> bool:
    """Whether it makes floats of the same numbers. CAST of codes makes others: the codes themselves."""
    types = {maker.operand(0).tensor.type, maker.outputs[0].tensor.type}
    floats = maker.outputs[0].tensor.type is TensorType.FLOAT32
    return floats and (maker.kind == "DEQUANTIZE" or (maker.kind == "CAST" and types <= FLOAT_TYPES))


def _check(graph: FlatGraph, node: Node, matrix: Matrix) -> None:
    """Check that LiteRT's kernel reads ``matrix`` as we do.

    Raises:
        UnreadableError: it does not, or its numbers are none of a drafter.
    """
    tensor = matrix.value.tensor
    if tensor.quantization is not None and tensor.quantization.scales.count and tensor.type not in FLOAT_TYPES:
        scales = np.abs(tensor.quantization.scale)
        if not (np.isfinite(scales).all() and scales.max() < LARGEST):
            raise UnreadableError("multiplies by numbers that no drafter has")
    if matrix.by_kernel and tensor.type not in FLOAT_TYPES:
        _check_codes(QuantizedTensor.of(graph.model, tensor), node, matrix)
    square = matrix.shape[0] == matrix.shape[1] > 1
    if square and tensor.elements <= _MOST_ROTATED and _is_hadamard(graph, matrix):
        raise UnsupportedError(
            f"{node.op.label} is a Hadamard rotation: the weights beside it are stored rotated. They are not the "
            "weights of the model, and this release does not rotate them back."
        )


def _check_codes(source: QuantizedTensor, node: Node, matrix: Matrix) -> None:
    """LiteRT's kernels take integer weights ``[out, in]``, signed, with a scale an output and no zero points."""
    if source.tensor.type is TensorType.INT16:
        raise UnreadableError(f"reads {source.tensor.label}, of a type that LiteRT multiplies by nothing")
    if source.packing is not None and not source.packing.signed:
        raise UnreadableError(f"reads {source.tensor.label}, which LiteRT takes for signed codes")
    untouched = matrix.transposed == (node.kind == "BATCH_MATMUL" and not _option(node, 1))
    if not untouched:
        raise UnreadableError(f"reads {source.tensor.label} transposed, as codes")
    rank = len(source.tensor.shape)
    outputs, storage = rank - 1 if matrix.transposed else rank - 2, source.storage
    if storage.kind == "per_channel" and storage.axis != outputs:
        raise UnreadableError(
            f"reads {source.tensor.label}, whose scales run along axis {storage.axis}: LiteRT takes them for outputs"
        )
    if not storage.symmetric:
        raise UnreadableError(f"reads {source.tensor.label}, whose zero points are not 0: LiteRT ignores them")


def _is_hadamard(graph: FlatGraph, matrix: Matrix) -> bool:
    """Whether all entries are ±1/√n."""
    size = matrix.shape[0]
    return bool(np.allclose(np.abs(graph.floats(matrix.value)), size**-0.5, rtol=1e-2))


def product_of(graph: FlatGraph, node: Node, matrix: Matrix, read: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a product with what has the shape ``read``.

    Raises:
        UnreadableError: the operator has a bias or a fused function, or shapes that do not fit.
    """
    options, (rows, columns) = node.op.options, matrix.shape
    if node.op.activation or (node.kind == "FULLY_CONNECTED" and options and options.integer(1, "b")):
        raise UnreadableError("has a fused activation, or a weight that is stored shuffled")
    bias = node.input(2)
    if bias is not None and (bias.depends or bias.producer is not None or np.any(graph.floats(bias))):
        raise UnreadableError("has a bias, which a drafter's checkpoint has no place for")
    if node.kind == "BATCH_MATMUL" and _option(node, 0):
        raise UnreadableError("multiplies what it transposes")
    keeps = node.kind != "FULLY_CONNECTED" or bool(options and options.scalar(2, "?", False))
    count, odd = divmod(int(np.prod(read)), columns)
    if odd or (keeps and read[-1:] != (columns,)):
        raise UnreadableError(f"multiplies {list(read)} numbers by a matrix of {columns} columns")
    return (*read[:-1], rows) if keeps else (count, rows)


def _option(node: Node, slot: int) -> bool:
    return bool(node.op.options and node.op.options.scalar(slot, "?", False))
