"""A TFLite model with constants of another type or of their own: its section laid out anew.

The old flatbuffer stands behind a :class:`~mtp_extract.litertlm.graft.Graft`; buffers that lay behind it move up, the
new ones are appended, 16-byte aligned as LiteRT's converter appends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_extract.errors import UnsupportedError
from mtp_extract.io.laid import Laid, Piece, made
from mtp_extract.io.output import aligned
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table
from mtp_extract.litertlm.graft import Field, Graft, copied_places
from mtp_extract.litertlm.storage import Storage
from mtp_extract.litertlm.tflite import TfliteModel

# struct codes of the slots, in the schema's order; "o" is an offset.
_MODEL = "Ioooooooooo"
_SUBGRAPH = "oooooi"
_TENSOR = "obIoo?oo?oI"
_OPERATOR = "IooBoobooQQBoi"
_BUFFER = "oQQ"
_QUANTIZATION = "ooooBoi"

_APPENDED_ALIGNMENT = 16
# So that the flatbuffer has its final size before it is known where what follows will lie.
_UNKNOWN = (1 << 63) - 1


@dataclass(frozen=True)
class NewTensor:
    """A tensor that gets a constant of its own: zeros, and scales of zero, for whoever fills them in.

    Attributes:
        subgraph, tensor: which one.
        storage: how the constant is to lie.
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
    return _Rebuild(model, changes).laid()


@dataclass(frozen=True)
class _Appended:
    """Bytes behind the flatbuffer: ``fields`` are places in it that say where they begin."""

    offset: int
    length: int
    fields: tuple[int, ...]


class _Rebuild:
    def __init__(self, model: TfliteModel, changes: Sequence[NewTensor]) -> None:
        self.model = model
        self.changes = changes
        self.root = FlatBuffer(model.region).root()
        self.buffers = list(self.root.tables(4))
        self.subgraphs = list(self.root.tables(2))

    def laid(self) -> Laid:
        region, dropped = self.model.region, self._dropped()
        appended = self._appended(dropped)
        kept = [a for a in appended if a.fields]
        # A flatbuffer does not say where it ends; what is appended to it does.
        end = min((a.offset for a in appended), default=region.size)
        shift = len(self._front([_UNKNOWN] * len(self.changes)))
        at = shift + end
        pieces = [Piece(shift, end, source=region.source, offset=region.begin)]
        for part in kept:
            at = aligned(at, _APPENDED_ALIGNMENT)
            pieces.append(Piece(at, part.length, source=region.source, offset=region.begin + part.offset))
            pieces += [made(shift + field, at.to_bytes(8, "little")) for field in part.fields]
            at += part.length
        places = []
        for change in self.changes:
            at = aligned(at, _APPENDED_ALIGNMENT)
            places.append(at)
            at += change.storage.length
        front = self._front(places)
        assert len(front) == shift
        pieces += self._erased(dropped, shift)
        return Laid(at, (made(0, front), *pieces))

    def _dropped(self) -> set[int]:
        """Buffers that nothing will read any more."""
        replaced = {(c.subgraph, c.tensor) for c in self.changes if c.readers is None}
        used = {
            tensor.buffer
            for graph in self.model.subgraphs
            for tensor in graph.tensors
            if (graph.index, tensor.index) not in replaced and not tensor.external_buffer
        }
        used |= {entry.integer(1, "I") for entry in self.root.tables(6)} | set(self.root.integers(5, "i"))
        changed = (self.model.subgraphs[g].tensors[t] for g, t in replaced)
        return {t.buffer for t in changed if not t.external_buffer and t.buffer} - used

    def _appended(self, dropped: set[int]) -> list[_Appended]:
        """Ranges behind the flatbuffer, in order; one without fields is no longer wanted."""
        fields: dict[tuple[int, int], list[int]] = {}
        inline = 0
        for index, table in enumerate(self.buffers):
            data, offset = table.vector(0, 1), table.integer(1, "Q")
            if data.count:
                inline = max(inline, data.start + data.count)
            elif offset > 1:
                entry = fields.setdefault((offset, table.integer(2, "Q")), [])
                if index not in dropped:
                    entry.append(table.at(1))
        for graph in self.subgraphs:
            for table in graph.tables(3):
                if table.integer(9, "Q") > 1:
                    fields.setdefault((table.integer(9, "Q"), table.integer(10, "Q")), []).append(table.at(9))
        found = [_Appended(offset, length, tuple(places)) for (offset, length), places in sorted(fields.items())]
        reached = inline
        for part in found:
            if part.offset < reached or part.offset + part.length > self.model.region.size:
                raise UnsupportedError(
                    f"{self.model.region.source.name}: buffers of {self.model.region.what} overlap at byte "
                    f"{part.offset} of it, so it cannot be rebuilt."
                )
            reached = part.offset + part.length
        return found

    def _erased(self, dropped: set[int], shift: int) -> Iterator[Piece]:
        """Of buffers that nothing reads any more: inline bytes become zeros, appended ones are not pointed to."""
        for index in sorted(dropped):
            table = self.buffers[index]
            data = table.vector(0, 1)
            if data.count:
                yield Piece(shift + data.start, data.count)
            elif table.at(1) and table.at(2):
                yield Piece(shift + table.at(1), 8)
                yield Piece(shift + table.at(2), 8)

    def _front(self, places: Sequence[int]) -> bytes:
        """The graft; ``places`` are where the new constants lie."""
        graft = Graft()
        new = []
        for change, place in zip(self.changes, places, strict=True):
            new.append(graft.table(_BUFFER, {1: place, 2: change.storage.length}))
        buffers = graft.offsets([*copied_places(self.buffers, {}), *new])
        subgraphs = {index: self._subgraph(graft, index) for index in sorted({c.subgraph for c in self.changes})}
        listed = graft.offsets(copied_places(self.subgraphs, subgraphs))
        return graft.finish(graft.copy(self.root, _MODEL, {2: listed, 4: buffers}, self._what), TFLITE_IDENTIFIER)

    @property
    def _what(self) -> str:
        return f"{self.model.region.source.name}: {self.model.region.what}"

    def _subgraph(self, graft: Graft, index: int) -> int:
        table = self.subgraphs[index]
        tensors, operators = list(table.tables(0)), list(table.tables(3))
        changed: dict[int, int] = {}
        added: list[int] = []
        inputs: dict[int, list[int]] = {}
        for number, change in enumerate(self.changes):
            if change.subgraph != index:
                continue
            place = self._tensor(graft, tensors[change.tensor], change, len(self.buffers) + number)
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
            rewired[operator] = graft.copy(operators[operator], _OPERATOR, {1: vector}, self._what)
        fields = {0: graft.offsets([*copied_places(tensors, changed), *added])}
        if rewired:
            fields[3] = graft.offsets(copied_places(operators, rewired))
        return graft.copy(table, _SUBGRAPH, fields, self._what)

    def _tensor(self, graft: Graft, table: Table, change: NewTensor, buffer: int) -> int:
        storage, old = change.storage, self.model.tensor(change.subgraph, change.tensor)
        fields: dict[int, Field] = {1: int(storage.type), 2: buffer, 10: None}
        if storage.packing is None and storage.type is not old.type:
            fields[4] = None
        elif storage.kind in ("per_tensor", "per_channel"):
            scale = graft.numbers(np.zeros(storage.groups, "<f4"))
            zero_point = graft.numbers(np.zeros(storage.groups, "<i8"))
            fields[4] = graft.table(_QUANTIZATION, {2: scale, 3: zero_point, 6: storage.axis})
        if storage.shape != old.shape:
            fields |= {0: graft.numbers(np.array(storage.shape, "<i4")), 7: None}
        return graft.copy(table, _TENSOR, fields, self._what)


def readers_of(model: TfliteModel, subgraph: int, tensor: int) -> list[tuple[int, int]]:
    """(operator, position) of everything in ``subgraph`` that reads ``tensor``."""
    return [
        (op.index, position)
        for op in model.subgraphs[subgraph].operators
        for position, source in enumerate(op.inputs)
        if source == tensor
    ]
