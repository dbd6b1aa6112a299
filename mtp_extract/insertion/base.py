"""A bundle's base: where every signature stores each role, and whether a checkpoint or a drafter fits it.

Signatures share the codes of a matrix and have scales of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, replace
from functools import partial
from typing import NamedTuple

from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint.documents import differences
from mtp_extract.errors import PairError, RoleError, UnsupportedError, escape
from mtp_extract.graph.base import BaseWalk, match_base, read_first, walk_base, walk_table
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED
from mtp_extract.graph.flat import FlatGraph, flatten
from mtp_extract.insertion.base_checkpoint import BaseCheckpoint
from mtp_extract.insertion.slots import Location
from mtp_extract.litertlm.container import TFLITE_MODEL, Section
from mtp_extract.litertlm.flatbuffer import Budget
from mtp_extract.litertlm.tflite import Signature, Tensor, TfliteModel

_DECODER = "prefill_decode"
_TABLES = {"embedder": "embed_tokens", "per_layer_embedder": "embed_tokens_per_layer"}
# The base of E2B has 976 subgraphs, and 35 layers in each of its signatures.
_BUDGET = 40_000_000
_MOST_NODES = 200_000
"""Operators of all signatures, their composites opened: some ten times those of E2B."""


# What exporters compute constants in, and configurations round them to.
_CONFIG_TOLERANCE = 1e-5


class BundledBase(NamedTuple):
    """A bundle's base."""

    opened: Opened
    walk: BaseWalk  # of the signature with most layers: what the decoder computes with
    places: Mapping[str, tuple[Location, ...]]  # role → wherever it is stored, one entry a signature (and a table)


def find_base(opened: Opened) -> BundledBase:
    """Walk every signature of the base's sections.

    Raises:
        UnsupportedError: the bundle lacks one of them, or computes what Gemma 4 does not.
        RoleError: a role is missing in a graph, or a constant left over.
        FormatError: a section is damaged.
    """
    sections = _find_model_sections(opened)
    elements, nodes = Budget(_BUDGET), Budget(_MOST_NODES)
    model = opened.model(sections[_DECODER], elements)
    decoder = _read_signature(model, read_first(model), walk_base, nodes)
    located = [*_locate_decoder_roles(model, decoder, nodes)]
    for kind, role in _TABLES.items():
        if kind in sections:
            later = decoder.per_layer_factor if kind == "per_layer_embedder" else 1.0
            located += _locate_tables(opened.model(sections[kind], elements), role, later, nodes)

    places = defaultdict[str, tuple[Location, ...]](tuple)
    for role, location in located:
        places[role] += (location,)
    for role in ("lm_head", "embed_tokens"):
        if role not in places:
            raise RoleError(f"{opened.source.name}: no signature of its base reads a {role}.")
    return BundledBase(opened, decoder, places)


def _find_model_sections(opened: Opened) -> dict[str, Section]:
    """The sections with models, by what they hold."""
    sections = dict[str, Section]()
    for section in opened.sections:
        if section.data_type != TFLITE_MODEL:
            continue
        kind = section.model_type or _DECODER
        if kind in sections and kind in (_DECODER, *_TABLES):
            raise UnsupportedError(
                f"{opened.source.name}: expected one section {kind}, found several, of which the runtime reads one. "
                "Take the bundle as it was published."
            )
        sections[kind] = section
    for needed in (_DECODER, "embedder"):
        if needed not in sections:
            listed = ", ".join(escape(k) for k in sections) or "none"
            raise UnsupportedError(
                f"{opened.source.name}: expected a section {needed}, where a base's weights are, found {listed}."
            )
    return sections


def _locate_decoder_roles(model: TfliteModel, first: BaseWalk, nodes: Budget) -> Iterator[tuple[str, Location]]:
    """Every role of every signature of the decoder, of which ``first`` says most."""
    for signature in _list_distinct_signatures(model):
        is_first = signature.subgraph == read_first(model).subgraph
        walk = first if is_first else _read_signature(model, signature, partial(match_base, decoder=first), nodes)
        for placed in walk.roles:
            # Without the graph, which is large, and of which nothing more is asked.
            yield placed.role, Location(model, replace(placed, result=None))


def _locate_tables(model: TfliteModel, role: str, later: float, nodes: Budget) -> Iterator[tuple[str, Location]]:
    """The tables of an embedder, in every signature; several are columns of ``role`` side by side. The decoder
    multiplies what they give by ``later``."""
    walk = partial(walk_table, role=role, later=later)
    for signature in _list_distinct_signatures(model):
        at = 0
        for placed in _read_signature(model, signature, walk, nodes).roles:
            columns = None if placed.role == role else (at, at + placed.shape[1])
            yield role, Location(model, replace(placed, role=role, result=None), columns)
            at += placed.shape[1]


def _list_distinct_signatures(model: TfliteModel) -> list[Signature]:
    """The signatures in their order; of those of one graph, which read one set of constants, the first."""
    firsts = dict[int, Signature]()
    for signature in model.signatures:
        firsts.setdefault(signature.subgraph, signature)
    return list(firsts.values())


def _read_signature(
    model: TfliteModel, signature: Signature, walk: Callable[[FlatGraph], BaseWalk], nodes: Budget
) -> BaseWalk:
    """The roles of one signature, which errors name; ``nodes`` are how many operators there may be."""
    try:
        graph = flatten(model, signature, nodes.elements)
        nodes.elements -= len(graph.nodes)
        return walk(graph)
    except (RoleError, UnsupportedError) as error:
        raise type(error)(f"{model.region.source.name}: signature {escape(signature.key)!r}: {error}") from error


def check_base(checkpoint: BaseCheckpoint, base: BundledBase) -> None:
    """Raise PairError, which lists what differs, unless both are of one shape, and compute norms and logits alike."""
    walk = base.walk
    graph = {
        "num_hidden_layers": walk.layers,
        "hidden_size": walk.width,
        "vocab_size": base.places["embed_tokens"][0].found.shape[0],
        "rms_norm_eps": walk.rms_norm_eps,
        "final_logit_softcapping": walk.soft_cap,
    }
    stated = {key: checkpoint.text.get(key, value) for key, value in graph.items()}
    if wrong := describe_differences(graph, stated, _CONFIG_TOLERANCE):
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{wrong}. Give the base that the bundle is of, or one tuned from it."
        )


def describe_differences(expected: Mapping[str, object], actual: Mapping[str, object], close: float) -> str:
    """What differs, floats by more than the share ``close``; empty if nothing does."""
    different = map(astuple, differences(expected, actual, close))
    return "; ".join(f"{place} {escape(value)} instead of {escape(wanted)}" for place, wanted, value in different)


def find_misfits(drafter: Shard) -> Iterator[str]:
    """Why the base in the bundle of ``drafter`` could not run it; none where it can, or there is none to ask.

    LiteRT-LM asks for the same: without ``verify`` it fails, with caches of other names it aborts, with others sizes
    the drafter's graph cannot be invoked.
    """
    sections = [s for s in drafter.opened.sections if s.data_type == TFLITE_MODEL and s.model_type == _DECODER]
    if not sections:
        return
    model = drafter.opened.model(sections[0])
    signatures = [s for key in ("decode", "verify") if (s := model.signature(key)) and ACTIVATIONS in s.outputs]
    if len(signatures) < 2:
        yield f"the base has no signatures decode and verify that both have an output {ACTIVATIONS!r}"
        return
    outputs = {name: model.tensor(signatures[0].subgraph, index) for name, index in signatures[0].outputs.items()}
    wanted = {name: _describe_tensor(cache) for name, cache in drafter.walk.caches.items()}
    forms = {name: _describe_tensor(outputs[name]) if name in outputs else "missing" for name in wanted}
    for name, output in ((ACTIVATIONS, PROJECTED), (LOGITS, LOGITS)):
        if name in outputs:
            drafter_shape, theirs = drafter.graph.outputs[output].tensor.shape, outputs[name].shape
            wanted[name], forms[name] = (f"{next(reversed(shape), 0)} wide" for shape in (drafter_shape, theirs))
    for name, form in wanted.items():
        if forms[name] != form:
            yield f"{escape(name)} is {forms[name]} in the base and {form} in the drafter"


def _describe_tensor(tensor: Tensor) -> str:
    return f"{tensor.type_name} {list(tensor.shape)}"
