"""What the names in a file say of its roles: a cross-check of what the graph says, never more.

Names in these files change with every export and are no evidence: agreement is reported, silence is accepted, and a
name that is known for another role is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtp_extract.architecture.roles import MATRIX, roles_of
from mtp_extract.graph.roles import FoundRole

# Real names have hundreds of characters; the time a pattern takes grows with the square of the length.
_LONGEST_NAME = 1 << 13


@dataclass(frozen=True)
class NameCheck:
    """How the names in the file compare with the roles found in the graph.

    Attributes:
        confirmed, unrecognised: roles.
        contradicted: role → the roles whose names its constant carries.
    """

    confirmed: tuple[str, ...]
    unrecognised: tuple[str, ...]
    contradicted: Mapping[str, tuple[str, ...]]


def check_names(found: Iterable[FoundRole], num_layers: int) -> NameCheck:
    """Compare every role with the names that its constant, or the result of its op, carries."""
    roles = {role.name: role for role in roles_of(num_layers)}
    confirmed, unrecognised, contradicted = [], [], {}
    for constant in found:
        is_matrix = len(constant.shape) == 2
        names = (constant.tensor.name,) if is_matrix and constant.tensor is not None else constant.known_as
        said = {
            role.name
            for role in roles.values()
            if (role.kind == MATRIX) == is_matrix and _carries(role.published_names, names)
        }
        if constant.role in said:
            confirmed.append(constant.role)
        elif said and not _carries(roles[constant.role].also_seen, names):
            contradicted[constant.role] = tuple(sorted(said))
        else:
            unrecognised.append(constant.role)
    return NameCheck(tuple(confirmed), tuple(unrecognised), contradicted)


def _carries(patterns: Iterable[str], names: Iterable[str]) -> bool:
    # Fused operators leave a constant with the names of several, joined by semicolons.
    pieces = [piece for name in names for piece in name[:_LONGEST_NAME].split(";")]
    return any(re.search(pattern, piece) for pattern in patterns for piece in pieces)
