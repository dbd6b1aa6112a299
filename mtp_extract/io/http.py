"""Byte ranges of one file over HTTP: retried, resumed, checked.

What makes two answers one file's is one rule: a strong ETag, else Last-Modified, and the length. The first answer's is
sent with every later request (``If-Range``), and must stand in every later answer. For a server
that gives neither, ``RangedFile.validator`` is None: who reads from it has to fetch twice.

huggingface_hub's own session does the talking, for the Hub and for plain URLs: proxies, certificates, offline mode and
a client that an application installed apply here as they do there. Its back-off cannot be used: it asks again for all
of a range and waits as long as a server likes. Nor can its file system: it holds a whole range in memory and looks at
neither status line nor ETag.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urljoin, urlsplit

from mtp_extract.errors import SourceError, escape
from mtp_extract.io.address import COMMIT, HubAddress, WebAddress, origin_of
from mtp_extract.io.http_library import BUSY, FaultError, busy_fault, date_of, faults, http_library
from mtp_extract.io.watchdog import watched

_WEB_STATUSES = {
    **dict.fromkeys((401, 403), "refuses access: if it needs a login, download the file and give its path"),
    **dict.fromkeys((404, 410), "has no such file: check the address"),
}

# Times in seconds.
_CONNECT_TIMEOUT = 10.0
_FAILURES, _FEW_FAILURES, _SLOW_FAILURES = 5, 2, 1
_BACKOFF, _LONGEST_BACKOFF = 0.5, 8.0
_PATIENCE = 45.0  # no attempt begins so long after something came, nor is a longer Retry-After obeyed
_SLOW_WINDOW, _SLOW_BYTES = 15.0, 32 << 10  # an answer that brings no head or fewer bytes in a window has failed
_FORGIVEN = 1 << 20  # whoever brought so many bytes starts counting failures again

_BY_HAND = "Download it yourself and give its path."
_CONTENT_RANGE = re.compile(r"\s*bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)\s*")
_NUMBER = re.compile(r"[0-9]{1,18}")
_STRONG = re.compile(r'"[\x21\x23-\x7e]+"')
"""An ETag that stands for the same bytes; a weak one (W/) stands for the same meaning."""


class NoRangesError(SourceError):
    """The server sends whole files only."""


def _validator_of(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Header and value that tell this content from any other of its length; None where the answer has none."""
    etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
    if _STRONG.fullmatch(etag):
        return "ETag", etag
    return ("Last-Modified", modified) if date_of(modified) is not None else None


class RangedFile:
    """One remote file, which must stay the same file throughout; on the Hub, on the commit found first.

    Args:
        address: of the file.
        token: for the Hub, and sent to it alone; None for the one of ``hf auth login`` or ``HF_TOKEN``, False for none.
        take_whole: take all of the file from a server without ranges, instead of failing.

    Attributes:
        name: the address, safe to show.
        whole: the server has no ranges and sends all of the file.
        validator: the header that tells this file from another, and its value; None where the server gives none. Known
            once a range was fetched.
    """

    def __init__(
        self, address: HubAddress | WebAddress, token: str | bool | None = False, take_whole: bool = False
    ) -> None:
        self.name, self.whole = address.name, False
        self.validator: tuple[str, str] | None = None
        self._address, self._token, self._take_whole = address, token, take_whole
        self._place: tuple[str, dict[str, str]] | None = None
        self._known: dict[str, Any] = {}
        self._failures, self._answered, self._examined, self._conditional = 0, False, False, True
        self._since = time.monotonic()  # when something came last

    @property
    def size(self) -> int:
        """Bytes of the file. Known once a range was fetched."""
        return int(self._known["size"])

    @property
    def sure(self) -> bool:
        """Whether all answers are known to be of one file: there was one alone, or a validator stood in each."""
        return self.whole or self.validator is not None or not self._examined

    @property
    def provenance(self) -> dict[str, str]:
        """What identifies the file, for the record. Known once a range was fetched; on the Hub, once located."""
        doubt = {} if self.sure else {"validator": "none"}
        if isinstance(self._address, HubAddress):
            return self._address.record(self._known["commit"], self._known.get("etag")) | doubt
        headers = {key: self._known[key] for key in ("etag", "last_modified") if self._known.get(key)}
        return {"url": self.name, **headers, **doubt}

    def locate(self) -> tuple[str, dict[str, str]]:
        """Where the file is served, and the headers to send there. Neither may be shown."""
        while self._place is None:
            try:
                with faults(self.name):
                    self._place = self._resolve()
            except FaultError as fault:  # noqa: PERF203 - a network call a turn
                self._wait(fault)
        return self._place

    def fetch(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Pieces of ``[begin, end)``, each with its offset; less if the file ends before, all of it if ``whole``.

        Raises:
            NoRangesError: the server ignores ranges.
            SourceError: refused, gone, changed, or not to be had with patience.
        """
        at = reached = begin
        self._since = time.monotonic()
        while at < (self.size if self.whole else min(end, self._known.get("size", end))):
            try:
                for offset, piece in self._request(at, end):
                    yield offset, piece
                    at = offset + len(piece)
            except FaultError as fault:  # noqa: PERF203 - a network call a turn
                if fault.kind == "expired":
                    self._place = None
                if at - reached >= _FORGIVEN:
                    self._failures = 0
                reached = max(reached, at)
                self._wait(fault)
        self._failures = 0

    def _resolve(self) -> tuple[str, dict[str, str]]:
        address = self._address
        if isinstance(address, WebAddress):
            return address.url, _headers(False)
        from huggingface_hub import close_session, constants, get_hf_file_metadata, hf_hub_url

        hub, revision = constants.ENDPOINT, self._known.get("commit", address.revision)
        url = hf_hub_url(address.repository, address.path, repo_type=address.kind, revision=revision, endpoint=hub)
        try:
            with watched(_SLOW_WINDOW, close_session):
                found = get_hf_file_metadata(url, token=self._token, timeout=_CONNECT_TIMEOUT, endpoint=hub)
            origin = origin_of(location := urljoin(url, found.location))
        except ValueError:
            raise SourceError(f"{self.name}: the Hub redirects to what is no address.") from None
        if not COMMIT.fullmatch(found.commit_hash or ""):
            raise SourceError(
                f"{self.name}: expected the Hub to name the file's commit, found "
                f"{escape(found.commit_hash or 'none', 60)}. Check HF_ENDPOINT, or a proxy that drops headers."
            )
        self._answered = True
        # The ETag that the Hub sends before it redirects: of the file itself, not of the CDN's copy.
        size = found.size if found.size is not None and found.size >= 0 else None
        self._same(commit=found.commit_hash, etag=found.etag, size=size)
        self._check_way([url, location])
        return location, _headers(self._token if origin == origin_of(url) else False)

    def _request(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        from huggingface_hub import close_session, constants, get_session

        url, headers = self.locate()
        headers = {**headers, "Range": f"bytes={begin}-{end - 1}"}
        if self.validator is not None and self._conditional:
            headers["If-Range"] = self.validator[1]
        timeout = http_library().Timeout(float(constants.HF_HUB_DOWNLOAD_TIMEOUT), connect=_CONNECT_TIMEOUT)
        get = get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True)
        with faults(self.name), watched(_SLOW_WINDOW, close_session) as watch, get as response:
            self._answered = True
            self._check_way([*(str(hop.url) for hop in response.history), str(response.url)])
            at, stop = self._examine(response, begin, end)
            before = at
            watch.restart()
            # Pieces as they come: collecting them into larger ones would hide a trickle and lose more when it breaks.
            for piece in response.iter_raw() if at < stop else ():
                if at + len(piece) > stop:
                    raise FaultError("the server sent more bytes than it announced")
                yield at, piece
                at += len(piece)
                if at - before >= _SLOW_BYTES:
                    watch.restart()
                    before, self._since = at, time.monotonic()
            if at < stop:
                raise FaultError(f"the answer ended {stop - at} bytes early")

    def _check_way(self, urls: Sequence[str]) -> None:
        """Refuse redirects to what is less safe than the address asked for, or no web address at all."""
        schemes = [urlsplit(url).scheme for url in urls]
        for before, after in pairwise(schemes):
            if after not in ("https", "http") or (before == "https" and after != "https"):
                raise SourceError(
                    f"{self.name}: expected a redirect to https://, found one to {escape(after, 20)}://. Give the "
                    "address of the file itself."
                )

    def _examine(self, response: Any, begin: int, end: int) -> tuple[int, int]:
        """Check status and headers of an answer; which bytes follow."""
        status, headers = int(response.status_code), response.headers
        if status in BUSY:
            raise busy_fault(response)
        # What the Hub redirects to is signed for a while. Whether that is all that is wrong, the Hub knows.
        if status in (401, 403, 410) and isinstance(self._address, HubAddress):
            raise FaultError(f"the storage behind the Hub refuses access ({status})", kind="expired")
        if status == 416:
            what = "the file changed while it was being read" if "size" in self._known else "the file is empty"
            raise SourceError(f"{self.name}: {what}. Fetch it again.")
        if status not in (200, 206):
            raise SourceError(f"{self.name}: the server {_WEB_STATUSES.get(status, 'answered')} ({status}).")
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise SourceError(f"{self.name}: the server compresses what it sends, which makes offsets meaningless.")
        length = headers.get("content-length", "")
        if length and not _NUMBER.fullmatch(length):
            raise FaultError("the server announced a length that is none")
        if status == 200 and self._examined:
            # All in place of a range, for another file; or the server knows no If-Range.
            self._identify(headers)
            if self.validator is not None and self._conditional and not self.whole:
                self._conditional = False
                raise FaultError("the server sends all of the file when asked for a range of the same one", 0.0)
        first, stop, size = self._whole(headers, length) if status == 200 else self._range(headers)
        self._same(size=size)
        self._identify(headers)
        if (first, stop) != (asked := (0, size) if status == 200 else (begin, min(end, size))):
            raise FaultError(f"the server sent bytes {first} to {stop - 1} when asked for {asked[0]} to {asked[1] - 1}")
        if length and int(length) != stop - first:
            raise FaultError(f"the server announced {length} bytes for a range of {stop - first}")
        return first, stop

    def _range(self, headers: Mapping[str, str]) -> tuple[int, int, int]:
        """Begin and end of the range that follows, and the size of the file."""
        match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if match is None:
            raise FaultError("the server sent a range without saying which")
        size = self._known.get("size") if match[3] == "*" else int(match[3])
        if size is None:
            raise SourceError(f"{self.name}: the server does not say how large the file is. {_BY_HAND}")
        return int(match[1]), int(match[2]) + 1, size

    def _identify(self, headers: Mapping[str, str]) -> None:
        """Hold an answer against the first one: is it of the same file?

        Raises:
            SourceError: it is not, or does not say so where the first did.
        """
        etag, modified = headers.get("etag"), headers.get("last-modified")
        if not self._examined:
            self._examined, self.validator = True, _validator_of(headers)
            self._known = {"etag": etag, "last_modified": modified, **self._known}
        if self.validator is not None:
            name, expected = self.validator
            found = headers.get(name)
            if found != expected:
                what = f"another {name}" if found else f"the server no longer gives its {name}"
                raise changed(self.name, what)
        if self.validator is None or self.validator[0] != "ETag":
            # A weak ETag proves nothing by staying, and a change by moving.
            self._same(**{"weak ETag": etag and etag.removeprefix("W/"), "Last-Modified": modified})

    def _whole(self, headers: Mapping[str, str], length: str) -> tuple[int, int, int]:
        """The same of a server without ranges, if all of the file is wanted and can be checked."""
        if headers.get("content-type", "").startswith("text/html"):
            raise SourceError(f"{self.name}: expected a file, found an HTML page. Give the address of the file itself.")
        if not self._take_whole:
            much = f" of {max(int(length) / 1e6, 0.1):,.1f} MB" if length else ""
            raise NoRangesError(
                f"{self.name}: expected a server of byte ranges, found one that sends whole files. Allow the download "
                f"of the whole file{much}, or give the path of a copy.",
                remedies=("download",),
            )
        if not length:
            # A lost connection could not be told from the end of the file.
            raise SourceError(f"{self.name}: the server does not say how large the file is. {_BY_HAND}")
        self.whole = True
        return 0, int(length), int(length)

    def _same(self, **facts: Any) -> None:
        for key, value in facts.items():
            known = value if value is None else self._known.setdefault(key, value)
            if known != value:
                what = f"{known} bytes by one answer and {value} by another" if key == "size" else f"another {key}"
                raise changed(self.name, what)

    def _wait(self, fault: FaultError) -> None:
        """Wait before the next attempt, unless there have been too many or the server asks for too long a wait."""
        self._failures += 1
        # Who has no network learns it soon.
        few = fault.kind == "unreachable" and not self._answered
        most = _SLOW_FAILURES if fault.kind == "slow" else _FEW_FAILURES if few else _FAILURES
        wait = min(_LONGEST_BACKOFF, _BACKOFF * 2.0 ** (self._failures - 1)) if fault.wait is None else fault.wait
        if self._failures > most or time.monotonic() + wait > self._since + _PATIENCE:
            again = "later" if fault.wait is None else f"in {fault.wait:.0f} seconds, as it asks"
            raise SourceError(
                f"{self.name}: {fault} (attempt {self._failures}, the last). Try again {again}."
            ) from fault
        time.sleep(wait)


def changed(name: str, how: str) -> SourceError:
    """The error for a file that did not stay the same file."""
    return SourceError(f"{name}: the file changed while it was being read ({how}). Start again.")


def _headers(token: str | bool | None) -> dict[str, str]:
    """Headers of a request, as huggingface_hub makes them. ``token=False`` leaves the token out."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, not in __all__

    # A compressed answer would have other offsets.
    return {**build_hf_headers(token=token, library_name="mtp-extract"), "Accept-Encoding": "identity"}
