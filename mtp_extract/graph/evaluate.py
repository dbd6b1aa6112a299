"""Compute values that do not depend on activations, operator by operator in NumPy: constants, position tables, masks.

Thousands of positions are computed together, one sample each. Inside this module the samples are the last axis of an
array: ``[*shape, samples]``, or ``[*shape, 1]`` if all samples share the value. Shapes therefore broadcast from the
right as they do in LiteRT. An operator that only moves elements moves each element's samples as one record. Operators
that move elements differently in each sample, and a few rare ones, run once per sample.

:data:`KERNELS` is an allow-list with LiteRT's semantics. A quantized tensor is computed as the real numbers that its
codes stand for. Integers are exact: an operator whose result would wrap around is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.graph.call import (
    CONVERSIONS,
    LARGEST_COMPUTED,
    LARGEST_CONSTANT,
    NUMPY_TYPES,
    Array,
    Call,
    Kernel,
    convert_errors,
    has_few_bits,
    holds_codes,
    read_ints,
)
from mtp_extract.graph.flat import FlatGraph, Node, Value, walk_ancestors
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES, widen_floats
from mtp_extract.litertlm.tflite import Tensor, TensorType

_ELEMENTS_AT_ONCE = 1 << 20  # most elements of one value, over all samples that are computed together
_COST_PER_VALUE = 1 << 10  # overhead of computing one value, counted in elements
_SMALL_INTEGERS = frozenset({"INT8", "UINT8", "INT16"})
_ROUNDED_KINDS = frozenset({"BATCH_MATMUL", "COS", "EXP", "POW", "RSQRT", "SIN", "SQRT"})
_SAFE_LIMIT = float(1 << 62)  # below it a float64 result is certain to fit int64, in spite of rounding


# Kernels that move elements. Their arrays may have any dtype: numbers, element indices, or records of samples.


def _broadcast(call: Call, x: Array, shape: Array) -> Array:
    call.check_size(*read_ints(shape))
    return np.broadcast_to(x, read_ints(shape))


def _fill(call: Call, shape: Array, number: Array) -> Array:
    if number.ndim:
        raise call.refuse("repeats more than one number")
    return _broadcast(call, number, shape)


def _slice(call: Call, x: Array, begin: Array, size: Array) -> Array:
    starts = read_ints(begin)
    ends = [d if n == -1 else b + n for b, n, d in zip(starts, read_ints(size), x.shape, strict=True)]
    if any(not 0 <= b <= e <= d for b, e, d in zip(starts, ends, x.shape, strict=True)):
        raise call.refuse(f"takes {starts} to {ends} of {list(x.shape)}")
    return x[tuple(map(slice, starts, ends))]


def _slice_with_strides(call: Call, x: Array, begin: Array, end: Array, strides: Array) -> Array:
    no_begin, no_end, ellipsis, new_axis, drops = (call.read_option(slot, "i") for slot in range(5))
    if ellipsis or new_axis or call.read_option(5, "?", False):
        raise call.refuse("adds axes, or has ends that are offsets from its begins")
    if drops and min(read_ints(strides)) < 0:
        raise call.refuse("drops an axis that it reads backwards, for which LiteRT reads beyond its operand")
    index: list[Any] = []
    for axis, bounds in enumerate(zip(read_ints(begin), read_ints(end), read_ints(strides), strict=True)):
        bit = 1 << axis
        start = None if no_begin & bit else bounds[0]
        index.append(start or 0 if drops & bit else slice(start, None if no_end & bit else bounds[1], bounds[2]))
    return np.asarray(x[tuple(index)])


def _gather(call: Call, x: Array, chosen: Array) -> Array:
    axis = call.read_option(0, "i")
    if call.read_option(1, "i"):
        raise call.refuse("has other indices in each batch")
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < x.shape[axis]):
        raise call.refuse("takes elements that its operand lacks")
    call.check_size(x.size // max(x.shape[axis], 1), chosen.size)
    return np.take(x, chosen, axis)


def _make_joining_kernel(join: Callable[..., Array], slot: int) -> Kernel:
    def kernel(call: Call, *operands: Array) -> Array:
        call.check_size(sum(x.size for x in operands))
        return join(operands, call.read_option(slot, "i"))

    return kernel


def _reshape(call: Call, x: Array, shape: Array | None = None) -> Array:
    sizes = list(call.read_axes(0)) if shape is None else read_ints(shape)
    if min(sizes, default=0) < -1 or (shape is not None and shape.ndim != 1):
        raise call.refuse(f"gives its operand the shape {sizes}")
    return x.reshape(sizes)


_EVERY_OPERAND = tuple(range(256))
_LAYOUT: dict[str, tuple[tuple[int, ...], Kernel]] = {
    "BROADCAST_TO": ((0,), _broadcast),
    "CONCATENATION": (_EVERY_OPERAND, _make_joining_kernel(np.concatenate, 0)),
    "EXPAND_DIMS": ((0,), lambda call, x, axis: np.expand_dims(x, read_ints(axis)[0])),
    "FILL": ((1,), _fill),
    "GATHER": ((0,), _gather),
    "PACK": (_EVERY_OPERAND, _make_joining_kernel(np.stack, 1)),
    "RESHAPE": ((0,), _reshape),
    "SLICE": ((0,), _slice),
    "SPLIT": ((1,), lambda call, axis, x: tuple(np.split(x, call.read_option(0, "i"), read_ints(axis)[0]))),
    "SQUEEZE": ((0,), lambda call, x: np.squeeze(x, call.read_axes(0) or None)),
    "STRIDED_SLICE": ((0,), _slice_with_strides),
    "TRANSPOSE": ((0,), lambda call, x, order: np.transpose(x, read_ints(order))),
    "UNPACK": ((0,), lambda call, x: tuple(np.moveaxis(x, call.read_option(1, "i"), 0))),
}
LAYOUT: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {**{kind: at for kind, (at, _) in _LAYOUT.items()}, "DYNAMIC_UPDATE_SLICE": (0, 1)}
)
"""Kind → positions of the operands whose elements are moved; the others hold shapes, axes or indices.
DYNAMIC_UPDATE_SLICE has no kernel: only the reader of scores follows it."""


# Kernels that compute.


def _cast_exactly(call: Call, values: Array, kind: np.dtype[Any]) -> Array:
    """Return the integers as ``kind``; raise an OperatorError if one does not fit."""
    limits = np.iinfo(kind)
    if values.size and not (values.min() >= limits.min and values.max() <= limits.max):
        raise call.refuse(f"makes integers that {kind.name} does not hold")
    return values.astype(kind)


def _compute_integers(call: Call, function: Callable[..., Any], *operands: Array) -> Array:
    """Return ``function`` of integers in their own type; raise an OperatorError on overflow or division by zero."""
    if not (np.abs(function(*(x.astype(np.float64) for x in operands))) < _SAFE_LIMIT).all():
        raise call.refuse("makes integers that int64 does not hold")
    return _cast_exactly(call, function(*(x.astype(np.int64) for x in operands)), operands[0].dtype)


def _make_elementwise(function: Callable[..., Any], count: int, *, on_integers: bool = False) -> Kernel:
    """Return a kernel for ``count`` operands of one type; ``on_integers`` if it computes integers of integers."""

    def kernel(call: Call, *operands: Array) -> Array:
        if len(operands) != count:
            raise FormatError(f"{call.node.op.label} has {len(operands)} operands and should have {count}.")
        names = {call.get_input_tensor(i).type_name for i in range(count)}
        result_names = {result.tensor.type_name for result in call.node.outputs} - {"BOOL"}
        if names & _SMALL_INTEGERS:
            raise call.refuse(
                f"computes with {' and '.join(sorted(names))}, for which LiteRT's kernels have rules of their own"
            )
        if len(names) > 1 or (result_names and result_names != names):
            raise call.refuse(f"mixes {' and '.join(sorted(names | result_names))}")
        if on_integers and operands[0].dtype.kind != "f":
            return _compute_integers(call, function, *operands)
        return np.asarray(function(*operands))

    return kernel


def _select(call: Call, condition: Array, yes: Array, no: Array) -> Array:
    if call.node.kind == "SELECT" and 1 < condition.ndim < yes.ndim:
        raise call.refuse("chooses whole rows by a vector")
    return np.where(condition, yes, no)


def _cast(call: Call, x: Array) -> Array:
    target = call.node.outputs[0].tensor.type
    kind = np.dtype(NUMPY_TYPES.get(target))  # float64 for an unknown type, which is refused with the result
    if target in FLOAT_TYPES - {TensorType.FLOAT32}:
        return _round_to_half(x.astype(np.float32), target)
    if kind.kind in "bf" or x.dtype.kind == "b":
        return x.astype(kind)
    if x.dtype.kind == "f":
        raise call.refuse("makes integers of floats")
    return _cast_exactly(call, x, kind)


def _round_to_half(x: Array, kind: TensorType) -> Array:
    """Round float32 to the nearest FLOAT16 or BFLOAT16, ties to even; NaN and infinities stay."""
    if kind is TensorType.FLOAT16:
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)).astype(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), upper.view(np.float32), x)


def _multiply_matrices(call: Call, left: Array, right: Array) -> Array:
    if {call.get_input_tensor(0).type, call.get_input_tensor(1).type} != {TensorType.FLOAT32}:
        raise call.refuse("multiplies matrices of other types than FLOAT32")
    a, b = (np.swapaxes(x, -1, -2) if call.read_option(i, "?", False) else x for i, x in enumerate((left, right)))
    call.check_size(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return np.asarray(np.matmul(a, b))


_FUNCTIONS: tuple[np.ufunc, ...] = (np.cos, np.exp, np.log, np.sin, np.sqrt, np.maximum, np.minimum, np.equal)
_FUNCTIONS += (np.not_equal, np.greater, np.greater_equal, np.less, np.less_equal)
_FUNCTIONS += (np.logical_not, np.logical_and, np.logical_or)
_EXACT_FUNCTIONS = {"ABS": np.abs, "ADD": np.add, "FLOOR_DIV": np.floor_divide, "MUL": np.multiply, "NEG": np.negative}
_EXACT_FUNCTIONS |= {"POW": np.power, "SQUARE": np.square, "SUB": np.subtract}
_ELEMENTWISE: dict[str, Kernel] = {
    **{function.__name__.upper(): _make_elementwise(function, function.nin) for function in _FUNCTIONS},
    **{kind: _make_elementwise(f, f.nin, on_integers=True) for kind, f in _EXACT_FUNCTIONS.items()},
    "CAST": _cast,
    "DIV": _make_elementwise(np.divide, 2),
    "RSQRT": _make_elementwise(lambda x: 1 / np.sqrt(x), 1),
    "DEQUANTIZE": lambda call, x: x,
    **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
}
KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {**{kind: kernel for kind, (_, kernel) in _LAYOUT.items()}, **_ELEMENTWISE, "BATCH_MATMUL": _multiply_matrices}
)
"""Kind → kernel. Any other operator is refused."""

ELEMENTWISE = frozenset(_ELEMENTWISE)
"""Kinds that compute each element of the result from the same element of the operands, broadcast as in NumPy."""


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
