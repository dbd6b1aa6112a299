"""The base in a bundle: every role of every signature of its sections, and where each is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from xxhash import xxh3_128_hexdigest

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.constant import Constant, constant_of
from mtp_extract.checkpoint.stored import columns_of, stored_of
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph.base import BaseWalk, match_base, read_first, walk_base, walk_table
from mtp_extract.graph.flat import flatten
from mtp_extract.graph.roles import FoundRole
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
    """A constant that plays a role in one signature."""

    section: Section
    signature: str
    model: TfliteModel
    found: FoundRole
    columns: tuple[int, int] | None = None
    """Which columns ``[begin, end)`` of the role's weight it holds; None for all."""

    @property
    def stored(self) -> Weight:
        """What it holds; ones where the converter folded them away."""
        if self.found.tensor is None:
            return filled(self.found.shape)
        return Constant.of(self.model, self.found).weight

    @property
    def key(self) -> object:
        """Equal for places that hold the same columns in the same bytes, with the same scales and factors."""
        stored = constant_of(self.stored)
        if stored is None:
            return self.columns
        # Summed, since a vocabulary has a scale a row and a table a layer.
        scales = stored.source.scale, stored.source.zero_point
        sums = (xxh3_128_hexdigest(np.ascontiguousarray(a).data) for a in scales)
        where = stored.source.location.begin
        return self.columns, where, *sums, stored.factor, stored.transposed

    def part_of(self, weight: Weight) -> Weight:
        """The columns of ``weight`` that it holds."""
        if self.columns is None or stored_of(weight) is None:
            return weight
        return columns_of(weight, *self.columns)


def grouped(places: Iterable[Place]) -> list[tuple[Place, ...]]:
    """``places``, those together that hold the same: signatures share most of what they read."""
    found: dict[object, list[Place]] = defaultdict(list)
    for place in places:
        found[place.key].append(place)
    return [tuple(group) for group in found.values()]


@dataclass(frozen=True)
class BundledBase:
    """A bundle's base."""

    opened: Opened
    walk: BaseWalk
    """Of the signature with most layers: what the decoder computes with."""
    places: Mapping[str, tuple[Place, ...]]
    """Role → wherever it is stored, one entry a signature (and a table)."""


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
    walks: list[BaseWalk] = []
    budget = Budget(_BUDGET)
    for kind in (_DECODER, *_TABLES):
        if kind not in sections:
            continue
        section = sections[kind]
        model = opened.model(section, budget)
        first = read_first(model) if kind == _DECODER else None
        known = None if first is None else _walk(section, model, first, kind)
        for signature in model.signatures:
            walked = known if signature is first else None
            walked = walked or _walk(section, model, signature, kind, known)
            walks.append(walked)
            for place in _placed(section, signature.key, model, walked, kind):
                places[place.found.role].append(place)
    for role in ("lm_head", "embed_tokens"):
        if role not in places:
            raise RoleError(f"{opened.source.name}: no signature of its base reads a {role}.")
    full = max(walks, key=lambda walked: walked.layers)
    return BundledBase(opened, full, MappingProxyType({role: tuple(found) for role, found in places.items()}))


def read_again(places: Iterable[Place], opened: Opened) -> Iterator[Place]:
    """``places`` of another file as they are in ``opened``, whose sections and graphs are the same byte for byte."""
    models: dict[int, TfliteModel] = {}
    budget = Budget(_BUDGET)
    for place in places:
        if (index := place.section.index) not in models:
            models[index] = opened.model(place.section, budget)
        model, tensor = models[index], place.found.tensor
        again = tensor and model.tensor(tensor.subgraph, tensor.index)
        yield replace(place, model=model, found=replace(place.found, tensor=again))


def _walk(
    section: Section, model: TfliteModel, signature: Signature, kind: str, known: BaseWalk | None = None
) -> BaseWalk:
    """The roles of one signature; ``known`` are those of the decoder's signature that says most."""
    try:
        graph = flatten(model, signature, _MOST_NODES)
        if kind != _DECODER:
            return walk_table(graph, _TABLES[kind])
        return walk_base(graph) if known is None else match_base(graph, known)
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
