"""Byte ranges of one remote file.

Every response must have the status 206, the range that was requested, and the size, ETag and Last-Modified of the first
response. A file whose server sends neither a strong ETag nor a date is refused. huggingface_hub's file system is not
used: it holds a whole range in memory, and checks neither status nor ETag.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, BinaryIO, TypeVar

from mtp_extract.errors import SourceError, escape
from mtp_extract.io.files import write_all
from mtp_extract.io.http_library import FaultError, translate_errors
from mtp_extract.io.source import FileSource
from mtp_extract.progress import BYTES, SILENT, Reporter

_T = TypeVar("_T")

_BLOCK = 1 << 16
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further attempt
_PAUSES_OF_QUESTIONS = _PAUSES[:4]  # fewer, as nothing has been fetched yet that would be lost
_FORGIVEN = 16  # blocks: an attempt that fetched so many is no failure
_WINDOW, _LEAST = 60.0, 1 << 17  # seconds, and the bytes that must arrive in them
_BY_HAND = "Download the file yourself and give its path."
_SIZE = re.compile(r"[0-9]{1,18}")
_STRONG = re.compile(r'"[\x21\x23-\x7e]+"')
"""A strong ETag: it changes with every byte, a weak one (W/) with the meaning alone."""


class RemoteSource(FileSource):
    """Byte ranges of a file behind HTTP, which must stay the same file throughout.

    A read fetches the missing blocks of 64 KiB around it. They are stored, at their offsets, in a sparse temporary file
    without a name, which takes no memory and vanishes with the process. Threads may read at the same time; they wait
    while one of them fetches.

    Args:
        name: of the file, safe to print; ``url`` is not shown.
        token: for the Hub, as for :func:`~mtp_extract.io.opening.open_source`.
        size: of the file in bytes, if it is known.
        reporter: told of the bytes of a prefetched range that have arrived.

    Raises:
        SourceError: the file is refused, gone, changed or not reachable, or its server sends no ranges or no validator.
    """

    def __init__(
        self, name: str, url: str, token: str | bool | None, size: int | None = None, reporter: Reporter = SILENT
    ) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, not in __all__

        self.name, self.size = name, _BLOCK
        # Size, ETag and Last-Modified of the first response, which all others must repeat.
        self._stated: dict[str, Any] = {} if size is None else {"size": size}
        # A compressed response would have other offsets.
        self._headers = {**build_hf_headers(token=token, library_name="mtp-extract"), "Accept-Encoding": "identity"}
        self._url, self._reporter = url, reporter
        self._fetched: set[int] = set()  # numbers of the blocks in the temporary file
        self._lock = threading.Lock()
        try:
            self._fetch(0, 1)
        except BaseException:
            if "file" in vars(self):
                self.close()
            raise
        stated = {"url": name, "etag": self._stated["ETag"], "last_modified": self._stated["Last-Modified"]}
        self.provenance = {key: str(value) for key, value in stated.items() if value}

    @cached_property
    def file(self) -> BinaryIO:  # type: ignore[override]
        return tempfile.TemporaryFile(prefix="mtp-extract-")

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        self._fetch(offset, length)
        return super().read(offset, length)

    def prefetch(self, offset: int, length: int) -> None:
        """Fetch the missing blocks of a range in one request."""
        self.check(offset, length)

        def show(end: int) -> None:
            self._reporter.report_progress("fetching", min(max(end - offset, 0), length), length, BYTES)

        self._fetch(offset, length, show)

    def _fetch(self, offset: int, length: int, show: Callable[[int], None] = lambda end: None) -> None:
        """Fetch the missing blocks of a range; after a fault that may go away, try again."""
        blocks = range(offset // _BLOCK, -(-(offset + length) // _BLOCK))
        failures = 0
        with self._lock:
            while missing := [block for block in blocks if block not in self._fetched]:
                before = len(self._fetched)
                try:
                    with translate_errors(self.name):
                        # The few blocks between two gaps are cheaper to fetch again than with two requests.
                        self._request(missing[0], missing[-1] + 1, show)
                except FaultError as fault:
                    failures = 1 if len(self._fetched) - before >= _FORGIVEN else failures + 1
                    if failures > len(_PAUSES):
                        raise _make_last_error(self.name, fault, failures) from fault
                    time.sleep(_PAUSES[failures - 1])
                except OSError as error:
                    why = f"the temporary file for fetched blocks cannot be written: {error.strerror or error}"
                    raise SourceError(f"{self.name}: {why}. Set TMPDIR to a directory with more room.") from error

    def _request(self, block: int, last: int, show: Callable[[int], None]) -> None:
        """Fetch the blocks from ``block`` up to ``last``, and store each as soon as it is complete."""
        from huggingface_hub import constants, get_session

        begin, end = block * _BLOCK, min(last * _BLOCK, self.size)
        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        get = get_session().stream("GET", self._url, headers=headers, timeout=timeout, follow_redirects=True)
        with get as response:
            check_redirects(self.name, *(str(hop.url) for hop in (*response.history, response)))
            self._check_status(response, begin)
            self._check_is_same(response.headers)
            end = min(end, self.size)
            self._check_range(response.headers, begin, end)
            self._keep(response.iter_raw(), begin, end, show)

    def _keep(self, pieces: Iterable[bytes], begin: int, end: int, show: Callable[[int], None]) -> None:
        """Write pieces of ``[begin, end)`` as they arrive: waiting for larger ones would hide a slow server."""
        at = begin
        since, arrived = time.monotonic(), 0
        for piece in pieces:
            if at + len(piece) > end:
                raise FaultError(self.name, "the server sent more bytes than it announced")
            write_all(self.file.fileno(), piece, at)
            first_block = at // _BLOCK
            at += len(piece)
            self._fetched.update(range(first_block, -(-at // _BLOCK) if at == end else at // _BLOCK))
            show(at)

            arrived += len(piece)
            if (passed := time.monotonic() - since) > _WINDOW:
                if arrived < _LEAST:
                    raise FaultError(self.name, f"the server is too slow: {arrived} bytes in {passed:.0f} seconds")
                since, arrived = since + passed, 0
        if at < end:
            raise FaultError(self.name, f"the answer ended {end - at} bytes early")

    def _check_status(self, response: Any, begin: int) -> None:
        """Check that a response contains uncompressed bytes from ``begin``.

        Raises:
            FaultError: another attempt may help.
            SourceError: none will.
            OSError: the status is an error that huggingface_hub knows.
        """
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # public, not in __all__

        status = int(response.status_code)
        if status in (401, 403, 410):
            refused = f"the server refuses access ({status})"
            # The Hub redirects to URLs whose signature expires; each request gets a new one.
            raise FaultError(self.name, refused) if self._stated else self._make_refusal(refused)
        if status == 416 and begin < self._stated.get("size", 0):
            # The file is larger: a cache on the way may have lost it, or have another one.
            raise FaultError(self.name, f"the server says that the file ends before byte {begin} (416)")
        hf_raise_for_status(response)
        if status != 206 or response.headers.get("content-encoding", "identity") != "identity":
            odd = f"expected a range of uncompressed bytes (206), found another answer ({status})"
            # The Hub, and a server that has sent ranges before, will send them again; another server will not.
            raise FaultError(self.name, odd) if self._stated else self._make_refusal(odd)

    def _check_is_same(self, headers: Mapping[str, str]) -> None:
        """Check that a response is of the same file as the first one, and set the size."""
        size = headers.get("content-range", "").rpartition("/")[2]
        if not _SIZE.fullmatch(size):
            raise FaultError(self.name, "the server sent a range without saying how many bytes the file has")
        stated = {"size": int(size), "ETag": headers.get("etag", ""), "Last-Modified": headers.get("last-modified", "")}
        for header, value in stated.items():
            if self._stated.setdefault(header, value) != value:
                raise SourceError(f"{self.name}: the file changed while being read (another {header}). Start again.")
        if not _STRONG.fullmatch(str(stated["ETag"])) and not stated["Last-Modified"]:
            raise self._make_refusal("the server sends neither a strong ETag nor a date, so a change would not be seen")
        self.size = int(size)

    def _check_range(self, headers: Mapping[str, str], begin: int, end: int) -> None:
        """Check that a response contains ``[begin, end)``, and states its length."""
        # Without a length, other headers may follow as if they were bytes of the file.
        wanted = {"Content-Range": f"bytes {begin}-{end - 1}/{self.size}", "Content-Length": str(end - begin)}
        for header, value in wanted.items():
            if (sent := headers.get(header, "none")) != value:
                raise FaultError(self.name, f"expected a {header} of {value}, the server sent {escape(sent, 60)}")

    def _make_refusal(self, why: str) -> SourceError:
        return SourceError(f"{self.name}: {why}. {_BY_HAND}")


def check_redirects(name: str, *urls: str) -> None:
    """Raise SourceError if a redirect leads from https:// to another scheme."""
    if urls[0].startswith("https:") and not all(url.startswith("https:") for url in urls):
        raise SourceError(f"{name}: the server redirects to an address without https://. {_BY_HAND}")


def retry_question(name: str, question: Callable[[], _T]) -> _T:
    """Call ``question``, which asks the Hub, and again after each fault that may go away.

    Raises:
        SourceError: the fault will not go away, or has not.
    """
    attempt = 1
    while True:
        try:
            with translate_errors(name):
                return question()
        except FaultError as fault:
            if attempt > len(_PAUSES_OF_QUESTIONS):
                raise _make_last_error(name, fault, attempt) from fault
            time.sleep(_PAUSES_OF_QUESTIONS[attempt - 1])
        attempt += 1


def _make_last_error(name: str, fault: FaultError, attempt: int) -> SourceError:
    return SourceError(f"{name}: {fault.what} (attempt {attempt}, the last). Try again later.")
