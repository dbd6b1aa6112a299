"""What is to be put into a bundle, and writing it: beside its place, read back and compared, then given its name.

Nothing is written over bytes that a tensor without a role has, or another role that is to hold something else.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError, few
from mtp_extract.insertion.encoding import KEPT, Encoding
from mtp_extract.insertion.slots import Place, Slot, over_rows
from mtp_extract.io.assembled import Put, Span, write_copy
from mtp_extract.io.place import PathLike, staged
from mtp_extract.io.source import LocalSource, Progress, Source, counter
from mtp_extract.litertlm.storage import FLOAT_TYPES, QuantizedTensor, float_bytes
from mtp_extract.litertlm.tflite import Tensor, TfliteModel
from mtp_extract.proof.proof import Proof

Key = tuple[int, int]
"""A tensor of a model: subgraph and index."""
Bytes = bytes | memoryview
Overlay = tuple[int, Bytes | Encoding]
"""Bytes, or the rows of an encoding, and where in the file they go."""


@dataclass(frozen=True)
class InsertionResult:
    """What was written."""

    path: Path
    size: int  # in bytes
    notes: tuple[str, ...]  # things worth knowing that are not errors
    proof: (
        Proof | None
    )  # that the new drafter computes what its weights say; None of a base, whose graphs are not proven


@dataclass(frozen=True)
class InsertionPlan:
    """What is to be done; nothing is written yet.

    Attributes:
        source: the bundle, with a drafter where it had none.
        encodings: role → what becomes of it: one encoding, several where tables or signatures of a base differ in it,
            none where no constant holds it.
        overlays: what is written over its copy.
        check: reads the new file and compares it with what was planned; OutputError where it is something else.
        of_base: whether it is a base that is put in, and no drafter.
        added: whether the bundle has no drafter yet.
    """

    source: Source
    encodings: Mapping[str, tuple[Encoding, ...]]
    overlays: tuple[Overlay, ...]
    notes: tuple[str, ...]
    inputs: tuple[PathLike | None, ...]
    check: Callable[[Path], Proof | None]
    of_base: bool = False
    added: bool = False

    @property
    def size(self) -> int:
        """Of the new file, in bytes."""
        return self.source.size

    @property
    def changed(self) -> int:
        """Bytes that are written over the copy."""
        parts = (what for _, what in self.overlays)
        return sum(what.storage.length if isinstance(what, Encoding) else len(what) for what in parts)

    def write(
        self, out: str | os.PathLike[str], *, overwrite: bool = False, progress: Progress = lambda done, total: None
    ) -> InsertionResult:
        """Write it to the new file ``out``: beside its place first, where it is read again and compared, and proven.

        Raises:
            OutputError: it cannot be written there, or reads back differently; nothing is left behind.
            ProofError: what was written does not compute what it holds.
        """
        target = Path(out)
        with staged(target, overwrite=overwrite, inputs=self.inputs) as stage:
            write_copy(stage, self.source, counter(progress, self.size), self._fill)
            proof = self.check(stage)
            _freshen(stage, target, self.source)
        notes = list(self.notes)
        if names := _caches_of(target):
            notes.append(f"Delete {few(names)}: the runtime packed them from an older file of this name.")
        return InsertionResult(target, self.size, tuple(notes), proof)

    def _fill(self, put: Put) -> None:
        rows: dict[Slot, list[tuple[int, Encoding]]] = defaultdict(list)
        for at, what in self.overlays:
            if isinstance(what, Encoding):
                rows[what.slot].append((at, what))
            else:
                put(at, what)

        def write(slot: Slot, first: int, last: int) -> None:
            for at, encoding in rows[slot]:
                put(at + slot.part(encoding.storage.length, first, last).start, encoding.data(first, last))

        over_rows(list(rows), write)

    def as_json(self, result: InsertionResult | None) -> dict[str, Any]:
        """What is to be done and, where it was, its ``result``; of a base a list for each role."""
        roles: dict[str, Any] = {
            role: [{"what": e.how, "stored": e.storage.type.name, "relative_rms_error": e.error} for e in own]
            for role, own in self.encodings.items()
        }
        return {
            "bundle": self.source.name,
            "out": str(result.path) if result else None,
            "size": self.size,
            "bytes_written": self.changed,
            "notes": (result or self).notes,
            "added": self.added,
            "roles": roles if self.of_base else {role: own[0] for role, own in roles.items() if own},
            "proof": result.proof if result else None,
        }


# LiteRT-LM (XNNPACK) keeps packed weights beside a bundle, in files called NAME_MTIME_SIZE…xnnpack_cache with the time
# in whole seconds. A file of the same name, size and second is taken for the one that was packed: the old matrices are
# then used with the new norms.


def _caches_of(target: Path) -> list[str]:
    with os.scandir(target.absolute().parent) as entries:
        return sorted(e.name for e in entries if e.name.startswith(target.name) and e.name.endswith("xnnpack_cache"))


def _freshen(stage: Path, target: Path, source: Source) -> None:
    """Give ``stage``, which becomes ``target``, a time of change that no cache and no older file has."""
    older = [os.fstat(source.fileno)] if isinstance(source, LocalSource) else []
    older += [target.stat()] if target.exists() else []
    taken, names = {other.st_mtime_ns // 10**9 for other in older}, _caches_of(target)
    made = second = stage.stat().st_mtime_ns // 10**9
    while second in taken or any(f"_{second}_" in name for name in names):
        second += 1
    if second != made:
        os.utime(stage, (second, second))


def overlays(encodings: Iterable[Encoding]) -> Iterator[Overlay]:
    """What to write so that all places of ``encodings`` hold what was decided, each byte once.

    Raises:
        UnsupportedError: bytes that are to change belong to something else too, or zero points have no place.
    """
    sites = [(place, encoding) for encoding in encodings for place in encoding.slot.places]
    for model in {id(place.model): place.model for place, _ in sites}.values():
        roles = defaultdict[Key, list[Encoding]](list)
        for place, encoding in sites:
            if place.model is model:
                roles[place.tensor.subgraph, place.tensor.index].append(encoding)
        _check_owners(model, roles)
    written: dict[int, tuple[Bytes | Encoding, str]] = {}
    for place, encoding in sites:
        if encoding.how == KEPT:
            continue
        for at, what in ((place.model.locate(place.tensor).begin, encoding), *_scale_bytes(place, encoding)):
            if at not in written:
                yield at, what
            other, role = written.setdefault(at, (what, encoding.role))
            # Encodings in one place were compared above; scales of blocks may lie in one tensor.
            if not isinstance(what, Encoding) and other != what:
                raise UnsupportedError(f"{encoding.role}: shares its scales with {role}, and they are to differ.")


def _check_owners(model: TfliteModel, roles: Mapping[Key, Sequence[Encoding]]) -> None:
    """Check that whatever has bytes that are to change is to hold the same; ``roles`` by subgraph and index of tensor.

    Raises:
        UnsupportedError: something else has them, or two ranges overlap and are not the same.
    """
    owners = defaultdict[Span, list[Tensor]](list)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            for span in _spans(model, tensor):
                owners[span].append(tensor)
    reached = (0, 0)
    for span in sorted(owners):
        if span[0] < reached[1]:
            raise UnsupportedError(
                f"{model.region.source.name}: buffers of {model.region.what} overlap at byte {span[0]}, so nothing can "
                "be written into one of them."
            )
        reached = span
    for tensors in owners.values():
        held = [(tensor, roles.get((tensor.subgraph, tensor.index), ())) for tensor in tensors]
        changed = next((e for _, own in held for e in own if e.how != KEPT), None)
        for tensor, own in held if changed is not None else ():
            assert changed is not None
            if not own:
                raise UnsupportedError(
                    f"{changed.role}: {tensor.label}, which plays no role, has the same bytes. Keep it as it is."
                )
            if other := next((e for e in own if e is not changed and not e.writes_as(changed)), None):
                raise UnsupportedError(
                    f"{changed.role} and {other.role}: the file stores one constant for both ({tensor.label}), and "
                    "they are to differ. Keep them equal."
                )


def _spans(model: TfliteModel, tensor: Tensor) -> Iterator[Span]:
    """The bytes of the file that are a tensor's: data, scales, zero points."""
    if not model.has_data(tensor):
        return
    data, quantization, begin = model.data_of(tensor), tensor.quantization, model.region.begin
    if data.size:
        yield data.begin, data.begin + data.size
    # Scales of floats mean nothing, and are not written.
    if quantization is None or tensor.type in FLOAT_TYPES:
        return
    for vector in (quantization.scales, quantization.zero_points):
        if vector.count:
            yield begin + vector.start, begin + vector.start + vector.width * vector.count


def _scale_bytes(place: Place, encoding: Encoding) -> Iterator[tuple[int, Bytes]]:
    """Scales and zero points of ``encoding``, each with where in the file they go.

    Raises:
        UnsupportedError: there is no place for the zero points.
    """
    model, tensor, quantization = place.model, place.tensor, place.tensor.quantization
    scale, zero_point = encoding.scales
    if not scale.size or quantization is None:
        return
    changed = not np.array_equal(QuantizedTensor.of(model, tensor).zero_point.reshape(-1), zero_point)
    held, begin = quantization.zero_points.count, model.region.begin
    if quantization.blockwise is not None:
        held, blocks = 0, model.tensor(tensor.subgraph, quantization.blockwise.scales)
        assert blocks.type is not None
        yield model.locate(blocks).begin, float_bytes(scale, blocks.type, encoding.role)
    else:
        yield begin + quantization.scales.start, _bytes_of(scale.astype("<f4", copy=False))
    if not changed:
        return
    if held != zero_point.size and (held != 1 or np.ptp(zero_point)):
        raise UnsupportedError(f"{encoding.role}: {tensor.label} has no place for its new zero points.")
    yield begin + quantization.zero_points.start, _bytes_of(zero_point[:held].astype("<i8", copy=False))


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    # Not copied: a vocabulary has a scale a row, and a table a layer.
    return np.ascontiguousarray(array).data.cast("B")
