"""What a graph says of a constant: the role it plays, or that it is no weight."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.roles import MATRIX, role_table, roles_of
from mtp_extract.errors import RoleError
from mtp_extract.graph.call import activation_scale
from mtp_extract.graph.flat import FlatGraph, Value
from mtp_extract.litertlm.storage import NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType


@dataclass(frozen=True)
class FoundRole:
    """A constant and the role it plays."""

    role: str  # "pre_projection", "layers.0.q_proj", … as in ``mappings/roles.json``
    tensor: Tensor | None  # the constant; None for a norm's weight of ones that the converter folded away
    shape: tuple[int, ...]  # ``[out, in]`` of a matrix, ``[size]`` of a vector
    factor: float  # stored = factor × weight; 1 unless something is folded into the weight
    why: str  # the evidence, in words
    known_as: tuple[str, ...]  # names of the tensors that carry the result, for the cross-check of names
    input: Activation | None = None  # static quantization of the op's activations; None where they are float
    output: Activation | None = None
    result: Value | None = field(default=None, repr=False, compare=False)  # the value of the graph it computes
    # What the factor may be as well: a norm follows, which takes any away, so that the graph does not say.
    other_factors: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[int, int] | None:
        """Subgraph and index of the constant."""
        return None if self.tensor is None else (self.tensor.subgraph, self.tensor.index)


@dataclass(frozen=True)
class OtherConstant:
    """A constant that is not a weight, the op that reads it, and the reason."""

    tensor: Tensor
    op: str
    reason: str


def in_order(roles: Collection[FoundRole]) -> tuple[FoundRole, ...]:
    """``roles`` by layer, those of the whole network first."""

    def order(role: FoundRole) -> tuple[int, str]:
        parts = role.role.split(".")
        return int(parts[1]) if len(parts) == 3 else -1, role.role

    return tuple(sorted(roles, key=order))


def set_aside(graph: FlatGraph, roles: Collection[FoundRole]) -> tuple[OtherConstant, ...]:
    """Every constant of ``graph`` that plays none of ``roles``.

    Raises:
        RoleError: numbers are stored that no operator reads, or read that nothing computes: an operator was lost.
    """
    for node in graph.nodes:
        for value in node.inputs:
            if value is not None and value.unproduced:
                raise RoleError(f"{node.op.label} reads {value.label}, which nothing computes: an op was lost.")
    used = {role.key for role in roles}
    others = [
        OtherConstant(
            value.tensor,
            value.consumers[0][0].op.label if value.consumers else "none",
            "a number between the roles" if value.tensor.type in NUMBER_TYPES else "a shape, an axis or an offset",
        )
        for key, value in graph.constants.items()
        if key not in used
    ]
    others.extend(_list_unread_constants(graph, roles))
    return tuple(sorted(others, key=lambda entry: (entry.tensor.subgraph, entry.tensor.index)))


def _list_unread_constants(graph: FlatGraph, roles: Collection[FoundRole]) -> Iterator[OtherConstant]:
    """Constants of the signature's subgraph that no op reads: parameters of blocks, or a sign of damage."""
    model, subgraph = graph.model, graph.model.subgraphs[graph.signature.subgraph]
    details = [t.quantization.blockwise for t in subgraph.tensors if t.quantization is not None]
    blocks = {
        index
        for quantization in details
        if quantization is not None
        for index in (quantization.scales, quantization.zero_points)
    }
    for tensor in subgraph.tensors:
        if not model.has_data(tensor) or (subgraph.index, tensor.index) in graph.constants:
            continue
        if tensor.index not in blocks and tensor.type in NUMBER_TYPES:
            missing = [role.role for role in roles if role.tensor is None and np.prod(role.shape) == tensor.elements]
            perhaps = f" {' or '.join(missing)} may have had it." if missing else ""
            raise RoleError(
                f"{tensor.label} is stored, and no op reads it: an op was lost after the graph was exported. No "
                f"checkpoint is written, because it might lack a weight.{perhaps}"
            )
        yield OtherConstant(tensor, "none", "scales of blocks" if tensor.index in blocks else "read by no op")


def read_activation(value: Value) -> Activation | None:
    """Static quantization of the tensor ``value``, if it is stored as integers."""
    tensor = value.tensors[-1]
    grid = activation_scale(tensor)
    if tensor.type not in (TensorType.INT8, TensorType.INT16, TensorType.UINT8) or grid is None:
        return None
    return Activation(tensor.type_name.lower(), *grid)


# Names, a cross-check of what the graph says, never more: they change with every export.

_LAYER = "{i}"
_LONGEST_NAME = 1 << 13
"""Real names have hundreds of characters."""


@dataclass(frozen=True)
class NameCheck:
    """How the names in the file compare with the roles found in the graph."""

    confirmed: tuple[str, ...]  # roles, as the next
    unrecognised: tuple[str, ...]
    contradicted: Mapping[str, tuple[str, ...]]  # role → the roles whose names its constant carries


def check_names(constants: Iterable[FoundRole], num_layers: int) -> NameCheck:
    """Compare every role with the names that its constant, or the result of its op, carries."""
    roles = {role.name: role for role in roles_of(num_layers)}
    confirmed = []
    unrecognised = []
    contradicted = {}
    for constant in constants:
        is_matrix = len(constant.shape) == 2
        names = (constant.tensor.name,) if is_matrix and constant.tensor is not None else constant.known_as
        named = roles_named(names, is_matrix=is_matrix) & roles.keys()
        if constant.role in named:
            confirmed.append(constant.role)
        elif named and not any(_layers_of(pattern, _split_names(names)) for pattern in roles[constant.role].also_seen):
            contradicted[constant.role] = tuple(sorted(named))
        else:
            unrecognised.append(constant.role)
    return NameCheck(tuple(confirmed), tuple(unrecognised), contradicted)


def roles_named(names: Iterable[str], *, is_matrix: bool) -> set[str]:
    """The roles of matrices, or of what is none, that one of ``names`` is published for; of any layer."""
    pieces = _split_names(names)
    named = set[str]()
    for template in role_table():
        if (template.kind == MATRIX) == is_matrix:
            for pattern in template.published_names:
                named |= {template.name.replace(_LAYER, layer) for layer in _layers_of(pattern, pieces)}
    return named


def _split_names(names: Iterable[str]) -> list[str]:
    """Fused operators leave a constant with the names of several, joined by semicolons: each by itself."""
    return [piece for name in names for piece in name[:_LONGEST_NAME].split(";")]


def _layers_of(pattern: str, pieces: Iterable[str]) -> set[str]:
    """The layers in those of ``pieces`` that ``pattern`` is found in; an empty text where it names no layer.

    What stands before its ``.*`` is looked for by itself, and so is what stands behind: so each piece is read once, and
    once for all layers.
    """
    begins, ends = _compile_pattern(pattern)
    layers = set[str]()
    for piece in pieces:
        last = max((match.start() for match in ends.finditer(piece)), default=-1)
        layers.update(match[1] for match in begins.finditer(piece) if match.end() <= last)
    return layers


@cache
def _compile_pattern(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What a pattern begins with, with a group that is the layer, and what it ends with."""
    begins, _, ends = pattern.partition(".*")
    if _LAYER in begins:
        begins = begins.replace(_LAYER, "([0-9]+)")
    else:
        begins += "()"
    return re.compile(begins), re.compile(ends)
