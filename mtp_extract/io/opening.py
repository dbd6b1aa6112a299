"""From what the user named, a path, an id of the Hub or a URL, to its bytes; or to a checkpoint's directory here."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_extract.errors import SourceError, escape, few, nearest
from mtp_extract.io.address import BUNDLE, COMMIT, HubAddress, cached_address, parse_address
from mtp_extract.io.http_library import faults
from mtp_extract.io.remote import RemoteSource
from mtp_extract.io.source import LocalSource, Progress, Source, nothing_shown

_CONFIG, _GGUF = "config.json", ".gguf"
_EXAMPLE = "litert-community/gemma-4-E4B-it-litert-lm"
_PATIENCE = 60.0
"""Seconds that may pass until the next bytes of a listing come."""
_LARGEST = 4_000_000_000
"""Bytes of a checkpoint that is fetched: a drafter has far less, and a base that is named by mistake more."""


def open_source(
    source: str | os.PathLike[str] | Source, *, token: str | bool | None = None, progress: Progress | None = None
) -> Source:
    """Open what the user named, as bytes.

    Args:
        source: a path; an id of the Hugging Face Hub, ``org/name[@revision][/file]``, with or without ``hf://`` before
            it; a URL of the Hub's site, or any other ``https://`` URL. Of a repository without a file, the one bundle
            in it. What is open already is returned as it is.
        token: for the Hub; None for the one that ``hf auth login`` or ``HF_TOKEN`` left, False for none.
        progress: called with bytes done and bytes in all while a remote range is fetched ahead.

    Raises:
        SourceError: it does not exist or cannot be read; of a remote file, it is refused, not reachable, without byte
            ranges, or offline and not in the Hub's cache.
    """
    if isinstance(source, Source):
        return source
    text, progress = os.fspath(source), progress or nothing_shown
    if "://" not in text and os.path.lexists(text):
        return _open_local(Path(text))
    if address := parse_address(text):
        with _or_no_path(text):
            return _open_hub(address, token, progress)
    if "://" in text:
        return RemoteSource(public_url(text), text, False, None, progress)
    raise SourceError(_not_here(text))


@contextmanager
def _or_no_path(text: str) -> Iterator[None]:
    """Say of what the Hub has not that there is no such file here either, where ``text`` may be meant as a path."""
    try:
        yield
    except SourceError as error:
        if "://" in text:
            raise
        raise SourceError(f"{error} There is no file {escape(text)} here.", remedies=error.remedies) from None


def _not_here(text: str) -> str:
    """What is said of a path at which there is nothing, with the nearest name in that folder, if one is near."""
    folder, name = os.path.split(text)
    names: list[str] = []
    with suppress(OSError, ValueError):
        names = os.listdir(folder or ".")
    what = nearest(name, filter(str.isprintable, names)) or " Check the path."
    is_path = text.startswith(("/", ".", "~"))
    no_id = "" if is_path else ", and it is no id of the Hugging Face Hub (ORG/NAME or ORG/NAME/FILE)"
    return f"{escape(text) or repr(text)}: cannot be opened: No such file or directory{no_id}.{what}"


def public_url(url: str) -> str:
    """``url`` as it may be shown and kept: without credentials, query and fragment."""
    return escape(re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", url, flags=re.DOTALL))


def _open_local(path: Path, address: HubAddress | None = None) -> LocalSource:
    """A file here; of one in the Hub's cache, name and provenance are the Hub's, as ``address`` has them."""
    source, cached = LocalSource(path), cached_address(path)
    if cached is not None:
        # A copy in the Hub's cache lies in a directory named by its commit, and links to a blob named by its ETag.
        blob, address = path.resolve(), address or cached
        source.name = address.name
        source.provenance = address.record(cached.revision or "", blob.name if blob.parent.name == "blobs" else None)
    return source


def _open_hub(address: HubAddress, token: str | bool | None, progress: Progress) -> Source:
    """A whole copy in the Hub's cache where there is one: nothing is fetched then. Else ranges of the remote file.

    The Hub is asked once for the file's commit, size and ETag. Ranges are requested of the file's address at that
    commit, which the Hub redirects to its storage.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if not address.is_file:
        address = _bundle_in(address, token)
    name, repository, path, revision = address.name, address.repository, address.path, address.revision

    def copy_of(revision: str | None) -> Source | None:
        found = try_to_load_from_cache(repository, path, revision=revision)
        return _open_local(Path(found), address) if isinstance(found, str) else None

    with faults(name):
        # A commit names the same bytes for ever, so the Hub need not be asked.
        if (constants.HF_HUB_OFFLINE or COMMIT.fullmatch(revision or "")) and (copy := copy_of(revision)):
            return copy
        url = hf_hub_url(repository, path, revision=revision)
        found = get_hf_file_metadata(url, token, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        commit = found.commit_hash or ""
        if not COMMIT.fullmatch(commit):
            raise SourceError(
                f"{name}: expected the Hub to name the file's commit, found {escape(commit or 'none', 60)}. Check "
                "HF_ENDPOINT, or a proxy that drops headers."
            )
        if copy := copy_of(commit):
            return copy
    pinned = hf_hub_url(repository, path, revision=commit)
    remote = RemoteSource(name, pinned, token, found.size, progress)
    remote.provenance = address.record(commit, found.etag)
    return remote


def _bundle_in(address: HubAddress, token: str | bool | None) -> HubAddress:
    """The address of the one ``.litertlm`` in the repository or folder that ``address`` names."""
    paths = sorted(_sizes(address, token))
    found = [replace(address, path=path) for path in paths if path.endswith(BUNDLE)]
    if len(found) == 1:
        return found[0]
    what = f"one {BUNDLE}, found {len(found)}. Name one of them: {few((one.name for one in found), most=20)}."
    if not found:
        what = f"a {BUNDLE}, found none among {few(paths) or 'no files'}. Name another, such as {_EXAMPLE}."
    raise SourceError(f"{address.name}: expected {what}")


def is_checkpoint(place: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint at ``place``, and not a bundle or model: a directory or a ``.gguf``."""
    return os.path.isdir(place) or (os.fspath(place).endswith(_GGUF) and os.path.isfile(place))


def checkpoint_here(source: str | os.PathLike[str], *, or_bundle: bool = False, largest: int = _LARGEST) -> str:
    """The path of a checkpoint: of one on the Hub that in the Hub's cache, into which it is fetched; else ``source``.

    On the Hub it is a repository or folder with a ``config.json``, or with one ``mtp-*.gguf``, or a ``.gguf``.

    Args:
        or_bundle: ``source`` may also mean a bundle, and stays as it is where it does.
        largest: bytes to be fetched at most.

    Raises:
        SourceError: the Hub has none of that name, or more than one; or it is too large; or the address is of another
            site.
    """
    # A Path has lost one of its slashes.
    text = re.sub(r"^(hf|https?):/(?=[^/])", r"\1://", os.fspath(source))
    address = None if os.path.lexists(text) else parse_address(text)
    may_be_bundle = or_bundle and not text.endswith(_GGUF)
    if address is None and "://" in text and not may_be_bundle:
        raise SourceError(
            f"{public_url(text)}: expected a checkpoint's directory or an id of the Hugging Face Hub, found the "
            "address of another site. Download it first, and give its path."
        )
    if address is None or (may_be_bundle and address.is_file):
        return text
    with _or_no_path(text):
        sizes = _sizes(address, None)
        if or_bundle and any(path.endswith(BUNDLE) for path in sizes):
            return text
        files, place = _files_of_checkpoint(address, list(sizes))
        if (size := sum(sizes[path] for path in files)) > largest:
            raise SourceError(
                f"{address.name}: expected at most {largest / 1e9:.1f} GB, found {size / 1e9:.1f} GB: more than a "
                "drafter has, or than the memory holds. Name the folder or file that is meant, or a smaller model."
            )
        return str(_snapshot(address, allow_patterns=[*map(glob.escape, files)]) / place)


def _files_of_checkpoint(address: HubAddress, paths: list[str]) -> tuple[list[str], str]:
    """Of ``paths``, which begin as ``address`` does, those of the checkpoint it names; and their folder or file."""
    # A folder may be named without its slash; what begins alike is another.
    folder = f"{address.path.rstrip('/')}/" if address.path else ""
    inside = [path for path in paths if path.startswith(folder)]
    drafters = [path for path in inside if path.endswith(_GGUF) and "mtp-" in path]
    if address.path in paths:
        return [address.path], address.path
    if f"{folder}{_CONFIG}" in inside:
        return inside, folder
    if len(drafters) == 1:
        return drafters, drafters[0]
    found = f"{len(drafters)}: {few(drafters)}" if drafters else few(sorted(inside)) or "no files"
    raise SourceError(f"{address.name}: expected a {_CONFIG} or one mtp-*.gguf, found {found}. Name what is meant.")


def _sizes(address: HubAddress, token: str | bool | None) -> dict[str, int]:
    """Path → bytes of all files of the repository that ``address`` names, or whose paths begin as it says."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        folder = _snapshot(address, local_files_only=True)
        here = (path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in here}
    else:
        api: Any = HfApi(endpoint=constants.ENDPOINT, token=token)
        # A listing by pages would be asked for again and again, with a line of the Hub's client each time.
        with faults(address.name):
            about = api.repo_info(address.repository, revision=address.revision, files_metadata=True, timeout=_PATIENCE)
        sizes = {one.rfilename: one.size or 0 for one in about.siblings or ()}
    return {path: size for path, size in sizes.items() if path.startswith(address.path)}


def _snapshot(address: HubAddress, **given: Any) -> Path:
    """The folder of the Hub's cache with that revision; what ``given`` says is fetched."""
    from huggingface_hub import snapshot_download

    with faults(address.name):
        return Path(snapshot_download(address.repository, revision=address.revision, **given))
