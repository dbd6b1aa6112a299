"""The role table (``mappings/roles.json``): the role of every weight of an architecture, and its name in every format.

Order, kind, shape and names are written only in the table; everything else is derived from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from msgspec import convert

from mtp_extract.data import load_mapping

Shapes = dict["Role", tuple[int, ...]]
"""Roles in order, each with the shape of its tensor."""

GEMMA4_MTP = "gemma4-mtp"
"""The architecture of Gemma 4's multi-token-prediction drafters."""

GEMMA4 = "gemma4"
"""The text model of a Gemma 4 base."""

MATRIX = "matrix"
NORM = "norm"
SCALAR = "scalar"
INDEX = "index"
"""Kinds of weights: a matrix ``[out, in]``, the scales of a norm, one factor, integer indices."""

_LAYERS = "layers."
CENTROIDS, ORDERING = HEAD_ROLES = ("ordered_head.centroids", "ordered_head.token_ordering")
"""The roles of the ordered head."""


@dataclass(frozen=True)
class Role:
    """The role of one weight; in :func:`load_role_table` its names still have ``{i}`` for the layer."""

    name: str  # "pre_projection", "layers.0.q_proj", …
    kind: str  # MATRIX, NORM, SCALAR or INDEX
    shape: tuple[str, ...]  # names of the dimensions, which resolve_shapes resolves
    names: Mapping[str, str] = field(hash=False)  # format → tensor name
    published_names: tuple[str, ...]  # regular expressions for the tensor names in Google's published files
    optional: bool = False  # whether a drafter may lack it
    also_seen: tuple[str, ...] = ()  # names of other roles that exporters use for it; they prove nothing

    @property
    def layer(self) -> int | None:
        """The index of its layer; None for a role outside of the layers."""
        return int(self.name.split(".")[1]) if self.name.startswith(_LAYERS) else None

    @property
    def path(self) -> str:
        """Its name in the state dict of the reference drafter: a module's ``weight``, or a buffer."""
        return f"{self.name}.weight" if self.kind in (MATRIX, NORM) else self.name


@cache
def load_role_table(architecture: str = GEMMA4_MTP) -> tuple[Role, ...]:
    """Return all roles of ``architecture`` as written in the table, with ``{i}`` for the layer."""
    entries = load_mapping("roles")["architectures"][architecture]
    return convert([{**entry, "name": entry["role"]} for entry in entries], tuple[Role, ...])


def list_roles(num_layers: int, *, ordered_head: bool = False, architecture: str = GEMMA4_MTP) -> tuple[Role, ...]:
    """Return every role of a model with ``num_layers`` layers, in the order of execution and of checkpoints."""
    table = [role for role in load_role_table(architecture) if ordered_head or role.name not in HEAD_ROLES]
    # The roles of a layer stand together in the table.
    of_layers = [role for role in table if role.name.startswith(_LAYERS)]
    first = table.index(of_layers[0])
    filled = [_fill_in_layer(role, layer) for layer in range(num_layers) for role in of_layers]
    return (*table[:first], *filled, *table[first + len(of_layers) :])


def _fill_in_layer(role: Role, layer: int) -> Role:
    name, *patterns = (text.replace("{i}", str(layer)) for text in (role.name, *role.published_names))
    names = {format_: name.replace("{i}", str(layer)) for format_, name in role.names.items()}
    return replace(role, name=name, names=names, published_names=tuple(patterns))


def resolve_shapes(roles: Iterable[Role], sizes: Mapping[str, int], num_heads: int, head_dims: Sequence[int]) -> Shapes:
    """Return ``roles``, each with the shape of its tensor.

    Args:
        sizes: sizes of the dimensions that are the same in every layer, by name.
        head_dims: width of a head in each layer: the size of ``head``; ``query`` is ``num_heads`` times as large.
    """
    shapes = Shapes()
    for role in roles:
        width = head_dims[role.layer or 0]
        sizes_here = {**sizes, "head": width, "query": num_heads * width}
        shapes[role] = tuple(sizes_here[dimension] for dimension in role.shape)
    return shapes
