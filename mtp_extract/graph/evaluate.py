"""Values that no activation decides, computed operator by operator in NumPy: constants, tables of positions, masks.

Thousands of positions are computed side by side. Inside of this module the samples of a value are its last axis,
``[*shape, samples]``, or ``[*shape, 1]`` where they share it: so shapes broadcast from the right as they do in LiteRT,
and an operator that only moves elements moves whole records of samples. Only what moves differently from sample to
sample, and a few rare operators, run once a sample.

:data:`KERNELS` is an allow-list, with LiteRT's own semantics. A number of a quantized tensor is the real number that
its code stands for. Integers are exact or refused: none wraps around.
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
    computing,
    has_few_bits,
    holds_codes,
    ints,
)
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES, widened
from mtp_extract.litertlm.tflite import Tensor, TensorType

_ELEMENTS_AT_ONCE = 1 << 20  # elements of a value, of all samples that are computed side by side
_COST_PER_VALUE = 1 << 10  # what a value costs besides its elements, in elements
_SMALL_INTEGERS = frozenset({"INT8", "UINT8", "INT16"})
_ROUNDED_KINDS = frozenset({"BATCH_MATMUL", "COS", "EXP", "POW", "RSQRT", "SIN", "SQRT"})
_SAFE_LIMIT = float(1 << 62)  # an integer that leaves int64 is larger, however float64 rounds it


# Operators that move elements: plain arrays of any dtype, numbers, numbers of elements, or records.


def _broadcast(call: Call, x: Array, shape: Array) -> Array:
    call.check_size(*ints(shape))
    return np.broadcast_to(x, ints(shape))


def _fill(call: Call, shape: Array, number: Array) -> Array:
    if number.ndim:
        raise call.refuse("repeats more than one number")
    return _broadcast(call, number, shape)


def _slice(call: Call, x: Array, begin: Array, size: Array) -> Array:
    starts = ints(begin)
    ends = [d if n == -1 else b + n for b, n, d in zip(starts, ints(size), x.shape, strict=True)]
    if any(not 0 <= b <= e <= d for b, e, d in zip(starts, ends, x.shape, strict=True)):
        raise call.refuse(f"takes {starts} to {ends} of {list(x.shape)}")
    return x[tuple(map(slice, starts, ends))]


def _slice_with_strides(call: Call, x: Array, begin: Array, end: Array, strides: Array) -> Array:
    no_begin, no_end, ellipsis, new_axis, drops = (call.option(slot, "i") for slot in range(5))
    if ellipsis or new_axis or call.option(5, "?", False):
        raise call.refuse("adds axes, or counts its ends from its begins")
    if drops and min(ints(strides)) < 0:
        raise call.refuse("drops an axis that it takes backwards, where LiteRT reads beyond its operand")
    index: list[Any] = []
    for axis, bounds in enumerate(zip(ints(begin), ints(end), ints(strides), strict=True)):
        bit = 1 << axis
        start = None if no_begin & bit else bounds[0]
        index.append(start or 0 if drops & bit else slice(start, None if no_end & bit else bounds[1], bounds[2]))
    return np.asarray(x[tuple(index)])


def _gather(call: Call, x: Array, chosen: Array) -> Array:
    axis = call.option(0, "i")
    if call.option(1, "i"):
        raise call.refuse("chooses otherwise in each batch")
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < x.shape[axis]):
        raise call.refuse("takes elements that its operand lacks")
    call.check_size(x.size // max(x.shape[axis], 1), chosen.size)
    return np.take(x, chosen, axis)


def _make_joining_kernel(join: Callable[..., Array], slot: int) -> Kernel:
    def kernel(call: Call, *operands: Array) -> Array:
        call.check_size(sum(x.size for x in operands))
        return join(operands, call.option(slot, "i"))

    return kernel


def _reshape(call: Call, x: Array, shape: Array | None = None) -> Array:
    sizes = list(call.read_axes(0)) if shape is None else ints(shape)
    if min(sizes, default=0) < -1 or (shape is not None and shape.ndim != 1):
        raise call.refuse(f"gives its operand the shape {sizes}")
    return x.reshape(sizes)


_ALL_OPERANDS = tuple(range(256))
_LAYOUT: dict[str, tuple[tuple[int, ...], Kernel]] = {
    "BROADCAST_TO": ((0,), _broadcast),
    "CONCATENATION": (_ALL_OPERANDS, _make_joining_kernel(np.concatenate, 0)),
    "EXPAND_DIMS": ((0,), lambda call, x, axis: np.expand_dims(x, ints(axis)[0])),
    "FILL": ((1,), _fill),
    "GATHER": ((0,), _gather),
    "PACK": (_ALL_OPERANDS, _make_joining_kernel(np.stack, 1)),
    "RESHAPE": ((0,), _reshape),
    "SLICE": ((0,), _slice),
    "SPLIT": ((1,), lambda call, axis, x: tuple(np.split(x, call.option(0, "i"), ints(axis)[0]))),
    "SQUEEZE": ((0,), lambda call, x: np.squeeze(x, call.read_axes(0) or None)),
    "STRIDED_SLICE": ((0,), _slice_with_strides),
    "TRANSPOSE": ((0,), lambda call, x, order: np.transpose(x, ints(order))),
    "UNPACK": ((0,), lambda call, x: tuple(np.moveaxis(x, call.option(1, "i"), 0))),
}
LAYOUT: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {**{kind: at for kind, (at, _) in _LAYOUT.items()}, "DYNAMIC_UPDATE_SLICE": (0, 1)}
)
"""Kind → which operands are moved; the others say where to. The last has no kernel: only scores may be written so."""


# Operators that compute.


def _cast_exactly(call: Call, values: Array, kind: np.dtype[Any]) -> Array:
    """Integers as ``kind``; refused where it does not hold them."""
    limits = np.iinfo(kind)
    if values.size and not (values.min() >= limits.min and values.max() <= limits.max):
        raise call.refuse(f"makes integers that {kind.name} does not hold")
    return values.astype(kind)


def _compute_integers(call: Call, function: Callable[..., Any], *operands: Array) -> Array:
    """What ``function`` makes of integers, in their own type; what divides by zero is refused with what wraps."""
    if not (np.abs(function(*(x.astype(np.float64) for x in operands))) < _SAFE_LIMIT).all():
        raise call.refuse("makes integers that int64 does not hold")
    return _cast_exactly(call, function(*(x.astype(np.int64) for x in operands)), operands[0].dtype)


def _make_elementwise_kernel(function: Callable[..., Any], count: int, *, on_integers: bool = False) -> Kernel:
    """An operator of ``count`` operands of one type; ``on_integers`` where it makes integers of integers."""

    def kernel(call: Call, *operands: Array) -> Array:
        if len(operands) != count:
            raise FormatError(f"{call.node.op.label} has {len(operands)} operands and should have {count}.")
        names = {call.input_tensor(i).type_name for i in range(count)}
        types = {result.tensor.type_name for result in call.node.outputs} - {"BOOL"}
        if names & _SMALL_INTEGERS:
            raise call.refuse(
                f"computes with {' and '.join(sorted(names))}, as LiteRT's kernels do in ways of their own"
            )
        if len(names) > 1 or (types and types != names):
            raise call.refuse(f"mixes {' and '.join(sorted(names | types))}")
        if on_integers and operands[0].dtype.kind != "f":
            return _compute_integers(call, function, *operands)
        return np.asarray(function(*operands))

    return kernel


def _select(call: Call, condition: Array, yes: Array, no: Array) -> Array:
    if call.node.kind == "SELECT" and 1 < condition.ndim < yes.ndim:
        raise call.refuse("chooses whole rows by a vector")
    return np.where(condition, yes, no)


def _cast(call: Call, x: Array) -> Array:
    """To floats, bools, or integers of integers; to float64, which the evaluator refuses, where a type is unknown."""
    target = call.node.outputs[0].tensor.type
    kind = np.dtype(NUMPY_TYPES.get(target))
    if target in FLOAT_TYPES - {TensorType.FLOAT32}:
        return _round_to_half(x.astype(np.float32), target)
    if kind.kind in "bf" or x.dtype.kind == "b":
        return x.astype(kind)
    if x.dtype.kind == "f":
        raise call.refuse("makes integers of floats")
    return _cast_exactly(call, x, kind)


def _round_to_half(x: Array, kind: TensorType) -> Array:
    """float32 numbers, to the nearest of FLOAT16 or BFLOAT16, ties to even; what is not finite stays as it is."""
    if kind is TensorType.FLOAT16:
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)).astype(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), upper.view(np.float32), x)


def _multiply_matrices(call: Call, first: Array, other: Array) -> Array:
    if {call.input_tensor(0).type, call.input_tensor(1).type} != {TensorType.FLOAT32}:
        raise call.refuse("multiplies matrices of other types than FLOAT32")
    a, b = (np.swapaxes(x, -1, -2) if call.option(i, "?", False) else x for i, x in enumerate((first, other)))
    call.check_size(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return np.asarray(np.matmul(a, b))


_FUNCTIONS: tuple[np.ufunc, ...] = (np.cos, np.exp, np.log, np.sin, np.sqrt, np.maximum, np.minimum, np.equal)
_FUNCTIONS += (np.not_equal, np.greater, np.greater_equal, np.less, np.less_equal)
_FUNCTIONS += (np.logical_not, np.logical_and, np.logical_or)
_INTEGER_FUNCTIONS = {
    "ABS": np.abs,
    "ADD": np.add,
    "FLOOR_DIV": np.floor_divide,
    "MUL": np.multiply,
    "NEG": np.negative,
}
_INTEGER_FUNCTIONS |= {"POW": np.power, "SQUARE": np.square, "SUB": np.subtract}
_ELEMENTWISE: dict[str, Kernel] = {
    **{function.__name__.upper(): _make_elementwise_kernel(function, function.nin) for function in _FUNCTIONS},
    **{
        kind: _make_elementwise_kernel(function, function.nin, on_integers=True)
        for kind, function in _INTEGER_FUNCTIONS.items()
    },
    "CAST": _cast,
    "DIV": _make_elementwise_kernel(np.divide, 2),
    "RSQRT": _make_elementwise_kernel(lambda x: 1 / np.sqrt(x), 1),
    "DEQUANTIZE": lambda call, x: x,
    **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
}
_MOVING = {kind: kernel for kind, (_, kernel) in _LAYOUT.items()}
KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {**_MOVING, **_ELEMENTWISE, "BATCH_MATMUL": _multiply_matrices}
)
"""Kind → kernel. What is not here is refused."""

ELEMENTWISE = frozenset(_ELEMENTWISE)
"""Those whose result is, element by element, what its operands decide there, broadcast as NumPy does."""


def moved(graph: FlatGraph, node: Node, arrays: Iterable[Array]) -> tuple[Array, ...]:
    """What an operator that moves elements makes of ``arrays``, which stand for its operands that are moved."""
    moving, places = iter(arrays), LAYOUT[node.kind]
    operands = [
        next(moving) if i in places else graph.integers(value).reshape(value.tensor.shape)
        for i, value in enumerate(node.inputs)
        if value is not None
    ]
    results = KERNELS[node.kind](Call(graph, node), *operands)
    return tuple(map(np.asarray, results)) if isinstance(results, tuple) else (np.asarray(results),)


# Evaluation.


def inputs_of(values: Sequence[Value]) -> frozenset[str]:
    """Names of the signature's inputs that ``values`` are computed from."""
    return frozenset(v.input_name for start in values for v in ancestors(start) if v.input_name is not None)


def is_rounded(node: Node) -> bool:
    """Whether the last bits of its result depend on who computes it; of a BOOL's logarithm, −∞ or 0, they do not."""
    if node.kind != "LOG":
        return node.kind in _ROUNDED_KINDS and node.outputs[0].tensor.type in FLOAT_TYPES
    maker = node.operand(0).producer
    return maker is None or maker.kind != "CAST" or maker.operand(0).tensor.type is not TensorType.BOOL


def computes_with_rounded(graph: FlatGraph, values: Iterable[Value]) -> bool:
    """Whether, on the way to ``values``, something is computed of a result that is rounded as :func:`is_rounded` says,
    and it is not only moved or converted."""
    rounded = set[int]()
    for node in _list_producers(graph, (source for value in values for source in ancestors(value))):
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
    """What ``wanted`` are, for every sample.

    Args:
        inputs: name of a signature's input → ``[samples, *shape]``, of the type of
            :data:`~mtp_extract.graph.call.NUMPY_TYPES`.
        overrides: ``id`` of a value → what it is, ``[1, *shape]``, instead of what computes it.
        last_bits: 1 or −1 move results by a last bit, as other hardware may, where :func:`is_rounded` says so: each by
            chance up or down, and the other way round.

    Returns:
        per wanted value ``[samples, *shape]``, or ``[1, *shape]`` where no sample decides it. Floats are float32.

    Raises:
        UnsupportedError: an operator is not known, or computes with numbers of few bits; an integer wraps around; a
            result is larger than any drafter's; all that was computed of this graph is more than of any drafter's.
        RoleError: a value is read and nothing computes it.
        FormatError: operands do not fit the operator.
    """
    reached = {id(value): value for start in wanted for value in ancestors(start, frozenset(overrides))}
    nodes = _list_producers(graph, (value for key, value in reached.items() if key not in overrides))
    samples = max(map(len, inputs.values()), default=1)
    step = max(
        1, _ELEMENTS_AT_ONCE // max([1, *(value.tensor.elements for value in reached.values() if value.depends)])
    )
    _charge_budget(graph, wanted[0], reached.values(), samples, step)

    shared = {key: np.moveaxis(array, 0, -1) for key, array in overrides.items()}
    parts = [
        _SampleBatch(graph, fed, dict(shared), last_bits).compute(nodes, wanted)
        for fed in _split_samples(inputs, samples, step)
    ]
    several = {name for name, array in inputs.items() if len(array) > 1}
    return [
        _join_samples(pieces if several & inputs_of([value]) else pieces[:1])
        for value, pieces in zip(wanted, zip(*parts, strict=True), strict=True)
    ]


def _split_samples(inputs: Mapping[str, Array], samples: int, step: int) -> Iterator[dict[str, Array]]:
    """``inputs`` of ``step`` samples at a time, which are the last axis from here on."""
    by_sample = {name: np.moveaxis(array, 0, -1) for name, array in inputs.items()}
    for at in range(0, samples, step):
        yield {name: a[..., at : at + step] if a.shape[-1] > 1 else a for name, a in by_sample.items()}


def _join_samples(pieces: Sequence[Array]) -> Array:
    """The samples of ``pieces``, as the first axis again."""
    return np.moveaxis(np.concatenate(pieces, -1) if len(pieces) > 1 else pieces[0], -1, 0)


def _list_producers(graph: FlatGraph, values: Iterable[Value]) -> list[Node]:
    """The operators that compute ``values``, in the order of execution."""
    # Of these alone, not of the whole graph: a graph of many layers is evaluated as many times.
    producers = {value.producer for value in values if value.producer is not None}
    return sorted(producers, key=graph.execution_order.__getitem__)


def _charge_budget(graph: FlatGraph, wanted: Value, reached: Collection[Value], samples: int, step: int) -> None:
    """Count what is computed of ``reached`` against the budget of the graph; ``step`` samples side by side."""
    # What no sample decides is computed once a step.
    steps = -(-samples // step)
    numbers = (value.tensor.elements * (samples if value.depends else steps) for value in reached)
    graph.computed.elements -= sum(numbers) + len(reached) * steps * _COST_PER_VALUE
    if graph.computed.elements < 0:
        raise UnsupportedError(
            f"{wanted.label}: more numbers are computed of positions and constants than in any drafter's graph, so it "
            "cannot be checked. Export the file again."
        )


class _SampleBatch:
    """Some samples, side by side, and what values are there, as far as they are computed and still needed."""

    def __init__(self, graph: FlatGraph, inputs: Mapping[str, Array], arrays: dict[int, Array], last_bits: int) -> None:
        self.graph = graph
        self.inputs = inputs
        self.arrays = arrays
        self.last_bits = last_bits

    def compute(self, nodes: Sequence[Node], wanted: Sequence[Value]) -> list[Array]:
        """What ``wanted`` are; a value without further readers is forgotten."""
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
            raise UnsupportedError(f"The input {escape(value.input_name)!r} is none that this release can fill.")
        return self.inputs[value.input_name]

    def _compute(self, node: Node) -> None:
        call = Call(self.graph, node)
        if node.kind not in KERNELS:
            raise call.refuse("is no operator that this release can evaluate")
        if node.op.activation:
            raise call.refuse(f"has the fused activation {node.op.activation}")
        _check_few_bits(call)
        operands = [self._read(node.operand(position)) for position in range(len(node.inputs))]
        with computing(node.op.label):
            results = _run_kernel(call, operands)
        if self.last_bits and is_rounded(node):
            results = tuple(
                _move_last_bits(result, self.last_bits, self.graph.execution_order[node]) for result in results
            )
        self._store(call, results)

    def _store(self, call: Call, results: Sequence[Array]) -> None:
        """Know the results of an operator, which have the types and shapes that the file says."""
        outputs = call.node.outputs
        if len(results) != len(outputs):
            raise FormatError(f"{call.node.op.label} has {len(outputs)} results and should have {len(results)}.")
        for value, array in zip(outputs, results, strict=True):
            if array.dtype != NUMPY_TYPES.get(value.tensor.type, np.void):
                raise call.refuse(f"makes {array.dtype.name} where {value.label} should be")
            if array.shape[:-1] != tuple(value.tensor.shape):
                raise FormatError(f"{value.label} is computed as {list(array.shape[:-1])}: the graph is damaged.")
            # What MAXIMUM and MINIMUM make of NaN depends on the hardware.
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise call.refuse("makes what is no number")
            self.arrays[id(value)] = array


def _move_last_bits(results: Array, direction: int, seed: int) -> Array:
    """Floats as other hardware may round them: the next one above or below each, by ``direction`` the one or other."""
    rises = np.random.default_rng(seed).integers(0, 2, results.shape, np.uint8).astype(bool)
    other: Array = np.nextafter(
        results, np.where(rises, np.float32(direction * np.inf), np.float32(-direction * np.inf))
    )
    # What overflows does so by more than a last bit, and is infinite everywhere.
    return np.where(np.isinf(results), results, other)


def _check_few_bits(call: Call) -> None:
    """Check that numbers of few bits become float32 before anything is computed of them. Those of half precision may
    also be made of floats, and moved.
    """
    kind = call.node.kind
    results = [value.tensor for value in call.node.outputs]
    operands = [call.input_tensor(position) for position in range(len(call.node.inputs))]
    if not any(map(has_few_bits, (*operands, *results))):
        return
    is_widened = not any(map(has_few_bits, results))
    if kind == "DEQUANTIZE":
        is_read = is_widened
    elif any(map(holds_codes, (*operands, *results))):
        is_read = False
    elif kind in LAYOUT:
        moved = (operands[place] for place in LAYOUT[kind] if place < len(operands))
        is_read = len({tensor.type for tensor in (*moved, *results)}) == 1
    else:
        is_read = kind == "CAST" and (is_widened or {tensor.type for tensor in results} <= FLOAT_TYPES)
    if not is_read:
        raise call.refuse("computes with numbers of few bits")


def _run_kernel(call: Call, operands: list[Array]) -> tuple[Array, ...]:
    """The results of an operator."""
    kind = call.node.kind
    counts = [x.shape[-1] for x in operands]
    # What is stored may be large; what is made of small constants is not.
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
    """The results of an operator that runs once a sample."""
    kernel = KERNELS[call.node.kind]
    results = [kernel(call, *(x[..., min(at, x.shape[-1] - 1)] for x in operands)) for at in range(samples)]
    arrays_by_output = zip(*results, strict=True) if isinstance(results[0], tuple) else [results]
    return tuple(np.stack(arrays, -1) for arrays in arrays_by_output)


def _move_records(call: Call, operands: list[Array], moved: tuple[int, ...]) -> tuple[Array, ...]:
    """Elements as records of what they are in all samples."""
    samples, dtype = max(x.shape[-1] for x in operands), operands[moved[0]].dtype
    if any(x.dtype != dtype for i, x in enumerate(operands) if i in moved):
        raise call.refuse("brings different types together")

    def record(x: Array) -> Array:
        contiguous = np.ascontiguousarray(np.broadcast_to(x, (*x.shape[:-1], samples)))
        return contiguous.view((np.void, samples * x.itemsize))

    moved_records = KERNELS[call.node.kind](
        call, *((record(x) if i in moved else x)[..., 0] for i, x in enumerate(operands))
    )
    results = moved_records if isinstance(moved_records, tuple) else (moved_records,)
    return tuple(np.asarray(each, order="C")[..., None].view(dtype) for each in results)


def _gather_per_sample(call: Call, table: Array, chosen: Array) -> Array:
    """What every sample takes of one table: the samples are one more axis of what is chosen, its first."""
    picked = KERNELS["GATHER"](Call(call.graph, call.node), table[..., 0], np.moveaxis(chosen, -1, 0))
    return np.moveaxis(picked, call.option(0, "i") % (table.ndim - 1), -1)


def _read_constant(graph: FlatGraph, tensor: Tensor) -> Array:
    """A constant, ``[*shape]``: floats widened, codes with scales as the real numbers that they stand for."""
    kind, quantization = NUMPY_TYPES.get(tensor.type), tensor.quantization
    if tensor.elements == 0:
        return np.empty(tensor.shape, kind or np.float32)
    if tensor.elements > LARGEST_CONSTANT or tensor.sparse:
        raise UnsupportedError(f"{tensor.label} is no constant that a drafter computes with.")
    if tensor.type in FLOAT_TYPES:
        # As they are: a masked score may be −∞, and a table that divides holds ∞.
        return widened(graph.model.locate(tensor).read(), tensor.type).reshape(tensor.shape)
    if quantization is not None and (quantization.scales.count or quantization.blockwise):
        return read_floats(graph.model, tensor)
    if kind is None:
        raise UnsupportedError(f"{tensor.label} has an element type that this release cannot evaluate.")
    stored = graph.model.locate(tensor).read()
    if kind is np.bool_ and not set(stored) <= {0, 1}:
        raise FormatError(f"{tensor.label} holds bytes that are neither true nor false: the file is damaged.")
    return np.frombuffer(stored, np.dtype(kind).newbyteorder("<")).reshape(tensor.shape)
