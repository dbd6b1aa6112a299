"""Byte ranges over HTTP: retried, resumed, checked.

huggingface_hub's own session does the talking, for the Hub and for plain URLs: proxies, certificates, offline
mode and a client that an application installed apply here as they do there. Its file system is not used, nor
fsspec's: both hold a whole range in memory, neither looks at the status line or the ETag, and a server
without ranges would send them all of the file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mtp_extract.errors import SourceError
from mtp_extract.io.faults import BUSY, FaultError, Faults, Patience, busy, http_library
from mtp_extract.io.origin import Origin, Target, escape_host
from mtp_extract.io.policy import Policy

__all__ = ["Channel", "Facts", "NoRangesError", "headers_for", "hide_queries", "pieces"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_EMPTY_RANGE = re.compile(r"bytes \*/(\d+)")


class NoRangesError(SourceError):
    """The server sends whole files only."""


class Sink(Protocol):
    """Takes the bytes of a range, in order, each piece with its offset in the file."""

    def __call__(self, offset: int, data: bytes, /) -> object: ...


class _ExpiredError(FaultError):
    """The place that the Hub redirected to refuses; the Hub can name another."""


@dataclass(frozen=True)
class Facts:
    """What the answers say of the file: bytes, ETag, date of the last change."""

    size: int
    etag: str | None
    modified: str | None


def headers_for(token: str | bool | None) -> dict[str, str]:
    """Headers of a request, as huggingface_hub makes them. ``token=False`` leaves the token out."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, not in __all__

    headers: dict[str, str] = build_hf_headers(token=token, library_name="mtp-extract")
    # A compressed answer would have other offsets.
    return {**headers, "Accept-Encoding": "identity"}


def pieces(response: Any, expected: int, policy: Policy) -> Iterator[bytes]:
    """The body of ``response``, which has announced ``expected`` bytes.

    Raises:
        FaultError: it brings more or fewer, or too few in the policy's window.
    """
    got, before, since = 0, 0, policy.clock()
    # Pieces as they come: collecting them into larger ones would hide a trickle and lose more when it breaks.
    for piece in response.iter_raw() if expected else ():
        got += len(piece)
        if got > expected:
            raise FaultError(f"the server sent more than the {expected} bytes it announced")
        yield piece
        now = policy.clock()
        if now - since >= policy.slow_window:
            if got - before < policy.slow_bytes and got < expected:
                raise FaultError(
                    f"the server is too slow: {got - before} bytes in {now - since:.0f} seconds", slow=True
                )
            before, since = got, now
    if got < expected:
        raise FaultError(f"the answer ended after {got} of {expected} bytes")


class Channel:
    """Ranges of one file, which must stay the same file throughout.

    Attributes:
        name: the address, safe to show.
        received: bytes of content received so far, those of failed attempts included.
    """

    def __init__(self, origin: Origin, policy: Policy) -> None:
        self.name = origin.name
        self.received = 0
        self._origin = origin
        self._policy = policy
        self._patience = Patience(origin.name, policy)
        self._target: Target | None = None
        self._facts: Facts | None = None
        self._identity: dict[str, str] = {}

    @property
    def facts(self) -> Facts:
        """Size, ETag and date. Known once a range was fetched."""
        assert self._facts is not None, "a range has to be fetched first"
        return self._facts

    def locate(self) -> dict[str, str]:
        """Find the file without reading it; what identifies it, for the record."""
        while True:
            try:
                return self._origin.provenance(self._where(), None, None)
            except FaultError as fault:  # noqa: PERF203 - a network call a turn
                self._patience.spend(fault)

    def provenance(self) -> dict[str, str]:
        """What identifies the file, for the record. Known once a range was fetched."""
        return self._origin.provenance(self._where(), self.facts.etag, self.facts.modified)

    def fetch(self, begin: int, end: int, sink: Sink) -> None:
        """Fetch ``[begin, end)`` and hand it to ``sink`` piece by piece; less if the file ends before.

        Raises:
            NoRangesError: the server ignores ranges.
            SourceError: refused, gone, changed, or not to be had within the policy's limits.
        """
        at = mark = begin
        while at < (end if self._facts is None else min(end, self._facts.size)):
            try:
                for piece in self._range(at, end):
                    sink(at, piece)
                    at += len(piece)
                if self._facts is not None and self._facts.size == 0:
                    return
            except FaultError as fault:  # noqa: PERF203 - a network call a turn
                if isinstance(fault, _ExpiredError):
                    self._target = None
                if at - mark >= self._policy.forgiven_bytes:
                    self._patience.forgive()
                mark = at
                self._patience.spend(fault)
        self._patience.forgive()

    def _where(self) -> Target:
        if self._target is None:
            with Faults(self.name):
                target = self._origin.resolve(self._policy.connect_timeout)
            self._patience.answered = self._patience.answered or bool(target.identity)
            self._same(target.identity)
            if target.size is not None and self._facts is not None:
                self._sized(self._facts.size, target.size)
            self._target = target
        return self._target

    def _range(self, begin: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import constants, get_session

        target = self._where()
        read = self._policy.read_timeout or float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        timeout = http_library().Timeout(read, connect=self._policy.connect_timeout)
        headers = {**target.headers, "Range": f"bytes={begin}-{end - 1}"}
        with (
            Faults(self.name),
            get_session().stream(
                "GET", target.url, headers=headers, timeout=timeout, follow_redirects=True
            ) as response,
        ):
            self._patience.answered = True
            for piece in pieces(response, self._examine(response, target, begin, end), self._policy):
                self.received += len(piece)
                yield piece

    def _examine(self, response: Any, target: Target, begin: int, end: int) -> int:
        """Check status and headers of an answer to a range; the number of bytes that follow."""
        status, headers = int(response.status_code), response.headers
        self._refused(response, target)
        if (
            status == 416
            and self._facts is None
            and (empty := _EMPTY_RANGE.fullmatch(headers.get("content-range", "")))
        ):
            self._learn(headers, target, int(empty[1]))
            return 0
        if status == 200:
            length = headers.get("content-length", "")
            much = f" of {int(length) / 1e9:.1f} GB" if length.isdigit() else ""
            raise NoRangesError(
                f"{self.name}: {escape_host(str(response.url))} does not serve byte ranges, so the whole "
                f"file{much} would have to be downloaded. Allow that, or give the path of a copy.",
                remedies=("download",),
            )
        if status != 206:
            raise SourceError(f"{self.name}: expected a byte range (status 206), the server answered {status}.")
        if headers.get("content-encoding", "identity") != "identity":
            raise SourceError(f"{self.name}: the server compresses byte ranges, which makes offsets meaningless.")
        match = _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
        if match is None:
            raise FaultError("the server sent a range without saying which")
        first, last = int(match[1]), int(match[2])
        size = target.size if match[3] == "*" else int(match[3])
        if size is None:
            raise SourceError(f"{self.name}: the server does not say how large the file is.")
        self._learn(headers, target, size)
        if first != begin or last != min(end, size) - 1:
            raise FaultError(f"the server sent bytes {first} to {last} when asked for {begin} to {end - 1}")
        announced = headers.get("content-length")
        if announced is not None and int(announced) != last - first + 1:
            raise FaultError(f"the server announced {announced} bytes for a range of {last - first + 1}")
        return last - first + 1

    def _learn(self, headers: Any, target: Target, size: int) -> None:
        if target.size is not None:
            self._sized(target.size, size)
        etag = headers.get("etag")
        if etag is not None:
            self._same({"ETag": etag.removeprefix("W/")})
        if self._facts is None:
            self._facts = Facts(size, etag, headers.get("last-modified"))
        self._sized(self._facts.size, size)

    def _same(self, identity: dict[str, str]) -> None:
        for key, value in identity.items():
            known = self._identity.setdefault(key, value)
            if known != value:
                raise SourceError(
                    f"{self.name}: the file changed while it was being read (another {key}). Start again."
                )

    def _sized(self, known: int, size: int) -> None:
        if known != size:
            raise SourceError(
                f"{self.name}: the file has {known} bytes by one answer and {size} by another. "
                "It changed while it was being read, or the server is at fault: start again."
            )

    def _refused(self, response: Any, target: Target) -> None:
        status = int(response.status_code)
        if status in BUSY:
            raise busy(response)
        # What the Hub redirects to is signed for a while. Whether that is all that is wrong, the Hub knows.
        if status in (401, 403, 410) and target.identity:
            raise _ExpiredError(f"the storage behind the Hub refuses access ({status})")
        if status in (401, 403):
            raise SourceError(
                f"{self.name}: the server refuses access ({status}). If it needs a login, download the "
                "file and give its path."
            )
        if status in (404, 410):
            raise SourceError(f"{self.name}: there is no such file on the server ({status}). Check the address.")


_URL_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")
_URL_LOGIN = re.compile(r"(https?://)[^\s/?@'\"]+@")


class _HideSecrets(logging.Filter):
    """Cuts queries, where signatures and tokens live, and logins from the URLs that an HTTP library logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "http" in message:
            record.msg, record.args = _URL_LOGIN.sub(r"\1…@", _URL_QUERY.sub(r"\1?…", message)), ()
        return True


_HIDE = _HideSecrets()


def hide_queries() -> None:
    """Keep signed URLs out of the logs of the HTTP library, whatever level the application logs at."""
    library = http_library().__name__
    core = library.replace("httpx", "httpcore")
    names = (library, *(f"{core}.{part}" for part in ("connection", "http11", "http2", "proxy")))
    for name in (*names, "huggingface_hub.utils._http"):
        logging.getLogger(name).addFilter(_HIDE)  # adding it twice adds it once
