"""The constants of a graph: roles of weights, other constants, and the cross-check with names in the file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.roles import MATRIX, list_roles, load_role_table
from mtp_extract.errors import RoleError
from mtp_extract.graph.call import read_activation_scale
from mtp_extract.graph.flat import FlatGraph, Value
from mtp_extract.litertlm.storage import NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType


@dataclass(frozen=True)
class FoundRole:
    """A role, and the constant that plays it."""

    role: str  # "pre_projection", "layers.0.q_proj", … as in ``mappings/roles.json``
    tensor: Tensor | None  # the constant; None for a norm's weight of ones that the converter folded away
    shape: tuple[int, ...]  # ``[out, in]`` of a matrix, ``[size]`` of a vector
    factor: float  # stored = factor × weight; 1 unless a number is folded into the weight
    why: str  # the evidence, for people
    known_as: tuple[str, ...]  # names of the tensors that hold the result, for the cross-check of names
    input: Activation | None = None  # static quantization of the op's operand; None for floats
    output: Activation | None = None
    result: Value | None = field(default=None, repr=False, compare=False)  # what the op computes with it
    # Other values that the factor may have: a norm follows, which cancels any, so the graph cannot tell.
    other_factors: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[int, int] | None:
        """Subgraph and index of the constant; None without one."""
        return None if self.tensor is None else (self.tensor.subgraph, self.tensor.index)


@dataclass(frozen=True)
class OtherConstant:
    """A constant that is not a weight, the op that reads it, and the reason."""

    tensor: Tensor
    op: str
    reason: str


def sort_roles(roles: Collection[FoundRole]) -> tuple[FoundRole, ...]:
    """Sort ``roles`` by layer and name; those outside layers come first."""

    def order(role: FoundRole) -> tuple[int, str]:
        parts = role.role.split(".")
        return int(parts[1]) if len(parts) == 3 else -1, role.role

    return tuple(sorted(roles, key=order))


def list_other_constants(graph: FlatGraph, roles: Collection[FoundRole]) -> tuple[OtherConstant, ...]:
    """List the constants of ``graph`` that play none of ``roles``, in the order of the file.

    Raises:
        RoleError: stored numbers that no operator reads, or an operand that nothing computes: an operator was lost.
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
    """Yield the constants of the signature's subgraph that no op reads; raise RoleError if one may be a weight."""
    model, subgraph = graph.model, graph.model.subgraphs[graph.signature.subgraph]
    quantizations = [tensor.quantization.blockwise for tensor in subgraph.tensors if tensor.quantization is not None]
    block_scales = {index for q in quantizations if q is not None for index in (q.scales, q.zero_points)}
    for tensor in subgraph.tensors:
        if not model.has_data(tensor) or (subgraph.index, tensor.index) in graph.constants:
            continue
        if tensor.index not in block_scales and tensor.type in NUMBER_TYPES:
            missing = [role.role for role in roles if role.tensor is None and np.prod(role.shape) == tensor.elements]
            perhaps = f" {' or '.join(missing)} may have had it." if missing else ""
            raise RoleError(
                f"{tensor.label} is stored, and no op reads it: an op was lost after the graph was exported. No "
                f"checkpoint is written, because it might lack a weight.{perhaps}"
            )
        yield OtherConstant(tensor, "none", "scales of blocks" if tensor.index in block_scales else "read by no op")


def read_activation(value: Value) -> Activation | None:
    """Return the static quantization of an activation; None unless it holds INT8, INT16 or UINT8 codes."""
    tensor = value.tensors[-1]
    grid = read_activation_scale(tensor)
    if tensor.type not in (TensorType.INT8, TensorType.INT16, TensorType.UINT8) or grid is None:
        return None
    return Activation(tensor.type_name.lower(), *grid)


# Names are a cross-check only: they change with every export.

_LAYER = "{i}"
_LONGEST_NAME = 1 << 13
"""Real names have hundreds of characters."""


@dataclass(frozen=True)
class NameCheck:
    """Roles from the graph, by what the names in the file say of them."""

    confirmed: tuple[str, ...]
    unrecognised: tuple[str, ...]
    contradicted: Mapping[str, tuple[str, ...]]  # role → the roles whose names its constant carries


def check_names(constants: Iterable[FoundRole], num_layers: int) -> NameCheck:
    """Compare every role with the names of its constant (a matrix), or of its op's result (a vector)."""
    roles = {role.name: role for role in list_roles(num_layers)}
    confirmed = []
    unrecognised = []
    contradicted = {}
    for constant in constants:
        is_matrix = len(constant.shape) == 2
        names = (constant.tensor.name,) if is_matrix and constant.tensor is not None else constant.known_as
        named = find_named_roles(names, is_matrix=is_matrix) & roles.keys()
        if constant.role in named:
            confirmed.append(constant.role)
        elif named and not any(
            _find_layers(pattern, _split_names(names)) for pattern in roles[constant.role].also_seen
        ):
            contradicted[constant.role] = tuple(sorted(named))
        else:
            unrecognised.append(constant.role)
    return NameCheck(tuple(confirmed), tuple(unrecognised), contradicted)


def find_named_roles(names: Iterable[str], *, is_matrix: bool) -> set[str]:
    """Return the roles, of any layer, whose published names are among ``names``: of matrices, or of all others."""
    pieces = _split_names(names)
    named = set[str]()
    for template in load_role_table():
        if (template.kind == MATRIX) == is_matrix:
            for pattern in template.published_names:
                named |= {template.name.replace(_LAYER, layer) for layer in _find_layers(pattern, pieces)}
    return named


def _split_names(names: Iterable[str]) -> list[str]:
    """Split names that fused operators joined with semicolons."""
    return [piece for name in names for piece in name[:_LONGEST_NAME].split(";")]


def _find_layers(pattern: str, pieces: Iterable[str]) -> set[str]:
    """Return the layers, as text, in those of ``pieces`` that match ``pattern``; "" if the pattern names no layer.

    The parts before and behind its ``.*`` are searched separately, so that hostile names take linear time.
    """
    begins, ends = _compile_pattern(pattern)
    layers = set[str]()
    for piece in pieces:
        last = max((match.start() for match in ends.finditer(piece)), default=-1)
        layers.update(match[1] for match in begins.finditer(piece) if match.end() <= last)
    return layers


@cache
def _compile_pattern(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compile the parts of ``pattern`` before and behind its ``.*``; group 1 of the first is the layer."""
    begins, _, ends = pattern.partition(".*")
    if _LAYER in begins:
        begins = begins.replace(_LAYER, "([0-9]+)")
    else:
        begins += "()"
    return re.compile(begins), re.compile(ends)
