"""Compute values that do not depend on activations, operator by operator in NumPy: constants, position tables, masks.

Thousands of positions are computed together, one sample each. Inside this module the samples are the last axis of an
array: ``[*shape, samples]``, or ``[*shape, 1]`` if all samples share the value. Shapes therefore broadcast from the
right as they do in LiteRT. An operator that only moves elements moves each element's samples as one record. Operators
that move elements differently in each sample, and a few rare ones, run once per sample.

What an operator computes is in :mod:`~mtp_extract.graph.kernels`. A quantized tensor is computed as the real numbers
that its codes stand for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.graph.call import (
    CONVERSIONS,
    LARGEST_COMPUTED,
    LARGEST_CONSTANT,
    NUMPY_TYPES,
    Array,
    Call,
    convert_errors,
    has_few_bits,
    holds_codes,
)
from mtp_extract.graph.flat import FlatGraph, Node, Value, walk_ancestors
from mtp_extract.graph.kernels import ELEMENTWISE, KERNELS, LAYOUT
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES, widen_floats
from mtp_extract.litertlm.tflite import Tensor, TensorType

_ELEMENTS_AT_ONCE = 1 << 20  # most elements of one value, over all samples that are computed together
_COST_PER_VALUE = 1 << 10  # overhead of computing one value, counted in elements
_ROUNDED_KINDS = frozenset({"BATCH_MATMUL", "COS", "EXP", "POW", "RSQRT", "SIN", "SQRT"})


def move_elements(graph: FlatGraph, node: Node, arrays: Iterable[Array]) -> tuple[Array, ...]:
    """Return the results of an operator that moves elements, applied to ``arrays`` instead of its moved operands."""
    moved_operands = iter(arrays)
    operands = [
        next(moved_operands) if i in LAYOUT[node.kind] else graph.read_small_integers(value).reshape(value.tensor.shape)
        for i, value in enumerate(node.inputs)
        if value is not None
    ]
    results = KERNELS[node.kind](Call(graph, node), *operands)
    return tuple(map(np.asarray, results)) if isinstance(results, tuple) else (np.asarray(results),)


# Evaluation.


def find_input_names(values: Sequence[Value]) -> frozenset[str]:
    """Return the names of the signature's inputs that ``values`` are computed from."""
    return frozenset(v.input_name for start in values for v in walk_ancestors(start) if v.input_name is not None)


def is_rounded(node: Node) -> bool:
    """Return whether the last bits of the result depend on the hardware or library that computes it."""
    # The logarithm of a BOOL is exact on all hardware: −∞ or 0.
    if node.kind != "LOG":
        return node.kind in _ROUNDED_KINDS and node.outputs[0].tensor.type in FLOAT_TYPES
    maker = node.get_operand(0).producer
    return maker is None or maker.kind != "CAST" or maker.get_operand(0).tensor.type is not TensorType.BOOL


def uses_rounded_results(graph: FlatGraph, values: Iterable[Value]) -> bool:
    """Return whether ``values`` are computed from rounded results (:func:`is_rounded`), not only moved or converted."""
    rounded = set[int]()
    for node in _list_producers(graph, (source for value in values for source in walk_ancestors(value))):
        reads_rounded = any(id(operand) in rounded for operand in node.inputs)
        if reads_rounded and node.kind not in LAYOUT and node.kind not in CONVERSIONS:
            return True
        if reads_rounded or is_rounded(node):
            rounded.update(map(id, node.outputs))
    return False


def evaluate(
    graph: FlatGraph,
    inputs: Mapping[str, Array],
    wanted: Sequence[Value],
    overrides: Mapping[int, Array] = MappingProxyType({}),
    *,
    last_bits: int = 0,
) -> list[Array]:
    """Compute ``wanted`` for every sample.

    Args:
        inputs: name of a signature's input → ``[samples, *shape]``, in the type that
            :data:`~mtp_extract.graph.call.NUMPY_TYPES` gives.
        overrides: ``id`` of a value → the array ``[1, *shape]`` to use instead of computing the value.
        last_bits: 1 or −1 to change rounded results (:func:`is_rounded`) by one last bit, as other hardware may: up or
            down at random, in opposite directions for 1 and −1.

    Returns:
        for each wanted value ``[samples, *shape]``, or ``[1, *shape]`` if it is the same for all samples. Floats are
        float32.

    Raises:
        UnsupportedError: an operator is unknown or computes with numbers of few bits; an integer would wrap around; one
            result, or all results together, are larger than in any drafter.
        RoleError: a value is read that nothing computes.
        FormatError: operands do not fit the operator.
    """
    reached = {id(value): value for start in wanted for value in walk_ancestors(start, frozenset(overrides))}
    nodes = _list_producers(graph, (value for key, value in reached.items() if key not in overrides))
    samples = max(map(len, inputs.values()), default=1)
    largest = max((value.tensor.elements for value in reached.values() if value.depends), default=0)
    step = max(1, _ELEMENTS_AT_ONCE // max(1, largest))
    _charge_budget(graph, wanted[0], reached.values(), samples, step)

    shared = {key: np.moveaxis(array, 0, -1) for key, array in overrides.items()}
    batches = [
        _SampleBatch(graph, batch_inputs, dict(shared), last_bits).compute(nodes, wanted)
        for batch_inputs in _split_samples(inputs, samples, step)
    ]
    varying = {name for name, array in inputs.items() if len(array) > 1}
    return [
        _join_samples(pieces if varying & find_input_names([value]) else pieces[:1])
        for value, pieces in zip(wanted, zip(*batches, strict=True), strict=True)
    ]


def _split_samples(inputs: Mapping[str, Array], samples: int, step: int) -> Iterator[dict[str, Array]]:
    """Yield ``inputs`` for ``step`` samples at a time, the samples moved from the first axis to the last."""
    by_sample = {name: np.moveaxis(array, 0, -1) for name, array in inputs.items()}
    for at in range(0, samples, step):
        yield {name: a[..., at : at + step] if a.shape[-1] > 1 else a for name, a in by_sample.items()}


def _join_samples(pieces: Sequence[Array]) -> Array:
    """Join the samples of ``pieces`` and move them back to the first axis."""
    return np.moveaxis(np.concatenate(pieces, -1) if len(pieces) > 1 else pieces[0], -1, 0)


def _list_producers(graph: FlatGraph, values: Iterable[Value]) -> list[Node]:
    """Return the operators that compute ``values``, in the order of execution."""
    # Sorting these is faster than filtering all nodes: a graph is evaluated many times for each of its layers.
    producers = {value.producer for value in values if value.producer is not None}
    return sorted(producers, key=graph.execution_order.__getitem__)


def _charge_budget(graph: FlatGraph, wanted: Value, reached: Collection[Value], samples: int, step: int) -> None:
    """Subtract the cost of computing ``reached`` from the graph's budget; raise UnsupportedError if it is used up."""
    # A value that all samples share is computed again in every step.
    steps = -(-samples // step)
    numbers = (value.tensor.elements * (samples if value.depends else steps) for value in reached)
    graph.computed.elements -= sum(numbers) + len(reached) * steps * _COST_PER_VALUE
    if graph.computed.elements < 0:
        raise UnsupportedError(
            f"{wanted.label}: more numbers are computed of positions and constants than in any drafter's graph, so it "
            "cannot be checked. Export the file again."
        )


class _SampleBatch:
    """Samples that are computed together, and the arrays of their values that are still needed."""

    def __init__(self, graph: FlatGraph, inputs: Mapping[str, Array], arrays: dict[int, Array], last_bits: int) -> None:
        self.graph = graph
        self.inputs = inputs
        self.arrays = arrays
        self.last_bits = last_bits

    def compute(self, nodes: Sequence[Node], wanted: Sequence[Value]) -> list[Array]:
        """Return the arrays of ``wanted``; drop every other array after its last reader."""
        last = {id(value): node for node in nodes for value in node.inputs} | {id(value): None for value in wanted}
        with np.errstate(all="ignore"):
            for node in nodes:
                self._compute(node)
                for value in (*node.inputs, *node.outputs):
                    if last.get(id(value), node) is node:
                        self.arrays.pop(id(value), None)
            return [self._read(value) for value in wanted]

    def _read(self, value: Value) -> Array:
        if id(value) in self.arrays:
            return self.arrays[id(value)]
        if value.unproduced:
            raise RoleError(f"{value.label} is read, and no op computes it: an op was lost after the graph was made.")
        if value.input_name is None:
            return self.arrays.setdefault(id(value), _read_constant(self.graph, value.tensor)[..., None])
        if value.input_name not in self.inputs:
            raise UnsupportedError(f"This release cannot fill the input {escape(value.input_name)!r}.")
        return self.inputs[value.input_name]

    def _compute(self, node: Node) -> None:
        call = Call(self.graph, node)
        if node.kind not in KERNELS:
            raise call.refuse("is no operator that this release can evaluate")
        if node.op.activation:
            raise call.refuse(f"has the fused activation {node.op.activation}")
        _check_few_bits(call)
        operands = [self._read(node.get_operand(position)) for position in range(len(node.inputs))]
        with convert_errors(node.op.label):
            results = _run_kernel(call, operands)
        if self.last_bits and is_rounded(node):
            seed = self.graph.execution_order[node]
            results = tuple(_move_last_bits(result, self.last_bits, seed) for result in results)
        self._store(call, results)

    def _store(self, call: Call, results: Sequence[Array]) -> None:
        """Store the results of an operator; raise if a type or shape is not the one that the file states."""
        outputs = call.node.outputs
        if len(results) != len(outputs):
            raise FormatError(f"{call.node.op.label} has {len(outputs)} results and should have {len(results)}.")
        for value, array in zip(outputs, results, strict=True):
            if array.dtype != NUMPY_TYPES.get(value.tensor.type, np.void):
                raise call.refuse(f"makes {array.dtype.name} where {value.label} should be")
            if array.shape[:-1] != tuple(value.tensor.shape):
                raise FormatError(f"{value.label} is computed as {list(array.shape[:-1])}: the graph is damaged.")
            # MAXIMUM and MINIMUM of NaN depend on the hardware.
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise call.refuse("makes NaN, which is no number")
            self.arrays[id(value)] = array


def _move_last_bits(results: Array, direction: int, seed: int) -> Array:
    """Move each float up or down by one last bit at random; the opposite ``direction`` moves each the other way."""
    rises = np.random.default_rng(seed).integers(0, 2, results.shape, np.uint8).astype(bool)
    targets = np.where(rises, np.float32(direction * np.inf), np.float32(-direction * np.inf))
    neighbours: Array = np.nextafter(results, targets)
    # A result that overflowed did so by more than a last bit: it is infinite on all hardware.
    return np.where(np.isinf(results), results, neighbours)


def _check_few_bits(call: Call) -> None:
    """Check that codes and half-precision floats are only converted to float32, never computed with. Half-precision
    floats may also be moved, and be the result of a CAST.
    """
    kind = call.node.kind
    results = [value.tensor for value in call.node.outputs]
    operands = [call.get_input_tensor(position) for position in range(len(call.node.inputs))]
    if not any(map(has_few_bits, (*operands, *results))):
        return
    widens = not any(map(has_few_bits, results))
    if kind == "DEQUANTIZE":
        is_allowed = widens
    elif any(map(holds_codes, (*operands, *results))):
        is_allowed = False
    elif kind in LAYOUT:
        moved = (operands[place] for place in LAYOUT[kind] if place < len(operands))
        is_allowed = len({tensor.type for tensor in (*moved, *results)}) == 1
    else:
        is_allowed = kind == "CAST" and (widens or {tensor.type for tensor in results} <= FLOAT_TYPES)
    if not is_allowed:
        raise call.refuse("computes with numbers of few bits")


def _run_kernel(call: Call, operands: list[Array]) -> tuple[Array, ...]:
    """Return the results of an operator for all samples, ``[*shape, samples]`` or ``[*shape, 1]`` each."""
    kind = call.node.kind
    counts = [x.shape[-1] for x in operands]
    # A stored constant may be large; a result may be no larger than the operands or LARGEST_COMPUTED.
    largest = max(LARGEST_COMPUTED, *(x[..., 0].size for x in operands))
    call = replace(call, largest=largest // max(counts))
    places = LAYOUT.get(kind, ())
    if kind in ELEMENTWISE:
        call.check_size(*np.broadcast_shapes(*(x.shape[:-1] for x in operands)))
        return (KERNELS[kind](call, *operands),)
    if kind in LAYOUT and all(count == 1 for position, count in enumerate(counts) if position not in places):
        return _move_records(call, operands, places)
    if kind == "GATHER" and counts[0] == 1:
        return (_gather_per_sample(call, *operands),)
    return _run_per_sample(call, operands, max(counts))


def _run_per_sample(call: Call, operands: Sequence[Array], samples: int) -> tuple[Array, ...]:
    kernel = KERNELS[call.node.kind]
    results = [kernel(call, *(x[..., min(at, x.shape[-1] - 1)] for x in operands)) for at in range(samples)]
    arrays_by_output = zip(*results, strict=True) if isinstance(results[0], tuple) else [results]
    return tuple(np.stack(arrays, -1) for arrays in arrays_by_output)


def _move_records(call: Call, operands: list[Array], moved: tuple[int, ...]) -> tuple[Array, ...]:
    """Return the results of an operator that moves elements in the same way in all samples.

    The samples of one element lie next to each other in memory, so ``[*shape, samples]`` is viewed as ``[*shape]`` of
    ``np.void`` records, each the bytes of one element in all samples. The kernel runs once and moves the records as if
    they were numbers. The result is viewed as ``[*shape, samples]`` of the original dtype again.
    """
    samples, dtype = max(x.shape[-1] for x in operands), operands[moved[0]].dtype
    if any(x.dtype != dtype for i, x in enumerate(operands) if i in moved):
        raise call.refuse("joins tensors of different types")

    def view_records(x: Array) -> Array:
        contiguous = np.ascontiguousarray(np.broadcast_to(x, (*x.shape[:-1], samples)))
        return contiguous.view((np.void, samples * x.itemsize))

    records = ((view_records(x) if i in moved else x)[..., 0] for i, x in enumerate(operands))
    results = KERNELS[call.node.kind](call, *records)
    results = results if isinstance(results, tuple) else (results,)
    return tuple(np.asarray(result, order="C")[..., None].view(dtype) for result in results)


def _gather_per_sample(call: Call, table: Array, chosen: Array) -> Array:
    """Return what each sample gathers from one shared table: the samples become the first axis of the indices."""
    picked = KERNELS["GATHER"](Call(call.graph, call.node), table[..., 0], np.moveaxis(chosen, -1, 0))
    return np.moveaxis(picked, call.read_option(0, "i") % (table.ndim - 1), -1)


def _read_constant(graph: FlatGraph, tensor: Tensor) -> Array:
    """Return a constant, ``[*shape]``: floats widened to float32, codes dequantized."""
    kind, quantization = NUMPY_TYPES.get(tensor.type), tensor.quantization
    if tensor.elements == 0:
        return np.empty(tensor.shape, kind or np.float32)
    if tensor.elements > LARGEST_CONSTANT or tensor.sparse:
        raise UnsupportedError(f"{tensor.label} is too large, or sparse: no drafter computes with such a constant.")
    if tensor.type in FLOAT_TYPES:
        # Infinities are legal here: a masked score may be −∞, a table of divisors may hold ∞.
        return widen_floats(graph.model.locate(tensor).read(), tensor.type).reshape(tensor.shape)
    if quantization is not None and (quantization.scales.count or quantization.blockwise):
        return read_floats(graph.model, tensor)
    if kind is None:
        raise UnsupportedError(f"{tensor.label} has an element type that this release cannot evaluate.")
    stored = graph.model.locate(tensor).read()
    if kind is np.bool_ and not set(stored) <= {0, 1}:
        raise FormatError(f"{tensor.label} holds bytes that are neither true nor false: the file is damaged.")
    return np.frombuffer(stored, np.dtype(kind).newbyteorder("<")).reshape(tensor.shape)
