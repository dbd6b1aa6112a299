"""The base in a bundle: every role of every signature of its sections, and where each is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mtp_extract.bundle import Opened
from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph.base import BaseWalk, walk_base, walk_table
from mtp_extract.graph.flat import flatten
from mtp_extract.graph.ledger import FoundRole
from mtp_extract.litertlm.container import TFLITE_MODEL, Section
from mtp_extract.litertlm.flatbuffer import Budget
from mtp_extract.litertlm.tflite import Signature, TfliteModel

_DECODER = "prefill_decode"
_TABLES = {"embedder": "embed_tokens", "per_layer_embedder": "embed_tokens_per_layer"}
# The base of E2B has 976 subgraphs, and 35 layers in each of its signatures.
_BUDGET = 40_000_000
_MOST_NODES = 100_000


@dataclass(frozen=True)
class Place:
    """A constant that plays a role in one signature.

    Attributes:
        section, signature: where.
        columns: which columns of the role's weight it holds; None for all.
    """

    section: Section
    signature: str
    model: TfliteModel
    found: FoundRole
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class BundledBase:
    """A bundle's base.

    Attributes:
        layers, width, soft_cap, rms_norm_eps: as its decoder computes.
        vocab_size: rows of its embedding table.
        places: role → wherever it is stored, one entry a signature (and a table).
        signatures: every signature that was walked, by section.
    """

    opened: Opened
    layers: int
    width: int
    vocab_size: int
    soft_cap: float | None
    rms_norm_eps: float | None
    places: Mapping[str, tuple[Place, ...]]
    signatures: Mapping[str, tuple[str, ...]]


def find_base(opened: Opened) -> BundledBase:
    """Walk every signature of the base's sections.

    Raises:
        UnsupportedError: the bundle lacks one of them, or computes what Gemma 4 does not.
        RoleError: a role is missing in a graph, or a constant left over.
        FormatError: a section is damaged.
    """
    sections = {s.model_type or _DECODER: s for s in opened.sections if s.data_type == TFLITE_MODEL}
    for needed in (_DECODER, "embedder"):
        if needed not in sections:
            listed = ", ".join(escape(k) for k in sections) or "none"
            raise UnsupportedError(
                f"{opened.source.name}: expected a section {needed}, where a base's weights are, found {listed}."
            )
    places: dict[str, list[Place]] = defaultdict(list)
    signatures: dict[str, tuple[str, ...]] = {}
    walks: list[BaseWalk] = []
    budget = Budget(_BUDGET)
    for kind in (_DECODER, *_TABLES):
        if kind not in sections:
            continue
        section = sections[kind]
        model = opened.model(section, budget)
        signatures[kind] = tuple(s.key for s in model.signatures)
        for signature in model.signatures:
            walked = _walk(section, model, signature, kind)
            walks.append(walked)
            for place in _placed(section, signature.key, model, walked, kind):
                places[place.found.role].append(place)
    for role in ("lm_head", "embed_tokens"):
        if role not in places:
            raise RoleError(f"{opened.source.name}: no signature of its base reads a {role}.")
    full = max(walks, key=lambda walked: walked.layers)
    return BundledBase(
        opened,
        full.layers,
        full.width,
        places["embed_tokens"][0].found.shape[0],
        full.soft_cap,
        full.rms_norm_eps,
        MappingProxyType({role: tuple(found) for role, found in places.items()}),
        MappingProxyType(signatures),
    )


def _walk(section: Section, model: TfliteModel, signature: Signature, kind: str) -> BaseWalk:
    try:
        graph = flatten(model, signature, _MOST_NODES)
        return walk_base(graph) if kind == _DECODER else walk_table(graph, _TABLES[kind])
    except (RoleError, UnsupportedError) as error:
        # Which of many signatures: the walk itself does not know.
        where = f"{model.region.source.name}: {section.label}, signature {escape(signature.key)!r}"
        raise type(error)(f"{where}: {error}") from error


def _placed(section: Section, signature: str, model: TfliteModel, walked: BaseWalk, kind: str) -> Iterator[Place]:
    at = 0
    for found in walked.roles:
        if kind in _TABLES and found.role != _TABLES[kind]:
            # One table of several: side by side they are the role's.
            columns = at, at + found.shape[1]
            at = columns[1]
            yield Place(section, signature, model, replace(found, role=_TABLES[kind]), columns)
        else:
            yield Place(section, signature, model, found)
