"""A TFLite model with constants of their own for some tensors: its section laid out anew.

The whole old section stands behind a :class:`~mtp_extract.litertlm.graft.Graft`, and the new constants behind that,
16-byte aligned as LiteRT's converter appends them. What lay behind the old flatbuffer has moved by the graft's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_extract.io.files import aligned
from mtp_extract.io.laid import Laid, Piece, made
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table
from mtp_extract.litertlm.graft import Field, Graft, copied_places
from mtp_extract.litertlm.storage import Storage
from mtp_extract.litertlm.tflite import TfliteModel

MODEL, SUBGRAPH, TENSOR, OPERATOR, BUFFER = "Ioooooooooo", "oooooi", "obIoo?oo?oI", "IooBoobooQQBoi", "oQQ"
"""struct codes of the tables' slots, in the schema's order; "o" is an offset."""

_QUANTIZATION = "ooooBoi"

_APPENDED_ALIGNMENT = 16


@dataclass(frozen=True)
class NewTensor:
    """A tensor that gets a constant of its own: zeros, and scales of zero, for whoever fills them in.

    Attributes:
        subgraph, tensor: which one.
        storage: how the constant is to lie; of the type that it has.
        readers: (operator, position of the input) that shall read it; the others keep the old one. None for all: the
            tensor itself changes.
    """

    subgraph: int
    tensor: int
    storage: Storage
    readers: tuple[tuple[int, int], ...] | None = None


def rebuilt(model: TfliteModel, changes: Sequence[NewTensor]) -> Laid:
    """The section of ``model`` with ``changes`` made; nothing is written yet.

    Raises:
        UnsupportedError: a part of it that would have to be copied is not known.
    """
    region, root = model.region, FlatBuffer(model.region).root()
    # No number of a graft changes its length.
    shift = len(_front(model, root, changes, [0] * len(changes)))
    at, places = shift + region.size, list[int]()
    for change in changes:
        places.append(aligned(at, _APPENDED_ALIGNMENT))
        at = places[-1] + change.storage.length
    front = _front(model, root, changes, places)
    assert len(front) == shift
    return Laid(at, (made(0, front), *moved_section(model, shift)))


def moved_section(model: TfliteModel, shift: int) -> Iterator[Piece]:
    """The old section, ``shift`` bytes further on, with its offsets of bytes behind the flatbuffer."""
    region, root = model.region, FlatBuffer(model.region).root()
    yield Piece(shift, region.size, source=region.source, offset=region.begin)
    places = [(table.at(1), table.integer(1, "Q")) for table in root.tables(4) if not table.vector(0, 1).count]
    for graph in root.tables(2):
        places += [(table.at(9), table.integer(9, "Q")) for table in graph.tables(3)]
    # 0 and 1 say that there are none; a table may be in the list twice.
    yield from (made(shift + field, (shift + offset).to_bytes(8, "little")) for field, offset in places if offset > 1)


def _front(model: TfliteModel, root: Table, changes: Sequence[NewTensor], places: Sequence[int]) -> bytes:
    """The graft; ``places`` are where the new constants lie."""
    graft, what = Graft(), f"{model.region.source.name}: {model.region.what}"
    new = [
        graft.table(BUFFER, {1: place, 2: change.storage.length}) for change, place in zip(changes, places, strict=True)
    ]
    old = list(root.tables(4))
    buffers = graft.offsets([*copied_places(old, {}), *new])
    tables, subgraphs = list(root.tables(2)), dict[int, int]()
    for index in sorted({change.subgraph for change in changes}):
        own = [(len(old) + number, change) for number, change in enumerate(changes) if change.subgraph == index]
        subgraphs[index] = _subgraph(graft, model, tables[index], own, what)
    listed = graft.offsets(copied_places(tables, subgraphs))
    return graft.finish(graft.copy(root, MODEL, {2: listed, 4: buffers}, what), TFLITE_IDENTIFIER)


def _subgraph(
    graft: Graft, model: TfliteModel, table: Table, changes: Sequence[tuple[int, NewTensor]], what: str
) -> int:
    """``table`` with ``changes``, each with the buffer of its constant."""
    tensors, operators = list(table.tables(0)), list(table.tables(3))
    changed, added = dict[int, int](), list[int]()
    inputs: dict[int, list[int]] = {}
    for buffer, change in changes:
        place = graft.copy(tensors[change.tensor], TENSOR, dict(_fields(graft, model, change, buffer)), what)
        if change.readers is None:
            changed[change.tensor] = place
            continue
        for operator, position in change.readers:
            row = inputs.setdefault(operator, list(operators[operator].integers(1, "i")))
            row[position] = len(tensors) + len(added)
        added.append(place)
    rewired = {}
    for operator, row in inputs.items():
        vector = graft.numbers(np.array(row, "<i4"))
        rewired[operator] = graft.copy(operators[operator], OPERATOR, {1: vector}, what)
    fields: dict[int, Field] = {0: graft.offsets([*copied_places(tensors, changed), *added])}
    if rewired:
        fields[3] = graft.offsets(copied_places(operators, rewired))
    return graft.copy(table, SUBGRAPH, fields, what)


def _fields(graft: Graft, model: TfliteModel, change: NewTensor, buffer: int) -> Iterator[tuple[int, Field]]:
    """The fields of a tensor that are its own now: its buffer, its scales, and its shape where that is another."""
    storage = change.storage
    yield from ((2, buffer), (10, None))
    if storage.kind in ("per_tensor", "per_channel"):
        scale = graft.numbers(np.zeros(storage.groups, "<f4"))
        zero_point = graft.numbers(np.zeros(storage.groups, "<i8"))
        yield 4, graft.table(_QUANTIZATION, {2: scale, 3: zero_point, 6: storage.axis})
    if storage.shape != model.tensor(change.subgraph, change.tensor).shape:
        yield from ((0, graft.numbers(np.array(storage.shape, "<i4"))), (7, None))


def readers_of(model: TfliteModel, subgraph: int, tensor: int) -> list[tuple[int, int]]:
    """(operator, position) of everything in ``subgraph`` that reads ``tensor``."""
    return [
        (op.index, position)
        for op in model.subgraphs[subgraph].operators
        for position, source in enumerate(op.inputs)
        if source == tensor
    ]
