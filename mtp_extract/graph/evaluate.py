"""Values that no activation decides, computed operator by operator in NumPy: constants, tables of positions, masks.

Thousands of positions are computed side by side. Inside of this module the samples of a value are its last axis,
``[*shape, samples]``, or ``[*shape, 1]`` where they share it: so shapes broadcast from the right as they do in LiteRT,
and an operator that only moves elements moves whole records of samples. Only what moves differently from sample to
sample, and a few rare operators, run once a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.graph.call import DTYPES, LARGEST, Array, Call, computing, has_few_bits, holds_codes
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.graph.kernels import ELEMENTWISE, KERNELS, LAYOUT
from mtp_extract.litertlm.storage import FLOAT_TYPES, read_floats, widened
from mtp_extract.litertlm.tflite import Tensor

_AT_ONCE = 1 << 20  # elements of a value, of all samples that are computed side by side
_IN_ALL = 1 << 35  # elements that are computed: minutes


def inputs_of(values: Sequence[Value]) -> frozenset[str]:
    """Names of the signature's inputs that ``values`` are computed from."""
    return frozenset(v.input_name for start in values for v in ancestors(start) if v.input_name is not None)


def evaluate(graph: FlatGraph, inputs: Mapping[str, Array], wanted: Sequence[Value]) -> list[Array]:
    """What ``wanted`` are, for every sample.

    Args:
        inputs: name of a signature's input → ``[samples, *shape]``, of the type of
            :data:`~mtp_extract.graph.call.DTYPES`.

    Returns:
        per wanted value ``[samples, *shape]``, or ``[1, *shape]`` where no sample decides it. Floats are float32.

    Raises:
        UnsupportedError: an operator is not known, or computes with numbers of few bits; an integer wraps around; a
            result has more than 2²⁵ elements.
        RoleError: a value is read and nothing computes it.
        FormatError: operands do not fit the operator.
    """
    reached = {id(value): value for start in wanted for value in ancestors(start)}
    nodes = [node for node in graph.nodes if any(id(value) in reached for value in node.outputs)]
    samples = max(map(len, inputs.values()), default=1)
    if sum(value.tensor.elements * (samples if value.depends else 1) for value in reached.values()) > _IN_ALL:
        raise UnsupportedError(f"{wanted[0].label} is computed of more numbers than any drafter has.")
    step = max(1, _AT_ONCE // max([1, *(value.tensor.elements for value in reached.values() if value.depends)]))
    several = {name for name, array in inputs.items() if len(array) > 1}
    parts = []
    for at in range(0, samples, step):
        fed = {name: np.moveaxis(a[at : at + step] if name in several else a, 0, -1) for name, a in inputs.items()}
        parts.append(_Block(graph, fed).run(nodes, wanted))
    return [
        np.moveaxis(np.concatenate(own, -1) if several & inputs_of([value]) else own[0], -1, 0)
        for value, own in zip(wanted, zip(*parts, strict=True), strict=True)
    ]


class _Block:
    """Some samples, side by side, and what is known of them, by the ``id`` of a value."""

    def __init__(self, graph: FlatGraph, inputs: Mapping[str, Array]) -> None:
        self.graph, self.inputs = graph, inputs
        self.known: dict[int, Array] = {}

    def run(self, nodes: Sequence[Node], wanted: Sequence[Value]) -> list[Array]:
        """What ``wanted`` are; a value without further readers is forgotten."""
        last = {id(value): node for node in nodes for value in node.inputs} | {id(value): None for value in wanted}
        with np.errstate(all="ignore"):
            for node in nodes:
                self.step(node)
                for value in (*node.inputs, *node.outputs):
                    if last.get(id(value), node) is node:
                        self.known.pop(id(value), None)
            return [self.read(value) for value in wanted]

    def read(self, value: Value) -> Array:
        """``value``, computed before or given."""
        if id(value) in self.known:
            return self.known[id(value)]
        if value.unproduced:
            raise RoleError(f"{value.label} is read, and no op computes it: an op was lost after the graph was made.")
        if value.input_name is None:
            return self.known.setdefault(id(value), _constant(self.graph, value.tensor)[..., None])
        if value.input_name not in self.inputs:
            raise UnsupportedError(f"The input {escape(value.input_name)!r} is none that this release can fill.")
        return self.inputs[value.input_name]

    def step(self, node: Node) -> None:
        """Compute ``node``."""
        call = Call(self.graph, node)
        if node.kind not in KERNELS:
            raise call.refuse("is no operator that this release can evaluate")
        _check_bits(call)
        operands = [self.read(node.operand(position)) for position in range(len(node.inputs))]
        with computing(node.op.label):
            results = _computed(call, operands)
        if len(results) != len(node.outputs):
            raise FormatError(f"{node.op.label} has {len(node.outputs)} results and should have {len(results)}.")
        for value, made in zip(node.outputs, results, strict=True):
            self.known[id(value)] = self.result(call, value.tensor, made)

    def result(self, call: Call, tensor: Tensor, made: Array) -> Array:
        """``made`` as ``tensor`` holds it."""
        if call.node.op.activation:
            raise call.refuse(f"has the fused activation {call.node.op.activation}")
        if made.dtype != DTYPES.get(tensor.type, np.void):
            raise call.refuse(f"makes {made.dtype.name} where {tensor.label} should be")
        if made.shape[:-1] != tuple(tensor.shape):
            raise FormatError(f"{tensor.label} is computed as {list(made.shape[:-1])}: the graph is damaged.")
        return made


def _check_bits(call: Call) -> None:
    """Of numbers of few bits only floats are made; those of half precision may be moved before."""
    kind, made = call.node.kind, [value.tensor for value in call.node.outputs]
    seen = [call.tensor(position) for position in range(len(call.node.inputs))]
    if not any(map(has_few_bits, (*seen, *made))):
        return
    on_grid = any(map(holds_codes, (*seen, *made)))
    types = {tensor.type for tensor in made} | {seen[i].type for i in LAYOUT.get(kind, ()) if i < len(seen)}
    moves = kind in LAYOUT and len(types) == 1 and not on_grid
    widens = not any(map(has_few_bits, made)) and (kind == "DEQUANTIZE" or (kind == "CAST" and not on_grid))
    if not (moves or widens):
        raise call.refuse("computes with numbers of few bits")


def _computed(call: Call, operands: list[Array]) -> tuple[Array, ...]:
    """The results of an operator."""
    kind, kernel, counts = call.node.kind, KERNELS[call.node.kind], [x.shape[-1] for x in operands]
    call = replace(call, largest=LARGEST // max(counts))
    moved = LAYOUT.get(kind, ())
    if kind in ELEMENTWISE:
        call.check_size(*np.broadcast_shapes(*(x.shape[:-1] for x in operands)))
        return (kernel(call, *operands),)
    if kind in LAYOUT and all(count == 1 for position, count in enumerate(counts) if position not in moved):
        return _moved(call, operands, moved)
    if kind == "GATHER" and counts[0] == 1:
        return (_looked_up(call, *operands),)
    made = [kernel(call, *(x[..., min(at, x.shape[-1] - 1)] for x in operands)) for at in range(max(counts))]
    return tuple(np.stack(own, -1) for own in (zip(*made, strict=True) if isinstance(made[0], tuple) else [made]))


def _moved(call: Call, operands: list[Array], moved: tuple[int, ...]) -> tuple[Array, ...]:
    """Elements as records of what they are in all samples."""
    samples, dtype = max(x.shape[-1] for x in operands), operands[moved[0]].dtype
    if any(x.dtype != dtype for i, x in enumerate(operands) if i in moved):
        raise call.refuse("brings different types together")

    def record(x: Array) -> Array:
        whole = np.ascontiguousarray(np.broadcast_to(x, (*x.shape[:-1], samples)))
        return whole.view((np.void, samples * x.itemsize))

    made = KERNELS[call.node.kind](call, *((record(x) if i in moved else x)[..., 0] for i, x in enumerate(operands)))
    results = made if isinstance(made, tuple) else (made,)
    return tuple(np.asarray(each, order="C")[..., None].view(dtype) for each in results)


def _looked_up(call: Call, table: Array, chosen: Array) -> Array:
    """What every sample takes of one table: the samples are one more axis of what is chosen, its first."""
    made = KERNELS["GATHER"](Call(call.graph, call.node), table[..., 0], np.moveaxis(chosen, -1, 0))
    return np.moveaxis(made, call.option(0, "i") % (table.ndim - 1), -1)


def _constant(graph: FlatGraph, tensor: Tensor) -> Array:
    """A constant, ``[*shape]``: floats widened, codes with scales as the real numbers that they stand for."""
    kind, quantization = DTYPES.get(tensor.type), tensor.quantization
    if tensor.elements == 0:
        return np.empty(tensor.shape, kind or np.float32)
    if tensor.elements > LARGEST or tensor.sparse:
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
