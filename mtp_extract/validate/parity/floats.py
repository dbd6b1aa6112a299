"""The drafter's section in floats: the same graph, with every tensor of codes as float32.

Constants become the numbers that their codes stand for, activations and caches lose their scales, and QUANTIZE and
DEQUANTIZE between two floats become CAST, which does nothing. What Google's interpreter computes of it is the graph's
function, rounded nowhere but in float additions.

The old flatbuffer stands whole behind a :class:`~mtp_extract.litertlm.graft.Graft` of the tables that change; float32
constants follow it, 16-byte aligned. They are written some rows at a time: what this needs is disk, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from mtp_extract.io.files import aligned
from mtp_extract.io.laid import Laid, Piece, made
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table
from mtp_extract.litertlm.graft import Graft, copied_places
from mtp_extract.litertlm.rebuild import BUFFER, MODEL, OPERATOR, SUBGRAPH, TENSOR, moved_section
from mtp_extract.litertlm.storage import QuantizedTensor
from mtp_extract.litertlm.tflite import Operator, Subgraph, Tensor, TensorType, TfliteModel

_OPERATOR_CODE, _CAST = "boii", 53
_ALIGNMENT = 16
_ELEMENTS = 1 << 20  # numbers that are made at a time


def in_floats(model: TfliteModel) -> Laid:
    """The section of ``model`` in floats; nothing is written yet.

    Raises:
        UnsupportedError: it has codes that this release cannot read, or tables with unknown fields.
        FormatError: damaged quantization.
    """
    coded = [tensor for graph in model.subgraphs for tensor in graph.tensors if is_coded(tensor)]
    constants = [QuantizedTensor.of(model, tensor) for tensor in coded if model.has_data(tensor)]
    # No number of a graft changes its length.
    shift = len(_front(model, constants, [0] * len(constants)))
    at, pieces = shift + model.region.size, list[Piece]()
    for constant in constants:
        at = aligned(at, _ALIGNMENT)
        pieces.append(Piece(at, 4 * constant.tensor.elements, produce=partial(_floats, constant)))
        at = pieces[-1].end
    front = _front(model, constants, [piece.at for piece in pieces])
    return Laid(at, (made(0, front), *moved_section(model, shift), *pieces))


def _floats(constant: QuantizedTensor) -> Iterator[bytes]:
    count = constant.tensor.elements
    return (constant.floats(at, min(at + _ELEMENTS, count)).tobytes() for at in range(0, count, _ELEMENTS))


def is_coded(tensor: Tensor) -> bool:
    """Whether the integers of ``tensor`` stand for real numbers by scales of its own."""
    scales = tensor.quantization
    integers = tensor.type not in (TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16)
    return integers and scales is not None and (scales.scales.count > 0 or scales.details != "none")


def _front(model: TfliteModel, constants: Sequence[QuantizedTensor], places: Sequence[int]) -> bytes:
    """The tables that change; ``places`` are where the float32 ``constants`` lie in the file."""
    graft, root = Graft(), FlatBuffer(model.region).root()
    what = f"{model.region.source.name}: {model.region.what}"
    old_codes, old_buffers, old_graphs = (list(root.tables(slot)) for slot in (1, 4, 2))
    buffers = {(c.tensor.subgraph, c.tensor.index): len(old_buffers) + n for n, c in enumerate(constants)}
    new = [
        graft.table(BUFFER, {1: place, 2: 4 * constant.tensor.elements})
        for place, constant in zip(places, constants, strict=True)
    ]
    graphs = {
        graph.index: _subgraph(graft, graph, old_graphs[graph.index], buffers, len(old_codes), what)
        for graph in model.subgraphs
    }
    cast = graft.table(_OPERATOR_CODE, {0: _CAST, 2: 1, 3: _CAST})
    changes = {
        1: graft.offsets([*copied_places(old_codes, {}), cast]),
        2: graft.offsets(copied_places(old_graphs, graphs)),
        4: graft.offsets([*copied_places(old_buffers, {}), *new]),
    }
    return graft.finish(graft.copy(root, MODEL, changes, what), TFLITE_IDENTIFIER)


def _subgraph(
    graft: Graft, graph: Subgraph, table: Table, buffers: Mapping[tuple[int, int], int], cast: int, what: str
) -> int:
    """The place of ``graph`` in floats; ``buffers`` of its constants, and the index of CAST among operator codes."""
    tensors, operators = list(table.tables(0)), list(table.tables(3))
    floats = {}
    for tensor in filter(is_coded, graph.tensors):
        fields: dict[int, int | None] = {1: int(TensorType.FLOAT32), 4: None, 10: None}
        if (key := (graph.index, tensor.index)) in buffers:
            fields[2] = buffers[key]
        floats[tensor.index] = graft.copy(tensors[tensor.index], TENSOR, fields, what)
    casts = {
        op.index: graft.copy(operators[op.index], OPERATOR, {0: cast, 3: None, 4: None}, what)
        for op in graph.operators
        if op.kind in ("QUANTIZE", "DEQUANTIZE") and _joins_floats(op, graph)
    }
    changes = {
        0: graft.offsets(copied_places(tensors, floats)),
        3: graft.offsets(copied_places(operators, casts)),
    }
    return graft.copy(table, SUBGRAPH, changes, what)


def _joins_floats(op: Operator, graph: Subgraph) -> bool:
    ends = (graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]])
    return all(tensor.type is TensorType.FLOAT32 or is_coded(tensor) for tensor in ends)
