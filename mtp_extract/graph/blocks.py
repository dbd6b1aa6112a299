"""The blocks that drafter and base are built of, read backwards from their results.

A :class:`Blocks` takes the graph apart: a linear layer, an RMSNorm, a gated product, a residual, one layer. Each gives
its constants a role or sets them aside (:mod:`mtp_extract.graph.ledger`). Names play no part in this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import RoleError, UnsupportedError
from mtp_extract.graph.attention import EXPONENTIALS, AnyAttention
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, ancestors, walk_back
from mtp_extract.graph.identities import mark_identities, taken_from
from mtp_extract.graph.kernels import refuse_wide_filter
from mtp_extract.graph.ledger import FoundRole, Ledger, activation_of, described, names_of, not_found, plain_reason
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.patterns import (
    MATRICES,
    PASSES,
    WEIGHT_PASSES,
    Aside,
    RmsNorm,
    constant_under,
    match_rms_norm,
    match_soft_cap,
    split_scalar,
    strip,
)
from mtp_extract.graph.probe import measure_gate
from mtp_extract.litertlm.quantized import stored_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES

_LARGEST_ROTATION = 1 << 20
_LARGEST_WIDTH = 1 << 24
_WEIGHTS_FORMAT_SLOT = 1
_ADJOINT_Y_SLOT = 1
_NO_FACTOR = 1e-6


SomeAttention = TypeVar("SomeAttention", bound=AnyAttention)


class Blocks(Ledger):
    """A graph that is being taken apart."""

    def __init__(self, graph: FlatGraph) -> None:
        super().__init__(graph)
        self.eps: set[float] = set()
        self.hidden_activations: set[str] = set()
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
        why = f"the factor {factor:g} on the layer's output"
        role = FoundRole(f"{name}.layer_scalar", constant.tensor, (1,), 1.0, why, names_of(out), result=out)
        self.found(role)
        return strip(inner)

    def lm_head(self, logits: Value) -> tuple[float | None, Value]:
        """The soft cap of ``logits``, None without one, and what the head reads."""
        soft_cap = match_soft_cap(self.graph, logits)
        self.set_aside(soft_cap.aside)
        factor = 1.0 if soft_cap.cap is None else 1.0 / (soft_cap.scale * soft_cap.cap)
        return soft_cap.cap, self.linear("lm_head", soft_cap.x, "whose output becomes the logits", factor)

    def layer(
        self, name: str, out: Value, read: Callable[[FlatGraph, Value, str], SomeAttention]
    ) -> tuple[SomeAttention, Value, Value]:
        """Attention and feed-forward of a layer whose residual sum is ``out``.

        Returns:
            the attention, as ``read`` sees it; the residual stream below; the normed stream the q projection reads.
        """
        after = f"the residual addition after it (perhaps times {name}.layer_scalar)"
        ffw_norm, middle = self.residual(f"{name}.post_ffw_norm", out, "on the second residual branch", after)
        down_in = self.linear(f"{name}.down_proj", ffw_norm.x, f"which feeds {name}.post_ffw_norm")
        normed = self._gated_pair(name, down_in)
        pre_ffw = self.norm(f"{name}.pre_ffw_norm", normed, "which feeds gate and up")
        self.require_same(f"{name}.pre_ffw_norm", pre_ffw.x, middle)
        attention_norm, stream = self.residual(f"{name}.post_attention_norm", middle, "on the first residual branch")
        o_in = self.linear(f"{name}.o_proj", attention_norm.x, f"which feeds {name}.post_attention_norm")
        attention = read(self.graph, strip(o_in), name)
        self.set_aside(attention.aside)
        self.take_norm(f"{name}.q_norm", attention.q_norm, "between the q projection and RoPE", attention.query)
        q_in = self.linear(f"{name}.q_proj", attention.q_norm.x, f"which feeds {name}.q_norm")
        pre_attention = self.norm(f"{name}.pre_attention_norm", q_in, "which feeds the q projection")
        self.require_same(f"{name}.pre_attention_norm", pre_attention.x, stream)
        return attention, strip(stream), strip(q_in)

    def gated(
        self, gate: str, up: str, result: Value, reader: str, stops: Callable[[Value, Node], bool]
    ) -> tuple[Value, Value]:
        """activation(gate) · up, which ``reader`` reads; the walk back ends at two values.

        Returns:
            the values of gate and up.
        """
        branches: dict[int, Value] = {}

        def at_branch(value: Value, node: Node) -> bool:
            if stops(value, node):
                branches[id(value)] = value
                return True
            return False

        edges, leaves = walk_back([result], at_branch)
        others = [value for value in leaves if not value.constant]
        if len(branches) != 2 or others:
            found = ", ".join(described(value) for value in (*branches.values(), *others)) or "nothing"
            raise RoleError(
                f"{gate}, {up}: expected a product of GELU(gate) and up before {reader}, computed from two matrices; "
                f"found {found}."
            )
        pair = list(branches.values())
        position, activation = measure_gate(self.graph, result, pair, f"{gate}, {up}", reader)
        self.hidden_activations.add(activation)
        self.set_aside(tuple(Aside(v, plain_reason(node, at, v)) for node, at, v in edges if v.constant))
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

    def residual(
        self, role: str, value: Value, why: str, expected: str = "the residual addition after it"
    ) -> tuple[RmsNorm, Value]:
        """The operand of the addition ``value`` that is an RMSNorm, taken for ``role``, and the other one."""
        add = strip(value).producer
        if add is None or add.kind != "ADD" or not add.binary or add.op.activation:
            raise not_found(role, expected, value)
        operands = [add.operand(i) for i in (0, 1)]
        matches = [match_rms_norm(self.graph, v) for v in operands]
        found = [(m, i) for i, m in enumerate(matches) if m is not None]
        if len(found) != 1:
            what = " and ".join(described(strip(v)) for v in operands)
            raise RoleError(f"{role}: expected an RMSNorm on one side of {add.op.label}, found {what}.")
        norm, position = found[0]
        self.take_norm(role, norm, why, operands[position])
        return norm, operands[1 - position]

    def norm(self, role: str, value: Value, why: str) -> RmsNorm:
        norm = match_rms_norm(self.graph, value)
        if norm is None:
            raise not_found(role, f"an RMSNorm with a weight, {why}", value)
        self.take_norm(role, norm, why, value)
        return norm

    def take_norm(self, role: str, norm: RmsNorm, why: str, result: Value) -> None:
        self.eps.add(float(f"{norm.eps:.6g}"))
        self.set_aside(norm.aside)
        tensor = None if norm.weight is None else norm.weight.tensor
        if tensor is None:
            why = f"the RMSNorm {why} multiplies by no weight: its weight was 1 and was folded away"
        else:
            stored = f", stored less {norm.offset:g}" if norm.offset else ""
            why = f"weight of the RMSNorm {why}{stored}"
        names = names_of(result)
        self.found(FoundRole(role, tensor, (norm.size,), 1.0, why, names, result=result, offset=norm.offset))

    def linear(self, role: str, value: Value, why: str, factor: float = 1.0) -> Value:
        """The matrix that ``value`` is a product with; takes it as the weight of ``role`` and returns its input."""
        result = root = strip(value)
        part = self._rows(root)
        if part is not None:
            root = part[0]
        node = root.producer
        if node is None or node.kind not in MATRICES:
            raise not_found(role, f"a FULLY_CONNECTED op {why}", root)
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
        if node.input(0) is None or node.input(1) is None:
            raise RoleError(f"{role}: {node.op.label} lacks its input or its weight: the graph is damaged.")
        if (bias := node.input(2)) is not None:
            self._bias(role, node, bias)
        weight, transposed, scale = self._matrix(node)
        if not weight.constant:
            raise RoleError(f"{role}: the weight of {node.op.label} is not a constant but {described(weight)}.")
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
        rows_of = "" if whole else f"rows {first} to {first + rows} of the "
        self.found(
            FoundRole(
                role,
                weight.tensor,
                (rows, shape[1]),
                1.0 if abs(factor - 1.0) < _NO_FACTOR else factor,
                f"{rows_of}weight of {node.op.label}, {why}",
                known_as=(),
                input=activation_of(node.operand(0)),
                output=activation_of(node.outputs[0]),
                result=result,
                transposed=transposed,
                first=None if whole else first,
            )
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

    def require_input(self, role: str, value: Value, name: str) -> None:
        """Check that ``role`` reads the input ``name`` of the signature."""
        if strip(value).input_name != name:
            raise not_found(role, f"to read the input {name!r}", value)

    def one_epsilon(self) -> float:
        """The epsilon of every norm."""
        if len(self.eps) > 1:
            raise UnsupportedError(f"The norms use different epsilons: {sorted(self.eps)}.")
        return self.eps.pop()

    def require_same(self, role: str, found: Value, expected: Value) -> None:
        if strip(found) is not strip(expected):
            raise RoleError(
                f"{role}: expected to read the residual stream {strip(expected).label}, it reads {strip(found).label}."
            )

    def refuse_rotation(self) -> None:
        for node in self.graph.nodes:
            if "hadamard" in node.kind.lower() or self._multiplies_by_hadamard(node):
                raise UnsupportedError(
                    f"{node.op.label} is a Hadamard rotation: the weights behind it ({_rotated(node)}) are stored "
                    "rotated. They are not the weights of the model, and this release does not rotate them back."
                )

    def _multiplies_by_hadamard(self, node: Node) -> bool:
        """Whether ``node`` multiplies by a constant matrix whose entries are all ±1/sqrt(n): a Hadamard rotation."""
        right = node.input(1) if node.kind in ("FULLY_CONNECTED", "BATCH_MATMUL") else None
        weight = constant_under(right) if right is not None else None
        if weight is None or len(weight.tensor.shape) < 2 or weight.tensor.type not in NUMBER_TYPES:
            return False
        size = weight.tensor.shape[-1]
        if weight.tensor.shape[-2] != size or size < 2 or weight.tensor.elements > _LARGEST_ROTATION:
            return False
        return bool(np.allclose(np.abs(self.graph.floats(weight)), size**-0.5, rtol=1e-2))


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
    weight = node.input(1) if node.kind in MATRICES else None
    return weight is not None and all(v.producer is not None or v.constant for v in ancestors(weight))


def _option(node: Node, slot: int) -> bool:
    return bool(node.op.options.scalar(slot, "?", False)) if node.op.options is not None else False
