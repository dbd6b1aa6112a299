"""What is to be put into a bundle, and writing it: beside its place, read back and compared, then given its name."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_extract.errors import few
from mtp_extract.insertion.encoding import Encoding
from mtp_extract.insertion.placing import Overlay
from mtp_extract.insertion.slots import Slot, over_rows
from mtp_extract.io.laid import Laid, Put, write_laid
from mtp_extract.io.place import PathLike, staged
from mtp_extract.io.source import LocalSource, Progress, Source, counter
from mtp_extract.proof.proof import Proof


@dataclass(frozen=True)
class InsertionResult:
    """What was written."""

    path: Path
    size: int
    """In bytes."""
    notes: tuple[str, ...]
    """Things worth knowing that are not errors."""
    proof: Proof | None
    """That the new file's drafter computes what its weights say; None of a base, whose graphs are not proven."""


@dataclass(frozen=True)
class InsertionPlan:
    """What is to be done; nothing is written yet."""

    name: str
    """Of the bundle."""
    encodings: Mapping[str, tuple[Encoding, ...]]
    """Role → what becomes of it: one encoding, several where tables or signatures of a base differ in it, none where no
    constant holds it."""
    layout: Laid = field(repr=False)
    """The file that is written over: the bundle, with new places where some are needed."""
    overlays: tuple[Overlay, ...] = field(repr=False)
    """What is written over it."""
    notes: tuple[str, ...]
    source: Source = field(repr=False)
    inputs: tuple[PathLike | None, ...] = field(repr=False)
    check: Callable[[Path], Proof | None] = field(repr=False)
    """Reads the new file and compares it with what was planned; OutputError where it is something else."""
    of_base: bool = False
    """Whether it is a base that is put in, and no drafter."""
    added: bool = False
    """Whether the bundle has no drafter yet."""
    rebuilt: int = 0
    """How many roles get a new place; 0 where all is written in place."""

    @property
    def size(self) -> int:
        """Of the new file, in bytes."""
        return self.layout.size

    @property
    def changed(self) -> int:
        """Bytes that are written over the layout."""
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
            write_laid(stage, self.layout, counter(progress, self.size), self._fill)
            proof = self.check(stage)
            _freshen(stage, target, self.source)
        stale = (
            [f"Delete {few(names)}: the runtime packed them from an older file of this name."]
            if (names := _caches_of(target))
            else []
        )
        return InsertionResult(target, self.size, (*self.notes, *stale), proof)

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
        """What is to be done and, where it was, its ``result``."""
        roles = {
            role: [
                {"what": each.how, "stored": each.storage.type.name, "relative_rms_error": each.error} for each in own
            ]
            for role, own in self.encodings.items()
        }
        document = {
            "bundle": self.name,
            "out": str(result.path) if result else None,
            "size": self.size,
            "bytes_written": self.changed,
            "notes": (result or self).notes,
        }
        if self.of_base:
            return document | {"roles": roles}
        proof = result.proof.as_json() if result and result.proof else None
        counts = {"added": self.added, "rebuilt_roles": self.rebuilt}
        return document | counts | {"roles": {role: one for role, (one,) in roles.items()}, "proof": proof}


# LiteRT-LM (XNNPACK) keeps packed weights beside a bundle, in files called NAME_MTIME_SIZE…xnnpack_cache with the time
# in whole seconds. A file of the same name, size and second is taken for the one that was packed: the old matrices are
# then used with the new norms.


def _caches_of(target: Path) -> list[str]:
    with os.scandir(target.absolute().parent) as entries:
        return sorted(e.name for e in entries if e.name.startswith(target.name) and e.name.endswith("xnnpack_cache"))


def _freshen(stage: Path, target: Path, source: Source) -> None:
    """Give ``stage``, which becomes ``target``, a time of change that no cache and no older file has."""
    status = stage.stat()
    older = [os.fstat(source.fileno)] if isinstance(source, LocalSource) else []
    older += [target.stat()] if target.exists() else []
    taken, names = {other.st_mtime_ns // 10**9 for other in older}, _caches_of(target)
    second = status.st_mtime_ns // 10**9
    while second in taken or any(f"_{second}_" in name for name in names):
        second += 1
    if second != status.st_mtime_ns // 10**9:
        os.utime(stage, ns=(status.st_atime_ns, second * 10**9))
