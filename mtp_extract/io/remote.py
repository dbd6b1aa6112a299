"""A :class:`~mtp_extract.io.source.Source` over byte ranges, and the ways to a file that is already here."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from mtp_extract.errors import SourceError, escape
from mtp_extract.io.address import HubAddress, WebAddress, parse_address
from mtp_extract.io.http import Channel, NoRangesError, headers_for, hide_queries
from mtp_extract.io.origin import HubOrigin, WebOrigin
from mtp_extract.io.policy import Policy, Progress
from mtp_extract.io.source import LocalSource, Source
from mtp_extract.io.spans import PartialFile
from mtp_extract.io.whole import cached_in_hub, download_from_hub, download_from_web

__all__ = ["RemoteSource", "open_remote"]

_BLOCK = 1 << 16
_COMMIT = re.compile(r"[0-9a-f]{40}")


class RemoteSource(Source):
    """Byte ranges of a file behind HTTP.

    A read fetches the blocks of 64 KiB around it, unless they are here: everything that was fetched stays in
    a temporary file. Threads may read at the same time; they wait for each other only while something is
    fetched.
    """

    def __init__(self, channel: Channel, progress: Progress | None = None) -> None:
        self.name = channel.name
        self._progress = progress
        self._channel = channel
        self._lock = threading.Lock()
        self._kept = PartialFile()
        try:
            channel.fetch(0, _BLOCK, self._kept.write)
        except BaseException:
            self._kept.close()
            raise
        self.size = channel.facts.size
        self.provenance = channel.provenance()

    @property
    def fetched(self) -> int:
        """Bytes of content received so far, repeats after a lost connection included."""
        return self._channel.received

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        end = offset + length
        with self._lock:
            if self._kept.missing(offset, end):
                for gap in self._kept.missing(*self._blocks(offset, end)):
                    self._channel.fetch(*gap, self._kept.write)
        return self._kept.read(offset, length)

    def _blocks(self, begin: int, end: int) -> tuple[int, int]:
        return begin // _BLOCK * _BLOCK, min(self.size, -(-end // _BLOCK) * _BLOCK)

    def prefetch(self, offset: int, length: int) -> None:
        """Fetch a range and keep it, so that reading it costs no request. Exactly the range is fetched."""
        self.check(offset, length)
        with self._lock:
            self._prefetch(offset, length)

    def _prefetch(self, offset: int, length: int) -> None:
        gaps = self._kept.missing(offset, offset + length)
        done = length - sum(end - begin for begin, end in gaps)

        def keep(at: int, piece: bytes) -> None:
            nonlocal done
            self._kept.write(at, piece)
            done += len(piece)
            if self._progress is not None:
                self._progress(done, length)

        for gap in gaps:
            self._channel.fetch(*gap, keep)

    def close(self) -> None:
        self._kept.close()


class _CopySource(LocalSource):
    """A whole copy on this machine of a remote file, known by the remote file's name."""

    def __init__(self, path: Path, name: str, provenance: dict[str, str]) -> None:
        super().__init__(path)
        self.name = name
        self.provenance = provenance


def open_remote(
    url: str,
    *,
    download: bool = False,
    token: str | bool | None = None,
    progress: Progress | None = None,
    policy: Policy | None = None,
) -> Source:
    """Open a remote file for random access.

    A whole copy of it in the Hub's cache is used where there is one: then nothing is fetched, and
    ``HF_HUB_OFFLINE`` works.

    Args:
        url: ``hf://org/repo/path[@revision]`` or an ``https://`` URL.
        download: where the server has no byte ranges, download the whole file (from the Hub into the Hub's
            cache, from elsewhere into this package's) instead of failing.
        token: for the Hub; None for the one that ``hf auth login`` or ``HF_TOKEN`` left, False for none.
        progress: called with bytes done and bytes in all while a prefetched range arrives.
        policy: time-outs and retries.

    Raises:
        SourceError: refused, gone, not reachable, or offline and not in the cache.
        NoRangesError: the server sends whole files only, and ``download`` is False.
    """
    from huggingface_hub import constants

    policy = policy or Policy()
    address = parse_address(url, constants.ENDPOINT)
    hide_queries()
    if isinstance(address, HubAddress):
        return _open_hub(address, download, token, progress, policy)
    return _open_web(address, download, progress, policy)


def _open_hub(
    address: HubAddress, download: bool, token: str | bool | None, progress: Progress | None, policy: Policy
) -> Source:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    try:
        validate_repo_id(address.repository)
    except HFValidationError:
        raise SourceError(f"{address.name}: {escape(address.repository)} is not a repository's name.") from None
    if constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(address.revision or ""):
        # A commit names the same bytes for ever, so the Hub need not be asked.
        copy = cached_in_hub(address, address.revision)
        if copy is not None:
            return _CopySource(copy, address.name, _record_of(address, copy))
    channel = Channel(HubOrigin(address, token, headers_for), policy)
    found = channel.locate()
    copy = cached_in_hub(address, found["commit"])
    if copy is not None:
        return _CopySource(copy, address.name, found)
    try:
        return RemoteSource(channel, progress)
    except NoRangesError:
        if not download:
            raise
    copy = download_from_hub(address, token)
    return _CopySource(copy, address.name, _record_of(address, copy))


def _record_of(address: HubAddress, path: Path) -> dict[str, str]:
    """What identifies a file of the Hub's cache: its path names the commit, the blob is named by its ETag."""
    commit = path.parts[path.parts.index("snapshots") + 1]
    blob = path.resolve()
    return address.record(commit, blob.name if blob.parent.name == "blobs" else None)


def _open_web(address: WebAddress, download: bool, progress: Progress | None, policy: Policy) -> Source:
    try:
        return RemoteSource(Channel(WebOrigin(address, headers_for), policy), progress)
    except NoRangesError:
        if not download:
            raise
    path, record = download_from_web(address, headers_for(False), policy, progress)
    return _CopySource(path, address.name, record)
