"""The role table (``mappings/roles.json``): what every weight of an architecture is, and its name in every format.

The table is the one place where order, kind, shape and names are written; everything else is derived from it.
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
"""Kinds of weights: ``[out, in]``, a vector that scales a normed vector, a factor, integers that are no numbers."""

_LAYERS = "layers."
CENTROIDS, ORDERING = HEAD_ROLES = ("ordered_head.centroids", "ordered_head.token_ordering")
"""Of the ordered head."""


@dataclass(frozen=True)
class Role:
    """One role; with its layer filled in, unless it comes from :func:`role_table`."""

    name: str  # "pre_projection", "layers.0.q_proj", …
    kind: str  # MATRIX, NORM, SCALAR or INDEX
    shape: tuple[str, ...]  # dimensions by name, as shapes_of resolves them
    names: Mapping[str, str] = field(hash=False)  # format → name of the tensor
    published_names: tuple[str, ...]  # regular expressions; one is found in the names of Google's published files
    optional: bool = False  # whether a model may lack it
    also_seen: tuple[str, ...] = ()  # names that exporters borrow from another; they neither confirm nor contradict

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None for a role of the whole drafter."""
        return int(self.name.split(".")[1]) if self.name.startswith(_LAYERS) else None

    @property
    def path(self) -> str:
        """Where the reference drafter keeps it: its name, as a module's ``weight`` unless it is a plain buffer."""
        return f"{self.name}.weight" if self.kind in (MATRIX, NORM) else self.name


@cache
def role_table(architecture: str = GEMMA4_MTP) -> tuple[Role, ...]:
    """All roles of ``architecture`` as written in the table, ``{i}`` still standing for the layer."""
    entries = load_mapping("roles")["architectures"][architecture]
    return convert([{**entry, "name": entry["role"]} for entry in entries], tuple[Role, ...])


def roles_of(num_layers: int, *, ordered_head: bool = False, architecture: str = GEMMA4_MTP) -> tuple[Role, ...]:
    """Every role of a model with ``num_layers`` layers, in the order of execution, which is that of writing."""
    table = [role for role in role_table(architecture) if ordered_head or role.name not in HEAD_ROLES]
    # Those of a layer stand together.
    of_layers = [role for role in table if role.name.startswith(_LAYERS)]
    first = table.index(of_layers[0])
    filled = [_fill_in_layer(role, layer) for layer in range(num_layers) for role in of_layers]
    return (*table[:first], *filled, *table[first + len(of_layers) :])


def _fill_in_layer(role: Role, layer: int) -> Role:
    """A ``role`` of the table, with the number of its layer for ``{i}``."""
    name, *patterns = (text.replace("{i}", str(layer)) for text in (role.name, *role.published_names))
    names = {format_: name.replace("{i}", str(layer)) for format_, name in role.names.items()}
    return replace(role, name=name, names=names, published_names=tuple(patterns))


def with_shapes(roles: Iterable[Role], sizes: Mapping[str, int], num_heads: int, head_dims: Sequence[int]) -> Shapes:
    """``roles``, each with the shape of its tensor.

    Args:
        sizes: of the dimensions that are the same in every layer, by name.
        head_dims: of each layer; a layer's ``head`` is this wide, and its ``query`` as wide as all its heads.
    """
    shapes = Shapes()
    for role in roles:
        width = head_dims[role.layer or 0]
        sizes_here = {**sizes, "head": width, "query": num_heads * width}
        shapes[role] = tuple(sizes_here[dimension] for dimension in role.shape)
    return shapes
