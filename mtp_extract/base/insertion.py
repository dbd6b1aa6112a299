"""A fine-tuned base into a bundle: its codes, scales and floats over those that are there, in every signature.

Signatures share the codes of a matrix and have scales of their own, so that codes are written once and scales as often
as there are signatures. Nothing moves: what has no place of its own is refused, by name. Weights are streamed.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from mtp_extract.base.checkpoint import BaseCheckpoint, read_base
from mtp_extract.base.comparison import Match, check_geometry, matches
from mtp_extract.base.places import BundledBase, Place, find_base, read_again
from mtp_extract.bundle import MODEL_TYPE, Opened, open_bundle
from mtp_extract.checkpoint.constant import constant_of
from mtp_extract.checkpoint.stored import common_dtype
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, few
from mtp_extract.insert.decision import KEPT, REQUANTIZED, Content, Decision, decide, require_ones, table_of
from mtp_extract.insert.placing import Site, new_tensors, pieces_of
from mtp_extract.insert.plan import InsertionPlan, check_written
from mtp_extract.io.laid import copied
from mtp_extract.io.place import PathLike, files_of
from mtp_extract.io.source import Progress, counter
from mtp_extract.io.threads import Job, Turns, on_all_cores


@contextmanager
def planned_base_insertion(
    directory: str | os.PathLike[str],
    bundle: str | os.PathLike[str],
    progress: Progress = lambda done, total: None,
) -> Iterator[InsertionPlan]:
    """Plan to put the base in ``directory`` into ``bundle``, which stays as it is; ``progress`` is of its weights.

    Raises:
        CheckpointError: the directory is no complete checkpoint of a Gemma 4 base.
        PairError: it is of another geometry than the bundle's base.
        UnsupportedError: a weight has no place of its own in the bundle.
        RoleError: the bundle's graphs cannot be read.
    """
    checkpoint = read_base(Path(directory))
    if checkpoint.unknown:
        raise CheckpointError(
            f"{escape(checkpoint.directory)}: {len(checkpoint.unknown)} tensors play no role in Gemma 4's text model: "
            f"{few(checkpoint.unknown)}. They cannot be put into a bundle."
        )
    with open_bundle(bundle) as opened:
        yield _plan((bundle, *files_of(directory)), opened, find_base(opened), checkpoint, progress)


def _plan(
    inputs: tuple[PathLike, ...], opened: Opened, base: BundledBase, checkpoint: BaseCheckpoint, progress: Progress
) -> InsertionPlan:
    check_geometry(base, checkpoint)
    decided = _decide(list(matches(base, checkpoint)), progress)
    sites = [Site(place.model, place.found, decision) for place, decision in chain(*decided.values())]
    _require_places(sites)
    layout, pieces = copied(opened.source, 0, opened.source.size), pieces_of(sites)
    notes = []
    if pieces and any(site.found.input is not None for site in sites):
        notes.append("Activations are quantized statically, with scales that were calibrated for the old weights.")
    if pieces and any(section.model_type == MODEL_TYPE for section in opened.sections):
        notes.append("The drafter was made for the base that was there: its drafts may be accepted less often.")

    def verify(path: Path) -> None:
        # Its graphs are the same byte for byte, and have their constants where they were.
        with open_bundle(path) as new:
            found: dict[object, tuple[Weight, Decision]] = {}
            every = list(chain(*decided.values()))
            for place, (_, decision) in zip(read_again((place for place, _ in every), new), every, strict=True):
                # What signatures share is compared once.
                found.setdefault((decision.role, place.key, id(decision)), (place.stored, decision))
            check_written(path, found.values())

    return InsertionPlan(
        name=opened.source.name,
        decisions={
            role: tuple({id(decision): decision for _, decision in each}.values()) for role, each in decided.items()
        },
        layout=layout,
        pieces=tuple(pieces),
        notes=tuple(notes),
        _source=opened.source,
        _inputs=inputs,
        _verify=verify,
        of_base=True,
    )


def _decide(found: Sequence[Match], progress: Progress) -> dict[str, list[tuple[Place, Decision]]]:
    """What becomes of each role in each place that has a constant for it: one decision for those that hold the same.

    Raises:
        CheckpointError: the checkpoint lacks one.
        UnsupportedError: one is not stored, and would have to be.
    """
    keyed: dict[str, list[tuple[Place, object]]] = {}
    jobs: dict[object, Job[Decision]] = {}
    tick = counter(progress, total := sum(match.length for match in found))
    for match in found:
        weight, places = _required(match)
        dtype = common_dtype([weight])
        # A graph does not multiply by what was 1 when it was exported.
        if len(places) < max(len(match.places), 1):
            require_ones(match.role, match.shape, weight, dtype)
        keyed[match.role] = [(place, (match.role, place.key)) for place in places]
        for place, key in keyed[match.role]:
            if key not in jobs:
                part = place.part_of(weight)
                done = partial(tick, match.length // len(places))
                deciding = _decided(match.role, place, part, dtype, done)
                jobs[key] = Job(deciding, math.prod(part.shape), table_of(part))
    decisions = dict(zip(jobs, on_all_cores(jobs.values()), strict=True))
    # Of places that hold the same, one was decided.
    tick(total)
    return {role: [(place, decisions[key]) for place, key in each] for role, each in keyed.items()}


def _required(match: Match) -> tuple[Weight, list[Place]]:
    """The weight of a role, and the places whose constants it did not become part of.

    Raises:
        CheckpointError, UnsupportedError: as :func:`_decide`.
    """
    if match.weight is None:
        raise CheckpointError(f"{match.role}: the bundle's base has this weight, and {match.problem}.")
    if match.problem:
        raise UnsupportedError(f"{match.role}: {match.problem}. Give a checkpoint of the same geometry.")
    return match.weight, [place for place in match.places if place.found.tensor is not None]


def _decided(role: str, place: Place, part: Weight, dtype: str, done: Callable[[], None]) -> Turns[Decision]:
    stored = constant_of(place.stored)
    assert stored is not None
    decision, old = (yield from decide(role, stored, part, dtype)), Content.of(stored.source)
    if decision.how == REQUANTIZED and (yield from decision.content.like(old)):
        decision = replace(decision, how=KEPT, content=old)
    done()
    return decision


def _require_places(sites: Sequence[Site]) -> None:
    """Check that everything can be written where it is.

    Raises:
        UnsupportedError: what is to change has no place of its own.
    """
    by_model: dict[int, list[Site]] = defaultdict(list)
    for site in sites:
        by_model[id(site.model)].append(site)
    for own in by_model.values():
        for _, why in new_tensors(own[0].model, own):
            raise UnsupportedError(f"{why}. A base's weights get no other places: keep equal what is stored once.")
