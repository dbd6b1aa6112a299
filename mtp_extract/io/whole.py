"""Whole copies of remote files: in the Hub's cache, or for plain URLs in this package's own."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtp_extract.errors import SourceError
from mtp_extract.io.address import HubAddress, WebAddress
from mtp_extract.io.faults import BUSY, FaultError, Faults, Patience, busy, http_library
from mtp_extract.io.http import pieces
from mtp_extract.io.policy import Policy, Progress

__all__ = ["cache_directory", "cached_in_hub", "download_from_hub", "download_from_web"]


def cached_in_hub(address: HubAddress, revision: str | None) -> Path | None:
    """The copy in the Hub's cache, if there is one of that revision."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(address.repository, address.path, revision=revision, repo_type=address.kind)
    return Path(found) if isinstance(found, str) else None


def download_from_hub(address: HubAddress, token: str | bool | None) -> Path:
    """Download the whole file into the Hub's cache, where every tool of the Hub finds it.

    The revision is passed as the user wrote it, so that the cache knows it offline.
    """
    from huggingface_hub import hf_hub_download

    try:
        with Faults(address.name):
            path = hf_hub_download(
                address.repository,
                address.path,
                revision=address.revision,
                repo_type=address.kind,
                token=token,
                library_name="mtp-extract",
            )
    except FaultError as fault:
        raise SourceError(f"{address.name}: {fault}. Run it again to resume.") from fault
    except OSError as error:
        # Full disk, no permission, or a copy that fails the Hub's check of size.
        reason = error.strerror or "the download is not complete"
        raise SourceError(f"{address.name}: could not be downloaded into the Hub's cache: {reason}.") from None
    return Path(path)


def cache_directory() -> Path:
    """Where whole files from plain URLs are kept: ``MTP_EXTRACT_CACHE``, else below the user's cache."""
    chosen = os.environ.get("MTP_EXTRACT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp-extract"


def download_from_web(
    address: WebAddress, headers: dict[str, str], policy: Policy, progress: Progress | None
) -> tuple[Path, dict[str, str]]:
    """Download the whole file, or find the copy of an earlier run; with what identifies it.

    Raises:
        SourceError: it cannot be had, or kept.
    """
    patience = Patience(address.name, policy)
    while True:
        try:
            return _download(address, headers, policy, patience, progress)
        except FaultError as fault:  # noqa: PERF203 - a network call a turn
            patience.spend(fault)
        except OSError as error:
            raise SourceError(
                f"{address.name}: cannot be kept in {cache_directory()}: {error.strerror}. "
                "Set MTP_EXTRACT_CACHE to a directory with room for the whole file."
            ) from error


def _download(
    address: WebAddress,
    headers: dict[str, str],
    policy: Policy,
    patience: Patience,
    progress: Progress | None,
) -> tuple[Path, dict[str, str]]:
    from huggingface_hub import constants, get_session

    read = policy.read_timeout or float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    timeout = http_library().Timeout(read, connect=policy.connect_timeout)
    with (
        Faults(address.name),
        get_session().stream("GET", address.url, headers=headers, timeout=timeout, follow_redirects=True) as response,
    ):
        patience.answered = True
        size = _examine(address, response)
        record = {"url": address.name}
        for key, header in (("etag", "etag"), ("last_modified", "last-modified")):
            if header in response.headers:
                record[key] = response.headers[header]
        place = _place(address, record, size)
        # Without an ETag or a date nothing says that the copy is still the file.
        if len(record) > 1 and place.is_file() and place.stat().st_size == size:
            return place, record
        place.parent.mkdir(parents=True, exist_ok=True)
        with _partial(place) as file:
            done = 0
            for piece in pieces(response, size, policy):
                file.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, size)
    return place, record


def _examine(address: WebAddress, response: Any) -> int:
    status = int(response.status_code)
    if status in BUSY:
        raise busy(response)
    if status != 200:
        raise SourceError(f"{address.name}: expected the file, the server answered {status}.")
    length = response.headers.get("content-length", "")
    if not length.isdigit() or response.headers.get("content-encoding", "identity") != "identity":
        raise SourceError(
            f"{address.name}: the server does not say how large the file is, so a lost connection could "
            "not be told from its end. Download it yourself and give its path."
        )
    return int(length)


def _place(address: WebAddress, record: dict[str, str], size: int) -> Path:
    key = hashlib.sha256("\n".join([address.url, str(size), *record.values()]).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]", "_", address.file)[-100:].lstrip(".") or "download"
    return cache_directory() / key[:32] / name


@contextmanager
def _partial(place: Path) -> Iterator[Any]:
    """A file that becomes ``place`` if all goes well, and vanishes if not."""
    with tempfile.NamedTemporaryFile(dir=place.parent, prefix=".partial-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)
            os.replace(file.name, place)
        except BaseException:
            os.unlink(file.name)
            raise
