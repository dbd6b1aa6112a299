"""A :class:`~mtp_extract.io.source.Source` over byte ranges, and the ways to a file that is already here."""

from __future__ import annotations

import tempfile
import threading
from bisect import bisect_left, bisect_right
from pathlib import Path

from mtp_extract.errors import SourceError
from mtp_extract.io.address import COMMIT, HubAddress, parse_address
from mtp_extract.io.http import NoRangesError, RangedFile, changed
from mtp_extract.io.http_library import FaultError, faults, hide_queries
from mtp_extract.io.output import write_all
from mtp_extract.io.repository import cached_address, file_of
from mtp_extract.io.source import FileSource, LocalSource, Progress, Source

_BLOCK = 1 << 16


class RemoteSource(FileSource):
    """Byte ranges of a file behind HTTP.

    A read fetches the blocks of 64 KiB around it, unless they are here: all that was fetched stays at its own offset of
    a sparse, nameless temporary file, which takes disk space for what was written and no memory, and vanishes with the
    process however that ends. Threads may read at the same time; they wait while one of them fetches.

    Where the server gives nothing that tells one file from another of the same length, both ends of every range that
    was fetched are kept in mind, and :meth:`confirm` fetches them once more.
    """

    def __init__(self, ranges: RangedFile, progress: Progress | None = None) -> None:
        self.name = ranges.name
        self._ranges, self._progress = ranges, progress
        self._lock = threading.Lock()
        # Where what is here begins and ends, in order; no two spans touch.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._again: set[tuple[int, int]] = set()
        try:
            self._file = tempfile.TemporaryFile(prefix="mtp-extract-")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._no_room(error) from error
        self.fileno = self._file.fileno()
        try:
            self._fetch(0, _BLOCK)
        except BaseException:
            self.close()
            raise
        self.size, self.provenance = ranges.size, ranges.provenance
        if not ranges.sure:
            self.notes = (
                "The server gives no validator (a strong ETag or Last-Modified): that all of this is of one file was "
                "checked by fetching headers and both ends of what was read twice, and by nothing else.",
            )

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        with self._lock:
            if self._missing(offset, offset + length):
                first, last = offset // _BLOCK * _BLOCK, -(-(offset + length) // _BLOCK) * _BLOCK
                for gap in self._missing(first, min(self.size, last)):
                    self._fetch(*gap)
        return super().read(offset, length)

    def copy(self, offset: int, length: int, fd: int, at: int) -> None:
        # What is not here yet is a hole of the file that the kernel copies from, and would be zeros.
        self.prefetch(offset, length)
        super().copy(offset, length, fd, at)

    def prefetch(self, offset: int, length: int) -> None:
        """Fetch what is missing of a range, in one request, so that reading it costs none."""
        self.check(offset, length)
        with self._lock:
            gaps = self._missing(offset, offset + length)
            if gaps:
                # What is here in between is a few blocks, cheaper to fetch again than to ask around.
                self._fetch(gaps[0][0], gaps[-1][1], (offset, offset + length))

    def confirm(self) -> None:
        with self._lock:
            # What is small is looked at whole: headers, and the tables of flatbuffers.
            for begin, end in sorted(self._again) if self.notes else ():
                kept = super().read(begin, end - begin)
                found = b"".join(piece for _, piece in self._ranges.fetch(begin, end))
                if found != kept:
                    raise changed(self.name, f"bytes {begin} to {end - 1} are others when fetched again")

    def close(self) -> None:
        self._file.close()

    def _fetch(self, begin: int, end: int, shown: tuple[int, int] | None = None) -> None:
        """Fetch ``[begin, end)`` and keep it; ``shown`` is the range whose progress is told."""
        self._again |= {(begin, min(begin + _BLOCK, end)), (max(begin, end - _BLOCK), end)}
        for at, piece in self._ranges.fetch(begin, end):
            try:
                write_all(self.fileno, piece, at)
            except OSError as error:
                raise self._no_room(error) from error
            self._add(at, at + len(piece))
            if self._ranges.whole:
                shown = 0, self._ranges.size
            if self._progress is not None and shown is not None:
                absent = sum(stop - start for start, stop in self._missing(*shown))
                self._progress(shown[1] - shown[0] - absent, shown[1] - shown[0])

    def _missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[begin, end)`` that are not here, in order."""
        gaps = []
        for at in range(bisect_right(self._ends, begin), bisect_left(self._begins, end)):
            if self._begins[at] > begin:
                gaps.append((begin, self._begins[at]))
            begin = self._ends[at]
        return [*gaps, (begin, end)] if begin < end else gaps

    def _add(self, begin: int, end: int) -> None:
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def _no_room(self, error: OSError) -> SourceError:
        return SourceError(
            f"{self.name}: what is fetched is kept in {tempfile.gettempdir()}, which cannot be written: "
            f"{error.strerror}. Set TMPDIR to a directory with more room."
        )


def open_remote(
    url: str, *, download: bool = False, token: str | bool | None = None, progress: Progress | None = None
) -> Source:
    """Open a remote file for random access.

    A whole copy of it in the Hub's cache is used where there is one: then nothing is fetched, and ``HF_HUB_OFFLINE``
    works.

    Args:
        url: ``hf://org/repo[/path][@revision]`` or an ``https://`` URL; of a repository, the one bundle in it.
        download: where the server has no byte ranges, download the whole file (from the Hub into the Hub's cache, from
            elsewhere into a temporary file) instead of failing.
        token: for the Hub; None for the one that ``hf auth login`` or ``HF_TOKEN`` left, False for none.
        progress: called with bytes done and bytes in all while a prefetched range or a whole file arrives.

    Raises:
        SourceError: refused, gone, not reachable, or offline and not in the cache.
        NoRangesError: the server sends whole files only, and ``download`` is False.
    """
    from huggingface_hub import constants

    address = parse_address(url, constants.ENDPOINT)
    hide_queries()
    if not isinstance(address, HubAddress):
        return RemoteSource(RangedFile(address, take_whole=download), progress)
    if not address.is_file:
        address = file_of(address, token)
    copy = None
    if constants.HF_HUB_OFFLINE or COMMIT.fullmatch(address.revision or ""):
        # A commit names the same bytes for ever, so the Hub need not be asked.
        copy = _cached(address, address.revision)
    if copy is None:
        ranges = RangedFile(address, token)
        ranges.locate()
        copy = _cached(address, ranges.provenance["commit"])
    if copy is None:
        try:
            return RemoteSource(ranges, progress)
        except NoRangesError:
            if not download:
                raise
        copy = _download(address, token)
    source = open_local(copy)
    # It is called what the user called it; the cache knows its commit.
    source.name = address.name
    source.provenance |= {"revision": address.revision or "main"}
    return source


def open_local(path: Path) -> LocalSource:
    """A file here; of one in the Hub's cache, the provenance is the Hub's."""
    source = LocalSource(path)
    address = cached_address(path)
    if address is not None:
        # A copy in the Hub's cache lies in a directory named by its commit, and links to a blob named by its ETag.
        blob = path.resolve()
        source.name = address.name
        etag = blob.name if blob.parent.name == "blobs" else None
        source.provenance = address.record(address.revision or "", etag)
    return source


def _cached(address: HubAddress, revision: str | None) -> Path | None:
    """The copy in the Hub's cache, if there is one of that revision."""
    from huggingface_hub import try_to_load_from_cache

    with faults(address.name):
        found = try_to_load_from_cache(address.repository, address.path, revision=revision, repo_type=address.kind)
    return Path(found) if isinstance(found, str) else None


def _download(address: HubAddress, token: str | bool | None) -> Path:
    """The whole file, in the Hub's cache. The revision is as the user wrote it, so that the cache knows it offline."""
    from huggingface_hub import hf_hub_download

    try:
        with faults(address.name):
            return Path(
                hf_hub_download(
                    address.repository, address.path, revision=address.revision, repo_type=address.kind, token=token
                )
            )
    except FaultError as fault:
        raise SourceError(f"{address.name}: {fault}. Run it again to resume.") from fault
    except OSError as error:
        # Full disk, no permission, or a copy that fails the Hub's check of size.
        reason = error.strerror or "the download is not complete"
        raise SourceError(f"{address.name}: could not be downloaded into the Hub's cache: {reason}.") from None
