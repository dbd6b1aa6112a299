"""The drafter's section in floats: the same graph, with every tensor of codes as float32.

Constants become the numbers that their codes stand for, activations and caches lose their scales, and QUANTIZE and
DEQUANTIZE between two floats become CAST, which does nothing. What Google's interpreter computes of it is the graph's
function, rounded nowhere but in float additions.

The old flatbuffer stands whole behind a :class:`~mtp_extract.litertlm.graft.Graft` of the tables that change; float32
constants follow it, 16-byte aligned. They are written some rows at a time: what this needs is disk, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mtp_extract.io.files import aligned
from mtp_extract.io.source import Region
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table
from mtp_extract.litertlm.graft import Graft, copied_places
from mtp_extract.litertlm.storage import QuantizedTensor
from mtp_extract.litertlm.tflite import Operator, Subgraph, Tensor, TensorType, TfliteModel

# struct codes of the slots, in the schema's order; "o" is an offset.
_MODEL, _SUBGRAPH, _BUFFER, _OPERATOR_CODE = "Ioooooooooo", "oooooi", "oQQ", "boii"
_TENSOR, _OPERATOR = "obIoo?oo?oI", "IooBoobooQQBoi"

_CAST = 53
_ALIGNMENT = 16
_CHUNK = 1 << 24  # bytes that are copied at a time
_ELEMENTS = 1 << 22  # numbers that are made at a time
# Written in place of offsets before it is known where constants will lie: the flatbuffer has its final size.
_UNKNOWN = (1 << 63) - 1


def write_section(region: Region, path: Path) -> None:
    """Write a section to the new file ``path``, as it is."""
    with open(path, "xb") as file:
        file.writelines(_bytes_of(region))


def write_floats(model: TfliteModel, path: Path) -> None:
    """Write the section of ``model`` to the new file ``path``, in floats.

    Raises:
        UnsupportedError: it has codes that this release cannot read, or tables with unknown fields.
        FormatError: damaged quantization.
    """
    coded = [tensor for graph in model.subgraphs for tensor in graph.tensors if is_coded(tensor)]
    constants = [QuantizedTensor.of(model, tensor) for tensor in coded if model.has_data(tensor)]
    shift = len(_front(model, constants, [_UNKNOWN] * len(constants)))
    places, at = [], shift + model.region.size
    for constant in constants:
        places.append(aligned(at, _ALIGNMENT))
        at = places[-1] + 4 * constant.tensor.elements
    with open(path, "xb") as file:
        file.write(_front(model, constants, places))
        file.writelines(_bytes_of(model.region))
        for place, constant in zip(places, constants, strict=True):
            file.seek(place)
            for begin in range(0, constant.tensor.elements, _ELEMENTS):
                end = min(begin + _ELEMENTS, constant.tensor.elements)
                file.write(constant.floats(begin, end).tobytes())
        for buffer in FlatBuffer(model.region).root().tables(4):
            # Counted from the start of the model, which is `shift` bytes further up now; 0 and 1 mean "none".
            if (offset := buffer.integer(1, "Q")) > 1:
                file.seek(shift + buffer.at(1))
                file.write((offset + shift).to_bytes(8, "little"))


def is_coded(tensor: Tensor) -> bool:
    """Whether the integers of ``tensor`` stand for real numbers by scales of its own."""
    scales = tensor.quantization
    integers = tensor.type not in (TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16)
    return integers and scales is not None and (scales.scales.count > 0 or scales.details != "none")


def _bytes_of(region: Region) -> Iterator[bytes]:
    return (region.read(at, min(_CHUNK, region.size - at)) for at in range(0, region.size, _CHUNK))


def _front(model: TfliteModel, constants: Sequence[QuantizedTensor], places: Sequence[int]) -> bytes:
    """The tables that change; ``places`` are where the float32 ``constants`` lie in the file."""
    graft, root = Graft(), FlatBuffer(model.region).root()
    what = f"{model.region.source.name}: {model.region.what}"
    old_codes, old_buffers, old_graphs = (list(root.tables(slot)) for slot in (1, 4, 2))
    buffers = {(c.tensor.subgraph, c.tensor.index): len(old_buffers) + n for n, c in enumerate(constants)}
    made = [
        graft.table(_BUFFER, {1: place, 2: 4 * constant.tensor.elements})
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
        4: graft.offsets([*copied_places(old_buffers, {}), *made]),
    }
    return graft.finish(graft.copy(root, _MODEL, changes, what), TFLITE_IDENTIFIER)


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
        floats[tensor.index] = graft.copy(tensors[tensor.index], _TENSOR, fields, what)
    casts = {
        op.index: graft.copy(operators[op.index], _OPERATOR, {0: cast, 3: None, 4: None}, what)
        for op in graph.operators
        if op.kind in ("QUANTIZE", "DEQUANTIZE") and _joins_floats(op, graph)
    }
    changes = {
        0: graft.offsets(copied_places(tensors, floats)),
        3: graft.offsets(copied_places(operators, casts)),
    }
    return graft.copy(table, _SUBGRAPH, changes, what)


def _joins_floats(op: Operator, graph: Subgraph) -> bool:
    ends = (graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]])
    return all(tensor.type is TensorType.FLOAT32 or is_coded(tensor) for tensor in ends)
