"""The plan of an insertion: which bytes change, how much rounding to the file's types loses, and how it is written.

The new file is written under a temporary name, read back, compared, and only then renamed. Bytes that belong to a
tensor without a role, or to another role with other numbers, are never overwritten.

A loss is relative: root mean square of (new file − checkpoint) over root mean square of the checkpoint's weight. It is
shown with the change, (checkpoint − old file): if both are equally large, most of the training is rounded away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.errors import UnsupportedError, list_few
from mtp_extract.insertion.encoding import KEPT, Encoding, SquareSums
from mtp_extract.insertion.slots import Location, WeightSlot, compute_relative_error, map_rows
from mtp_extract.io.assembled import Put, write_copy
from mtp_extract.io.place import PathLike, stage_output
from mtp_extract.io.source import Source
from mtp_extract.litertlm.storage import FLOAT_TYPES, encode_floats
from mtp_extract.litertlm.tflite import Tensor, TfliteModel
from mtp_extract.progress import SILENT, Reporter, make_counter
from mtp_extract.proof.proof import Proof

NewBytes = bytes | memoryview
Overlay = tuple[int, NewBytes | Encoding]
"""Offset in the file, and the bytes, or the encoding of all rows, to write there."""

MOST_LOST = 0.1
"""Largest acceptable loss of a role. A checkpoint trained on the file's grid loses almost nothing; floats rounded to
two bits lose two fifths."""

_MOSTLY = 0.5  # share of the squared change above which most of it counts as lost
_WORST = 5  # roles that are listed


@dataclass(frozen=True)
class Loss:
    """Loss and change of one role, or of all together, relative to the norm of the checkpoint's weight."""

    relative_rms_error: float  # new file − checkpoint
    relative_change: float  # checkpoint − old file

    @classmethod
    def of(cls, sums: SquareSums) -> Loss:
        return cls(compute_relative_error(sums.lost, sums.size), compute_relative_error(sums.changed, sums.size))


@dataclass(frozen=True)
class Losses:
    """Losses of all roles that rounding changes."""

    total: Loss
    roles: Mapping[str, Loss]  # largest loss first

    @classmethod
    def of(cls, encodings: Mapping[str, Iterable[Encoding]]) -> Losses:
        """Sum the losses of ``encodings`` by role, and over all roles."""
        totals = {role: SquareSums.total(e.weight_sums for e in of_role) for role, of_role in encodings.items()}
        measured = {role: sums for role, sums in totals.items() if sums.size and sums.lost}
        losses = {role: Loss.of(sums) for role, sums in measured.items()}
        worst_first = sorted(losses.items(), key=lambda item: -item[1].relative_rms_error)
        return cls(Loss.of(SquareSums.total(measured.values())), dict(worst_first))

    @property
    def description(self) -> str:
        """The total and the largest losses, as a sentence; empty if nothing is lost."""
        if not self.roles:
            return ""
        return (
            f"Rounding to the file's types loses {self.total.relative_rms_error:.1%} of what is put in (the checkpoint "
            f"changes {self.total.relative_change:.1%}); most: {', '.join(_format_losses(self.roles)[:_WORST])}"
        )

    @property
    def warning(self) -> str:
        """A warning if most of a training is rounded away, else empty."""
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
    """The file that an insertion wrote."""

    path: Path
    size: int  # in bytes
    notes: tuple[str, ...]  # for the user; no errors
    proof: Proof | None  # that the new drafter computes what its weights say; None for a base, which is not proven
    plan: InsertionPlan = field(repr=False)


@dataclass(frozen=True)
class InsertionPlan:
    """An insertion that is not written yet."""

    source: Source  # the bundle; with the added drafter if it had none
    # Role → its encodings: several if tables or signatures of a base differ in it, none if the file does not store it.
    encodings: Mapping[str, tuple[Encoding, ...]]
    overlays: tuple[Overlay, ...]  # what changes in the copy of ``source``
    notes: tuple[str, ...]
    inputs: tuple[PathLike | None, ...]  # files that must not be overwritten
    check: Callable[[Path], Proof | None]  # reads the new file; raises OutputError if it differs from the plan
    of_base: bool = False  # whether a base is inserted, not a drafter
    added: bool = False  # whether a drafter is added to a bundle without one

    @cached_property
    def losses(self) -> Losses:
        """Losses from rounding to the file's types."""
        return Losses.of(self.encodings)

    @property
    def refusal(self) -> UnsupportedError | None:
        """The error if a base would lose too much. A drafter may lose more, because its base checks every draft."""
        ruined = {role: loss for role, loss in self.losses.roles.items() if loss.relative_rms_error > MOST_LOST}
        if not (ruined and self.of_base and self.overlays):
            return None
        return UnsupportedError(
            f"{self.source.name}: rounding to its types would lose more than {MOST_LOST:.0%} of {len(ruined)} roles: "
            f"{list_few(_format_losses(ruined))}. Train with the file's grid in the loop (quantization-aware), from "
            "Google's public mobile checkpoint, whose codes the bundle holds; or take the loss.",
            remedies=("force",),
        )

    def write(
        self, out: PathLike, *, overwrite: bool = False, force: bool = False, reporter: Reporter = SILENT
    ) -> InsertionResult:
        """Write the new file ``out``, after its content was read back, compared and proven under a temporary name.

        Args:
            force: write a base even if it loses too much.

        Raises:
            UnsupportedError: a base loses too much; see :attr:`refusal`.
            OutputError: the file cannot be written, or reads back differently; nothing is left behind.
            ProofError: the new drafter does not compute what its weights say.
        """
        if (refusal := self.refusal) is not None and not force:
            raise refusal
        target = Path(out)
        with stage_output(target, overwrite=overwrite, inputs=self.inputs) as stage:
            write_copy(stage, self.source, make_counter(reporter, "writing", self.source.size), self._fill)
            proof = self.check(stage)
        notes = list(self.notes)
        # LiteRT-LM (XNNPACK) uses weights packed from an older file if name, modification second and size are equal.
        neighbours = (path.name for path in target.absolute().parent.iterdir() if path.name.startswith(target.name))
        if names := sorted(name for name in neighbours if name.endswith("xnnpack_cache")):
            notes.append(f"Delete {list_few(names)}: the runtime packed them from an older file of this name.")
        return InsertionResult(target, self.source.size, tuple(notes), proof, self)

    def _fill(self, put: Put) -> None:
        encodings: dict[WeightSlot, list[tuple[int, Encoding]]] = defaultdict(list)
        for offset, content in self.overlays:
            if isinstance(content, Encoding):
                encodings[content.slot].append((offset, content))
            else:
                put(offset, content)

        def write_rows(slot: WeightSlot, first: int, last: int) -> None:
            for offset, encoding in encodings[slot]:
                begin = offset + slot.find_slice(encoding.storage.length, first, last).start
                put(begin, encoding.encode_and_record(first, last))

        map_rows(list(encodings), write_rows)

    def as_json(self, result: InsertionResult | None) -> dict[str, Any]:
        """Return the plan, with its ``result`` if it was written, as JSON; a base has a list for each role."""
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
    """Bytes ``[begin, end)`` of the file that belong to a role or to another tensor."""

    begin: int
    end: int
    changes: bool
    owner: str  # the role, or a description of the tensor
    content: NewBytes | Encoding | None = None  # None: they stay as they are


def build_overlays(encodings: Iterable[Encoding]) -> Iterator[Overlay]:
    """Build the overlays that store ``encodings`` at all their locations: every byte that changes, once.

    Raises:
        UnsupportedError: a byte that changes also belongs to a tensor with other content, or the file has no place for
            zero points.
    """
    sites = [(place, encoding) for encoding in encodings for place in encoding.slot.places]
    ranges = [byte_range for site in sites for byte_range in _find_byte_ranges(*site)]
    for model in {id(place.model): place.model for place, _ in sites}.values():
        ranges += _find_other_byte_ranges(model, [place.found.tensor for place, _ in sites if place.model is model])

    previous = _ByteRange(0, 0, False, "")
    # Among equal ranges, those that change come first.
    for current in sorted(ranges, key=lambda current: (current.begin, current.end, not current.changes)):
        overlaps = current.begin < previous.end
        if overlaps and (current.changes or previous.changes) and not _are_identical(current, previous):
            changed, neighbour = (current, previous) if current.changes else (previous, current)
            raise UnsupportedError(
                f"{changed.owner}: the file stores {neighbour.owner} in the same bytes, and the two are to differ. "
                "Keep them equal, or as they are."
            )
        if current.changes and current.content is not None and not overlaps:
            yield current.begin, current.content
        previous = max(previous, current, key=lambda byte_range: byte_range.end)


def _are_identical(first: _ByteRange, second: _ByteRange) -> bool:
    """Whether both cover the same bytes and put the same content there."""
    if first[:2] != second[:2]:
        return False
    ours, theirs = first.content, second.content
    if not (isinstance(ours, Encoding) and isinstance(theirs, Encoding)) or ours is theirs:
        return ours == theirs
    return ours.storage == theirs.storage and all(
        ours.encode_rows(*rows) == theirs.encode_rows(*rows) for rows in ours.slot.list_row_ranges()
    )


def _find_byte_ranges(place: Location, encoding: Encoding) -> Iterator[_ByteRange]:
    """List the bytes of ``encoding`` at ``place``: data, scales and zero points."""
    assert place.found.tensor is not None
    data, role = place.model.locate(place.found.tensor), encoding.slot.role
    yield _ByteRange(data.begin, data.begin + data.size, encoding.how != KEPT, role, encoding)
    if not encoding.scales.scale.size or place.found.tensor.quantization is None:
        return
    for offset, vector in _encode_scales(place.model, place.found.tensor, encoding):
        if vector:
            changes = place.model.region.source.read(offset, len(vector)) != vector
            yield _ByteRange(offset, offset + len(vector), changes, role, vector)


def _encode_scales(model: TfliteModel, tensor: Tensor, encoding: Encoding) -> list[tuple[int, memoryview]]:
    """Return the scales and zero points of ``encoding`` as ``tensor`` stores them, each with its offset in the file."""
    quantization, (scale, zeros) = tensor.quantization, encoding.scales
    assert quantization is not None
    blocks = _find_block_scales(model, tensor)
    zero_points = quantization.zero_points.count if blocks is None else 0
    fits = zero_points == zeros.size or (zero_points == 1 and not np.ptp(zeros))
    if not fits and not np.array_equal(encoding.slot.stored_constant.source.zero_point.reshape(-1), zeros):
        raise UnsupportedError(f"{encoding.slot.role}: {tensor.label} has no place for its new zero points.")
    if blocks is not None and blocks.type is not None:
        return [(model.locate(blocks).begin, memoryview(encode_floats(scale, blocks.type, encoding.slot.role)))]
    # Views, not copies: an embedding has a scale for each row, and a table for each layer.
    begin = model.region.begin
    return [
        (begin + quantization.scales.start, np.ascontiguousarray(scale, "<f4").view(np.uint8).data),
        (begin + quantization.zero_points.start, np.ascontiguousarray(zeros[:zero_points], "<i8").view(np.uint8).data),
    ]


def _find_other_byte_ranges(model: TfliteModel, weights: Sequence[Tensor | None]) -> Iterator[_ByteRange]:
    """List data, scales and zero points of all tensors except ``weights``."""
    # Scales of blocks are tensors themselves.
    block_scales = [_find_block_scales(model, weight) for weight in weights if weight]
    keys = {(tensor.subgraph, tensor.index) for tensor in (*weights, *block_scales) if tensor}
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        if (tensor.subgraph, tensor.index) in keys or not model.has_data(tensor):
            continue
        data = model.locate_data(tensor)
        spans = [(data.begin, data.size)]
        # Scales of floats are unused metadata.
        if tensor.quantization is not None and tensor.type not in FLOAT_TYPES:
            vectors = (tensor.quantization.scales, tensor.quantization.zero_points)
            spans += [(model.region.begin + vector.start, vector.width * vector.count) for vector in vectors]
        owner = f"{tensor.label}, which plays no role,"
        yield from (_ByteRange(begin, begin + size, False, owner) for begin, size in spans if size)


def _find_block_scales(model: TfliteModel, tensor: Tensor) -> Tensor | None:
    """Return the tensor that holds the scales of ``tensor``'s blocks; None if it is not quantized in blocks."""
    if tensor.quantization is None or tensor.quantization.blockwise is None or tensor.type in FLOAT_TYPES:
        return None
    return model.tensor(tensor.subgraph, tensor.quantization.blockwise.scales)
