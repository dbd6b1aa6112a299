"""From what the user named, a path, an id of the Hub or a URL, to its bytes; or to a checkpoint's directory here."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_extract.errors import CheckpointError, SourceError, escape, few
from mtp_extract.io.address import BUNDLE, COMMIT, HubAddress, find_cached_address, parse_address
from mtp_extract.io.http_library import FaultError, translate_errors, without_secrets
from mtp_extract.io.remote import RemoteSource, retry_question
from mtp_extract.io.source import LocalSource, Source
from mtp_extract.progress import SILENT, Reporter

_LARGEST = 4_000_000_000
"""Bytes of a checkpoint that is fetched: a drafter has far less, and a base that is named by mistake more."""

ADAPTER = "adapter_config.json"
"""What PEFT writes beside the weights of an adapter, which it calls ``adapter_model.safetensors``."""

MERGE_FIRST = (
    f"a LoRA adapter ({ADAPTER}); merge it into its base first (PEFT's merge_and_unload), and give the merged model."
)
_WEIGHTS = re.compile(r"^(?!adapter_).*\.(safetensors|gguf)$")

Named = str | os.PathLike[str] | HubAddress
"""How a user, or an address that was read before, names a file."""


def open_source(source: Named | Source, *, token: str | bool | None = None, reporter: Reporter = SILENT) -> Source:
    """Open what the user named, as bytes.

    Args:
        source: a path; an id of the Hugging Face Hub, ``[hf://]org/name[@revision][/file]``, of a repository the one
            bundle in it; a URL of the Hub's site, or any other; or an address. What is open already is returned as
            it is.
        token: for the Hub; None for the one that ``hf auth login`` or ``HF_TOKEN`` left, False for none.
        reporter: told of the bytes of a remote range that is fetched ahead.

    Raises:
        SourceError: it does not exist, or cannot be read or reached, or its server sends no ranges.
    """
    if isinstance(source, Source):
        return source
    if address := _find_address(source):
        files = bundles_at(address, token) or [address]
        if len(files) > 1:
            names = few((file.name for file in files), most=20)
            raise SourceError(f"{address.name}: expected one {BUNDLE}, found {names}. Name a file.")
        return _open_hub(files[0], token, reporter)
    assert not isinstance(source, HubAddress)
    text = os.fspath(source)
    return (
        RemoteSource(strip_url_secrets(text), text, False, None, reporter) if "://" in text else _open_local(Path(text))
    )


def bundles_at(source: Named | Source, token: str | bool | None = None) -> list[HubAddress]:
    """The addresses of the bundles in the repository or folder of the Hub that ``source`` names, by their paths.

    Offline, of those that the Hub's cache has.

    Returns:
        An empty list where ``source`` names a file, whether on the Hub or elsewhere.

    Raises:
        SourceError: there is no such repository, or no bundle in it.
    """
    address = None if isinstance(source, Source) else _find_address(source)
    if address is None or address.is_file:
        return []
    paths = _list_sizes(address, token)
    bundles = [replace(address, path=path) for path in sorted(paths) if path.endswith(BUNDLE)]
    if not bundles:
        present = few(paths) or "no files"
        raise SourceError(f"{address.name}: expected a {BUNDLE}, found {present}. Name another repository, or a file.")
    return bundles


def _find_address(source: Named) -> HubAddress | None:
    """What ``source`` names on the Hub; None for a path that exists here, and for an address of another site."""
    if isinstance(source, HubAddress):
        return source
    text = os.fspath(source)
    exists = "://" not in text and os.path.lexists(text)
    return None if exists else parse_address(text)


def strip_url_secrets(url: str) -> str:
    """``url`` as it may be shown and kept: without credentials, query and fragment."""
    return escape(re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", url, flags=re.DOTALL))


def _open_local(path: Path, address: HubAddress | None = None) -> LocalSource:
    """A file here; of one in the Hub's cache, name and provenance are the Hub's, as ``address`` has them."""
    source, cached = LocalSource(path), find_cached_address(path)
    if cached is not None:
        # A copy in the Hub's cache lies in a directory named by its commit, and links to a blob named by its ETag.
        blob, address = path.resolve(), address or cached
        source.name = address.name
        source.provenance = address.record(cached.revision or "", blob.name if blob.parent.name == "blobs" else None)
    return source


def _open_hub(address: HubAddress, token: str | bool | None, reporter: Reporter) -> Source:
    """A whole copy in the Hub's cache where there is one: nothing is fetched then. Else ranges of the remote file.

    The Hub is asked once for the file's commit, size and ETag. Ranges are requested of the file's address at that
    commit, which the Hub redirects to its storage.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    name = address.name
    repository = address.repository
    path = address.path
    revision = address.revision

    def copy_of(revision: str | None) -> Source | None:
        copy = try_to_load_from_cache(repository, path, revision=revision)
        return _open_local(Path(copy), address) if isinstance(copy, str) else None

    with translate_errors(name):
        # A commit names the same bytes for ever, so the Hub need not be asked.
        if (constants.HF_HUB_OFFLINE or COMMIT.fullmatch(revision or "")) and (copy := copy_of(revision)):
            return copy
        url = hf_hub_url(repository, path, revision=revision)
        metadata = retry_question(name, lambda: get_hf_file_metadata(url, token, timeout=constants.HF_HUB_ETAG_TIMEOUT))
        commit = metadata.commit_hash or ""
        if not COMMIT.fullmatch(commit):
            why = "expected the Hub to name the file's commit. Check HF_ENDPOINT, or a proxy that drops headers."
            raise SourceError(f"{name}: {why}")
        if copy := copy_of(commit):
            return copy
    pinned = hf_hub_url(repository, path, revision=commit)
    remote = RemoteSource(name, pinned, token, metadata.size, reporter)
    remote.provenance = address.record(commit, metadata.etag)
    return remote


def is_checkpoint(place: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint at ``place``, and not a bundle or model: a directory or a ``.gguf``."""
    return os.path.isdir(place) or (os.fspath(place).endswith(".gguf") and os.path.isfile(place))


def checkpoint_here(
    source: str | os.PathLike[str], *, or_bundle: bool = False, largest: int = _LARGEST, fetch: bool = True
) -> str:
    """The path of a checkpoint: of one on the Hub that in the Hub's cache, into which it is fetched; else ``source``.

    On the Hub it is a repository, or a folder of one, with a ``config.json``.

    Args:
        or_bundle: ``source`` may also mean a bundle, and stays as it is where it does.
        largest: bytes to be fetched at most.
        fetch: else nothing is fetched, and all that is done is to see that there is one, here or on the Hub.

    Raises:
        SourceError: the Hub has none of that name; or it is too large; or the address is of another site.
        CheckpointError: it is a LoRA adapter.
    """
    # An address in a Path has lost one of its slashes.
    text = re.sub(r"^(hf|https?):/(?=[^/])", r"\1://", os.fspath(source))
    folder = None if os.path.lexists(text) else parse_address(text)
    if (folder is None and "://" in text and not or_bundle) or not (fetch or folder or os.path.isdir(text)):
        what = "expected a directory or an id of the Hugging Face Hub. Download it, and give its path."
        raise SourceError(f"{strip_url_secrets(text)}: {what}")
    if folder is None or (or_bundle and folder.is_file):
        if os.path.isdir(text):
            _check_merged(escape(text), os.listdir(text))
        return text

    from huggingface_hub import constants

    folder = replace(folder, path=f"{folder.path.rstrip('/')}/" if folder.path else "")
    if or_bundle or not constants.HF_HUB_OFFLINE:
        sizes = _list_sizes(folder, None)
        if or_bundle and any(path.endswith(BUNDLE) for path in sizes):
            return text
        _check_listing(folder, sizes, largest)
    return _download(folder) if fetch else text


def _download(folder: HubAddress) -> str:
    """The path in the Hub's cache of ``folder``, which is fetched into it."""
    from huggingface_hub import snapshot_download

    def download() -> str:
        pattern = f"{glob.escape(folder.path)}*"
        try:
            return snapshot_download(folder.repository, revision=folder.revision, allow_patterns=pattern)
        except RuntimeError as error:  # so hf_xet says that the Hub's storage fails
            raise FaultError(folder.name, f"the storage failed: {without_secrets(str(error))}") from None

    return os.path.join(retry_question(folder.name, download), folder.path).rstrip("/")


def _check_listing(folder: HubAddress, sizes: Mapping[str, int], largest: int) -> None:
    """Check that the files of ``folder`` are those of a checkpoint, and have ``largest`` bytes at most."""
    _check_merged(folder.name, sizes)
    if f"{folder.path}config.json" not in sizes:
        excess = f"found {few(sizes) or 'no files'}. Name another, or download a file and give its path."
        raise SourceError(f"{folder.name}: expected a folder with a config.json, {excess}")
    if (size := sum(sizes.values())) > largest:
        excess = f"expected at most {largest / 1e9:.1f} GB (what a drafter or memory has), found {size / 1e9:.1f} GB"
        raise SourceError(f"{folder.name}: {excess}. Name a folder with less, or a smaller model.")


def _check_merged(name: str, paths: Collection[str]) -> None:
    """Raise CheckpointError where the files ``paths`` are those of a LoRA adapter alone: PEFT's, and no weights."""
    files = {os.path.basename(path) for path in paths}
    if ADAPTER in files and not any(_WEIGHTS.search(file) for file in files):
        raise CheckpointError(f"{name}: {MERGE_FIRST}")


def _list_sizes(address: HubAddress, token: str | bool | None) -> dict[str, int]:
    """Path → bytes of the files of the repository or folder; offline, of those that the Hub's cache has of it."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        with translate_errors(address.name):
            folder = Path(snapshot_download(address.repository, revision=address.revision, local_files_only=True))
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    else:
        api: Any = HfApi(endpoint=constants.ENDPOINT, token=token)

        # A listing by pages would be asked for again and again, with a line of the Hub's client each time.
        about = retry_question(
            address.name,
            lambda: api.repo_info(address.repository, revision=address.revision, files_metadata=True, timeout=60.0),
        )
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    return {path: size for path, size in sizes.items() if path.startswith(address.path)}
