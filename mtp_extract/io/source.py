"""Random access to the bytes of files.

Local files are read with ``pread`` rather than mapped. If a file shrinks or a disk fails, that raises an exception
where a mapped file would end in SIGBUS; and no more memory is used than is read.
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO

from mtp_extract.errors import SourceError, TruncatedError, escape
from mtp_extract.io.files import open_regular
from mtp_extract.progress import BYTES, SILENT, Reporter

_PAGE = 1 << 15
_HASHED_AT_ONCE = 1 << 22


class Source(AbstractContextManager["Source"]):
    """Bytes with a known size that can be read at any offset."""

    name: str  # as the user named it; safe to print
    size: int  # in bytes
    provenance: dict[str, str]  # repository, commit, ETag or URL, for the record
    path: Path | None = None  # of a local file

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``offset``.

        Raises:
            TruncatedError: the range does not lie inside the source.
            SourceError: the bytes could not be read.
        """

    def read_small(self, offset: int, length: int) -> bytes:
        """Read bytes, up to 32 KiB at a time through a cache of 8 MiB: a flatbuffer is read in many small pieces."""
        if length > _PAGE:
            return self.read(offset, length)
        index, start = divmod(offset, _PAGE)
        data = self._page(index)[start : start + length]
        return data if len(data) == length else data + self._page(index + 1)[: length - len(data)]

    @cached_property
    def _page(self) -> Callable[[int], bytes]:
        return lru_cache(256)(lambda index: self.read(index * _PAGE, min(_PAGE, self.size - index * _PAGE)))

    def prefetch(self, offset: int, length: int) -> None:
        """Announce that a range will be read in small pieces. Local sources ignore it."""

    def compute_sha256(self, reporter: Reporter = SILENT) -> str:
        """Read all bytes and return their SHA-256: about 3 seconds per GiB."""
        digest = hashlib.sha256()
        for begin in range(0, self.size, _HASHED_AT_ONCE):
            digest.update(self.read(begin, min(_HASHED_AT_ONCE, self.size - begin)))
            reporter.report_progress("hashing", min(begin + _HASHED_AT_ONCE, self.size), self.size, BYTES)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file. Reading afterwards is an error."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self, offset: int, length: int) -> None:
        """Raise :class:`TruncatedError` unless ``[offset, offset + length)`` lies inside the source."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedError(
                f"{self.name}: bytes {offset}…{offset + length} are needed, but the file has {self.size}. "
                "The download is probably incomplete: fetch it again."
            )


class BytesSource(Source):
    """Bytes in memory."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.provenance = {}

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        return self.data[offset : offset + length]


class FileSource(Source):
    """Bytes of an open ``file``, which a subclass sets."""

    file: BinaryIO

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        pieces = list[bytes]()
        end = offset + length
        while offset < end:
            try:
                pieces.append(os.pread(self.file.fileno(), end - offset, offset))
            except OSError as error:
                raise SourceError(f"{self.name}: reading at byte {offset} failed: {error.strerror}.") from error
            if not pieces[-1]:
                raise TruncatedError(f"{self.name}: the file shrank while it was being read (at byte {offset}).")
            offset += len(pieces[-1])
        return b"".join(pieces)

    def close(self) -> None:
        self.file.close()


class LocalSource(FileSource):
    """A regular file on this machine, opened read-only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = escape(self.path, 1 << 12)
        self.provenance = {}
        try:
            self.file = open_regular(self.path)
        except OSError as error:
            advice = "Give a file in it" if os.path.isdir(self.path) else "Check the path, and whether you may read it"
            why = f"cannot be opened: {error.strerror}. {advice}."
            raise SourceError(f"{self.name}: {why}") from error
        self.size = os.fstat(self.file.fileno()).st_size


@dataclass(frozen=True)
class Region:
    """Part of a source: ``size`` bytes from ``begin``; messages call it ``what``."""

    source: Source
    begin: int
    size: int
    what: str

    def part(self, offset: int, size: int, what: str) -> Region:
        """Return ``size`` bytes from ``offset`` as a region; the caller has checked that they lie in this one."""
        return Region(self.source, self.begin + offset, size, what)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Read ``length`` bytes from ``offset`` within the region, to its end if None.

        Raises:
            TruncatedError: the range does not lie inside the region.
        """
        length = self.size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedError(
                f"{self.source.name}: {self.what} has {self.size} bytes, but bytes {offset}…{offset + length} of it "
                "are needed. The file is damaged or incomplete: fetch it again."
            )
        return self.source.read_small(self.begin + offset, length)
