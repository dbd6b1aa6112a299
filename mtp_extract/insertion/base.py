"""The base in a bundle: where every signature of its sections stores each role, and putting a fine-tuned one there.

Signatures share the codes of a matrix and have scales of their own, so that codes are written once and scales as often
as there are signatures. Weights are streamed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mtp_extract.bundle import MODEL_TYPE, Opened, open_bundle
from mtp_extract.checkpoint.stored import Stored, common_dtype
from mtp_extract.checkpoint.weight import filled
from mtp_extract.errors import CheckpointError, PairError, RoleError, UnsupportedError, escape, few
from mtp_extract.graph.base import BaseWalk, match_base, read_first, walk_base, walk_table
from mtp_extract.graph.flat import FlatGraph, flatten
from mtp_extract.insertion.base_checkpoint import BaseCheckpoint
from mtp_extract.insertion.encoding import check_written, encode
from mtp_extract.insertion.fit import differences
from mtp_extract.insertion.plan import InsertionPlan, overlays
from mtp_extract.insertion.slots import Place, Slot, slots_of
from mtp_extract.io.place import PathLike
from mtp_extract.io.source import Progress, counter
from mtp_extract.litertlm.container import TFLITE_MODEL, Section
from mtp_extract.litertlm.flatbuffer import Budget
from mtp_extract.litertlm.tflite import Signature, TfliteModel

_DECODER = "prefill_decode"
_TABLES = {"embedder": "embed_tokens", "per_layer_embedder": "embed_tokens_per_layer"}
_LAYER_SCALAR = ".layer_scalar"
# The base of E2B has 976 subgraphs, and 35 layers in each of its signatures.
_BUDGET = 40_000_000
_MOST_NODES = 100_000
# What exporters compute constants in, and configurations round them to.
_NUMBERS_ALIKE = 1e-5


class BundledBase(NamedTuple):
    """A bundle's base."""

    opened: Opened
    walk: BaseWalk  # of the signature with most layers: what the decoder computes with
    places: Mapping[str, tuple[Place, ...]]  # role → wherever it is stored, one entry a signature (and a table)


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
    budget, found = Budget(_BUDGET), list[Place]()
    section = sections[_DECODER]
    model = opened.model(section, budget)
    first = read_first(model)
    decoder = _walk(section, model, first, walk_base)
    for signature in model.signatures:
        by_bytes = partial(match_base, known=decoder)
        walked = decoder if signature is first else _walk(section, model, signature, by_bytes)
        # Without the graph, which is large, and of which nothing more is asked.
        found += [Place(signature.key, model, replace(role, result=None)) for role in walked.roles]
    for section, table in ((sections[kind], table) for kind, table in _TABLES.items() if kind in sections):
        model = opened.model(section, budget)
        for signature in model.signatures:
            walked = _walk(section, model, signature, partial(walk_table, role=table))
            found += _tables(signature.key, model, walked, table)
    places = defaultdict[str, list[Place]](list)
    for place in found:
        places[place.found.role].append(place)
    for role in ("lm_head", "embed_tokens"):
        if role not in places:
            raise RoleError(f"{opened.source.name}: no signature of its base reads a {role}.")
    return BundledBase(opened, decoder, {role: tuple(own) for role, own in places.items()})


def _walk(
    section: Section, model: TfliteModel, signature: Signature, walk: Callable[[FlatGraph], BaseWalk]
) -> BaseWalk:
    """The roles of one signature."""
    try:
        return walk(flatten(model, signature, _MOST_NODES))
    except (RoleError, UnsupportedError) as error:
        # Which of many signatures: the walk itself does not know.
        where = f"{model.region.source.name}: {section.label}, signature {escape(signature.key)!r}"
        raise type(error)(f"{where}: {error}") from error


def _tables(signature: str, model: TfliteModel, walked: BaseWalk, role: str) -> Iterator[Place]:
    """The table of an embedder, or its tables, which are columns of one role side by side."""
    at = 0
    for found in walked.roles:
        columns = None if found.role == role else (at, at + found.shape[1])
        yield Place(signature, model, replace(found, role=role, result=None), columns)
        at += found.shape[1]


def check_geometry(base: BundledBase, checkpoint: BaseCheckpoint) -> None:
    """Whether the two are of one shape, and compute norms and logits alike.

    Raises:
        PairError: they are not; the message lists what differs.
    """
    expected = {
        "num_hidden_layers": base.walk.layers,
        "hidden_size": base.walk.width,
        "vocab_size": base.places["embed_tokens"][0].found.shape[0],
        "rms_norm_eps": base.walk.rms_norm_eps,
        "final_logit_softcapping": base.walk.soft_cap,
    }
    found = ((key, value, checkpoint.text.get(key, value)) for key, value in expected.items())
    if wrong := differences(found, _NUMBERS_ALIKE):
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{'; '.join(wrong)}. Give the base that the bundle is of, or one tuned from it."
        )


class Match(NamedTuple):
    """A role of a base: its weight in the checkpoint, and where the bundle holds it."""

    role: str
    name: str | None  # of its tensor in the checkpoint; None where the checkpoint has none
    shape: tuple[int, ...]  # of the weight in the checkpoint, or else in the bundle
    places: tuple[Place, ...]
    slots: list[Slot]  # one for every constant that holds it, or columns of it; none where there is a problem
    problem: str  # why the two cannot be compared; empty where they can


def matches(base: BundledBase, checkpoint: BaseCheckpoint) -> Iterator[Match]:
    """Every role of either. A head that the checkpoint ties is its embedding table; a scalar that it lacks is 1."""
    for role in dict.fromkeys((*checkpoint.weights, *base.places)):
        own = "embed_tokens" if role == "lm_head" and role not in checkpoint.weights else role
        weight, places = checkpoint.weights.get(own), base.places.get(role, ())
        name = weight.name if isinstance(weight, Stored) else None
        if weight is None and role.endswith(_LAYER_SCALAR):
            weight = filled((1,))
        # No graph multiplies by a layer scalar of 1, and several tables are one weight.
        shape = places[0].found.shape if places else (1,)
        if ends := [place.columns[1] for place in places if place.columns is not None]:
            shape = (shape[0], max(ends))
        problem, slots = "", list[Slot]()
        if weight is None:
            problem = "the checkpoint has no such tensor"
        elif not places and not role.endswith(_LAYER_SCALAR):
            problem = "no graph of the bundle reads it"
        elif shape != weight.shape:
            problem = f"the checkpoint's is {list(weight.shape)}, the bundle's {list(shape)}"
        else:
            slots = slots_of(role, places, weight, common_dtype([weight]))
        yield Match(role, name, weight.shape if weight else shape, places, slots, problem)


def plan_base(
    checkpoint: BaseCheckpoint, opened: Opened, inputs: tuple[PathLike | None, ...], progress: Progress
) -> InsertionPlan:
    """Plan to put a base into the bundle ``opened``.

    Raises:
        CheckpointError: it has tensors that no bundle holds.
        PairError: it is of another geometry than the bundle's base.
        UnsupportedError: a weight has no place of its own in the bundle.
        RoleError: the bundle's graphs cannot be read.
    """
    if checkpoint.unknown:
        raise CheckpointError(
            f"{escape(checkpoint.directory)}: {len(checkpoint.unknown)} tensors play no role in Gemma 4's text model: "
            f"{few(checkpoint.unknown)}. They cannot be put into a bundle."
        )
    slots = _slots(opened, checkpoint)
    encodings = encode(slots, counter(progress, sum(math.prod(slot.new.shape) for slot in slots)))
    written, notes = tuple(overlays(encoding for own in encodings.values() for encoding in own)), []
    if written and any(place.found.input is not None for slot in slots for place in slot.places):
        notes.append("Activations are quantized statically, with scales that were calibrated for the old weights.")
    if written and any(section.model_type == MODEL_TYPE for section in opened.sections):
        notes.append("The drafter was made for the base that was there: its drafts may be accepted less often.")

    def check(path: Path) -> None:
        with open_bundle(path) as new:
            check_written(path, _slots(new, checkpoint))

    return InsertionPlan(opened.source, encodings, written, tuple(notes), inputs, check, of_base=True)


def _slots(opened: Opened, checkpoint: BaseCheckpoint) -> list[Slot]:
    """Every role of the base in ``opened``, with its weight in ``checkpoint``.

    Raises:
        PairError: one of the two lacks it, or has it in another shape.
    """
    base, found = find_base(opened), list[Slot]()
    check_geometry(base, checkpoint)
    for match in matches(base, checkpoint):
        if match.problem:
            raise PairError(f"{match.role}: {match.problem}. Give a checkpoint of the base that the bundle holds.")
        found += match.slots
    return found
