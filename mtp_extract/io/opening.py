"""Open the file that a user names by a path, an id of the Hub or a URL; or fetch a checkpoint from the Hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_extract.errors import CheckpointError, SourceError, escape, list_few
from mtp_extract.io.address import BUNDLE, COMMIT, HubAddress, find_cached_address, parse_address
from mtp_extract.io.http_library import FaultError, mask_secrets, translate_errors
from mtp_extract.io.remote import RemoteSource, retry_question
from mtp_extract.io.source import LocalSource, Source
from mtp_extract.progress import SILENT, Reporter

_LARGEST = 4_000_000_000
"""The most bytes that are fetched of a checkpoint: a drafter has far fewer, a base named by mistake has more."""

ADAPTER = "adapter_config.json"
"""The file that PEFT writes beside the weights of an adapter, ``adapter_model.safetensors``."""

MERGE_FIRST = (
    f"a LoRA adapter ({ADAPTER}); merge it into its base first (PEFT's merge_and_unload), and give the merged model."
)
_WEIGHTS = re.compile(r"^(?!adapter_).*\.(safetensors|gguf)$")

_CHECKPOINT = "a directory or an id of the Hugging Face Hub"

Named = str | os.PathLike[str] | HubAddress
"""A file as a user names it, or as an address that was parsed before."""


def open_source(source: Named | Source, *, token: str | bool | None = None, reporter: Reporter = SILENT) -> Source:
    """Open the file that a user names.

    Args:
        source: a path; an id of the Hugging Face Hub, ``[hf://]org/name[@revision][/file]``, where a repository stands
            for the one bundle in it; a URL of the Hub's site, or any other; or an address. A source is returned as
            it is.
        token: for the Hub; None for that of ``hf auth login`` or ``HF_TOKEN``, False for none.
        reporter: told of the bytes of a remote range that is fetched ahead.

    Raises:
        SourceError: the file does not exist, cannot be read or reached, or its server sends no ranges.
    """
    if isinstance(source, Source):
        return source
    if address := _find_address(source):
        files = list_bundles(address, token) or [address]
        if len(files) > 1:
            names = list_few((file.name for file in files), most=20)
            raise SourceError(f"{address.name}: expected one {BUNDLE}, found {names}. Name a file.")
        return _open_hub(files[0], token, reporter)
    assert not isinstance(source, HubAddress)
    text = os.fspath(source)
    if "://" not in text:
        return _open_local(Path(text))
    if not re.match("https?:", text, re.IGNORECASE):
        expected = "a path, an id of the Hugging Face Hub, or an address that begins with http:// or https://"
        raise _make_address_error(text, expected)
    return RemoteSource(strip_url_secrets(text), text, False, None, reporter)


def list_bundles(source: Named | Source, token: str | bool | None = None) -> list[HubAddress]:
    """Return the addresses of the bundles in a repository or folder of the Hub, sorted by path.

    Offline, these are the bundles in the Hub's cache. The list is empty if ``source`` names a file, on the Hub or
    elsewhere.

    Raises:
        SourceError: there is no such repository, or no bundle in it.
    """
    address = None if isinstance(source, Source) else _find_address(source)
    if address is None or address.is_file:
        return []
    paths = _list_sizes(address, token)
    bundles = [replace(address, path=path) for path in sorted(paths) if path.endswith(BUNDLE)]
    if not bundles:
        present = list_few(paths) or "no files"
        raise SourceError(f"{address.name}: expected a {BUNDLE}, found {present}. Name another repository, or a file.")
    return bundles


def _find_address(source: Named) -> HubAddress | None:
    """Return the address on the Hub; None for a path that exists on this machine, and for a URL of another site."""
    if isinstance(source, HubAddress):
        return source
    text = os.fspath(source)
    exists = "://" not in text and os.path.lexists(text)
    return None if exists else parse_address(text)


def strip_url_secrets(url: str) -> str:
    """Return ``url`` without credentials, query and fragment, as it may be shown and recorded."""
    return escape(re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", url, flags=re.DOTALL))


def _open_local(path: Path, address: HubAddress | None = None) -> LocalSource:
    """Open a file of this machine; in the Hub's cache, it has the name and provenance of ``address`` on the Hub."""
    source, cached = LocalSource(path), find_cached_address(path)
    if cached is not None:
        # A copy in the Hub's cache lies in a directory named by its commit, and links to a blob named by its ETag.
        blob, address = path.resolve(), address or cached
        source.name = address.name
        source.provenance = address.record(cached.revision or "", blob.name if blob.parent.name == "blobs" else None)
    return source


def _open_hub(address: HubAddress, token: str | bool | None, reporter: Reporter) -> Source:
    """Open the copy in the Hub's cache if there is one, else the remote file.

    The Hub is asked once for the commit, size and ETag of the file. Ranges are requested from its URL at that commit,
    which the Hub redirects to its storage.
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
    """Return whether ``place`` is a directory or a ``.gguf``: a checkpoint, and not a bundle or LiteRT model."""
    return os.path.isdir(place) or (os.fspath(place).endswith(".gguf") and os.path.isfile(place))


def fetch_checkpoint(
    source: str | os.PathLike[str], *, or_bundle: bool = False, largest: int = _LARGEST, fetch: bool = True
) -> str:
    """Return the local path of a checkpoint: ``source`` itself, or the folder of the Hub's cache it is fetched to.

    On the Hub a checkpoint is a repository, or a folder of one, with a ``config.json``.

    Args:
        or_bundle: ``source`` may also be a bundle, which is returned as it is.
        largest: the most bytes to fetch.
        fetch: if False, only check that there is a checkpoint, here or on the Hub, and return ``source``.

    Raises:
        SourceError: the Hub has no such checkpoint, it is too large, or the address is of another site.
        CheckpointError: it is a LoRA adapter.
    """
    # An address in a Path has lost some of its slashes.
    text = re.sub(r"^(hf|https?):/(?=[^/])", r"\1://", os.fspath(source))
    text = re.sub("^file:/(?=[^/])", "file:///", text)
    folder = None if os.path.lexists(text) else parse_address(text)
    if folder is None and "://" in text and not or_bundle:
        raise _make_address_error(text, _CHECKPOINT)
    if not (fetch or folder or os.path.isdir(text)):
        raise SourceError(f"{strip_url_secrets(text)}: expected {_CHECKPOINT}, found neither. Check the path.")
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
    """Fetch ``folder`` into the Hub's cache, and return its path there."""
    from huggingface_hub import snapshot_download

    def download() -> str:
        pattern = f"{glob.escape(folder.path)}*"
        try:
            return snapshot_download(folder.repository, revision=folder.revision, allow_patterns=pattern)
        except RuntimeError as error:  # raised by hf_xet if the Hub's storage fails
            raise FaultError(folder.name, f"the storage failed: {mask_secrets(str(error))}") from None

    return os.path.join(retry_question(folder.name, download), folder.path).rstrip("/")


def _make_address_error(address: str, expected: str) -> SourceError:
    scheme = address.partition("://")[0]
    advice = "Give the path alone." if scheme.lower() == "file" else "Check it, or download it and give its path."
    problem = f"expected {expected}, found an address that begins with {escape(scheme)}://"
    return SourceError(f"{strip_url_secrets(address)}: {problem}. {advice}")


def _check_listing(folder: HubAddress, sizes: Mapping[str, int], largest: int) -> None:
    """Raise SourceError unless ``folder`` holds a checkpoint of at most ``largest`` bytes."""
    _check_merged(folder.name, sizes)
    if f"{folder.path}config.json" not in sizes:
        advice = "Name another, or download a file and give its path."
        if any(path.endswith(BUNDLE) for path in (*sizes, folder.name)):
            # `mtp-extract` takes what ends in a slash for a folder, else for a file.
            slash = "/" if folder.path and sizes else ""
            advice = f"Name another; a bundle's drafter is extracted by `mtp-extract {folder.name}{slash}`."
        files = list_few(sizes) or "no files"
        raise SourceError(f"{folder.name}: expected a folder with a config.json, found {files}. {advice}")
    if (size := sum(sizes.values())) > largest:
        excess = f"expected at most {largest / 1e9:.1f} GB (what a drafter or memory has), found {size / 1e9:.1f} GB"
        raise SourceError(f"{folder.name}: {excess}. Name a folder with less, or a smaller model.")


def _check_merged(name: str, paths: Collection[str]) -> None:
    """Raise CheckpointError if the files are those of a LoRA adapter, without the weights of a model."""
    files = {os.path.basename(path) for path in paths}
    if ADAPTER in files and not any(_WEIGHTS.search(file) for file in files):
        raise CheckpointError(f"{name}: {MERGE_FIRST}")


def _list_sizes(address: HubAddress, token: str | bool | None) -> dict[str, int]:
    """Return path → size of the files of a repository or folder; offline, of those in the Hub's cache."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        with translate_errors(address.name):
            folder = Path(snapshot_download(address.repository, revision=address.revision, local_files_only=True))
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    else:
        api: Any = HfApi(endpoint=constants.ENDPOINT, token=token)

        # A listing by pages would be repeated by the Hub's client itself, which logs a line each time.
        about = retry_question(
            address.name,
            lambda: api.repo_info(address.repository, revision=address.revision, files_metadata=True, timeout=60.0),
        )
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    return {path: size for path, size in sizes.items() if path.startswith(address.path)}
