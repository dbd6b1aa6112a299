"""A :class:`~mtp_extract.io.source.Source` over byte ranges of one remote file, and the way to a copy that is here.

The Hub is asked once where the file lies, at which commit, with which size and ETag. From then on ranges of that
address are requested. Every answer must be a 206 with the range that was asked for, and with the size, ETag and
Last-Modified of the first answer; a file whose server gives neither a strong ETag nor a date is refused. Nothing is
fetched twice: what has arrived stays at its own offset of a sparse temporary file.

huggingface_hub's file system is not used: it holds a whole range in memory and looks at neither status nor ETag.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from mtp_extract.errors import SourceError, escape
from mtp_extract.io.address import COMMIT, HubAddress, WebAddress, origin_of, parse_address
from mtp_extract.io.http_library import BUSY, FaultError, busy_fault, date_of, faults, hide_queries, http_library
from mtp_extract.io.output import write_all
from mtp_extract.io.repository import cached_address, file_of
from mtp_extract.io.source import FileSource, LocalSource, Progress, Source

_BLOCK = 1 << 16

# Times in seconds.
_CONNECT_TIMEOUT = 10.0
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each further attempt
_FEW = 2  # attempts more for a server that cannot be reached: who has no network learns it soon
_LONGEST_WAIT = 45.0  # that a server may ask for
_FORGIVEN = 1 << 20  # an attempt that brought so many bytes is no failure
_WINDOW, _LEAST = 60.0, 1 << 17  # an answer that brings fewer bytes in so long a time has failed

_BY_HAND = "Download the file yourself and give its path."
_CONTENT_RANGE = re.compile(r"\s*bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})\s*")
_STRONG = re.compile(r'"[\x21\x23-\x7e]+"')
"""An ETag that stands for the same bytes; a weak one (W/) stands for the same meaning."""
_WEB_STATUSES = {
    **dict.fromkeys((401, 403), "refuses access: if it needs a login, download the file and give its path"),
    **dict.fromkeys((404, 410), "has no such file: check the address"),
}


@dataclass(frozen=True)
class _Place:
    """Where a file is served, and the headers to send there: neither may be shown. Of the Hub, what the file is."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    commit: str = ""
    etag: str | None = None
    size: int | None = None


def _locate(address: HubAddress | WebAddress, token: str | bool | None) -> _Place:
    """Where ``address`` is served now.

    Raises:
        SourceError: the Hub refuses, has no such file, or cannot be reached.
    """
    if isinstance(address, WebAddress):
        return _Place(address.url, _headers(False))
    failures = 0
    while True:
        try:
            with faults(address.name):
                return _ask_hub(address, token)
        except FaultError as fault:  # noqa: PERF203 - a network call a turn
            failures += 1
            _pause(address.name, fault, failures)


def _ask_hub(address: HubAddress, token: str | bool | None) -> _Place:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    hub = constants.ENDPOINT
    asked = hf_hub_url(
        address.repository, address.path, repo_type=address.kind, revision=address.revision, endpoint=hub
    )
    found = get_hf_file_metadata(asked, token=token, timeout=_CONNECT_TIMEOUT, endpoint=hub)
    url = urljoin(asked, found.location)
    token_for = token if origin_of(url) == origin_of(asked) else False
    if not COMMIT.fullmatch(found.commit_hash or ""):
        raise SourceError(
            f"{address.name}: expected the Hub to name the file's commit, found "
            f"{escape(found.commit_hash or 'none', 60)}. Check HF_ENDPOINT, or a proxy that drops headers."
        )
    _check_redirects(address.name, [asked, url])
    size = found.size if found.size is not None and found.size >= 0 else None
    return _Place(url, _headers(token_for), found.commit_hash or "", found.etag, size)


def _headers(token: str | bool | None) -> dict[str, str]:
    """Headers of a request, as huggingface_hub makes them. ``token=False`` leaves the token out."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, not in __all__

    # A compressed answer would have other offsets.
    return {**build_hf_headers(token=token, library_name="mtp-extract"), "Accept-Encoding": "identity"}


def _check_redirects(name: str, urls: Sequence[str]) -> None:
    """Refuse redirects to what is less safe than the address asked for, or no web address at all."""
    for before, after in pairwise(urlsplit(url).scheme for url in urls):
        if after not in ("https", "http") or (before == "https" and after != "https"):
            raise SourceError(
                f"{name}: expected a redirect to https://, found one to {escape(after, 20)}://. Give the address of "
                "the file itself."
            )


def _pause(name: str, fault: FaultError, failures: int) -> None:
    """Wait before the next attempt, unless there have been too many or the server asks for too long a wait."""
    most = _FEW if fault.kind == "unreachable" else len(_PAUSES)
    if failures > most or (fault.wait or 0) > _LONGEST_WAIT:
        again = "later" if fault.wait is None else f"in {fault.wait:.0f} seconds, as it asks"
        raise SourceError(f"{name}: {fault} (attempt {failures}, the last). Try again {again}.") from fault
    time.sleep(_PAUSES[failures - 1] if fault.wait is None else fault.wait)


class RemoteSource(FileSource):
    """Byte ranges of a file behind HTTP, which must stay the same file throughout.

    A read fetches the blocks of 64 KiB around it, unless they are here: all that was fetched stays at its own offset of
    a sparse, nameless temporary file, which takes disk space for what was written and no memory, and vanishes with the
    process however that ends. Threads may read at the same time; they wait while one of them fetches.

    Args:
        address: of the file.
        place: where it is served.
        token: for the Hub, and sent to it alone; None for the one of ``hf auth login`` or ``HF_TOKEN``, False for none.
        progress: called with bytes done and bytes in all while a prefetched range arrives.

    Raises:
        SourceError: refused, gone, changed, without ranges or a validator, or not reachable.
    """

    def __init__(
        self,
        address: HubAddress | WebAddress,
        place: _Place,
        token: str | bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.name, self.size = address.name, _BLOCK
        self._address, self._place, self._token, self._progress = address, place, token, progress
        # Size, ETag and Last-Modified of the first answer.
        self._identity: tuple[int, str, str] | None = None
        self._lock = threading.Lock()
        # Where what is here begins and ends, in order; no two spans touch.
        self._begins: list[int] = []
        self._ends: list[int] = []
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
        assert self._identity is not None
        _, etag, modified = self._identity
        if isinstance(address, HubAddress):
            self.provenance = address.record(place.commit, place.etag)
        else:
            headers = {"etag": etag, "last_modified": modified}
            self.provenance = {"url": self.name, **{key: value for key, value in headers.items() if value}}

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        with self._lock:
            if self._missing(offset, offset + length):
                self._fetch(offset // _BLOCK * _BLOCK, -(-(offset + length) // _BLOCK) * _BLOCK)
        return super().read(offset, length)

    def prefetch(self, offset: int, length: int) -> None:
        """Fetch what is missing of a range, in one request, so that reading it costs none."""
        self.check(offset, length)
        with self._lock:
            self._fetch(offset, offset + length, self._progress)

    def close(self) -> None:
        self._file.close()

    def _fetch(self, begin: int, end: int, progress: Progress | None = None) -> None:
        """Fetch what is missing of ``[begin, end)``, as far as the file goes; an answer that breaks off is resumed."""
        failures = 0
        while gaps := self._missing(begin, min(end, self.size)):
            # What is here between two gaps is a few blocks, cheaper to fetch again than to ask around.
            at = gaps[0][0]
            try:
                with faults(self.name):
                    self._request(at, gaps[-1][1], begin, end, progress)
            except FaultError as fault:
                left = self._missing(begin, min(end, self.size))
                failures = 1 if left and left[0][0] - at >= _FORGIVEN else failures + 1
                _pause(self.name, fault, failures)
                if fault.kind == "expired":
                    self._locate_again()

    def _locate_again(self) -> None:
        """Get another address for the same bytes."""
        assert isinstance(self._address, HubAddress)
        pinned = HubAddress(self._address.repository, self._address.path, self._place.commit, self._address.kind)
        found = _locate(pinned, self._token)
        if found.etag != self._place.etag:
            raise self._changed("another etag")
        self._place = found

    def _request(self, begin: int, end: int, first: int, last: int, progress: Progress | None) -> None:
        """Fetch ``[begin, end)`` and keep it as it comes; ``[first, last)`` is the range whose progress is shown."""
        from huggingface_hub import constants, get_session

        headers = {**self._place.headers, "Range": f"bytes={begin}-{end - 1}"}
        timeout = http_library().Timeout(float(constants.HF_HUB_DOWNLOAD_TIMEOUT), connect=_CONNECT_TIMEOUT)
        get = get_session().stream("GET", self._place.url, headers=headers, timeout=timeout, follow_redirects=True)
        with get as response:
            _check_redirects(self.name, [*(str(hop.url) for hop in response.history), str(response.url)])
            end = self._examine(response, begin, end)
            at, mark, since = begin, begin, time.monotonic()
            # Pieces as they come: collecting them into larger ones would hide a trickle and lose more when it breaks.
            for piece in response.iter_raw():
                if at + len(piece) > end:
                    raise FaultError("the server sent more bytes than it announced")
                self._keep(at, piece)
                at += len(piece)
                if progress is not None:
                    absent = sum(stop - start for start, stop in self._missing(first, last))
                    progress(last - first - absent, last - first)
                if (now := time.monotonic()) - since > _WINDOW:
                    if at - mark < _LEAST:
                        raise FaultError(f"the server is too slow: {at - mark} bytes in {now - since:.0f} seconds")
                    mark, since = at, now
            if at < end:
                raise FaultError(f"the answer ended {end - at} bytes early")

    def _examine(self, response: Any, begin: int, end: int) -> int:
        """Check status and headers of an answer, and hold them against the first one's; where what follows ends.

        Raises:
            FaultError: another attempt may do.
            SourceError: refused, gone, changed, or a server that sends no ranges of one file.
        """
        status, headers = int(response.status_code), response.headers
        if status in BUSY:
            raise busy_fault(response)
        # What the Hub redirects to is signed for a while. Whether that is all that is wrong, the Hub knows.
        if status in (401, 403, 410) and isinstance(self._address, HubAddress):
            raise FaultError(f"the storage behind the Hub refuses access ({status})", kind="expired")
        if status == 416:
            raise self._changed("it has become shorter") if self._identity else self._refused("the file is empty")
        if status == 200:
            page = headers.get("content-type", "").startswith("text/html")
            what = "an HTML page. Give the address of the file itself." if page else f"one of whole files. {_BY_HAND}"
            raise SourceError(f"{self.name}: expected a server of byte ranges, found {what}")
        if status != 206:
            raise SourceError(f"{self.name}: the server {_WEB_STATUSES.get(status, 'answered')} ({status}).")
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise self._refused("the server compresses what it sends, which makes offsets meaningless")
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if found is None:
            raise FaultError("the server sent a range without saying which of how many bytes")
        start, stop, size = int(found[1]), int(found[2]) + 1, int(found[3])
        self._identify(size, headers.get("etag", ""), headers.get("last-modified", ""))
        end = min(end, size)
        if (start, stop) != (begin, end):
            raise FaultError(f"the server sent bytes {start} to {stop - 1} when asked for {begin} to {end - 1}")
        # Without a length, what follows the head may be another head as well.
        if (length := headers.get("content-length", "no number of")) != str(end - begin):
            raise FaultError(f"the server announced {escape(length, 30)} bytes for a range of {end - begin}")
        return end

    def _identify(self, size: int, etag: str, modified: str) -> None:
        """Hold an answer against the first one: is it of the same file?"""
        if self._identity is None:
            if not _STRONG.fullmatch(etag) and date_of(modified) is None:
                raise self._refused("the server gives neither a strong ETag nor a date, so a change would not be seen")
            if self._place.size not in (None, size):
                raise self._changed(f"{self._place.size} bytes by one answer and {size} by another")
            self._identity, self.size = (size, etag, modified), size
        known_size, known_etag, known_date = self._identity
        if size != known_size:
            raise self._changed(f"{known_size} bytes by one answer and {size} by another")
        if etag != known_etag:
            raise self._changed("another ETag")
        if modified != known_date:
            raise self._changed("another Last-Modified")

    def _refused(self, why: str) -> SourceError:
        return SourceError(f"{self.name}: {why}. {_BY_HAND}")

    def _changed(self, how: str) -> SourceError:
        return SourceError(f"{self.name}: the file changed while it was being read ({how}). Start again.")

    def _no_room(self, error: OSError) -> SourceError:
        return SourceError(
            f"{self.name}: what is fetched is kept in {tempfile.gettempdir()}, which cannot be written: "
            f"{error.strerror}. Set TMPDIR to a directory with more room."
        )

    def _missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[begin, end)`` that are not here, in order."""
        gaps = []
        for at in range(bisect_right(self._ends, begin), bisect_left(self._begins, end)):
            if self._begins[at] > begin:
                gaps.append((begin, self._begins[at]))
            begin = self._ends[at]
        return [*gaps, (begin, end)] if begin < end else gaps

    def _keep(self, begin: int, piece: bytes) -> None:
        """Write ``piece`` into the temporary file, at ``begin``."""
        try:
            write_all(self.fileno, piece, begin)
        except OSError as error:
            raise self._no_room(error) from error
        end = begin + len(piece)
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]


def open_remote(url: str, *, token: str | bool | None = None, progress: Progress | None = None) -> Source:
    """Open a remote file for random access.

    A whole copy of it in the Hub's cache is used where there is one: then nothing is fetched, and ``HF_HUB_OFFLINE``
    works.

    Args:
        url: ``hf://org/repo[/path][@revision]`` or an ``https://`` URL; of a repository, the one bundle in it.
        token: for the Hub; None for the one that ``hf auth login`` or ``HF_TOKEN`` left, False for none.
        progress: called with bytes done and bytes in all while a prefetched range arrives.

    Raises:
        SourceError: refused, gone, not reachable, without byte ranges, or offline and not in the cache.
    """
    from huggingface_hub import constants

    address = parse_address(url, constants.ENDPOINT)
    hide_queries()
    if not isinstance(address, HubAddress):
        return RemoteSource(address, _locate(address, False), progress=progress)
    if not address.is_file:
        address = file_of(address, token)
    copy = None
    if constants.HF_HUB_OFFLINE or COMMIT.fullmatch(address.revision or ""):
        # A commit names the same bytes for ever, so the Hub need not be asked.
        copy = _cached(address, address.revision)
    if copy is None:
        place = _locate(address, token)
        copy = _cached(address, place.commit)
        if copy is None:
            return RemoteSource(address, place, token, progress)
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
