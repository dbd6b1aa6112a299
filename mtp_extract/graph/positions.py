"""What the position alone decides: computed at every position that the caches have.

A step of a drafter has one query; its position is also the slot of the caches that it stands at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import Array, Call, grid_of
from mtp_extract.graph.evaluate import evaluate, inputs_of
from mtp_extract.graph.expressions import Ids
from mtp_extract.graph.fill import fill_position, is_mask
from mtp_extract.graph.flat import INPUT_POS, PARAM_TENSOR, Depends, FlatGraph, Value
from mtp_extract.litertlm.storage import NUMBER_TYPES

_MOST_SLOTS = 1 << 20
_MOST_NUMBERS = 64
_SMALL_CONSTANT = 1 << 12
_NUMBERS_AT_ONCE = 1 << 18
_COMPARED = frozenset(
    {"CAST", "MUL", "ADD", "SUB", "NEG", "COS", "SIN", "DEQUANTIZE", "QUANTIZE", "CONCATENATION", "RESHAPE"}
)
"""Operators that may be recognized as the same, because no option but an axis decides what they compute."""


class Positions:
    """Values of the position, and where each is among all numbers that rotate queries.

    Attributes:
        slots: of the caches, and so positions.
        first_slots: tables ``[positions]`` of the slots where windows begin.
        rotating: the values that meet queries, whose elements are numbered from 1 in this order.
    """

    def __init__(self, graph: FlatGraph) -> None:
        self.graph, self.slots = graph, cache_slots(graph)
        self.first_slots: list[Ids] = []
        self.rotating: list[Value] = []
        self.count = 1
        self._first: dict[int, int] = {}
        self._tables: dict[int, npt.NDArray[np.float64]] = {}
        self._same: dict[tuple[object, ...], Value] = {}
        self._canonical: dict[int, Value] = {}

    def table(self, value: Value) -> npt.NDArray[np.float64]:
        """What ``value`` is at every position, ``[positions, elements]``.

        Raises:
            UnsupportedError: it has many elements, or something else decides it, too.
        """
        if value.depends & ~Depends.POSITION or value.tensor.elements > _MOST_NUMBERS:
            raise UnsupportedError(f"{value.label} is no small value that the position alone decides.")
        value = self.canonical(value)
        if id(value) not in self._tables:
            pieces = [numbers for _, (numbers,) in self.at(np.arange(self.slots), [value])]
            self._tables[id(value)] = np.concatenate(pieces).astype(np.float64)
        return self._tables[id(value)]

    def window(self, first_slots: npt.NDArray[np.float64]) -> int:
        """The number of a table of first slots, the same for equal tables."""
        wanted = first_slots.astype(np.int64)
        for number, table in enumerate(self.first_slots):
            if np.array_equal(table, wanted):
                return number
        self.first_slots.append(wanted)
        return len(self.first_slots) - 1

    def elements(self, value: Value) -> Ids:
        """The numbers of the elements of a value that rotates queries; the same for what is computed alike."""
        value = self.canonical(value)
        if id(value) not in self._first:
            self._first[id(value)] = self.count
            self.rotating.append(value)
            self.count += value.tensor.elements
        return self._first[id(value)] + np.arange(value.tensor.elements).reshape(value.tensor.shape)

    def values_of(self, elements: Ids) -> list[Value]:
        """The values whose elements are among ``elements``."""
        firsts = np.array([self._first[id(value)] for value in self.rotating], np.int64)
        used = np.unique(np.searchsorted(firsts, np.unique(elements[elements > 0]), "right") - 1)
        return [self.rotating[index] for index in used]

    def canonical(self, value: Value) -> Value:
        """The first value that is computed by the same operators of the same."""
        if id(value) not in self._canonical:
            key = self._key(value)
            self._canonical[id(value)] = value if key is None else self._same.setdefault(key, value)
        return self._canonical[id(value)]

    def _key(self, value: Value) -> tuple[object, ...] | None:
        node, tensor = value.producer, value.tensor
        described = tensor.type, tuple(tensor.shape), grid_of(tensor) if not value.constant else None
        if value.constant:
            plain = tensor.quantization is None and tensor.type in NUMBER_TYPES and tensor.elements <= _SMALL_CONSTANT
            return (*described, bytes(self.graph.model.locate(tensor).read())) if plain else None
        if node is None or node.kind not in _COMPARED:
            return None
        axis = Call(self.graph, node).option(0, "i") if node.kind == "CONCATENATION" else None
        operands = (None if v is None else id(self.canonical(v)) for v in node.inputs)
        return (*described, node.kind, node.op.activation, axis, *operands)

    def fed(self, needed: frozenset[str], positions: Ids) -> dict[str, Array]:
        """The inputs of ``needed`` that say the position, ``[positions, *shape]``."""
        names = needed & {INPUT_POS, PARAM_TENSOR}
        return {name: fill_position(self.graph.inputs[name], positions) for name in sorted(names)}

    def at(self, positions: Ids, values: Sequence[Value]) -> Iterator[tuple[Ids, list[npt.NDArray[np.float32]]]]:
        """Some of ``positions`` after others, and what ``values`` are there, ``[positions, elements]`` each."""
        needed, step = inputs_of(values), max(1, _NUMBERS_AT_ONCE // max(v.tensor.elements for v in values))
        for begin in range(0, positions.size, step):
            some = positions[begin : begin + step]
            made = evaluate(self.graph, self.fed(needed, some), values)
            yield some, [np.broadcast_to(m.reshape(len(m), -1), (some.size, m[0].size)) for m in made]


def cache_slots(graph: FlatGraph) -> int:
    """Slots of the caches: the axis that they share with a mask, or with one another.

    Raises:
        UnsupportedError: more than any cache has.
    """
    masks = [value.tensor.shape for name, value in graph.inputs.items() if is_mask(name) and value.tensor.shape]
    caches = caches_of(graph.inputs)
    shared = set.intersection(*(set(value.tensor.shape) for value in caches.values())) if caches else {1}
    slots = masks[0][-1] if masks else max(shared, default=1)
    if not 0 < slots <= _MOST_SLOTS:
        raise UnsupportedError(f"Caches of {slots} slots are none of a drafter.")
    return slots


def caches_of(inputs: Mapping[str, Value]) -> dict[str, Value]:
    """The inputs that hold K or V: those of four axes that are no mask."""
    return {
        name: value
        for name, value in sorted(inputs.items())
        if len(value.tensor.shape) == 4 and not is_mask(name) and name != PARAM_TENSOR
    }
