"""Flatten the graph of one signature into a list of plain operators, with every composite replaced by its body.

A composite (``STABLEHLO_COMPOSITE``) names an operation and carries its decomposition as another subgraph. This package
reads the decomposition, not the name: the same patterns then serve every exporter, and a composite cannot claim to be
something that it does not compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.litertlm.flatbuffer import Budget
from mtp_extract.litertlm.flexbuffer import read_numbers
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Operator, Signature, Subgraph, Tensor, TensorType, TfliteModel

_DEEPEST_COMPOSITE = 8
_LARGEST_ATTRIBUTES = 1 << 16
_EPSILON = "epsilon"
_SCALE = "scale"
_MOST_NODES = 10_000
_EDGES_PER_NODE = 10
_KEEP_NUMBERS = frozenset({"DEQUANTIZE", "RESHAPE", "TRANSPOSE"})
_MOST_SMALL_ELEMENTS = 1 << 20
_MOST_READ = 1 << 27
_COST_OF_A_READ = 1 << 10
# Evaluating positions, masks and constants of Google's 44 MB drafter (32 003 positions) takes about 4e7 numbers. These
# two limits allow 40 times as many, which is enough for caches with a million slots.
_COMPUTED_PER_BYTE = 1 << 5
_COMPUTED = 1 << 27

_INTEGERS: dict[TensorType | None, str] = {
    TensorType.INT8: "<i1",
    TensorType.UINT8: "<u1",
    TensorType.INT16: "<i2",
    TensorType.INT32: "<i4",
    TensorType.INT64: "<i8",
    TensorType.BOOL: "?",
}


class Depends(IntFlag):
    """The kinds of inputs, besides constants, that a value is computed from."""

    CONSTANT = 0
    POSITION = 1
    MASK = 2
    DATA = 4
    """Activations, or a cache."""


INPUT_POS = "input_pos"
PARAM_TENSOR = "param_tensor"
CACHE_PREFIX = "kv_cache_"
RUNTIME_BMM = "odml.runtime_bmm"
"""The composite for the product of queries or weights with a cache, in files of Google's own exporter."""
MASK = "mask"
MASK_LOCAL = "mask_local"

_OTHER_NAMES = {"positions": INPUT_POS}
_MASK_TYPES = frozenset({TensorType.BOOL, TensorType.FLOAT32, TensorType.FLOAT16})
_DEPENDS: MappingProxyType[str, Depends] = MappingProxyType(
    # The runtime fills param_tensor with numbers that it computes from the position.
    {INPUT_POS: Depends.POSITION, PARAM_TENSOR: Depends.POSITION, MASK: Depends.MASK, MASK_LOCAL: Depends.MASK}
)


@dataclass(eq=False)
class Value:
    """One value of the graph: an input, a constant, or the result of an operator."""

    tensors: list[Tensor]  # the tensors that hold it, in the innermost composite first
    # The node that computes it; None for inputs, constants, and values that nothing computes. Left out of the repr,
    # which would otherwise show everything before the value.
    producer: Node | None = field(default=None, repr=False)
    constant: bool = False  # whether its bytes are stored in the model
    input_name: str | None = None  # its name in FlatGraph.inputs; None for anything else
    consumers: list[tuple[Node, int]] = field(default_factory=list, repr=False)  # readers, with the operand's position
    depends: Depends = Depends.CONSTANT

    @property
    def tensor(self) -> Tensor:
        """The innermost tensor: where the bytes and the shape are."""
        return self.tensors[0]

    @property
    def label(self) -> str:
        """The name that messages use."""
        return self.tensor.label

    @property
    def unproduced(self) -> bool:
        """Whether it has elements but no operator, constant or input that provides them."""
        has_source = self.producer is not None or self.constant or self.input_name is not None
        return not has_source and self.tensor.elements > 0


@dataclass(eq=False)
class Node:
    """A plain operator, or a composite without a body."""

    op: Operator
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]

    @property
    def kind(self) -> str:
        """Builtin name; ``COMPOSITE:name`` for a composite without a body, ``CUSTOM:code`` for a custom op."""
        return self.op.kind if self.op.composite is None else f"COMPOSITE:{self.op.composite}"

    def get_operand(self, position: int) -> Value:
        """Return input ``position``; raise RoleError if the operator lacks it."""
        value = self.inputs[position] if position < len(self.inputs) else None
        if value is None:
            raise RoleError(f"{self.op.label} lacks its input {position}: the graph is damaged.")
        return value


@dataclass(frozen=True)
class FlatGraph:
    """The graph of one signature without composites."""

    model: TfliteModel
    signature: Signature
    nodes: tuple[Node, ...] = field(repr=False)  # in execution order
    inputs: dict[str, Value]
    outputs: dict[str, Value]
    constants: dict[tuple[int, int], Value] = field(repr=False)  # by subgraph and tensor index
    # Label of a composite → the epsilon in its attributes, which accelerators use instead of the body's.
    epsilons: dict[str, float] = field(repr=False)
    # Name of an input in the signature → its name in ``inputs`` (:func:`map_input_names`).
    input_names: Mapping[str, str] = field(repr=False)
    # How many elements of constants may still be read, by all readers of the graph together.
    budget: Budget = field(default_factory=lambda: Budget(_MOST_READ), repr=False, compare=False)
    # How many numbers may still be computed by the evaluator.
    computed: Budget = field(default_factory=lambda: Budget(_COMPUTED), repr=False, compare=False)

    @cached_property
    def execution_order(self) -> dict[Node, int]:
        """Node → its index in :attr:`nodes`."""
        return {node: place for place, node in enumerate(self.nodes)}

    def read_small_floats(self, value: Value) -> npt.NDArray[np.float32]:
        """Return a small constant as float32 ``[elements]``, dequantized if it holds codes; raise UnsupportedError if
        it is too large or its type holds no numbers.
        """
        self._charge_budget(value)
        return read_floats(self.model, value.tensor).reshape(-1)

    def read_small_integers(self, value: Value) -> npt.NDArray[Any]:
        """Return a small integer or bool constant ``[elements]`` in its own type; raise UnsupportedError otherwise."""
        self._charge_budget(value)
        dtype = _INTEGERS.get(value.tensor.type)
        if dtype is None:
            raise UnsupportedError(f"{value.label} should hold integers.")
        return np.frombuffer(self.model.locate(value.tensor).read(), dtype)

    def _charge_budget(self, value: Value) -> None:
        if value.tensor.elements > _MOST_SMALL_ELEMENTS:
            raise UnsupportedError(f"{value.label} is larger than any table of a drafter.")
        self.budget.elements -= value.tensor.elements + _COST_OF_A_READ
        if self.budget.elements < 0:
            raise UnsupportedError(f"{value.label}: the graph has more tables than any drafter's.")


class _Builder:
    def __init__(self, model: TfliteModel, most_nodes: int, passed: Collection[tuple[int, int]]) -> None:
        self.model = model
        self.most_nodes = most_nodes
        self.passed = passed
        self.nodes: list[Node] = []
        self.constants: dict[tuple[int, int], Value] = {}
        self.open_bodies: list[int] = []  # subgraphs of the composites around the current operator
        self.edges = 0
        self.epsilons: dict[str, float] = {}
        self.cache_scales: list[tuple[Operator, float, Tensor]] = []  # scale in the attributes, and the cache
        self.boundaries: list[tuple[Operator, Tensor, Tensor]] = []  # tensors inside and outside of a composite
        self.attributes: dict[tuple[int, int], Mapping[str, float]] = {}

    def build(self, index: int, arguments: dict[int, Value]) -> dict[int, Value]:
        """Add the nodes of subgraph ``index``, whose inputs are ``arguments``; return its values by tensor index."""
        graph = self.model.subgraphs[index]
        self._check_no_data(graph)
        # An input without an argument becomes a value that nothing computes.
        values = {i: Value([self.model.tensor(index, i)]) for i in graph.inputs if i >= 0} | arguments
        for op in graph.operators:
            self._check_size(op)
            inputs = tuple(None if i < 0 else self._get_value(index, i, values) for i in op.inputs)
            if (op.subgraph, op.index) in self.passed:
                self._bypass(op, inputs, values)
            elif self._can_open(op):
                self._open_composite(op, inputs, values)
            else:
                self._add_node(op, inputs, values)
        for output in graph.outputs:
            if output >= 0:
                self._get_value(index, output, values)
        return values

    def _check_no_data(self, graph: Subgraph) -> None:
        for index in (*graph.inputs, *(output for op in graph.operators for output in op.outputs)):
            if index >= 0 and self.model.has_data(tensor := graph.tensors[index]):
                raise RoleError(f"{tensor.label} is filled when the graph runs, and numbers are stored for it, too.")

    def _check_size(self, op: Operator) -> None:
        # A composite is copied wherever it is used: a small file can describe a huge graph.
        self.edges += len(op.inputs) + len(op.outputs)
        if len(self.nodes) >= self.most_nodes or self.edges > self.most_nodes * _EDGES_PER_NODE:
            raise RoleError(f"The graph has more than {self.most_nodes} operators once its composites are opened.")

    def _get_value(self, subgraph: int, index: int, values: dict[int, Value]) -> Value:
        value = values.get(index)
        if value is None:
            tensor = self.model.tensor(subgraph, index)
            # An empty constant (the shape of a scalar) has a buffer of its own without data.
            constant = self.model.has_data(tensor) or (tensor.elements == 0 and tensor.buffer > 0)
            if constant and tensor.variable:
                raise UnsupportedError(f"{tensor.label} is a variable with numbers of its own, which LiteRT refuses.")
            value = values[index] = Value([tensor], constant=constant)
            if constant:
                value = values[index] = self.constants.setdefault((subgraph, index), value)
        return value

    def _can_open(self, op: Operator) -> bool:
        if op.composite is None or not 0 < op.body < len(self.model.subgraphs):
            return False
        body = self.model.subgraphs[op.body]
        return bool(body.operators) and len(body.inputs) == len(op.inputs) and len(body.outputs) == len(op.outputs)

    def _bypass(self, op: Operator, inputs: tuple[Value | None, ...], values: dict[int, Value]) -> None:
        """Replace the result of ``op`` by its one operand that is no constant."""
        if len(op.outputs) != 1 or op.outputs[0] < 0 or op.outputs[0] in values:
            raise UnsupportedError(f"{op.label} cannot be left out: expected one result, of this operator alone.")
        tensor = self.model.tensor(op.subgraph, op.outputs[0])
        kind = tensor.type, tensor.shape
        similar = [v for v in inputs if v is not None and (v.tensor.type, v.tensor.shape) == kind]
        # Prefer activations: a mask of the same shape may be another operand.
        candidates = [v for v in similar if v.depends & Depends.DATA] or [v for v in similar if v.depends]
        if len({id(value) for value in candidates}) != 1:
            raise UnsupportedError(f"{op.label} cannot be left out: expected one operand like its result.")
        candidates[0].tensors.append(tensor)
        values[op.outputs[0]] = candidates[0]

    def _open_composite(self, op: Operator, inputs: tuple[Value | None, ...], values: dict[int, Value]) -> None:
        if op.body in self.open_bodies or len(self.open_bodies) >= _DEEPEST_COMPOSITE:
            raise RoleError(f"{op.label} contains itself, or composites are nested too deeply.")
        body = self.model.subgraphs[op.body]
        pairs = zip(body.inputs, inputs, strict=True)
        arguments = {inner: outer for inner, outer in pairs if outer is not None and inner >= 0}
        self.boundaries += [(op, body.tensors[inner], outer.tensor) for inner, outer in arguments.items()]
        self._note_attributes(op, inputs)
        self.open_bodies.append(op.body)
        inner_values = self.build(op.body, arguments)
        self.open_bodies.pop()
        for outer, inner in zip(op.outputs, body.outputs, strict=True):
            if outer < 0 or inner < 0:
                raise RoleError(f"{op.label} has an output without a tensor: the graph is damaged.")
            self._bind_output(op, self._get_value(op.body, inner, inner_values), outer, values)

    def _bind_output(self, op: Operator, value: Value, outer: int, values: dict[int, Value]) -> None:
        """Make ``value``, which the body of the composite ``op`` computed, the composite's output ``outer``."""
        tensor = self.model.tensor(op.subgraph, outer)
        self.boundaries.append((op, value.tensor, tensor))
        if outer in values:
            raise RoleError(f"{op.label} computes {values[outer].label} after it was read or set.")
        if len(value.tensors) > _DEEPEST_COMPOSITE * _DEEPEST_COMPOSITE:
            raise RoleError(f"{op.label} hands {value.label} on through more composites than any exporter writes.")
        if tensor not in value.tensors:
            value.tensors.append(tensor)
        values[outer] = value

    def check_composites(self) -> None:
        """Check that the operands, results and attributes of every composite agree with its body."""
        for op, inner, outer in self.boundaries:
            _check_same_tensor(op, inner, outer)
        for op, scale, cache in self.cache_scales:
            _check_cache_scale(op, scale, cache)

    def _note_attributes(self, op: Operator, inputs: tuple[Value | None, ...]) -> None:
        attributes = self._read_attributes(op)
        if _EPSILON in attributes:
            self.epsilons[op.label] = attributes[_EPSILON]
        if op.composite == RUNTIME_BMM and len(inputs) > 1 and inputs[1] is not None and _SCALE in attributes:
            self.cache_scales.append((op, attributes[_SCALE], find_source(inputs[1], _KEEP_NUMBERS).tensor))

    def _read_attributes(self, op: Operator) -> Mapping[str, float]:
        """Return the numbers in a composite's attributes that are used here; shared attributes are read once."""
        stored = op.attributes
        if stored is None or stored.count == 0:
            return {}
        place = (stored.start, stored.count)
        if place not in self.attributes:
            if stored.count > _LARGEST_ATTRIBUTES:
                raise UnsupportedError(f"{op.label} has {stored.count} bytes of attributes, more than any exporter's.")
            try:
                self.attributes[place] = read_numbers(stored.bytes(), (_EPSILON, _SCALE))
            except FormatError as error:
                raise UnsupportedError(
                    f"{op.label} has attributes that cannot be read: {error}. The file is damaged: fetch it again."
                ) from error
        return self.attributes[place]

    def _add_node(self, op: Operator, inputs: tuple[Value | None, ...], values: dict[int, Value]) -> None:
        node = Node(op, inputs, ())
        depends = Depends.CONSTANT
        for position, source in enumerate(inputs):
            if source is not None:
                depends |= source.depends
                source.consumers.append((node, position))
        outputs = []
        for index in op.outputs:
            if index < 0:
                continue
            # Execution order makes the graph acyclic: nothing is read before it is computed.
            if index in values:
                raise RoleError(f"{op.label} computes {values[index].label} after it was read or set.")
            values[index] = Value([self.model.tensor(op.subgraph, index)], producer=node, depends=depends)
            outputs.append(values[index])
        node.outputs = tuple(outputs)
        self.nodes.append(node)


def map_input_names(inputs: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name of an input in the signature → its name in :attr:`FlatGraph.inputs`.

    LiteRT-LM accepts several names for the same input (``mask`` or ``attn_mask``; ``local_mask``, ``attn_mask_local``,
    ``local_attn_mask`` or ``mask_local``). An input is a mask if it has a mask's type and "mask" in its name, and the
    local mask if the name has "local", too. Any other input, and a second one of a kind, keeps its name.
    """
    names: dict[str, str] = {name: name for name in inputs}
    for name, tensor in inputs.items():
        meaning = _OTHER_NAMES.get(name, name)
        if "mask" in name and tensor.type in _MASK_TYPES and not name.startswith(CACHE_PREFIX):
            meaning = MASK_LOCAL if "local" in name else MASK
        if meaning not in names.values():
            names[name] = meaning
    return names


def flatten(
    model: TfliteModel, signature: Signature, most_nodes: int = _MOST_NODES, passed: Collection[tuple[int, int]] = ()
) -> FlatGraph:
    """Return the graph of ``signature`` with its composites replaced by their bodies.

    Args:
        most_nodes: limit on the operators; the default is more than any drafter has.
        passed: operators ``(subgraph, index)`` to leave out: each result is replaced by the operand like it.

    Raises:
        RoleError: operators are connected in a way that no exporter produces (cycles, a value written twice), or the
            signature does not name an input of the graph, so that no runtime fills it.
    """
    graph = model.subgraphs[signature.subgraph]
    names = map_input_names({name: graph.tensors[index] for name, index in signature.inputs.items()})
    arguments = _bind_inputs(graph, signature, names)
    builder = _Builder(model, most_nodes, passed)
    values = builder.build(signature.subgraph, arguments)
    builder.check_composites()
    if unnamed := next((value for value in arguments.values() if value.input_name is None and value.consumers), None):
        raise RoleError(
            f"{unnamed.label} is an input of the graph that the signature {escape(signature.key)!r} does not name: no "
            "runtime fills it."
        )
    outputs = {name: builder._get_value(signature.subgraph, index, values) for name, index in signature.outputs.items()}
    inputs = {value.input_name: value for value in arguments.values() if value.input_name is not None}
    size = model.region.size + (model.weights.size if model.weights is not None else 0)
    computed = Budget(_COMPUTED + _COMPUTED_PER_BYTE * size)
    nodes = tuple(builder.nodes)
    return FlatGraph(
        model, signature, nodes, inputs, outputs, builder.constants, builder.epsilons, names, computed=computed
    )


def _bind_inputs(graph: Subgraph, signature: Signature, names: Mapping[str, str]) -> dict[int, Value]:
    """Return the inputs of ``graph`` by tensor index; only those of ``signature`` have a name, taken from ``names``."""
    by_tensor = {tensor: names[name] for name, tensor in signature.inputs.items()}
    if len(by_tensor) < len(signature.inputs) or not set(by_tensor) <= set(graph.inputs):
        raise RoleError(
            f"The signature {escape(signature.key)!r} names one tensor twice, or one that is no input of its graph: a "
            "runtime cannot fill it so."
        )
    arguments = {}
    for index in graph.inputs:
        if index >= 0:
            name = by_tensor.get(index)
            depends = _DEPENDS.get(name or "", Depends.DATA)
            arguments[index] = Value([graph.tensors[index]], input_name=name, depends=depends)
    return arguments


def _check_same_tensor(op: Operator, inner: Tensor, outer: Tensor) -> None:
    same = (inner.type_id, tuple(inner.shape)) == (outer.type_id, tuple(outer.shape))
    if same and inner.type not in FLOAT_TYPES:
        quantizations = [tensor.quantization for tensor in (inner, outer) if tensor.quantization is not None]
        if len(quantizations) == 2:
            same = quantizations[0].has_same_scales(quantizations[1])
        else:
            same = all(q.scales.count == q.zero_points.count == 0 for q in quantizations)
    if not same:
        raise RoleError(f"{op.label} takes {inner.label} and {outer.label} for one, but type, shape or scale differ.")


def _check_cache_scale(op: Operator, stated: float, cache: Tensor) -> None:
    # Accelerators compute with the attribute of a product with a cache, CPUs with the scale of the cache itself.
    scales = [] if cache.quantization is None else cache.quantization.scale.tolist()
    # For a float cache, 0 and 1 mean that there is no scale.
    if scales[:1] == [np.float32(stated)] or (cache.type in FLOAT_TYPES and stated in (0.0, 1.0)):
        return
    scale_of_cache = f"{scales[0]:g}" if scales else "none"
    raise UnsupportedError(
        f"{op.label}: its attribute says that the scale of {cache.label} is {stated:g}, and the tensor's own "
        f"is {scale_of_cache}. "
        "Which of the two a runtime uses depends on its hardware, so there is no one function to extract. Export the "
        "file again."
    )


def walk_ancestors(start: Value, stops: frozenset[int] = frozenset()) -> Iterator[Value]:
    """Yield ``start`` and all values before it, once each; stop at values whose ``id`` is in ``stops``."""
    visited, queue = {id(start)}, [start]
    while queue:
        value = queue.pop()
        yield value
        for source in value.producer.inputs if value.producer and id(value) not in stops else ():
            if source is not None and id(source) not in visited:
                visited.add(id(source))
                queue.append(source)


def find_source(value: Value, kinds: Collection[str]) -> Value:
    """Return the value that operators of ``kinds`` turned into ``value``: the first operand of the first of them."""
    while value.producer is not None and value.producer.kind in kinds:
        value = value.producer.get_operand(0)
    return value
