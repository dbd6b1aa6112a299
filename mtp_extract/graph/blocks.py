"""The blocks that drafter and base are built of, read backwards from their results; and the ledger of constants.

A :class:`Blocks` takes the graph apart: a linear layer, an RMSNorm, a gated product, a residual, one layer. Each gives
its constants a role or sets them aside with a reason; one left over is an error. Names play no part in this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.graph.attention import EXPONENTIALS
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, ancestors, walk_back
from mtp_extract.graph.identities import mark_identities, taken_from
from mtp_extract.graph.kernels import refuse_wide_filter
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.patterns import (
    MATRICES,
    PASSES,
    SHAPE_OPERANDS,
    WEIGHT_PASSES,
    Aside,
    RmsNorm,
    constant_under,
    match_rms_norm,
    split_scalar,
    strip,
)
from mtp_extract.graph.probe import measure_gate
from mtp_extract.litertlm.quantized import stored_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

_LARGEST_ROTATION = 1 << 20
_LARGEST_WIDTH = 1 << 24
_WEIGHTS_FORMAT_SLOT = 1
_ADJOINT_Y_SLOT = 1
_NO_FACTOR = 1e-6
_MOST_SHOWN = 3

CHECKED = "a number between the roles, whose result is checked by execution"


@dataclass(frozen=True)
class Activation:
    """Static quantization of an activation: ``real = scale · (code − zero_point)``."""

    type: str
    scale: float
    zero_point: int


@dataclass(frozen=True)
class FoundRole:
    """A constant and the role it plays.

    Attributes:
        role: "pre_projection", "layers.0.q_proj", … as in ``mappings/roles.json``.
        tensor: the constant; None for a norm's weight of ones that the converter folded away.
        shape: ``[out, in]`` of a matrix, ``[size]`` of a vector.
        factor: stored = factor × (weight − offset); 1 unless something is folded into the weight.
        why: the evidence, in words.
        known_as: names of the tensors that carry the result, for the cross-check of names.
        input, output: static quantization of the op's activations; None where they are float.
        result: the value of the graph that carries the role's result.
        transposed: whether the constant is stored ``[in, out]``.
        offset: what the graph adds to what is stored; 0 but for a norm whose weight is stored less 1.
        first: the row of the constant where the role's rows begin; None where it has all of them.
    """

    role: str
    tensor: Tensor | None
    shape: tuple[int, ...]
    factor: float
    why: str
    known_as: tuple[str, ...]
    input: Activation | None = None
    output: Activation | None = None
    result: Value | None = field(default=None, repr=False, compare=False)
    transposed: bool = False
    offset: float = 0.0
    first: int | None = None


@dataclass(frozen=True)
class SetAside:
    """A constant that is not a weight, the op that reads it, and the reason."""

    tensor: Tensor
    op: str
    reason: str


class _ReadAttention(Protocol):
    """What :meth:`Blocks.layer` asks of an attention."""

    @property
    def q_norm(self) -> RmsNorm:
        """The norm of the query."""

    @property
    def query(self) -> Value:
        """Its result."""

    @property
    def aside(self) -> tuple[Aside, ...]:
        """Constants that are no weights."""


AnyAttention = TypeVar("AnyAttention", bound=_ReadAttention)


class Blocks:
    """A graph that is being taken apart, and what was found in it so far."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.roles: list[FoundRole] = []
        self.aside: dict[int, Aside] = {}
        self.used: set[int] = set()
        self.unread: list[SetAside] = []
        self.eps: set[float] = set()
        self.hidden_activations: set[str] = set()
        self.count = 0
        self.set_aside(tuple(mark_identities(graph)))

    def layer_scalar(self, name: str, out: Value) -> Value:
        """What a layer's result is before its factor, if it has one."""
        out = strip(out)
        scaled = split_scalar(self.graph, out.producer) if out.producer else None
        if scaled is None:
            return out
        inner, constant, factor = scaled
        if out.producer is not None and out.producer.kind == "DIV":
            raise UnsupportedError(f"{name}.layer_scalar: {out.producer.op.label} divides by its scalar.")
        self.found(f"{name}.layer_scalar", constant, f"the factor {factor:g} on the layer's output", out)
        return strip(inner)

    def layer(
        self, name: str, out: Value, read: Callable[[FlatGraph, Value, str], AnyAttention]
    ) -> tuple[AnyAttention, Value, Value]:
        """Attention and feed-forward of a layer whose residual sum is ``out``.

        Returns:
            the attention, as ``read`` sees it; the residual stream below; the normed stream the q projection reads.
        """
        add = self.residual(name, "post_ffw_norm", out)
        ffw_norm, middle = self.norm_operand(f"{name}.post_ffw_norm", add, "on the second residual branch")
        down_in = self.linear(f"{name}.down_proj", ffw_norm.x, f"which feeds {name}.post_ffw_norm")
        normed = self._gated_pair(name, down_in)
        pre_ffw = self.norm(f"{name}.pre_ffw_norm", normed, "which feeds gate and up")
        self.same(f"{name}.pre_ffw_norm", pre_ffw.x, middle)
        add = self.residual(name, "post_attention_norm", middle)
        attention_norm, stream = self.norm_operand(f"{name}.post_attention_norm", add, "on the first residual branch")
        o_in = self.linear(f"{name}.o_proj", attention_norm.x, f"which feeds {name}.post_attention_norm")
        attention = read(self.graph, strip(o_in), name)
        self.set_aside(attention.aside)
        self.take_norm(f"{name}.q_norm", attention.q_norm, "between the q projection and RoPE", attention.query)
        q_in = self.linear(f"{name}.q_proj", attention.q_norm.x, f"which feeds {name}.q_norm")
        pre_attention = self.norm(f"{name}.pre_attention_norm", q_in, "which feeds the q projection")
        self.same(f"{name}.pre_attention_norm", pre_attention.x, stream)
        return attention, strip(stream), strip(q_in)

    def gated(
        self, gate: str, up: str, result: Value, reader: str, ends: Callable[[Value, Node], bool]
    ) -> tuple[Value, Value]:
        """activation(gate) · up, which ``reader`` reads; the walk back ends at two values.

        Returns:
            the values of gate and up.
        """
        branches: dict[int, Value] = {}

        def at_branch(value: Value, node: Node) -> bool:
            if ends(value, node):
                branches[id(value)] = value
                return True
            return False

        edges, leaves = walk_back([result], at_branch)
        others = [value for value in leaves if not value.constant]
        if len(branches) != 2 or others:
            found = ", ".join(what_is(value) for value in (*branches.values(), *others)) or "nothing"
            raise RoleError(
                f"{gate}, {up}: expected a product of GELU(gate) and up before {reader}, computed from two matrices; "
                f"found {found}."
            )
        pair = list(branches.values())
        position, activation = measure_gate(self.graph, result, pair, f"{gate}, {up}", reader)
        self.hidden_activations.add(activation)
        self.set_aside(tuple(Aside(v, _plain_reason(node, at, v)) for node, at, v in edges if v.constant))
        return pair[position], pair[1 - position]

    def _gated_pair(self, name: str, down_in: Value) -> Value:
        """Gate and up of a feed-forward block; returns what both read."""
        gate, up = self.gated(
            f"{name}.gate_proj",
            f"{name}.up_proj",
            down_in,
            f"{name}.down_proj",
            lambda value, node: is_matrix(node) or self._rows(value) is not None,
        )
        gate_in = self.linear(f"{name}.gate_proj", gate, "whose output goes through GELU")
        up_in = self.linear(f"{name}.up_proj", up, "whose output is multiplied with GELU(gate)")
        if strip(gate_in) is not strip(up_in):
            raise RoleError(f"{name}.gate_proj and {name}.up_proj read different values; they must read the same.")
        return gate_in

    def residual(self, name: str, norm: str, value: Value) -> Node:
        value = strip(value)
        node = value.producer
        if node is None or node.kind != "ADD" or not node.binary or node.op.activation:
            raise RoleError(
                f"{name}.{norm}: expected the residual addition after it{_or_scalar(name, norm)}, found "
                f"{what_is(value)}."
            )
        return node

    def norm_operand(self, role: str, add: Node, why: str) -> tuple[RmsNorm, Value]:
        """The operand of a residual addition that is an RMSNorm, and the other one."""
        operands = [add.operand(i) for i in (0, 1)]
        matches = [match_rms_norm(self.graph, v) for v in operands]
        found = [(m, i) for i, m in enumerate(matches) if m is not None]
        if len(found) != 1:
            what = " and ".join(what_is(strip(v)) for v in operands)
            raise RoleError(f"{role}: expected an RMSNorm on one side of {add.op.label}, found {what}.")
        norm, position = found[0]
        self.take_norm(role, norm, why, operands[position])
        return norm, operands[1 - position]

    def norm(self, role: str, value: Value, why: str) -> RmsNorm:
        norm = match_rms_norm(self.graph, value)
        if norm is None:
            raise RoleError(f"{role}: expected an RMSNorm with a weight, {why}; found {what_is(strip(value))}.")
        self.take_norm(role, norm, why, value)
        return norm

    def take_norm(self, role: str, norm: RmsNorm, why: str, result: Value) -> None:
        self.eps.add(float(f"{norm.eps:.6g}"))
        self.set_aside(norm.aside)
        if norm.weight is None:
            why = f"the RMSNorm {why} multiplies by no weight: its weight was 1 and was folded away"
            names = tuple(_names(result))
            self.roles.append(FoundRole(role, None, (norm.size,), 1.0, why, names, result=result))
        else:
            stored = f", stored less {norm.offset:g}" if norm.offset else ""
            why = f"weight of the RMSNorm {why}{stored}"
            self.found(role, norm.weight, why, result, shape=(norm.size,), offset=norm.offset)

    def linear(self, role: str, value: Value, why: str, factor: float = 1.0) -> Value:
        """The matrix that ``value`` is a product with; takes it as the weight of ``role`` and returns its input."""
        result = root = strip(value)
        part = self._rows(root)
        if part is not None:
            root = part[0]
        node = root.producer
        if node is None or node.kind not in MATRICES:
            raise RoleError(f"{role}: expected a FULLY_CONNECTED op {why}, found {what_is(root)}.")
        if node.kind == "CONV_2D":
            refuse_wide_filter(node)
        if node.op.activation:
            raise UnsupportedError(
                f"{role}: {node.op.label} has a fused activation, which no drafter is known to have."
            )
        if node.kind == "FULLY_CONNECTED" and node.op.options and node.op.options.integer(_WEIGHTS_FORMAT_SLOT, "b"):
            raise UnsupportedError(
                f"{role}: {node.op.label} stores its weight shuffled, which this release cannot read."
            )
        if len(node.inputs) < 2 or None in node.inputs[:2]:
            raise RoleError(f"{role}: {node.op.label} lacks its input or its weight: the graph is damaged.")
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            self._bias(role, node, node.inputs[2])
        weight, transposed, scale = self._matrix(node)
        if not weight.constant:
            raise RoleError(f"{role}: the weight of {node.op.label} is not a constant but {what_is(weight)}.")
        shape = tuple(size for size in weight.tensor.shape if size != 1 or len(weight.tensor.shape) == 2)
        if len(shape) != 2 or not all(0 < size <= _LARGEST_WIDTH for size in shape):
            raise RoleError(f"{role}: expected a weight [out, in], found {weight.label}.")
        factor /= scale
        shape = shape[::-1] if transposed else shape
        first, rows = (part[1], part[2]) if part is not None else (0, shape[0])
        whole = (first, rows) == (0, shape[0])
        if transposed and not whole:
            raise UnsupportedError(
                f"{role}: {weight.label} holds it beside another role and is stored [in, out], which this release "
                "cannot take apart."
            )
        self.found(
            role,
            weight,
            f"{'' if whole else f'rows {first} to {first + rows} of the '}weight of {node.op.label}, {why}",
            result,
            factor=1.0 if abs(factor - 1.0) < _NO_FACTOR else factor,
            node=node,
            shape=(rows, shape[1]),
            transposed=transposed,
            first=None if whole else first,
        )
        return node.operand(0)

    def _rows(self, value: Value) -> tuple[Value, int, int] | None:
        """For neighbouring columns of a product with a matrix: the product, the first of them, and how many."""
        if value.producer is None or value.producer.kind not in LAYOUT:
            return None
        taken = taken_from(self.graph, value)
        if taken is None or taken[0].producer is None or not is_matrix(taken[0].producer):
            return None
        product, elements = taken
        width = product.tensor.shape[-1]
        count, odd = divmod(elements.size * width, product.tensor.elements)
        if odd or not count:
            return None
        columns = elements.reshape(-1, count)
        expected = np.arange(len(columns))[:, None] * width + columns[0, 0] + np.arange(count)
        return (product, int(columns[0, 0]), count) if np.array_equal(columns, expected) else None

    def _matrix(self, node: Node) -> tuple[Value, bool, float]:
        """The weight of ``node``, whether it is stored ``[in, out]``, and the number it is multiplied by before use."""
        transposed = node.kind == "BATCH_MATMUL" and not _option(node, _ADJOINT_Y_SLOT)
        value, scale = strip(node.operand(1), WEIGHT_PASSES), 1.0
        while (maker := value.producer) is not None:
            scaled = split_scalar(self.graph, maker)
            if scaled is not None:
                self.set_aside((Aside(scaled[1], "a factor on a weight"),))
                value, scale = strip(scaled[0], WEIGHT_PASSES), scale * scaled[2]
            elif maker.kind == "TRANSPOSE" and len(value.tensor.shape) == 2 and maker.binary:
                axes = constant_under(maker.operand(1))
                if axes is None or self.graph.integers(axes).tolist() != [1, 0]:
                    break
                value, transposed = strip(maker.operand(0), WEIGHT_PASSES), not transposed
            else:
                break
        return value, transposed, scale

    def _bias(self, role: str, node: Node, bias: Value) -> None:
        constant = strip(bias, WEIGHT_PASSES)
        if not constant.constant:
            raise UnsupportedError(f"{role}: the bias of {node.op.label} is computed.")
        if constant.tensor.elements > _LARGEST_WIDTH or self._bytes_of(constant).any():
            raise UnsupportedError(
                f"{role}: {node.op.label} has a bias, which the drafter's checkpoint has no place for."
            )
        self.set_aside((Aside(constant, "a bias of zeros"),))

    def _bytes_of(self, constant: Value) -> npt.NDArray[np.generic]:
        """Numbers or bytes that are all 0 where those of ``constant`` are; a float's 0 may have a sign."""
        stored = self.graph.model.locate(constant.tensor).read()
        floats = constant.tensor.type in FLOAT_TYPES
        return stored_floats(stored, constant.tensor) if floats else np.frombuffer(stored, np.uint8)

    def found(
        self,
        role: str,
        constant: Value,
        why: str,
        result: Value,
        factor: float = 1.0,
        node: Node | None = None,
        shape: tuple[int, ...] = (1,),
        transposed: bool = False,
        offset: float = 0.0,
        first: int | None = None,
    ) -> None:
        if constant.tensor.type not in NUMBER_TYPES:
            raise UnsupportedError(f"{role}: weights of type {constant.tensor.type_name} are not supported.")
        self.used.add(id(constant))
        self.roles.append(
            FoundRole(
                role,
                constant.tensor,
                shape,
                factor,
                why,
                () if node else tuple(_names(result)),
                _activation(node.operand(0)) if node else None,
                _activation(node.outputs[0]) if node and node.outputs else None,
                result,
                transposed,
                offset,
                first,
            )
        )

    def same(self, role: str, found: Value, expected: Value) -> None:
        if strip(found) is not strip(expected):
            raise RoleError(
                f"{role}: expected to read the residual stream {strip(expected).label}, it reads {strip(found).label}."
            )

    def set_aside(self, aside: tuple[Aside, ...]) -> None:
        for entry in aside:
            self.aside.setdefault(id(entry.value), entry)

    def account(self, between: str = CHECKED) -> None:
        """Every constant is a role or set aside with a reason; raise for the first that is neither.

        ``between`` is the reason for numbers that no block claimed.
        """
        for value in self.graph.constants.values():
            if id(value) in self.used or id(value) in self.aside:
                continue
            reasons = {_plain_reason(node, position, value, between) for node, position in value.consumers}
            reason = " and ".join(sorted(reasons)) or "an output of the signature"
            self.aside[id(value)] = Aside(value, reason)
        self._account_readers()
        self._account_unread()
        self._account_uncomputed()

    def _account_readers(self) -> None:
        """A weight is read once for every role it plays: another reader would make the graph another function."""
        roles: dict[tuple[int, int], list[FoundRole]] = {}
        for role in self.roles:
            if role.tensor is not None and role.tensor.elements > 1:
                roles.setdefault((role.tensor.subgraph, role.tensor.index), []).append(role)
        for key, found in roles.items():
            constant, names = self.graph.constants[key], " and ".join(role.role for role in found)
            readers = list(_readers(constant))
            # A product with the rows of several roles is one reader of all of them.
            parts = sorted({(role.first, role.shape[0]) for role in found if role.first is not None})
            if len(readers) * max(len(parts), 1) != len(found):
                ops = ", ".join(reader.op.label for reader in readers[:_MOST_SHOWN])
                raise RoleError(
                    f"{names}: {constant.label} is read {len(readers)} times, by {ops}. "
                    "No checkpoint is written, because it would not be the same function."
                )
            rows = constant.tensor.elements // found[0].shape[-1]
            ends = [0, *(first + count for first, count in parts)]
            if parts and ([first for first, _ in parts] != ends[:-1] or ends[-1] != rows):
                raise RoleError(f"{names}: {constant.label} has {rows} rows, of which they are not one each.")

    def _account_uncomputed(self) -> None:
        """Every value that is read is an input, a constant, or computed."""
        for node in self.graph.nodes:
            for value in node.inputs:
                if (
                    value is not None
                    and value.producer is None
                    and not value.constant
                    and value.input_name is None
                    and value.tensor.elements
                ):
                    raise RoleError(
                        f"{node.op.label} reads {what_is(value)}: an op was lost after the graph was exported."
                    )

    def _account_unread(self) -> None:
        """Constants of the signature's subgraph that no op reads: parameters of blocks, or a sign of damage."""
        model = self.graph.model
        graph = model.subgraphs[self.graph.signature.subgraph]
        blocks = {
            index: f"{what} of the blocks of tensor {tensor.index}"
            for tensor in graph.tensors
            if tensor.quantization is not None and (details := tensor.quantization.blockwise) is not None
            for index, what in ((details.scales, "scales"), (details.zero_points, "zero points"))
        }
        for tensor in graph.tensors:
            if not model.has_data(tensor) or (graph.index, tensor.index) in self.graph.constants:
                continue
            if tensor.index not in blocks and tensor.type in NUMBER_TYPES:
                raise RoleError(
                    f"{tensor.label} is stored, and no op reads it: an op was lost after the graph was exported. No "
                    f"checkpoint is written, because it might lack a weight.{self._suspects(tensor)}"
                )
            self.unread.append(SetAside(tensor, "none", blocks.get(tensor.index, "read by no op")))

    def _suspects(self, unread: Tensor) -> str:
        """Roles that share one constant of the size of ``unread``, or have none: one of them may want it."""
        played: dict[tuple[int, int] | None, list[str]] = {}
        for role in self.roles:
            if np.prod(role.shape) == unread.elements:
                played.setdefault((role.tensor.subgraph, role.tensor.index) if role.tensor else None, []).append(
                    role.role
                )
        for key, names in played.items():
            if key is None or len(names) > 1:
                return f" {' and '.join(names)} {'have no constant' if key is None else 'share one'}."
        missing = [f"layers.{i}.layer_scalar" for i in range(self.count)]
        missing = [name for name in missing if name not in {role.role for role in self.roles}]
        return f" {' and '.join(missing)} may have had it." if missing and unread.elements == 1 else ""

    def aside_list(self) -> list[SetAside]:
        entries = [
            SetAside(a.value.tensor, a.value.consumers[0][0].op.label if a.value.consumers else "none", a.reason)
            for a in self.aside.values()
            if id(a.value) not in self.used
        ]
        entries += self.unread
        return sorted(entries, key=lambda e: (e.tensor.subgraph, e.tensor.index))

    def refuse_rotation(self) -> None:
        for node in self.graph.nodes:
            if "hadamard" in node.kind.lower() or self._multiplies_by_hadamard(node):
                raise UnsupportedError(
                    f"{node.op.label} is a Hadamard rotation: the weights behind it ({_rotated(node)}) are stored "
                    "rotated. They are not the weights of the model, and this release does not rotate them back."
                )

    def _multiplies_by_hadamard(self, node: Node) -> bool:
        """Whether ``node`` multiplies by a constant matrix whose entries are all ±1/sqrt(n): a Hadamard rotation."""
        multiplies = node.kind in ("FULLY_CONNECTED", "BATCH_MATMUL") and len(node.inputs) > 1
        right = node.inputs[1] if multiplies else None
        weight = constant_under(right) if right is not None else None
        if weight is None or len(weight.tensor.shape) < 2 or weight.tensor.type not in NUMBER_TYPES:
            return False
        size = weight.tensor.shape[-1]
        if weight.tensor.shape[-2] != size or size < 2 or weight.tensor.elements > _LARGEST_ROTATION:
            return False
        return bool(np.allclose(np.abs(self.graph.floats(weight)), size**-0.5, rtol=1e-2))


def _readers(value: Value) -> Iterator[Node]:
    """The ops that read ``value``, once per operand, seen through those that only hand it on."""
    queue = [value]
    while queue:
        for reader, position in queue.pop().consumers:
            if position == 0 and reader.kind in WEIGHT_PASSES:
                queue.extend(reader.outputs)
            else:
                yield reader


def in_order(roles: Sequence[FoundRole]) -> list[FoundRole]:
    """``roles`` by layer, those of the whole network first."""

    def order(role: FoundRole) -> tuple[int, str]:
        parts = role.role.split(".")
        return (int(parts[1]) if len(parts) == 3 else -1, role.role)

    return sorted(roles, key=order)


def _rotated(node: Node) -> str:
    """The weight that a rotation's result is multiplied with, for the message."""
    queue = list(node.outputs)
    while queue:
        for reader, position in queue.pop(0).consumers:
            if position:
                continue
            weight = constant_under(reader.operand(1)) if reader.kind == "FULLY_CONNECTED" else None
            if weight is not None:
                return weight.label
            if reader.kind in PASSES:
                queue.extend(reader.outputs)
    return "unnamed"


def _names(value: Value) -> list[str]:
    """Names of ``value`` and of what it was before it was reshaped: where exporters leave a block's name."""
    root = strip(value)
    return [t.name for v in ((value,) if root is value else (value, root)) for t in v.tensors]


def _or_scalar(name: str, norm: str) -> str:
    return f" (perhaps times {name}.layer_scalar)" if norm == "post_ffw_norm" else ""


def what_is(value: Value) -> str:
    if value.producer is not None:
        return value.producer.op.label
    if value.constant:
        return f"the constant {value.label}"
    if value.input_name is not None:
        return f"the input {escape(value.input_name)!r}"
    return f"{value.label}, which no op computes"


def _activation(value: Value) -> Activation | None:
    """Static quantization of the tensor ``value``, if it is stored as integers."""
    tensor = value.tensors[-1]
    quantization = tensor.quantization
    if tensor.type not in (TensorType.INT8, TensorType.INT16, TensorType.UINT8) or quantization is None:
        return None
    if quantization.scale_count != 1 or quantization.zero_point_count > 1:
        raise UnsupportedError(f"{tensor.label}: an activation with {quantization.scale_count} scales.")
    if not 0 <= quantization.scale[0] < np.inf:
        raise FormatError(f"{tensor.label} has a scale of {quantization.scale[0]}: the file is damaged.")
    zero_point = int(quantization.zero_point[0]) if quantization.zero_point.size else 0
    return Activation(tensor.type_name.lower(), float(quantization.scale[0]), zero_point)


def _plain_reason(node: Node, position: int, constant: Value, between: str = CHECKED) -> str:
    """What a constant is that no pattern claimed."""
    if position in SHAPE_OPERANDS.get(node.kind, ()):
        return "shape, axis or offset"
    if constant.tensor.type not in NUMBER_TYPES:
        return "index arithmetic"
    return between


def count_layers(graph: FlatGraph) -> int:
    """One softmax a layer, or, where exporters spell it out, one exponential: of what a cache was multiplied into.

    What norms, activations and a softmax of the logits raise is computed from products with matrices alone.
    """
    return sum(node.kind in EXPONENTIALS and _reads_cache(node.operand(0)) for node in graph.nodes)


def _reads_cache(value: Value) -> bool:
    """Whether an input of activations or a cache leads to ``value``, past every product with a matrix."""
    _, leaves = walk_back([value], lambda _, node: is_matrix(node))
    return any(leaf.input_name is not None and leaf.depends & Depends.DATA for leaf in leaves)


def is_matrix(node: Node) -> bool:
    """Whether ``node`` multiplies by a constant of two axes."""
    if node.kind not in MATRICES or len(node.inputs) < 2 or node.inputs[1] is None:
        return False
    return all(value.producer is not None or value.constant for value in ancestors(node.inputs[1]))


def _option(node: Node, slot: int) -> bool:
    return bool(node.op.options.scalar(slot, "?", False)) if node.op.options is not None else False
