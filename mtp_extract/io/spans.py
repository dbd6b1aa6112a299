"""The parts of a remote file that are already here."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left, bisect_right

from mtp_extract.errors import SourceError

__all__ = ["PartialFile"]


class PartialFile:
    """A sparse, nameless temporary file that holds some byte ranges of a larger one at their own offsets.

    It takes the disk space of what was written and no memory, and vanishes with the process however that
    ends.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="mtp-extract-")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise SourceError(self._full(error)) from error
        self._begins: list[int] = []
        self._ends: list[int] = []

    @staticmethod
    def _full(error: OSError) -> str:
        return (
            f"What is fetched is kept in {tempfile.gettempdir()}, which cannot be written: {error.strerror}. "
            "Set TMPDIR to a directory with room for the drafter."
        )

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[begin, end)`` that are not here, in order."""
        gaps = []
        for at in range(bisect_right(self._ends, begin), len(self._begins)):
            if self._begins[at] >= end:
                break
            if self._begins[at] > begin:
                gaps.append((begin, self._begins[at]))
            begin = self._ends[at]
        if begin < end:
            gaps.append((begin, end))
        return gaps

    def write(self, offset: int, data: bytes) -> None:
        """Keep ``data``, which begins at ``offset``."""
        view = memoryview(data)
        at = offset
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, at)
                at, view = at + written, view[written:]
        except OSError as error:
            raise SourceError(self._full(error)) from error
        self._add(offset, at)

    def _add(self, begin: int, end: int) -> None:
        first = bisect_left(self._ends, begin)
        last = bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``, all of which are here."""
        pieces: list[bytes] = []
        while length:
            piece = os.pread(self._file.fileno(), length, offset)
            if not piece:
                raise SourceError(f"A temporary file in {tempfile.gettempdir()} lost what was written to it.")
            if len(piece) == length and not pieces:
                return piece
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Free the space."""
        self._file.close()
