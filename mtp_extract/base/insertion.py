"""A fine-tuned base into a bundle: its codes, scales and floats over those that are there, in every signature.

Signatures share the codes of a matrix and have scales of their own, so that codes are written once and scales as often
as there are signatures. Nothing moves: what has no place of its own is refused, by name. Weights are streamed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mtp_extract.base.checkpoint import BaseCheckpoint, read_base
from mtp_extract.base.comparison import check_geometry, grouped, of_place, stored_as, wanted, whole_shape
from mtp_extract.base.places import BundledBase, Place, find_base
from mtp_extract.bundle import MODEL_TYPE, Opened, open_bundle
from mtp_extract.checkpoint.distance import EQUAL, EQUAL_CODES, measure_distance
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.lazy import ConstantTensor, FilledTensor, LazyTensor
from mtp_extract.checkpoint.stored import StoredWeight
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError, escape, few
from mtp_extract.insert.caches import freshen, stale_caches
from mtp_extract.insert.decision import KEPT, REQUANTIZED, Content, Decision, as_stored, decide, holds
from mtp_extract.insert.placing import check_overlaps, fingerprint, role_pieces, spans, sum_of
from mtp_extract.io.place import PathLike, files_of, staged
from mtp_extract.io.source import Progress, counter
from mtp_extract.litertlm.tflite import Tensor, TfliteModel
from mtp_extract.litertlm.writer import Laid, Piece, write_laid

# A calculation in another order of chunks leaves this much.
_SAME_ERROR = 1e-6
# What a folded factor leaves in a scale.
_SCALES_ALIKE = 1e-6


@dataclass(frozen=True)
class BaseInsertionResult:
    """What was written.

    Attributes:
        notes: things worth knowing that are not errors.
    """

    path: Path
    size: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class BaseInsertionPlan:
    """What is to be done; nothing is written yet.

    Attributes:
        decisions: role → what becomes of it; one, or one for each of its tables.
        written: how many codes, floats, scales and zero points are written, each as a whole.
        changed: bytes that are written.
    """

    name: str
    decisions: Mapping[str, tuple[Decision, ...]]
    written: int
    changed: int
    size: int
    notes: tuple[str, ...]
    _pieces: tuple[Piece, ...] = field(repr=False)
    _inputs: tuple[PathLike, ...] = field(repr=False)
    _opened: Opened = field(repr=False)
    _checkpoint: BaseCheckpoint = field(repr=False)

    def write(
        self, out: str | os.PathLike[str], *, overwrite: bool = False, progress: Progress = lambda done, total: None
    ) -> BaseInsertionResult:
        """Write it to the new file ``out``: beside its place first, where it is read again and compared.

        Raises:
            OutputError: it cannot be written there, or reads back differently; nothing is left behind.
        """
        target, source = Path(out), self._opened.source
        whole = Piece(0, source.size, source=source)
        with staged(target, overwrite=overwrite, inputs=self._inputs) as stage:
            write_laid(stage, Laid(source.size, (whole, *self._pieces)), counter(progress, self.size))
            self._read_again(stage)
            freshen(stage, target, source)
        return BaseInsertionResult(target, self.size, (*self.notes, *stale_caches(target)))

    def _read_again(self, path: Path) -> None:
        """Walk what was written, and compare every role with what was put in."""
        with open_bundle(path) as opened:
            base = find_base(opened)
            for role, _, weight in wanted(base, self._checkpoint):
                assert weight is not None
                groups = _stored(base.places.get(role, ()))
                for (place, *_), decision in zip(groups, self.decisions[role], strict=True):
                    distance = measure_distance(stored_as(place), of_place(weight, place))
                    close = abs(distance.error - decision.error) <= _SAME_ERROR
                    if distance.verdict not in (EQUAL, EQUAL_CODES) and not close:
                        raise OutputError(f"{path}: {role} reads back differently. Nothing was kept.")


@contextmanager
def planned_base_insertion(
    directory: str | os.PathLike[str], bundle: str | os.PathLike[str]
) -> Iterator[BaseInsertionPlan]:
    """Plan to put the base in ``directory`` into ``bundle``, which stays as it is.

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
        yield _plan((bundle, *files_of(directory)), opened, find_base(opened), checkpoint)


def _plan(
    inputs: tuple[PathLike, ...], opened: Opened, base: BundledBase, checkpoint: BaseCheckpoint
) -> BaseInsertionPlan:
    check_geometry(base, checkpoint)
    decided: list[tuple[Place, Decision]] = []
    decisions: dict[str, tuple[Decision, ...]] = {}
    for role, _, weight in wanted(base, checkpoint):
        groups = list(_decided(role, weight, base.places.get(role, ())))
        decisions[role] = tuple(decision for _, decision in groups)
        decided += ((place, decision) for group, decision in groups for place in group)
    _require_own(decided)
    pieces: dict[int, tuple[Piece, Decision]] = {}
    for place, decision in decided:
        if decision.how == KEPT:
            continue
        for piece in role_pieces(place.model, decision.role, _tensor(place), decision):
            known = pieces.setdefault(piece.at, (piece, decision))
            if known[1] is not decision and sum_of(known[0]) != sum_of(piece):
                raise UnsupportedError(f"{decision.role}: shares what lies at byte {piece.at} with {known[1].role}.")
    notes = []
    if pieces and any(place.found.input is not None for place, _ in decided):
        notes.append("Activations are quantized statically, with scales that were calibrated for the old weights.")
    if pieces and any(section.model_type == MODEL_TYPE for section in opened.sections):
        notes.append("The drafter was made for the base that was there: its drafts may be accepted less often.")
    return BaseInsertionPlan(
        opened.source.name,
        decisions,
        len(pieces),
        sum(piece.length for piece, _ in pieces.values()),
        opened.source.size,
        tuple(notes),
        tuple(piece for piece, _ in pieces.values()),
        inputs,
        opened,
        checkpoint,
    )


def _tensor(place: Place) -> Tensor:
    assert place.found.tensor is not None
    return place.found.tensor


def _stored(places: Sequence[Place]) -> list[tuple[Place, ...]]:
    """``places`` as :func:`grouped`, without weights that were folded away."""
    return grouped([place for place in places if place.found.tensor is not None])


def _decided(
    role: str, weight: LazyTensor | None, places: Sequence[Place]
) -> Iterator[tuple[tuple[Place, ...], Decision]]:
    """What becomes of ``role``, for each group of places that hold the same of it.

    Raises:
        CheckpointError: the checkpoint lacks it.
        UnsupportedError: it is not stored, and would have to be.
    """
    if weight is None:
        raise CheckpointError(f"{role}: the bundle's base has this weight, and the checkpoint has not.")
    dtype = _dtype(weight)
    if not places and not role.endswith(".layer_scalar"):
        raise UnsupportedError(f"{role}: no graph of the bundle reads this weight, so it has no place.")
    shape = whole_shape(places) if places else (1,)
    if shape != weight.shape:
        raise UnsupportedError(
            f"{role}: the checkpoint's is {list(weight.shape)}, the bundle's {list(shape)}. Give a checkpoint of the "
            "same geometry."
        )
    groups = _stored(places)
    # A graph does not multiply by what was 1 when it was exported.
    if sum(map(len, groups)) < max(len(places), 1) and not holds(FilledTensor(shape), weight, dtype):
        raise UnsupportedError(
            f"{role}: the weight was 1 when the graph was exported, and was folded away; the checkpoint has another. "
            "Keep it at 1."
        )
    for group in groups:
        stored = stored_as(group[0])
        assert isinstance(stored, ConstantTensor)
        decision = decide(role, stored, of_place(weight, group[0]), dtype)
        if decision.storage.shape != stored.source.tensor.shape:
            raise UnsupportedError(
                f"{role}: its equal numbers were stored as one, and now differ; {_tensor(group[0]).label} has no room."
            )
        if decision.how == REQUANTIZED and _is_stored(decision.content, stored):
            decision = replace(decision, how=KEPT, content=as_stored(stored.source))
        if decision.how != KEPT and group[0].found.first is not None:
            raise UnsupportedError(
                f"{role}: {_tensor(group[0]).label} holds it beside other weights, so it cannot be changed alone. "
                "Keep it."
            )
        yield group, decision


def _is_stored(content: Content, stored: ConstantTensor) -> bool:
    """Whether ``content`` is what is there: the same codes, with scales that differ by rounding at most."""
    source = stored.source
    if not np.array_equal(content.zero_point, source.zero_point.reshape(-1)):
        return False
    if not np.allclose(content.scale, source.scale.reshape(-1), rtol=_SCALES_ALIKE, atol=0):
        return False
    at = 0
    for chunk in content.produce():
        if source.location.read(at, len(chunk)) != bytes(chunk):
            return False
        at += len(chunk)
    return True


def _dtype(weight: LazyTensor) -> str:
    """The name of the type that ``weight`` was rounded to."""
    return next(name for name, d in DTYPES.items() if d is weight.dtype) if isinstance(weight, StoredWeight) else "f32"


def _require_own(decided: Sequence[tuple[Place, Decision]]) -> None:
    """Check that what is to be written belongs to roles that agree on it, and to nothing else.

    Raises:
        UnsupportedError: a buffer or a vector of scales is something else's as well.
    """
    sharing: dict[int, list[Decision]] = defaultdict(list)
    models: dict[int, TfliteModel] = {}
    known: dict[tuple[int, int, int], bool] = {}
    for place, decision in decided:
        tensor, model = _tensor(place), place.model
        models[id(model)] = model
        key = id(model), tensor.subgraph, tensor.index
        known[key] = known.get(key, False) or decision.how != KEPT
        at = model.locate(tensor).file_offset
        if all(other is not decision for other in sharing[at]):
            sharing[at].append(decision)
    for at, decisions in sharing.items():
        changes = len(decisions) > 1 and any(d.how != KEPT for d in decisions)
        if changes and len({fingerprint(d) for d in decisions}) > 1:
            roles = " and ".join(sorted({d.role for d in decisions}))
            raise UnsupportedError(
                f"{roles}: all that lies at byte {at} is shared, in several roles or with other scales in other "
                "signatures, and is to differ, which one place cannot."
            )
    for number, model in models.items():
        owners: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
            for span in spans(model, tensor):
                owners[span].append(tensor)
        check_overlaps(model, owners)
        for owned in owners.values():
            keys = [(number, tensor.subgraph, tensor.index) for tensor in owned]
            others = [tensor for tensor, key in zip(owned, keys, strict=True) if key not in known]
            if others and any(known.get(key, False) for key in keys):
                raise UnsupportedError(
                    f"{others[0].label} plays no role, and shares its bytes with a weight that is to change."
                )
