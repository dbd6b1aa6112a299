"""Execution of the flat operator list: what the graph computes, operator by operator, in NumPy.

Several inputs are evaluated in lock-step: an operator is computed for all samples before the next one. What does not
depend on the sample is computed once, and a weight is dequantized once for all of them. A value is forgotten as soon
as its last reader has run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.graph.arrays import Array, Coded, Lazy, Numbers, Weight, array_of
from mtp_extract.graph.call import DTYPES, Call, grid_of, rounded
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.graph.kernels import ELEMENTWISE, KERNELS
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.litertlm.quantized import QuantizedTensor, stored_floats
from mtp_extract.litertlm.storage import CODE_TYPES, FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType


@dataclass(frozen=True, eq=False)
class Stacked:
    """One array a sample, all in one: ``[samples, *shape]``. Thousands of positions are computed side by side."""

    array: Array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, sample: int) -> Array:
        made: Array = self.array[sample]
        return made

    def aligned(self, rank: int) -> Array:
        """With axes of one element in front of the shape, so that samples of ``rank`` axes broadcast."""
        count, *shape = self.array.shape
        return self.array.reshape(count, *(1,) * (rank - len(shape)), *shape)


Samples = tuple[Numbers, ...] | Stacked
"""What a value is: one entry a sample, or a single one where all samples share it."""

Results = Sequence[Array] | Array
"""An array a sample; ``[samples, *shape]`` where they were computed side by side."""

_SMALL = 1 << 16
"""Elements up to which a floating-point constant is read at once."""


def inputs_of(values: Sequence[Value]) -> frozenset[str]:
    """Names of the signature's inputs that ``values`` are computed from."""
    return frozenset(v.input_name for start in values for v in ancestors(start) if v.input_name is not None)


def evaluate(
    graph: FlatGraph,
    inputs: Mapping[str, Samples],
    wanted: Sequence[Value],
    given: Sequence[tuple[Value, Samples]] = (),
    *,
    rounds: bool = True,
) -> list[Results]:
    """What ``wanted`` are, for every sample.

    Args:
        graph: the operators.
        inputs: name of a signature's input → its numbers, one entry a sample or one for all. Of an input of a
            quantized type, a :class:`Coded`.
        wanted: values to compute.
        given: values that are known already, and what they are: what computes them is not run.
        rounds: whether numbers that depend on no activation and no cache are rounded as the types of the file say.

    Returns:
        per wanted value, an array a sample. Floats are float32; of a quantized type, the real numbers.

    Raises:
        UnsupportedError: an operator that is not in the allow-list, or one that does what the evaluator does not.
        RoleError: a value that is read and that nothing computes.
        FormatError: operands that do not fit the operator.
    """
    samples = max((len(numbers) for numbers in (*inputs.values(), *(numbers for _, numbers in given))), default=1)
    run = _Run(graph, inputs, wanted, given, rounds)
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            if id(node) in run.needed:
                run.step(node)
        return [_read_out(run.read(value), samples) for value in wanted]


def _read_out(numbers: Samples, samples: int) -> Results:
    if isinstance(numbers, Stacked):
        return numbers.array
    arrays = [array_of(v) for v in numbers]
    return arrays if len(arrays) == samples else arrays * samples


class _Run:
    def __init__(
        self,
        graph: FlatGraph,
        inputs: Mapping[str, Samples],
        wanted: Sequence[Value],
        given: Sequence[tuple[Value, Samples]],
        rounds: bool,
    ) -> None:
        self.graph, self.inputs, self.rounds = graph, inputs, rounds
        self.known: dict[int, Samples] = {id(value): numbers for value, numbers in given}
        stops = frozenset(self.known)
        reached = {id(v): v for start in wanted for v in ancestors(start, stops)}
        self.needed = {id(v.producer) for key, v in reached.items() if v.producer is not None and key not in self.known}
        self.readers = {
            key: sum(id(node) in self.needed for node, _ in value.consumers) for key, value in reached.items()
        }
        for value in wanted:
            self.readers[id(value)] += 1

    def read(self, value: Value) -> Samples:
        """The numbers of ``value``, for one reader of it."""
        known = self.known.get(id(value))
        if known is None:
            known = self.known[id(value)] = self._leaf(value)
        self.readers[id(value)] -= 1
        if not self.readers[id(value)]:
            del self.known[id(value)]
        return known

    def _leaf(self, value: Value) -> Samples:
        if value.constant:
            return (_constant(self.graph, value),)
        if value.input_name is None:
            if not value.tensor.elements:
                return (np.empty(value.tensor.shape, np.float32),)
            raise RoleError(f"{value.label} is read, and no op computes it: an op was lost after the graph was made.")
        if value.input_name not in self.inputs:
            raise UnsupportedError(
                f"The input {escape(value.input_name)!r} is none that this release knows how to fill. "
                "Look for a newer release."
            )
        return self.inputs[value.input_name]

    def step(self, node: Node) -> None:
        """Compute ``node`` for all samples."""
        kernel = KERNELS.get(node.kind)
        if kernel is None:
            raise UnsupportedError(
                f"{node.op.label} is no operator that this release can evaluate, so it cannot check what the graph "
                "computes. Please report the file."
            )
        call = Call(self.graph, node)
        operands = [None if value is None else self._operand(call, i, value) for i, value in enumerate(node.inputs)]
        while operands and operands[-1] is None:
            operands.pop()
        if None in operands:
            raise FormatError(f"{node.op.label} lacks an operand: the graph is damaged.")
        results = _apply(call, operands)
        if len(results) != len(node.outputs):
            raise FormatError(f"{node.op.label} has {len(node.outputs)} results and should have {len(results)}.")
        for value, made in zip(node.outputs, results, strict=True):
            if self.readers.get(id(value)):
                self.known[id(value)] = _rounded(made, value.tensor) if self.rounds and call.exact else made

    def _operand(self, call: Call, position: int, value: Value) -> Samples:
        seen, made = call.tensor(position), value.tensor
        if seen is not made and not value.constant and (seen.type, grid_of(seen)) != (made.type, grid_of(made)):
            raise call.refuse(f"reads {made.label} as {seen.label}, with another type or scale")
        return self.read(value)


def _rounded(numbers: Samples, tensor: Tensor) -> Samples:
    if isinstance(numbers, Stacked):
        return Stacked(rounded(numbers.array, tensor))
    return tuple(rounded(n, tensor) if isinstance(n, np.ndarray) else n for n in numbers)


def _apply(call: Call, operands: list[Samples | None]) -> list[Samples]:
    """Each result of an operator: an entry a sample; one entry where no operand depends on the sample."""
    count = max((len(o) for o in operands if o is not None), default=1)
    kernel = KERNELS[call.node.kind]
    try:
        if any(isinstance(o, Stacked) for o in operands):
            stacked = _all_samples(call, operands)
            if stacked is not None:
                return [Stacked(made) for made in stacked]
        if count > 1 and call.node.kind in _STACKED and len(operands[1] or ()) == 1:
            rows = _STACKED[call.node.kind](call, operands, count)
            if rows is not None:
                return [tuple(rows)]
        results = []
        for sample in range(count):
            chosen = [None if o is None else o[sample if len(o) > 1 else 0] for o in operands]
            made = kernel(call, *chosen)
            results.append(tuple(map(_settle, made)) if isinstance(made, tuple) else (_settle(made),))
    except (ValueError, IndexError, TypeError, ArithmeticError, MemoryError) as error:
        # NumPy's word for shapes that do not fit; LiteRT refuses such a graph when it is loaded.
        raise FormatError(f"{call.node.op.label} cannot be computed: {error}. The graph is damaged.") from error
    made_by_result = [tuple(column) for column in zip(*results, strict=True)]
    if count > 1 and any(isinstance(o, Stacked) for o in operands):
        return [_restacked(column) for column in made_by_result]
    return list(made_by_result)


def _restacked(column: tuple[Numbers, ...]) -> Samples:
    arrays = [n for n in column if isinstance(n, np.ndarray)]
    alike = len(arrays) == len(column) and len({a.shape for a in arrays}) == 1
    return Stacked(np.stack(arrays)) if alike else column


def _all_samples(call: Call, operands: list[Samples | None]) -> Sequence[Array] | None:
    """The results for all samples at once; None where the operator has to be run sample by sample."""
    kind, kernel = call.node.kind, KERNELS[call.node.kind]
    if any(o is None for o in operands) or any(not isinstance(o, Stacked) and len(o or ()) > 1 for o in operands):
        return None
    given = [o for o in operands if o is not None]
    single = [o.array[0] if isinstance(o, Stacked) else o[0] for o in given]
    if kind in ELEMENTWISE:
        rank = max(len(n.shape) for n in single)
        if kind == "SELECT" and len(single[0].shape) != rank:
            return None
        arrays = [o.aligned(rank) if isinstance(o, Stacked) else n for o, n in zip(given, single, strict=True)]
        return [np.asarray(kernel(call, *arrays))]
    if (
        kind == "FULLY_CONNECTED"
        and isinstance(given[0], Stacked)
        and not any(isinstance(o, Stacked) for o in given[1:])
    ):
        count = len(given[0])
        made = kernel(call, given[0].array.reshape(count, -1, given[0].array.shape[-1]), *single[1:])
        one = kernel(call, np.zeros_like(single[0]), *single[1:])
        return [np.asarray(made).reshape(count, *one.shape)]
    if kind in LAYOUT and not any(isinstance(o, Stacked) for i, o in enumerate(given) if i not in LAYOUT[kind]):
        return _moved(call, given, single)
    return None


def _moved(call: Call, operands: list[Samples], single: list[Numbers]) -> list[Array]:
    """What an operator does that only moves elements: found once, with the numbers of the elements in their places."""
    count = max(len(o) for o in operands)
    moved = LAYOUT[call.node.kind]
    flats, numbered, total = [], [], 0
    for position, (samples, one) in enumerate(zip(operands, single, strict=True)):
        if position not in moved:
            numbered.append(one)
            continue
        size = math.prod(one.shape)
        array = samples.array if isinstance(samples, Stacked) else np.broadcast_to(array_of(one), (count, *one.shape))
        flats.append(array.reshape(count, size))
        numbered.append(np.arange(total, total + size).reshape(one.shape))
        total += size
    flat = flats[0] if len(flats) == 1 else np.concatenate(flats, 1)
    made = KERNELS[call.node.kind](call, *numbered)
    return [
        flat.reshape(count, *ids.shape)
        if ids.size == total and np.array_equal(ids.reshape(-1), np.arange(total))
        else flat[:, ids.reshape(-1)].reshape(count, *ids.shape)
        for ids in (made if isinstance(made, tuple) else (made,))
    ]


def _settle(numbers: Numbers) -> Numbers:
    return numbers if isinstance(numbers, Lazy) else np.asarray(numbers)


def _stack_rows(call: Call, operands: list[Samples | None], count: int) -> list[Array] | None:
    """FULLY_CONNECTED: the inputs of all samples as rows of one, so that the weight is read once."""
    first, *rest = operands
    assert first is not None and not isinstance(first, Stacked)
    arrays = [array_of(v) for v in first]
    if any(len(o) > 1 for o in rest if o is not None) or arrays[0].ndim < 2:
        return None
    made = KERNELS["FULLY_CONNECTED"](call, np.concatenate(arrays), *(None if o is None else o[0] for o in rest))
    return np.split(made, count)


def _stack_queries(call: Call, operands: list[Samples | None], count: int) -> list[Array] | None:
    """BATCH_MATMUL: the rows of all samples' left operands as rows of one, so that the right one is read once."""
    left, right = operands
    assert left is not None and right is not None and not isinstance(left, Stacked)
    axis = -1 if call.option(0, "?", False) else -2
    made = KERNELS["BATCH_MATMUL"](call, np.concatenate([array_of(v) for v in left], axis), right[0])
    return np.split(made, count, -2)


_STACKED = {"FULLY_CONNECTED": _stack_rows, "BATCH_MATMUL": _stack_queries}


def _constant(graph: FlatGraph, value: Value) -> Numbers:
    tensor = value.tensor
    kind = DTYPES.get(tensor.type)
    if tensor.elements == 0:
        return np.empty(tensor.shape, kind or np.float32)
    if tensor.type in FLOAT_TYPES and tensor.elements <= _SMALL and not tensor.sparse:
        # As they are: a masked score may be −∞, and a table that divides holds ∞.
        return stored_floats(graph.model.locate(tensor).read(), tensor).reshape(tensor.shape)
    if tensor.type in FLOAT_TYPES or (tensor.type in CODE_TYPES and tensor.quantization is not None):
        return Weight(QuantizedTensor.of(graph.model, tensor), tensor.shape)
    if kind is None:
        raise UnsupportedError(f"{tensor.label} has an element type that this release cannot evaluate.")
    stored = np.frombuffer(graph.model.locate(tensor).read(), np.dtype(kind).newbyteorder("<")).reshape(tensor.shape)
    grid = grid_of(tensor) if tensor.type is TensorType.INT16 else None
    return stored if grid is None else Coded(stored, *grid)
