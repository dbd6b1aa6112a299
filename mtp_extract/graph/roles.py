"""The role table (``mappings/roles.json``): what every constant of a drafter is called in each layout.

The table is the one place where names are written; patterns and their inverses are derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from mtp_extract.data import load_mapping
from mtp_extract.errors import RoleError, escape
from mtp_extract.graph import FoundRole

__all__ = ["LAYER_SCALAR", "NameCheck", "Role", "check_names", "role_table", "roles_of"]

LAYER_SCALAR = "layer_scalar"
"""Last part of the role that a drafter may lack."""

# Real names have hundreds of characters; the time a pattern takes grows with the square of the length.
_LONGEST_NAME = 1 << 13


@dataclass(frozen=True)
class Role:
    """One role, its layer filled in.

    Attributes:
        name: "pre_projection", "layers.0.q_proj", …
        transformers, litert: tensor name in that layout.
        published_names: regular expressions; one of them is found in the names of Google's published files.
        also_seen: the same for names that exporters borrow from another role; they neither confirm nor contradict.
    """

    name: str
    transformers: str
    litert: str
    published_names: tuple[str, ...]
    also_seen: tuple[str, ...] = ()

    @property
    def per_layer(self) -> bool:
        """Whether every layer has its own."""
        return self.name.startswith("layers.")


@cache
def role_table() -> tuple[Role, ...]:
    """All roles as written in the table, ``{i}`` still standing for the layer."""
    return tuple(
        Role(
            entry["role"],
            entry["transformers"],
            entry["litert"],
            tuple(entry["published_names"]),
            tuple(entry.get("also_seen", ())),
        )
        for entry in load_mapping("roles")["roles"]
    )


def roles_of(num_layers: int) -> tuple[Role, ...]:
    """Every role of a drafter with ``num_layers`` layers, in the order in which tensors are written."""
    table = role_table()
    first = next(i for i, role in enumerate(table) if role.per_layer)
    last = max(i for i, role in enumerate(table) if role.per_layer)
    layers = (_fill(role, layer) for layer in range(num_layers) for role in table[first : last + 1])
    return (*table[:first], *layers, *table[last + 1 :])


def _fill(role: Role, layer: int) -> Role:
    def fill(text: str) -> str:
        return text.replace("{i}", str(layer))

    return Role(
        fill(role.name),
        fill(role.transformers),
        fill(role.litert),
        tuple(fill(p) for p in role.published_names),
        role.also_seen,
    )


@dataclass(frozen=True)
class NameCheck:
    """How the names in the file compare with the roles found in the graph."""

    confirmed: tuple[str, ...]
    unrecognised: tuple[str, ...]


def check_names(found: Iterable[FoundRole], num_layers: int) -> NameCheck:
    """Compare every role with the names that its constant, or the result of its op, carries.

    Raises:
        RoleError: names that are known for one role are on the constant of another.
    """
    roles = {role.name: role for role in roles_of(num_layers)}
    confirmed, unrecognised = [], []
    for constant in found:
        is_matrix = len(constant.shape) == 2
        names = (constant.tensor.name,) if is_matrix and constant.tensor is not None else constant.known_as
        said = {
            role.name
            for role in roles.values()
            if _is_matrix(role.name) == is_matrix and _carries(role.published_names, names)
        }
        if constant.role in said:
            confirmed.append(constant.role)
        elif said and not _carries(roles[constant.role].also_seen, names):
            shown = ", ".join(repr(escape(n)) for n in names)
            raise RoleError(
                f"{constant.role}: the graph says so ({constant.why}), but its name {shown} is that of "
                f"{' or '.join(sorted(said))}. One of the two is wrong; no checkpoint is written."
            )
        else:
            unrecognised.append(constant.role)
    return NameCheck(tuple(confirmed), tuple(unrecognised))


def _is_matrix(role: str) -> bool:
    return role.endswith(("_proj", "_projection", "lm_head"))


def _carries(patterns: Iterable[str], names: Iterable[str]) -> bool:
    # Fused operators leave a constant with the names of several, joined by semicolons.
    pieces = [piece for name in names for piece in name[:_LONGEST_NAME].split(";")]
    return any(re.search(pattern, piece) for pattern in patterns for piece in pieces)
