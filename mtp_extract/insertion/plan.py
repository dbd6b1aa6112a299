"""What is to be put into a bundle, what rounding to the file's types loses of it, and writing it: beside its place,
read back and compared, then given its name.

Nothing is written over bytes that a tensor without a role has, or another role that is to hold something else.

A loss is relative: root mean square of what the file will hold less the checkpoint's weight, as a share of the root
mean square of the weight. Beside it stands how far the checkpoint's weight is from what the file held: where rounding
moves a weight as far as its training did, most of the training is rounded away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.errors import UnsupportedError, few
from mtp_extract.insertion.encoding import KEPT, Encoding, SquareSums
from mtp_extract.insertion.slots import Location, WeightSlot, compute_relative_error, map_rows
from mtp_extract.io.assembled import Put, write_copy
from mtp_extract.io.place import PathLike, staged
from mtp_extract.io.source import Source
from mtp_extract.litertlm.storage import FLOAT_TYPES, encode_floats
from mtp_extract.litertlm.tflite import Tensor, TfliteModel
from mtp_extract.progress import SILENT, Reporter, counter
from mtp_extract.proof.proof import Proof

NewBytes = bytes | memoryview
Overlay = tuple[int, NewBytes | Encoding]
"""Bytes, or the rows of an encoding, and where in the file they go."""


MOST_LOST = 0.1
"""Of a role. A checkpoint trained on the file's grid loses almost nothing; floats lose two fifths in two bits."""

_MOSTLY = 0.5
_WORST = 5


@dataclass(frozen=True)
class Loss:
    """Of one role, or of all together, as shares of the checkpoint's norm."""

    relative_rms_error: float  # what the file's types lose
    relative_change: float  # what the checkpoint changes of what the file holds

    @classmethod
    def of(cls, sums: SquareSums) -> Loss:
        """The roots of ``sums``, as shares."""
        return cls(compute_relative_error(sums.lost, sums.size), compute_relative_error(sums.changed, sums.size))


@dataclass(frozen=True)
class Losses:
    """Of every role that the file does not hold to the bit."""

    total: Loss
    roles: Mapping[str, Loss]  # the worst first

    @classmethod
    def of(cls, encodings: Mapping[str, Iterable[Encoding]]) -> Losses:
        """Of what is to be put in."""
        totals = ((role, SquareSums.total(each.weight_sums for each in of_role)) for role, of_role in encodings.items())
        measured = {role: sums for role, sums in totals if sums.size and sums.lost}
        losses = {role: Loss.of(sums) for role, sums in measured.items()}
        worst_first = sorted(losses.items(), key=lambda item: -item[1].relative_rms_error)
        return cls(Loss.of(SquareSums.total(measured.values())), dict(worst_first))

    @property
    def in_words(self) -> str:
        """The total, and the worst; empty where nothing is lost."""
        if not self.roles:
            return ""
        return (
            f"Rounding to the file's types loses {self.total.relative_rms_error:.1%} of what is put in (the checkpoint "
            f"changes {self.total.relative_change:.1%}); most: {', '.join(_format_losses(self.roles)[:_WORST])}"
        )

    @property
    def warning(self) -> str:
        """What to know where most of a training is rounded away; empty where it is not."""
        lost, changed = self.total.relative_rms_error, self.total.relative_change
        if not changed or lost**2 < _MOSTLY * changed**2:
            return ""
        return (
            f"Most of what the checkpoint changes is rounded away: {changed:.1%} is changed, {lost:.1%} is lost. Train "
            "with the file's grid in the loop (quantization-aware), so that its codes change."
        )


def _format_losses(losses: Mapping[str, Loss]) -> list[str]:
    return [f"{role} {loss.relative_rms_error:.1%}" for role, loss in losses.items()]


@dataclass(frozen=True)
class InsertionResult:
    """What was written."""

    path: Path
    size: int  # in bytes
    notes: tuple[str, ...]  # things worth knowing that are not errors
    # That the new drafter computes what its weights say; None of a base, whose graphs are not proven.
    proof: Proof | None
    plan: InsertionPlan = field(repr=False)


@dataclass(frozen=True)
class InsertionPlan:
    """What is to be done; nothing is written yet."""

    source: Source  # the bundle, with a drafter where it had none
    # Role → what becomes of it: several where tables or signatures of a base differ in it, none where nothing holds it.
    encodings: Mapping[str, tuple[Encoding, ...]]
    overlays: tuple[Overlay, ...]  # what is written over its copy
    notes: tuple[str, ...]
    inputs: tuple[PathLike | None, ...]
    check: Callable[[Path], Proof | None]  # reads the new file; OutputError where it is not what was planned
    of_base: bool = False  # whether it is a base that is put in, and no drafter
    added: bool = False  # whether the bundle has no drafter yet

    @cached_property
    def losses(self) -> Losses:
        """What rounding to the file's types loses."""
        return Losses.of(self.encodings)

    @property
    def refusal(self) -> UnsupportedError | None:
        """Why it should not be written: a base that loses too much. A drafter's drafts are checked by its base."""
        ruined = {role: loss for role, loss in self.losses.roles.items() if loss.relative_rms_error > MOST_LOST}
        if not (ruined and self.of_base and self.overlays):
            return None
        return UnsupportedError(
            f"{self.source.name}: rounding to its types would lose more than {MOST_LOST:.0%} of {len(ruined)} roles: "
            f"{few(_format_losses(ruined))}. Train with the file's grid in the loop (quantization-aware), from "
            "Google's public mobile checkpoint, whose codes the bundle holds; or take the loss.",
            remedies=("force",),
        )

    def write(
        self, out: PathLike, *, overwrite: bool = False, force: bool = False, reporter: Reporter = SILENT
    ) -> InsertionResult:
        """Write it to the new file ``out``: beside its place first, where it is read again and compared, and proven.

        Args:
            force: write it although a base loses too much.

        Raises:
            UnsupportedError: a base loses too much; see :attr:`refusal`.
            OutputError: it cannot be written there, or reads back differently; nothing is left behind.
            ProofError: what was written does not compute what it holds.
        """
        if (refusal := self.refusal) is not None and not force:
            raise refusal
        target = Path(out)
        with staged(target, overwrite=overwrite, inputs=self.inputs) as stage:
            write_copy(stage, self.source, counter(reporter, "writing", self.source.size), self._fill)
            proof = self.check(stage)
        notes = list(self.notes)
        # LiteRT-LM (XNNPACK) takes packed weights of a file of the same name, second and size for those of the new one.
        beside = (path.name for path in target.absolute().parent.iterdir() if path.name.startswith(target.name))
        if names := sorted(name for name in beside if name.endswith("xnnpack_cache")):
            notes.append(f"Delete {few(names)}: the runtime packed them from an older file of this name.")
        return InsertionResult(target, self.source.size, tuple(notes), proof, self)

    def _fill(self, put: Put) -> None:
        rows: dict[WeightSlot, list[tuple[int, Encoding]]] = defaultdict(list)
        for at, what in self.overlays:
            if isinstance(what, Encoding):
                rows[what.slot].append((at, what))
            else:
                put(at, what)

        def write(slot: WeightSlot, first: int, last: int) -> None:
            for at, encoding in rows[slot]:
                put(
                    at + slot.find_slice(encoding.storage.length, first, last).start,
                    encoding.encode_and_record(first, last),
                )

        map_rows(list(rows), write)

    def as_json(self, result: InsertionResult | None) -> dict[str, Any]:
        """What is to be done and, where it was, its ``result``; of a base a list for each role."""
        roles: dict[str, Any] = {
            role: [{"what": e.how, "stored": e.storage.type.name, "relative_rms_error": e.error} for e in encodings]
            for role, encodings in self.encodings.items()
        }
        return {
            "bundle": self.source.name,
            "out": str(result.path) if result else None,
            "size": self.source.size,
            "notes": (result or self).notes,
            "added": self.added,
            "loss": asdict(self.losses),
            "roles": roles if self.of_base else {role: encodings[0] for role, encodings in roles.items() if encodings},
            "proof": result.proof if result else None,
        }


class _ByteRange(NamedTuple):
    """Bytes of the file: where, whose, and what they are to be."""

    begin: int
    end: int
    changes: bool
    owner: str  # a role, or which tensor without one
    what: NewBytes | Encoding | None = None  # None: what they are


def build_overlays(encodings: Iterable[Encoding]) -> Iterator[Overlay]:
    """What to write so that all places of ``encodings`` hold what was decided: the bytes that change, each once;
    UnsupportedError where such bytes belong to something else too, or zero points have no place."""
    sites = [(place, encoding) for encoding in encodings for place in encoding.slot.places]
    parts = [part for site in sites for part in _find_byte_ranges(*site)]
    for model in {id(place.model): place.model for place, _ in sites}.values():
        parts += _find_other_byte_ranges(model, [place.found.tensor for place, _ in sites if place.model is model])
    last = _ByteRange(0, 0, False, "")
    # Of the same bytes those that change come first.
    for part in sorted(parts, key=lambda part: (part.begin, part.end, not part.changes)):
        shared = part.begin < last.end
        if shared and (part.changes or last.changes) and not _are_identical(part, last):
            changed, other = (part, last) if part.changes else (last, part)
            raise UnsupportedError(
                f"{changed.owner}: the file stores {other.owner} in the same bytes, and the two are to differ. Keep "
                "them equal, or as they are."
            )
        if part.changes and part.what is not None and not shared:
            yield part.begin, part.what
        last = max(last, part, key=lambda part: part.end)


def _are_identical(part: _ByteRange, other: _ByteRange) -> bool:
    """Whether both are the same bytes, and are to be the same."""
    if isinstance(part.what, Encoding) and isinstance(other.what, Encoding) and part.what is not other.what:
        same = part[:2] == other[:2] and part.what.storage == other.what.storage
        return same and all(
            part.what.encode_rows(*rows) == other.what.encode_rows(*rows) for rows in part.what.slot.list_row_ranges()
        )
    return part[:2] == other[:2] and part.what == other.what


def _find_byte_ranges(place: Location, encoding: Encoding) -> Iterator[_ByteRange]:
    """The rows of ``encoding``, its scales and its zero points, where ``place`` has them."""
    assert place.found.tensor is not None
    data, role = place.model.locate(place.found.tensor), encoding.slot.role
    yield _ByteRange(data.begin, data.begin + data.size, encoding.how != KEPT, role, encoding)
    if not encoding.scales.scale.size or place.found.tensor.quantization is None:
        return
    for at, vector in _encode_scales(place.model, place.found.tensor, encoding):
        if vector:
            changes = place.model.region.source.read(at, len(vector)) != vector
            yield _ByteRange(at, at + len(vector), changes, role, vector)


def _encode_scales(model: TfliteModel, tensor: Tensor, encoding: Encoding) -> list[tuple[int, memoryview]]:
    """The scales and zero points of ``encoding`` as ``tensor`` stores them, and where."""
    quantization, (scale, zeros) = tensor.quantization, encoding.scales
    assert quantization is not None
    blocks = _find_block_scales(model, tensor)
    zero_points = quantization.zero_points.count if blocks is None else 0
    fits = zero_points == zeros.size or (zero_points == 1 and not np.ptp(zeros))
    if not fits and not np.array_equal(encoding.slot.stored_constant.source.zero_point.reshape(-1), zeros):
        raise UnsupportedError(f"{encoding.slot.role}: {tensor.label} has no place for its new zero points.")
    if blocks is not None and blocks.type is not None:
        return [(model.locate(blocks).begin, memoryview(encode_floats(scale, blocks.type, encoding.slot.role)))]
    # Not copied: a vocabulary has a scale a row, and a table a layer.
    begin = model.region.begin
    return [
        (begin + quantization.scales.start, np.ascontiguousarray(scale, "<f4").view(np.uint8).data),
        (begin + quantization.zero_points.start, np.ascontiguousarray(zeros[:zero_points], "<i8").view(np.uint8).data),
    ]


def _find_other_byte_ranges(model: TfliteModel, playing: Sequence[Tensor | None]) -> Iterator[_ByteRange]:
    """Data, scales and zero points of all tensors but those ``playing`` a role."""
    # Scales of blocks are tensors themselves.
    keys = {
        (part.subgraph, part.index)
        for role in playing
        if role
        for part in (role, _find_block_scales(model, role))
        if part
    }
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        if (tensor.subgraph, tensor.index) in keys or not model.has_data(tensor):
            continue
        data = model.data_of(tensor)
        spans = [(data.begin, data.size)]
        # Scales of floats mean nothing.
        if tensor.quantization is not None and tensor.type not in FLOAT_TYPES:
            vectors = (tensor.quantization.scales, tensor.quantization.zero_points)
            spans += [(model.region.begin + vector.start, vector.width * vector.count) for vector in vectors]
        owner = f"{tensor.label}, which plays no role,"
        yield from (_ByteRange(begin, begin + size, False, owner) for begin, size in spans if size)


def _find_block_scales(model: TfliteModel, tensor: Tensor) -> Tensor | None:
    """The tensor that holds the scales of ``tensor``'s blocks; None where it has none."""
    if tensor.quantization is None or tensor.quantization.blockwise is None or tensor.type in FLOAT_TYPES:
        return None
    return model.tensor(tensor.subgraph, tensor.quantization.blockwise.scales)
