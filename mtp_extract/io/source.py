"""Random-access bytes: the one place where this package touches the outside of a file.

Local files are read with ``pread`` rather than mapped: a file that shrinks or a disk that fails while it is being
read then ends in an exception instead of a SIGBUS, and resident memory is what was asked for and nothing else.
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
    provenance: dict[str, str]  # what identifies the bytes beyond their name (repository, commit, ETag), for the record
    path: Path | None = None  # of the file, where it is one here

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``.

        Raises:
            TruncatedError: the range leaves the source.
            SourceError: the bytes could not be read.
        """

    def read_small(self, offset: int, length: int) -> bytes:
        """As :meth:`read`; up to 32 KiB come from pages that are kept, 8 MiB of them: a flatbuffer is read in words."""
        if length > _PAGE:
            return self.read(offset, length)
        index, start = divmod(offset, _PAGE)
        data = self._page(index)[start : start + length]
        return data if len(data) == length else data + self._page(index + 1)[: length - len(data)]

    @cached_property
    def _page(self) -> Callable[[int], bytes]:
        return lru_cache(256)(lambda index: self.read(index * _PAGE, min(_PAGE, self.size - index * _PAGE)))

    def prefetch(self, offset: int, length: int) -> None:
        """Say that a range will be read soon, in many small pieces. Local sources ignore it."""

    def sha256(self, reporter: Reporter = SILENT) -> str:
        """SHA-256 of all bytes, which are read: about 3 seconds a GiB."""
        digest = hashlib.sha256()
        for begin in range(0, self.size, _HASHED_AT_ONCE):
            digest.update(self.read(begin, min(_HASHED_AT_ONCE, self.size - begin)))
            reporter.done("hashing", min(begin + _HASHED_AT_ONCE, self.size), self.size, BYTES)
        return digest.hexdigest()

    def close(self) -> None:
        """Release what the source holds. Reading afterwards is an error."""

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
    """A source that is ``data`` in memory."""

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
        pieces, end = list[bytes](), offset + length
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
        self.path = local = Path(path)
        self.name, self.provenance = escape(local, 1 << 12), {}
        try:
            self.file = open_regular(local)
        except OSError as error:
            advice = "Give a file in it" if os.path.isdir(local) else "Check the path, and whether you may read it"
            why = f"cannot be opened: {error.strerror}. {advice}."
            raise SourceError(f"{self.name}: {why}") from error
        self.size = os.fstat(self.file.fileno()).st_size


@dataclass(frozen=True)
class Region:
    """A bounded part of a source: ``size`` bytes from ``begin``, called ``what`` in messages."""

    source: Source
    begin: int
    size: int
    what: str

    def part(self, offset: int, size: int, what: str) -> Region:
        """``size`` bytes of it from ``offset``, called ``what``; who asks has checked that they lie in it."""
        return Region(self.source, self.begin + offset, size, what)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from ``offset`` within the region; to its end if None.

        Raises:
            TruncatedError: the range leaves the region.
        """
        length = self.size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedError(
                f"{self.source.name}: {self.what} has {self.size} bytes, but bytes {offset}…{offset + length} of it "
                "are needed. The file is damaged or incomplete: fetch it again."
            )
        return self.source.read_small(self.begin + offset, length)
