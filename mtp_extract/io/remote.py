"""A :class:`~mtp_extract.io.source.Source` over byte ranges of one remote file.

The Hub is asked once for the file's commit, size and ETag. From then on ranges are requested of the file's address at
that commit, which the Hub redirects to its storage. Every answer must be a 206 with the range that was asked for, and
with the size, ETag and Last-Modified of the first answer; a file whose server gives neither a strong ETag nor a date is
refused. No block is fetched twice: what has arrived stays at its own offset of a sparse temporary file.

huggingface_hub's file system is not used: it holds a whole range in memory and looks at neither status nor ETag.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mtp_extract.errors import SourceError, escape
from mtp_extract.io.files import write_all
from mtp_extract.io.http_library import BUSY, FaultError, busy_fault, faults, http_library
from mtp_extract.io.source import FileSource, Progress, nothing_shown

T = TypeVar("T")

_BLOCK = 1 << 16

# Times in seconds.
CONNECT_TIMEOUT = 10.0
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each further attempt
_FEW = 2  # attempts more for a server that cannot be reached: who has no network learns it soon
_LONGEST_WAIT = 45.0  # that a server may ask for
_FORGIVEN = 1 << 20  # an attempt that brought so many bytes is no failure
_WINDOW, _LEAST = 60.0, 1 << 17  # an answer that brings fewer bytes in so long a time has failed

_BY_HAND = "Download the file yourself and give its path."
_CONTENT_RANGE = re.compile(r"\s*bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})\s*")
_STRONG = re.compile(r'"[\x21\x23-\x7e]+"')
"""An ETag that stands for the same bytes; a weak one (W/) stands for the same meaning."""
_STATUSES = {
    401: "the server refuses access",
    403: "the server refuses access",
    404: "the server has no such file",
    410: "the server has no such file any more",
    416: "the file is empty, or has become shorter",
}


def retried(name: str, attempt: Callable[[], T], arrived: Callable[[], int] = lambda: 0) -> T:
    """What ``attempt`` returns, which is called again after a fault that may go away.

    Args:
        name: of what is asked for.
        arrived: bytes that attempts have brought so far; one that brought much is no failure.

    Raises:
        SourceError: it failed too often, or the server asks for too long a wait.
    """
    failures = 0
    while True:
        before = arrived()
        try:
            with faults(name):
                return attempt()
        except FaultError as fault:
            failures = 1 if arrived() - before >= _FORGIVEN else failures + 1
            most = _FEW if fault.unreachable else len(_PAUSES)
            if failures > most or (fault.wait or 0) > _LONGEST_WAIT:
                again = "later" if fault.wait is None else f"in {fault.wait:.0f} seconds, as it asks"
                last = f"{name}: {fault.what} (attempt {failures}, the last). Try again {again}."
                raise SourceError(last) from fault
            time.sleep(_PAUSES[failures - 1] if fault.wait is None else fault.wait)


class RemoteSource(FileSource):
    """Byte ranges of a file behind HTTP, which must stay the same file throughout.

    A read fetches the blocks of 64 KiB around it, unless they are here: all that was fetched stays at its own offset of
    a sparse, nameless temporary file, which takes disk space for what was written and no memory, and vanishes with the
    process however that ends. Threads may read at the same time; they wait while one of them fetches.

    Args:
        name: of the file, safe to print.
        url, headers: where it is served, and what is sent there: neither is shown.
        size: bytes that it has, where that is known.
        progress: called with bytes done and bytes in all while a prefetched range arrives.

    Attributes:
        told: what must be the same in every answer, by the first: "size", "ETag" and "Last-Modified".

    Raises:
        SourceError: refused, gone, changed, without ranges or a validator, or not reachable.
    """

    def __init__(
        self,
        name: str,
        url: str,
        headers: Mapping[str, str],
        size: int | None = None,
        progress: Progress = nothing_shown,
    ) -> None:
        self.name, self.size, self.provenance = name, _BLOCK, {}
        self.told: dict[str, str | int] = {} if size is None else {"size": size}
        self._url, self._headers, self._progress = url, headers, progress
        self._here: set[int] = set()  # numbers of the blocks in the file
        self._lock = threading.Lock()
        try:
            self._fetch(0, 1)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        self._fetch(offset, length)
        return super().read(offset, length)

    def prefetch(self, offset: int, length: int) -> None:
        """Fetch what is missing of a range, in one request, so that reading it costs none."""
        self.check(offset, length)
        self._fetch(offset, length, self._progress)

    def _fetch(self, offset: int, length: int, progress: Progress = nothing_shown) -> None:
        """Fetch the blocks of a range that are not here; an answer that breaks off is resumed."""
        blocks = range(offset // _BLOCK, -(-(offset + length) // _BLOCK))

        def missing() -> list[int]:
            return [block for block in blocks if block not in self._here]

        def show() -> None:
            progress(max(0, length - (wanted - len(self._here)) * _BLOCK), length)

        def attempt() -> None:
            # What is here between two gaps is a few blocks, cheaper to fetch again than to ask around.
            if gaps := missing():
                self._request(gaps[0], gaps[-1] + 1, show)

        with self._lock:
            wanted = len(self._here) + len(missing())
            try:
                if self.fileno < 0:
                    with tempfile.TemporaryFile(prefix="mtp-extract-") as file:
                        self.fileno = os.dup(file.fileno())
                retried(self.name, attempt, lambda: len(self._here) * _BLOCK)
            except OSError as error:
                raise SourceError(
                    f"{self.name}: what is fetched is kept in a temporary file, which cannot be written: "
                    f"{error.strerror or error}. Set TMPDIR to a directory with more room."
                ) from error

    def _request(self, block: int, last: int, show: Callable[[], None]) -> None:
        """Fetch the blocks from ``block`` up to ``last``, and keep each as soon as it is whole."""
        from huggingface_hub import constants, get_session

        at, end = block * _BLOCK, min(last * _BLOCK, self.size)
        headers = {**self._headers, "Range": f"bytes={at}-{end - 1}"}
        timeout = http_library().Timeout(float(constants.HF_HUB_DOWNLOAD_TIMEOUT), connect=CONNECT_TIMEOUT)
        get = get_session().stream("GET", self._url, headers=headers, timeout=timeout, follow_redirects=True)
        with get as response:
            check_redirects(self.name, *(str(hop.url) for hop in (*response.history, response)))
            end = self._examine(response, at, end)
            since, arrived = time.monotonic(), 0
            # As it comes: collecting it into larger pieces would hide a trickle, and lose more when it breaks.
            for piece in response.iter_raw():
                if at + len(piece) > end:
                    raise FaultError(self.name, "the server sent more bytes than it announced")
                write_all(self.fileno, piece, at)
                at += len(piece)
                whole = last if at == end else at // _BLOCK
                self._here.update(range(block, whole))
                block = whole
                show()
                arrived += len(piece)
                if (passed := time.monotonic() - since) > _WINDOW:
                    if arrived < _LEAST:
                        slow = f"the server is too slow: {arrived} bytes in {passed:.0f} seconds"
                        raise FaultError(self.name, slow)
                    since, arrived = since + passed, 0
        if at < end:
            raise FaultError(self.name, f"the answer ended {end - at} bytes early")

    def _examine(self, response: Any, begin: int, end: int) -> int:
        """Check status and headers of an answer, and hold them against the first one's; where what follows ends.

        Raises:
            FaultError: another attempt may do.
            SourceError: refused, gone, changed, or a server that sends no ranges of one file.
        """
        status, headers = int(response.status_code), response.headers
        if status in BUSY:
            raise busy_fault(self.name, response)
        if status in (401, 403, 410) and self.told:
            # What the Hub redirects to is signed for a while, and anew for each request.
            raise FaultError(self.name, f"the server refuses access ({status})")
        if status == 200:
            page = headers.get("content-type", "").startswith("text/html")
            raise self._refused(
                f"expected a server of byte ranges, found {'an HTML page' if page else 'one of whole files'}"
            )
        if status != 206:
            raise self._refused(f"{_STATUSES.get(status, 'the server answered')} ({status})")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise self._refused("the server compresses what it sends, which makes offsets meaningless")
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if found is None:
            raise FaultError(self.name, "the server sent a range without saying which of how many bytes")
        start, stop, size = int(found[1]), int(found[2]) + 1, int(found[3])
        told = {"size": size, "ETag": headers.get("etag", ""), "Last-Modified": headers.get("last-modified", "")}
        for what, value in told.items():
            if self.told.setdefault(what, value) != value:
                changed = f"the file changed while it was being read (another {what}). Start again."
                raise SourceError(f"{self.name}: {changed}")
        if not _STRONG.fullmatch(str(told["ETag"])) and not told["Last-Modified"]:
            raise self._refused("the server gives neither a strong ETag nor a date, so a change would not be seen")
        self.size, end = size, min(end, size)
        if (start, stop) != (begin, end):
            wrong = f"the server sent bytes {start} to {stop - 1} when asked for {begin} to {end - 1}"
            raise FaultError(self.name, wrong)
        # Without a length, what follows the head may be another head as well.
        if (length := headers.get("content-length", "no number of")) != str(end - begin):
            wrong = f"the server announced {escape(length, 30)} bytes for a range of {end - begin}"
            raise FaultError(self.name, wrong)
        return end

    def _refused(self, why: str) -> SourceError:
        return SourceError(f"{self.name}: {why}. {_BY_HAND}")


def check_redirects(name: str, *urls: str) -> None:
    """Refuse to be led from a safe address to another kind."""
    if urls[0].startswith("https:") and not all(url.startswith("https:") for url in urls):
        raise SourceError(f"{name}: the server redirects to an address without https://. {_BY_HAND}")
