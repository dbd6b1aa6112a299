"""Compute values that depend on the position alone, at every position that the caches have.

A step of a drafter has one query. Its position is also the index of its slot in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import NUMPY_TYPES, Array, Call, has_few_bits
from mtp_extract.graph.evaluate import evaluate, find_input_names
from mtp_extract.graph.expressions import Ids
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR, Depends, FlatGraph, Value
from mtp_extract.litertlm.tflite import TensorType

_MOST_SLOTS = 1 << 20
_MOST_NUMBERS = 64
_NUMBERS_AT_ONCE = 1 << 18
_SMALL_CONSTANT = 1 << 12
_COMPARED = frozenset({"CAST", "MUL", "ADD", "SUB", "NEG", "COS", "SIN", "CONCATENATION", "RESHAPE"})
"""Operators that can be compared: two of one kind, with equal operands and axis, compute the same."""


class Positions:
    """The values of a graph that depend on the position, with a number for each element that rotates queries."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.slots = count_cache_slots(graph)  # slots of the caches, which is also the number of positions
        self.first_slots: list[Ids] = []  # tables ``[positions]`` of the first slot of a window
        # The values that rotate queries. Their elements are numbered from 1 in this order.
        self.rotating: list[Value] = []
        self.count = 1
        self._first_number: dict[int, int] = {}
        self._tables: dict[int, npt.NDArray[Any]] = {}
        self._by_key: dict[tuple[object, ...], Value] = {}
        self._canonical: dict[int, Value] = {}

    def compute_table(self, value: Value) -> npt.NDArray[Any]:
        """Return ``value`` at every position, ``[positions, elements]``: int64 for integers, else float64. Raise
        UnsupportedError if it has too many elements or does not depend on the position alone.
        """
        if value.depends & ~Depends.POSITION or value.tensor.elements > _MOST_NUMBERS:
            raise UnsupportedError(f"{value.label} is too large, or does not depend on the position alone.")
        if id(value) not in self._tables:
            pieces = [numbers for _, (numbers,) in self.evaluate_in_batches(np.arange(self.slots), [value])]
            table = np.concatenate(pieces)
            self._tables[id(value)] = table.astype(np.int64 if table.dtype.kind in "iu" else np.float64)
        return self._tables[id(value)]

    def register_window(self, first_slots: npt.NDArray[Any]) -> int:
        """Return the index in :attr:`first_slots` of a table ``[positions]``, which is added if it is new."""
        first_slots = first_slots.astype(np.int64)
        for number, table in enumerate(self.first_slots):
            if np.array_equal(table, first_slots):
                return number
        self.first_slots.append(first_slots)
        return len(self.first_slots) - 1

    def number_elements(self, value: Value) -> Ids:
        """Return the numbers of the elements of a value that rotates queries; values computed alike share them."""
        value = self._find_first_equal(value)
        if id(value) not in self._first_number:
            self._first_number[id(value)] = self.count
            self.rotating.append(value)
            self.count += value.tensor.elements
        return self._first_number[id(value)] + np.arange(value.tensor.elements).reshape(value.tensor.shape)

    def find_values(self, elements: Ids) -> list[Value]:
        """Return the values that have an element with one of these numbers."""
        return [value for value in self.rotating if np.isin(self.number_elements(value), elements).any()]

    def _find_first_equal(self, value: Value) -> Value:
        """Return the first value that is computed alike: every layer computes the same RoPE tables again."""
        if id(value) not in self._canonical:
            key = self._make_key(value)
            self._canonical[id(value)] = value if key is None else self._by_key.setdefault(key, value)
        return self._canonical[id(value)]

    def _make_key(self, value: Value) -> tuple[object, ...] | None:
        node, tensor = value.producer, value.tensor
        if tensor.quantization is not None:
            return None
        if value.constant:
            small = tensor.elements <= _SMALL_CONSTANT
            return (tensor.type, *tensor.shape, bytes(self.graph.model.locate(tensor).read())) if small else None
        if node is None or node.kind not in _COMPARED:
            return None
        axis = Call(self.graph, node).read_option(0, "i") if node.kind == "CONCATENATION" else None
        operands = (None if v is None else id(self._find_first_equal(v)) for v in node.inputs)
        return tensor.type, *tensor.shape, node.kind, node.op.activation, axis, *operands

    def fill_inputs(self, needed: frozenset[str], positions: Ids) -> dict[str, Array]:
        """Return the position inputs among ``needed`` as runtimes fill them, ``[positions, *shape]`` each: the
        position, or the slots to write and read, ``[start, end, end]``, and zeros.
        """
        filled = {}
        for name in sorted(needed & {INPUT_POS, PARAM_TENSOR}):
            value = self.graph.inputs[name]
            numbers = np.zeros((positions.size, 1 if name == INPUT_POS else max(value.tensor.elements, 3)), np.int64)
            numbers[:, :3] = positions[:, None] + np.array([0, 1, 1])[: numbers.shape[1]]
            filled[name] = fill_input(value, numbers)
        return filled

    def evaluate_in_batches(
        self, positions: Ids, values: Sequence[Value], *, last_bits: int = 0
    ) -> Iterator[tuple[Ids, list[npt.NDArray[np.float32]]]]:
        """Yield batches of ``positions``, each with ``values`` at these positions, ``[positions, elements]`` each."""
        needed = find_input_names(values)
        step = max(1, _NUMBERS_AT_ONCE // max(v.tensor.elements for v in values))
        for begin in range(0, positions.size, step):
            batch = positions[begin : begin + step]
            arrays = evaluate(self.graph, self.fill_inputs(needed, batch), values, last_bits=last_bits)
            yield batch, [np.broadcast_to(m.reshape(len(m), -1), (batch.size, m[0].size)) for m in arrays]


def is_mask(name: str) -> bool:
    """Return whether the runtime fills the input ``name`` with a mask."""
    return name in (MASK, MASK_LOCAL)


def fill_input(value: Value, numbers: npt.NDArray[np.generic]) -> Array:
    """Return ``numbers`` ``[samples, elements]`` as the input ``value``: ``[samples, *shape]`` in its type. Raise
    UnsupportedError if the input has another size or a type that cannot hold numbers.
    """
    kind = NUMPY_TYPES.get(value.tensor.type)
    halves = value.tensor.type is TensorType.FLOAT16 and is_mask(value.input_name or "")
    if kind is None or (has_few_bits(value.tensor) and not halves) or value.tensor.elements != numbers.shape[1]:
        raise UnsupportedError(
            f"The input {value.label} does not hold the {numbers.shape[1]} numbers that runtimes fill."
        )
    return np.asarray(numbers, kind).reshape(-1, *value.tensor.shape)


def count_cache_slots(graph: FlatGraph) -> int:
    """Return the slots of the caches: the last axis of a mask, else the largest size that all caches share. Raise
    UnsupportedError if that is too large.
    """
    masks = [value.tensor.shape for name, value in graph.inputs.items() if is_mask(name) and value.tensor.shape]
    caches = find_caches(graph.inputs)
    shared = set.intersection(*(set(value.tensor.shape) for value in caches.values())) if caches else {1}
    slots = masks[0][-1] if masks else max(shared, default=1)
    if not 0 < slots <= _MOST_SLOTS:
        raise UnsupportedError(f"Caches of {slots} slots: expected 1 to {_MOST_SLOTS}.")
    return slots


def find_caches(inputs: Mapping[str, Value]) -> dict[str, Value]:
    """Return the inputs that hold K or V: those with four axes that hold floats or codes and are no mask."""
    return {
        name: value
        for name, value in sorted(inputs.items())
        if len(value.tensor.shape) == 4 and not is_mask(name) and value.tensor.type not in (TensorType.INT32, None)
    }
