"""What is to be put into a bundle, and writing it: beside its place, read back and compared, then given its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_extract.checkpoint.weight import Weight
from mtp_extract.insert.caches import freshen, stale_caches
from mtp_extract.insert.decision import Decision, table_of
from mtp_extract.io.laid import Laid, Piece, write_laid
from mtp_extract.io.place import PathLike, staged
from mtp_extract.io.source import Progress, Source, counter
from mtp_extract.io.threads import Job, on_all_cores
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
    """Graph and weights of the new file's drafter, executed side by side; None of a base, whose graphs are not."""


@dataclass(frozen=True)
class InsertionPlan:
    """What is to be done; nothing is written yet."""

    name: str
    """Of the bundle."""
    decisions: Mapping[str, tuple[Decision, ...]]
    """Role → what becomes of it, in the order of the roles: one decision, several where tables or signatures of a base
    differ in it, none where no constant holds it."""
    layout: Laid = field(repr=False)
    """The file that is written over: the bundle, with new places where some are needed."""
    pieces: tuple[Piece, ...] = field(repr=False)
    """What is written over it."""
    notes: tuple[str, ...]
    _source: Source = field(repr=False)
    _inputs: tuple[PathLike | None, ...] = field(repr=False)
    _verify: Callable[[Path], Proof | None] = field(repr=False)
    """Compare the new file with what was put in; raises OutputError where it reads back differently. What was copied is
    compared before."""
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
    def written(self) -> int:
        """How many codes, floats, scales and zero points are written, each as a whole."""
        return len(self.pieces)

    @property
    def changed(self) -> int:
        """Bytes that are written over the layout."""
        return sum(piece.length for piece in self.pieces)

    def write(
        self, out: str | os.PathLike[str], *, overwrite: bool = False, progress: Progress = lambda done, total: None
    ) -> InsertionResult:
        """Write it to the new file ``out``: beside its place first, where it is read again and compared, and proven.

        Raises:
            OutputError: it cannot be written there, or reads back differently; nothing is left behind.
            ProofError: what was written does not compute what it holds.
        """
        target = Path(out)
        laid = Laid(self.size, (*self.layout.pieces, *self.pieces))
        with staged(target, overwrite=overwrite, inputs=self._inputs) as stage:
            write_laid(stage, laid, counter(progress, self.size))
            proof = self._verify(stage)
            freshen(stage, target, self._source)
        return InsertionResult(target, self.size, (*self.notes, *stale_caches(target)), proof)

    def as_json(self, result: InsertionResult | None) -> dict[str, Any]:
        """What is to be done and, where it was, its ``result``."""
        counts: dict[str, Any] = {"added": self.added, "rebuilt_roles": self.rebuilt}
        if self.of_base:
            counts = {"places_written": self.written, "bytes_written": self.changed}
        roles: dict[str, list[dict[str, Any]]] = {
            role: [
                {
                    "what": decision.how,
                    "stored": decision.storage.type.name,
                    "relative_rms_error": decision.error,
                }
                for decision in each
            ]
            for role, each in self.decisions.items()
        }
        document = {
            "bundle": self.name,
            "out": str(result.path) if result else None,
            "size": self.size,
            **counts,
            "roles": roles if self.of_base else {role: one for role, (one,) in roles.items()},
            "notes": (result or self).notes,
        }
        if not self.of_base:
            document["proof"] = result.proof.as_json() if result and result.proof else None
        return document


def check_written(path: Path, written: Iterable[tuple[Weight, Decision]]) -> None:
    """Check that every weight read from the new file at ``path`` is as it was decided.

    Raises:
        OutputError: one is not.
    """
    on_all_cores(
        Job(decision.check_written(path, tensor), decision.storage.elements, table_of(decision.new))
        for tensor, decision in written
    )
