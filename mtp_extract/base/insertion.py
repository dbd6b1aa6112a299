"""A fine-tuned base into a bundle: its codes, scales and floats over those that are there, in every signature.

Signatures share the codes of a matrix and have scales of their own, so that codes are written once and scales as often
as there are signatures. Nothing moves: what has no place of its own is refused, by name. Weights are streamed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from mtp_extract.base.checkpoint import BaseCheckpoint, read_base
from mtp_extract.base.comparison import Match, check_geometry, matches
from mtp_extract.base.places import BundledBase, Place, find_base
from mtp_extract.bundle import MODEL_TYPE, Opened, open_bundle
from mtp_extract.checkpoint.lazy import ConstantTensor
from mtp_extract.checkpoint.stored import StoredWeight, common_dtype
from mtp_extract.checkpoint.tensor_file import cores
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, few
from mtp_extract.insert.decision import KEPT, REQUANTIZED, Content, Decision, decide, require_ones
from mtp_extract.insert.placing import Site, new_tensors, pieces_of
from mtp_extract.insert.plan import InsertionPlan, check_written
from mtp_extract.io.place import PathLike, files_of
from mtp_extract.io.source import Progress, counter
from mtp_extract.litertlm.writer import copied


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
    found = list(matches(base, checkpoint))
    with ThreadPoolExecutor(cores()) as pool:
        tick, decided = counter(progress, sum(match.length for match in found)), {}
        for match, each in zip(found, pool.map(_decided, found), strict=True):
            decided[match.role] = each
            tick(match.length)
    sites = [Site(place.model, place.found, decision) for place, decision in chain(*decided.values())]
    _require_places(sites)
    pieces = pieces_of(sites)
    notes = []
    if pieces and any(site.found.input is not None for site in sites):
        notes.append("Activations are quantized statically, with scales that were calibrated for the old weights.")
    if pieces and any(section.model_type == MODEL_TYPE for section in opened.sections):
        notes.append("The drafter was made for the base that was there: its drafts may be accepted less often.")

    def verify(path: Path) -> None:
        with open_bundle(path) as new:
            written = find_base(new).places
            found: dict[object, tuple[Place, Decision]] = {}
            for role, each in decided.items():
                for place, (_, decision) in zip(_with_constant(written.get(role, ())), each, strict=True):
                    # What signatures share is compared once.
                    found.setdefault((role, place.key, id(decision)), (place, decision))
            check_written(path, ((place.stored, decision) for place, decision in found.values()))

    return InsertionPlan(
        name=opened.source.name,
        decisions={
            role: tuple({id(decision): decision for _, decision in each}.values()) for role, each in decided.items()
        },
        layout=copied(opened.source, 0, opened.source.size),
        pieces=tuple(pieces),
        notes=tuple(notes),
        _source=opened.source,
        _inputs=inputs,
        _verify=verify,
        of_base=True,
    )


def _with_constant(places: Sequence[Place]) -> list[Place]:
    """``places`` whose weights were not folded away."""
    return [place for place in places if place.found.tensor is not None]


def _decided(match: Match) -> list[tuple[Place, Decision]]:
    """What becomes of a role in each place that has a constant for it: one decision for those that hold the same.

    Raises:
        CheckpointError: the checkpoint lacks it.
        UnsupportedError: it is not stored, and would have to be.
    """
    role, weight = match.role, match.weight
    if weight is None:
        raise CheckpointError(f"{role}: the bundle's base has this weight, and {match.problem}.")
    if match.problem:
        raise UnsupportedError(f"{role}: {match.problem}. Give a checkpoint of the same geometry.")
    dtype = common_dtype([weight] if isinstance(weight, StoredWeight) else [])
    places = _with_constant(match.places)
    # A graph does not multiply by what was 1 when it was exported.
    if len(places) < max(len(match.places), 1):
        require_ones(role, match.shape, weight, dtype)
    decisions: dict[object, Decision] = {}
    decided = []
    for place in places:
        if (key := place.key) not in decisions:
            stored = place.stored
            assert isinstance(stored, ConstantTensor)
            decision, old = decide(role, stored, place.part_of(weight), dtype), Content.of(stored.source)
            if decision.how == REQUANTIZED and decision.content.like(old):
                decision = replace(decision, how=KEPT, content=old)
            decisions[key] = decision
        decided.append((place, decisions[key]))
    return decided


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
