"""Which constant of the graph plays which role: the walk from the two heads back to the input.

Everything is read backwards from the signature's outputs, because a value has one producer and many readers. The
residual stream is taken apart layer by layer::

    logits     ← soft cap ← lm_head         ┐
    projected  ← post_projection            ┴ final_norm ← stream
    stream     ← [layer_scalar ·] (h + post_ffw_norm(down(gelu(gate(x)) · up(x)))),  x = pre_ffw_norm(h)
    h          ← stream + post_attention_norm(o(attention(q(pre_attention_norm(stream)))))
    stream of the first layer ← pre_projection ← activations

What is not where it must be is an error that names the role; what is left over is an error that names the constant
and its reader. Names play no part in this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mtp_extract.errors import FormatError, NoDrafterError, RoleError, UnsupportedError, escape
from mtp_extract.graph.attention import EXPONENTIALS, Attention, read_attention
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors, walk_back
from mtp_extract.graph.patterns import (
    PASSES,
    SHAPE_OPERANDS,
    WEIGHT_PASSES,
    Aside,
    RmsNorm,
    constant_under,
    match_rms_norm,
    match_soft_cap,
    split_scalar,
    strip,
)
from mtp_extract.graph.probe import cache_slots, measure_gate, measure_windows
from mtp_extract.graph.rope import rounding_of
from mtp_extract.litertlm.quantized import NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

__all__ = ["Activation", "FoundRole", "Layer", "SetAside", "Walk", "walk"]

ACTIVATIONS = "activations"
LOGITS = "logits"
PROJECTED = "projected_activations"

_LARGEST_ROTATION = 1 << 20
_LARGEST_WIDTH = 1 << 24
_WEIGHTS_FORMAT_SLOT = 1
_ADJOINT_Y_SLOT = 1
_NO_FACTOR = 1e-6
_MOST_SHOWN = 3


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
        factor: stored = factor × weight; 1 unless something is folded into the weight.
        why: the evidence, in words.
        known_as: names of the tensors that carry the result, for the cross-check of names.
        input, output: static quantization of the op's activations; None where they are float.
        result: the value of the graph that carries the role's result.
        transposed: whether the constant is stored ``[in, out]``.
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


@dataclass(frozen=True)
class SetAside:
    """A constant that is not a weight, the op that reads it, and the reason."""

    tensor: Tensor
    op: str
    reason: str


@dataclass(frozen=True)
class Layer:
    """What the graph says of one layer, beyond its weights. Cache names are those of the signature's inputs."""

    key: str
    value: str
    kv_heads: int
    head_dim: int
    heads: int
    window: int | None
    masks: tuple[str, ...]
    inverse_frequencies: np.ndarray
    frequency_rounding: np.ndarray


@dataclass(frozen=True)
class Walk:
    """All that the graph says."""

    roles: tuple[FoundRole, ...]
    layers: tuple[Layer, ...]
    aside: tuple[SetAside, ...]
    soft_cap: float | None
    rms_norm_eps: float
    hidden_activation: str
    caches: MappingProxyType[str, Tensor]


def walk(graph: FlatGraph) -> Walk:
    """Find every role in ``graph``.

    Raises:
        NoDrafterError: the signature has not the inputs and outputs of a drafter.
        RoleError: a role is missing, or a constant is left over.
        UnsupportedError: the graph computes something a checkpoint cannot express.
    """
    return _Walker(graph).run()


class _Walker:
    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.roles: list[FoundRole] = []
        self.aside: dict[int, Aside] = {}
        self.used: set[int] = set()
        self.unread: list[SetAside] = []
        self.eps: set[float] = set()
        self.hidden_activations: set[str] = set()
        self.count = 0

    def run(self) -> Walk:
        graph = self.graph
        for name in (LOGITS, PROJECTED):
            if name not in graph.outputs:
                found = ", ".join(escape(n) for n in graph.outputs) or "none"
                raise NoDrafterError(f"The signature has no output {name!r} (it has: {found}): this is not a drafter.")
        if ACTIVATIONS not in graph.inputs:
            found = ", ".join(escape(n) for n in graph.inputs) or "none"
            raise NoDrafterError(
                f"The signature has no input {ACTIVATIONS!r} (it has: {found}): this is not a drafter."
            )
        self._refuse_rotation()
        soft_cap = match_soft_cap(graph, graph.outputs[LOGITS])
        self._set_aside(soft_cap.aside)
        factor = 1.0 if soft_cap.cap is None else 1.0 / (soft_cap.scale * soft_cap.cap)
        head = self._linear("lm_head", soft_cap.x, "whose output becomes the logits", factor)
        post = self._linear("post_projection", graph.outputs[PROJECTED], "whose output is projected_activations")
        norm = self._norm("final_norm", head, "which feeds both heads")
        if strip(post) is not strip(head):
            raise RoleError(
                "final_norm: lm_head and post_projection do not read the same normalized state, as a drafter's do."
            )
        self.count = count = _count_layers(graph, {id(graph.outputs[LOGITS]), id(soft_cap.x)})
        attentions: list[Attention] = []
        stream = norm.x
        for index in reversed(range(count)):
            attention, stream = self._layer(index, stream)
            attentions.append(attention)
        source = self._linear("pre_projection", stream, "which is fed by activations")
        if strip(source).input_name != ACTIVATIONS:
            raise RoleError(
                f"pre_projection: expected to read the input {ACTIVATIONS!r}, it reads {strip(source).label}."
            )
        attentions.reverse()
        self._account()
        windows = measure_windows(
            graph,
            [a.mixed for a in attentions],
            [a.query for a in attentions],
            [str(a.value.input_name) for a in attentions],
        )
        slots = cache_slots(graph)
        layers = [
            self._layer_facts(f"layers.{index}", attention, window, slots)
            for index, (attention, window) in enumerate(zip(attentions, windows, strict=True))
        ]
        if len(self.eps) > 1:
            raise UnsupportedError(f"The norms use different epsilons: {sorted(self.eps)}.")
        if len(self.hidden_activations) > 1:
            raise UnsupportedError(f"The layers use different activations: {sorted(self.hidden_activations)}.")
        return Walk(
            tuple(sorted(self.roles, key=_order)),
            tuple(layers),
            tuple(self._aside_list()),
            soft_cap.cap,
            self.eps.pop(),
            self.hidden_activations.pop() if self.hidden_activations else "gelu_pytorch_tanh",
            self._caches(),
        )

    def _layer(self, index: int, out: Value) -> tuple[Attention, Value]:
        name = f"layers.{index}"
        out = strip(out)
        scaled = split_scalar(self.graph, out.producer) if out.producer else None
        if scaled is not None:
            inner, constant, factor = scaled
            if out.producer is not None and out.producer.kind == "DIV":
                raise UnsupportedError(f"{name}.layer_scalar: {out.producer.op.label} divides by its scalar.")
            self._found(f"{name}.layer_scalar", constant, f"the factor {factor:g} on the layer's output", out)
            out = strip(inner)
        add = self._residual(name, "post_ffw_norm", out)
        ffw_norm, middle = self._norm_operand(f"{name}.post_ffw_norm", add, "on the second residual branch")
        down_in = self._linear(f"{name}.down_proj", ffw_norm.x, f"which feeds {name}.post_ffw_norm")
        normed = self._gated(name, down_in)
        pre_ffw = self._norm(f"{name}.pre_ffw_norm", normed, "which feeds gate and up")
        self._same(f"{name}.pre_ffw_norm", pre_ffw.x, middle)
        add = self._residual(name, "post_attention_norm", middle)
        attention_norm, stream = self._norm_operand(f"{name}.post_attention_norm", add, "on the first residual branch")
        o_in = self._linear(f"{name}.o_proj", attention_norm.x, f"which feeds {name}.post_attention_norm")
        attention = read_attention(self.graph, strip(o_in), name)
        self._set_aside(attention.aside)
        self._take_norm(f"{name}.q_norm", attention.q_norm, "between the q projection and RoPE", attention.query)
        q_in = self._linear(f"{name}.q_proj", attention.q_norm.x, f"which feeds {name}.q_norm")
        pre_attention = self._norm(f"{name}.pre_attention_norm", q_in, "which feeds the q projection")
        self._same(f"{name}.pre_attention_norm", pre_attention.x, stream)
        return attention, strip(stream)

    def _gated(self, name: str, down_in: Value) -> Value:
        """activation(gate(x)) · up(x), the input of the down projection; returns x."""
        branches: dict[int, Value] = {}

        def at_matrix(value: Value, node: Node) -> bool:
            if not _is_matrix(node):
                return False
            branches[id(value)] = value
            return True

        edges, leaves = walk_back([down_in], at_matrix)
        others = [value for value in leaves if not value.constant]
        if len(branches) != 2 or others:
            found = ", ".join(_what(value) for value in (*branches.values(), *others)) or "nothing"
            raise RoleError(
                f"{name}.gate_proj, {name}.up_proj: expected a product of GELU(gate) and up before {name}.down_proj, "
                f"computed from two matrices; found {found}."
            )
        pair = list(branches.values())
        gate, activation = measure_gate(self.graph, down_in, pair, name)
        self.hidden_activations.add(activation)
        self._set_aside(tuple(Aside(v, _plain_reason(node, at, v)) for node, at, v in edges if v.constant))
        gate_in = self._linear(f"{name}.gate_proj", pair[gate], "whose output goes through GELU")
        up_in = self._linear(f"{name}.up_proj", pair[1 - gate], "whose output is multiplied with GELU(gate)")
        if strip(gate_in) is not strip(up_in):
            raise RoleError(f"{name}.gate_proj and {name}.up_proj read different values; they must read the same.")
        return gate_in

    def _residual(self, name: str, norm: str, value: Value) -> Node:
        node = value.producer
        if node is None or node.kind != "ADD" or not node.binary or node.op.activation:
            raise RoleError(
                f"{name}.{norm}: expected the residual addition after it{_or_scalar(name, norm)}, found {_what(value)}."
            )
        return node

    def _norm_operand(self, role: str, add: Node, why: str) -> tuple[RmsNorm, Value]:
        """The operand of a residual addition that is an RMSNorm, and the other one."""
        operands = [add.operand(i) for i in (0, 1)]
        matches = [match_rms_norm(self.graph, v) for v in operands]
        found = [(m, i) for i, m in enumerate(matches) if m is not None]
        if len(found) != 1:
            what = " and ".join(_what(strip(v)) for v in operands)
            raise RoleError(f"{role}: expected an RMSNorm on one side of {add.op.label}, found {what}.")
        norm, position = found[0]
        self._take_norm(role, norm, why, operands[position])
        return norm, operands[1 - position]

    def _norm(self, role: str, value: Value, why: str) -> RmsNorm:
        norm = match_rms_norm(self.graph, value)
        if norm is None:
            raise RoleError(f"{role}: expected an RMSNorm with a weight, {why}; found {_what(strip(value))}.")
        self._take_norm(role, norm, why, value)
        return norm

    def _take_norm(self, role: str, norm: RmsNorm, why: str, result: Value) -> None:
        self.eps.add(float(f"{norm.eps:.6g}"))
        self._set_aside(norm.aside)
        if norm.weight is None:
            why = f"the RMSNorm {why} multiplies by no weight: its weight was 1 and was folded away"
            names = tuple(_names(result))
            self.roles.append(FoundRole(role, None, (norm.size,), 1.0, why, names, result=result))
        else:
            self._found(role, norm.weight, f"weight of the RMSNorm {why}", result, shape=(norm.size,))

    def _linear(self, role: str, value: Value, why: str, factor: float = 1.0) -> Value:
        """The matrix that ``value`` is a product with; takes it as the weight of ``role`` and returns its input."""
        root = strip(value)
        node = root.producer
        if node is None or node.kind not in ("FULLY_CONNECTED", "BATCH_MATMUL"):
            raise RoleError(f"{role}: expected a FULLY_CONNECTED op {why}, found {_what(root)}.")
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
            raise RoleError(f"{role}: the weight of {node.op.label} is not a constant but {_what(weight)}.")
        shape = tuple(size for size in weight.tensor.shape if size != 1 or len(weight.tensor.shape) == 2)
        if len(shape) != 2 or not all(0 < size <= _LARGEST_WIDTH for size in shape):
            raise RoleError(f"{role}: expected a weight [out, in], found {weight.label}.")
        factor /= scale
        self._found(
            role,
            weight,
            f"weight of {node.op.label}, {why}",
            root,
            factor=1.0 if abs(factor - 1.0) < _NO_FACTOR else factor,
            node=node,
            shape=shape[::-1] if transposed else shape,
            transposed=transposed,
        )
        return node.operand(0)

    def _matrix(self, node: Node) -> tuple[Value, bool, float]:
        """The weight of ``node``, whether it is stored ``[in, out]``, and the number it is multiplied by before use."""
        transposed = node.kind == "BATCH_MATMUL" and not _option(node, _ADJOINT_Y_SLOT)
        value, scale = strip(node.operand(1), WEIGHT_PASSES), 1.0
        while (maker := value.producer) is not None:
            scaled = split_scalar(self.graph, maker)
            if scaled is not None:
                self._set_aside((Aside(scaled[1], "a factor on a weight"),))
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
        if constant.tensor.elements > _LARGEST_WIDTH or any(self.graph.model.locate(constant.tensor).read()):
            raise UnsupportedError(
                f"{role}: {node.op.label} has a bias, which the drafter's checkpoint has no place for."
            )
        self._set_aside((Aside(constant, "a bias of zeros"),))

    def _found(
        self,
        role: str,
        constant: Value,
        why: str,
        result: Value,
        factor: float = 1.0,
        node: Node | None = None,
        shape: tuple[int, ...] = (1,),
        transposed: bool = False,
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
            )
        )

    def _same(self, role: str, found: Value, expected: Value) -> None:
        if strip(found) is not strip(expected):
            raise RoleError(
                f"{role}: expected to read the residual stream {strip(expected).label}, it reads {strip(found).label}."
            )

    def _set_aside(self, aside: tuple[Aside, ...]) -> None:
        for entry in aside:
            self.aside.setdefault(id(entry.value), entry)

    def _layer_facts(self, name: str, attention: Attention, window: int | None, slots: int) -> Layer:
        head_dim = attention.q_norm.size
        width = next(r.shape[0] for r in self.roles if r.role == f"{name}.q_proj")
        key, value = attention.key.tensor, attention.value.tensor
        kv_heads = key.elements // max(head_dim * slots, 1)
        fits = sorted((1, kv_heads, slots, head_dim))
        if not head_dim or width % head_dim or sorted(key.shape) != fits or sorted(value.shape) != fits:
            raise RoleError(
                f"{name}: q projection of width {width}, q norm of {head_dim}, key cache {list(key.shape)} and value "
                f"cache {list(value.shape)} of {slots} slots do not fit together."
            )
        if not kv_heads or (width // head_dim) % kv_heads:
            raise RoleError(f"{name}: {width // head_dim} query heads do not share {kv_heads} KV heads.")
        assert attention.key.input_name is not None and attention.value.input_name is not None
        return Layer(
            attention.key.input_name,
            attention.value.input_name,
            kv_heads,
            head_dim,
            width // head_dim,
            window,
            attention.masks,
            attention.inverse_frequencies,
            rounding_of(attention.inverse_frequencies, self.graph),
        )

    def _account(self) -> None:
        """Every constant is a role or set aside with a reason; raise for the first that is neither."""
        for value in self.graph.constants.values():
            if id(value) in self.used or id(value) in self.aside:
                continue
            reasons = {_plain_reason(node, position, value) for node, position in value.consumers}
            reason = " and ".join(sorted(reasons)) or "an output of the signature"
            self.aside[id(value)] = Aside(value, reason)
        self._account_readers()
        self._account_unread()
        self._account_uncomputed()

    def _account_readers(self) -> None:
        """A weight is read once for every role it plays: another reader would make the graph another function."""
        roles: dict[tuple[int, int], list[str]] = {}
        for role in self.roles:
            if role.tensor is not None and role.tensor.elements > 1:
                roles.setdefault((role.tensor.subgraph, role.tensor.index), []).append(role.role)
        for key, names in roles.items():
            readers = list(_readers(self.graph.constants[key]))
            if len(readers) != len(names):
                ops = ", ".join(reader.op.label for reader in readers[:_MOST_SHOWN])
                raise RoleError(
                    f"{' and '.join(names)}: {self.graph.constants[key].label} is read {len(readers)} times, by {ops}. "
                    "No checkpoint is written, because it would not be the same function."
                )

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
                        f"{node.op.label} reads {_what(value)}: an op was lost after the graph was exported."
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

    def _aside_list(self) -> list[SetAside]:
        entries = [
            SetAside(a.value.tensor, a.value.consumers[0][0].op.label if a.value.consumers else "none", a.reason)
            for a in self.aside.values()
            if id(a.value) not in self.used
        ]
        entries += self.unread
        return sorted(entries, key=lambda e: (e.tensor.subgraph, e.tensor.index))

    def _caches(self) -> MappingProxyType[str, Tensor]:
        return MappingProxyType(
            {
                name: value.tensors[-1]
                for name, value in sorted(self.graph.inputs.items())
                if len(value.tensor.shape) == 4
                and value.tensor.type not in (TensorType.BOOL, TensorType.INT32, TensorType.INT64)
            }
        )

    def _refuse_rotation(self) -> None:
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


def _order(role: FoundRole) -> tuple[int, str]:
    parts = role.role.split(".")
    return (int(parts[1]) if len(parts) == 3 else -1, role.role)


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


def _what(value: Value) -> str:
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


def _plain_reason(node: Node, position: int, constant: Value) -> str:
    """What a constant is that no pattern claimed."""
    if position in SHAPE_OPERANDS.get(node.kind, ()):
        return "shape, axis or offset"
    if constant.tensor.type not in NUMBER_TYPES:
        return "index arithmetic"
    return "a number between the roles, whose result is checked by execution"


def _count_layers(graph: FlatGraph, logits: set[int]) -> int:
    """One softmax a layer, or, where exporters spell it out, one exponential; what the logits feed is no layer."""
    kinds = Counter(
        node.kind
        for node in graph.nodes
        if node.kind in EXPONENTIALS
        and not any(id(v) in logits for source in node.inputs if source is not None for v in ancestors(source))
    )
    return kinds["SOFTMAX"] or kinds["EXP"]


def _is_matrix(node: Node) -> bool:
    """Whether ``node`` multiplies by a constant of two axes."""
    if node.kind != "BATCH_MATMUL" or len(node.inputs) < 2 or node.inputs[1] is None:
        return node.kind == "FULLY_CONNECTED"
    return all(value.producer is not None or value.constant for value in ancestors(node.inputs[1]))


def _option(node: Node, slot: int) -> bool:
    return bool(node.op.options.scalar(slot, "?", False)) if node.op.options is not None else False
