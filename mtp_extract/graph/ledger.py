"""The ledger of a graph's constants: each plays a role, or is set aside with a reason; one left over is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mtp_extract.errors import FormatError, RoleError, UnsupportedError, escape
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.graph.patterns import SHAPE_OPERANDS, WEIGHT_PASSES, Aside, strip
from mtp_extract.litertlm.storage import NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

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
    """A constant and the role it plays."""

    role: str  # "pre_projection", "layers.0.q_proj", … as in ``mappings/roles.json``
    tensor: Tensor | None  # the constant; None for a norm's weight of ones that the converter folded away
    shape: tuple[int, ...]  # ``[out, in]`` of a matrix, ``[size]`` of a vector
    factor: float  # stored = factor × (weight − offset); 1 unless something is folded into the weight
    why: str  # the evidence, in words
    known_as: tuple[str, ...]  # names of the tensors that carry the result, for the cross-check of names
    input: Activation | None = None  # static quantization of the op's activations; None where they are float
    output: Activation | None = None
    result: Value | None = field(default=None, repr=False, compare=False)  # the value of the graph it computes
    transposed: bool = False  # whether the constant is stored ``[in, out]``
    offset: float = 0.0  # what the graph adds to what is stored; 0 but for a norm whose weight is stored less 1
    first: int | None = None  # the row of the constant where the role's rows begin; None where it has all of them

    @property
    def key(self) -> tuple[int, int] | None:
        """Subgraph and index of the constant."""
        return None if self.tensor is None else (self.tensor.subgraph, self.tensor.index)


@dataclass(frozen=True)
class SetAside:
    """A constant that is not a weight, the op that reads it, and the reason."""

    tensor: Tensor
    op: str
    reason: str


class Ledger:
    """The roles found so far, and the constants set aside."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.roles: list[FoundRole] = []
        self.aside: dict[int, Aside] = {}  # by ``id`` of the value
        self.unread: list[SetAside] = []
        self.count = 0  # of layers

    def found(self, role: FoundRole) -> None:
        """Add a role.

        Raises:
            UnsupportedError: its constant is of a type that weights never have.
        """
        if role.tensor is not None and role.tensor.type not in NUMBER_TYPES:
            raise UnsupportedError(f"{role.role}: weights of type {role.tensor.type_name} are not supported.")
        self.roles.append(role)

    def set_aside(self, aside: tuple[Aside, ...]) -> None:
        for entry in aside:
            self.aside.setdefault(id(entry.value), entry)

    def account(self, between: str = CHECKED) -> None:
        """Every constant is a role or set aside with a reason; raise for the first that is neither.

        ``between`` is the reason for numbers that no block claimed.
        """
        used = {role.key for role in self.roles}
        for key, value in self.graph.constants.items():
            if key in used or id(value) in self.aside:
                continue
            reasons = {plain_reason(node, position, value, between) for node, position in value.consumers}
            reason = " and ".join(sorted(reasons)) or "an output of the signature"
            self.aside[id(value)] = Aside(value, reason)
        self._account_readers()
        self._account_unread()
        self._account_uncomputed()

    def _account_readers(self) -> None:
        """A weight is read once for every role it plays: another reader would make the graph another function."""
        roles: dict[tuple[int, int], list[FoundRole]] = {}
        for role in self.roles:
            if role.tensor is not None and role.key is not None and role.tensor.elements > 1:
                roles.setdefault(role.key, []).append(role)
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
                if value is not None and value.unproduced:
                    reads = f"{node.op.label} reads {described(value)}"
                    raise RoleError(f"{reads}: an op was lost after the graph was exported.")

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
                played.setdefault(role.key, []).append(role.role)
        for key, names in played.items():
            if key is None or len(names) > 1:
                return f" {' and '.join(names)} {'have no constant' if key is None else 'share one'}."
        missing = [f"layers.{i}.layer_scalar" for i in range(self.count)]
        missing = [name for name in missing if name not in {role.role for role in self.roles}]
        return f" {' and '.join(missing)} may have had it." if missing and unread.elements == 1 else ""

    def aside_list(self) -> list[SetAside]:
        used = {role.key for role in self.roles}
        entries = [
            SetAside(a.value.tensor, a.value.consumers[0][0].op.label if a.value.consumers else "none", a.reason)
            for a in self.aside.values()
            if (a.value.tensor.subgraph, a.value.tensor.index) not in used
        ]
        entries += self.unread
        return sorted(entries, key=lambda e: (e.tensor.subgraph, e.tensor.index))


def _readers(value: Value) -> Iterator[Node]:
    """The ops that read ``value``, once per operand, seen through those that only hand it on."""
    queue = [value]
    while queue:
        for reader, position in queue.pop().consumers:
            if position == 0 and reader.kind in WEIGHT_PASSES:
                queue.extend(reader.outputs)
            else:
                yield reader


def names_of(value: Value) -> tuple[str, ...]:
    """Names of ``value`` and of what it was before it was reshaped: where exporters leave a block's name."""
    root = strip(value)
    return tuple(t.name for v in ((value,) if root is value else (value, root)) for t in v.tensors)


def described(value: Value) -> str:
    """What messages call ``value``: the operator, constant or input that it comes from."""
    if value.producer is not None:
        return value.producer.op.label
    if value.constant:
        return f"the constant {value.label}"
    if value.input_name is not None:
        return f"the input {escape(value.input_name)!r}"
    return f"{value.label}, which no op computes"


def not_found(role: str, expected: str, value: Value) -> RoleError:
    """The error where ``expected`` should be behind ``value``, of which ``role`` is read, and is not."""
    return RoleError(f"{role}: expected {expected}, found {described(strip(value))}.")


def activation_of(value: Value) -> Activation | None:
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


def plain_reason(node: Node, position: int, constant: Value, between: str = CHECKED, where: str = "") -> str:
    """What a constant is that no pattern claimed; ``where`` follows the reason of integers."""
    if position in SHAPE_OPERANDS.get(node.kind, ()):
        return "shape, axis or offset"
    if constant.tensor.type not in NUMBER_TYPES:
        return f"index arithmetic{where}"
    return between
