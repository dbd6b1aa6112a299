"""Which file of a Hub repository is meant where the repository alone is named; what a path in the cache stands for."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_extract.errors import SourceError, escape, few, nearest
from mtp_extract.io.address import BUNDLE, COMMIT, HubAddress, WebAddress, as_address, parse_address
from mtp_extract.io.http_library import FaultError, bars, faults, hide_queries

_CONFIG, _GGUF = "config.json", ".gguf"
_PATIENCE = 60.0
"""Seconds that may pass until the next bytes of a listing come."""
_LARGEST = 4_000_000_000
"""Bytes of a checkpoint that is fetched: a drafter has far less, and a base that is named by mistake more."""
_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}


def file_of(address: HubAddress, token: str | bool | None = None) -> HubAddress:
    """The address of the one ``.litertlm`` in the repository or folder that ``address`` names.

    The Hub is asked, or where it is not to be (``HF_HUB_OFFLINE``) its cache.

    Raises:
        SourceError: there is none, or more than one: the message lists them; or the Hub does not say.
    """
    paths = _sizes(address, token)
    found = sorted(path for path in paths if path.endswith(BUNDLE))
    if len(found) == 1:
        return replace(address, path=found[0])
    if found:
        listed = few((replace(address, path=path).name for path in found), most=20)
        raise SourceError(f"{address.name}: expected one {BUNDLE}, found {len(found)}. Name one of them: {listed}.")
    what = f"expected a {BUNDLE}, found none among {few(sorted(paths)) or 'no files'}"
    raise SourceError(f"{address.name}: {what}. Name another, such as litert-community/gemma-4-E4B-it-litert-lm.")


def checkpoint_path(source: str | os.PathLike[str]) -> Path:
    """:func:`checkpoint_here`, as a path."""
    return Path(checkpoint_here(source))


def checkpoint_here(source: str | os.PathLike[str], *, or_bundle: bool = False) -> str:
    """The path of a checkpoint: of one on the Hub that in the Hub's cache, into which it is fetched; else ``source``.

    On the Hub it is a repository or folder with a ``config.json``, or with one ``mtp-*.gguf``, or a ``.gguf``.

    Args:
        or_bundle: ``source`` may also mean a bundle, and stays as it is where it does.

    Raises:
        SourceError: the Hub has none of that name, or more than one; or it is too large for a drafter; or the address
            is of another site.
    """
    # A Path has lost one of its slashes.
    text = re.sub(r"^(hf|https?):/(?=[^/])", r"\1://", os.fspath(source))
    found = None if os.path.lexists(text) else as_address(text)
    if found is None:
        return text
    from huggingface_hub import constants

    address = parse_address(found, constants.ENDPOINT)
    if isinstance(address, WebAddress) and (not or_bundle or text.endswith(_GGUF)):
        raise SourceError(
            f"{address.name}: expected a checkpoint's directory or an id of the Hugging Face Hub, found the address of "
            "another site. Download it first, and give its path."
        )
    if isinstance(address, WebAddress) or (or_bundle and address.is_file and not text.endswith(_GGUF)):
        return text
    hide_queries()
    try:
        sizes = _sizes(address, None)
        if address.is_file and address.path not in sizes:
            # A folder, named without its slash; not whatever begins alike.
            address = replace(address, path=f"{address.path}/")
            sizes = {path: size for path, size in sizes.items() if path.startswith(address.path)}
        elif address.is_file:
            sizes = {address.path: sizes[address.path]}
        if or_bundle and any(path.endswith(BUNDLE) for path in sizes):
            return text
        files = _checkpoint_in(address, sizes)
        if (size := sum(sizes[path] for path in files)) > _LARGEST:
            raise SourceError(
                f"{address.name}: expected a drafter's checkpoint, found {size / 1e9:.1f} GB, which is more than any "
                "has. Name the drafter's folder or file."
            )
        folder = _snapshot(address, files)
    except SourceError as error:
        raise (neither(text, error) if found == f"hf://{text}" else error) from None
    return str(Path(folder, files[0] if len(files) == 1 and files[0].endswith(_GGUF) else address.path))


def _checkpoint_in(address: HubAddress, paths: Iterable[str]) -> list[str]:
    """The files of the checkpoint that ``address`` names among ``paths``."""
    if f"{address.path}{_CONFIG}" in paths and not address.is_file:
        return list(paths)
    found = [path for path in paths if path.endswith(_GGUF) and (address.is_file or "mtp-" in path)]
    if len(found) == 1:
        return found
    several = f"{len(found)}: {few(found)}" if found else few(sorted(paths)) or "no files"
    raise SourceError(f"{address.name}: expected a {_CONFIG} or one mtp-*.gguf, found {several}. Name what is meant.")


def _sizes(address: HubAddress, token: str | bool | None) -> dict[str, int]:
    """Path → bytes of all files of the repository that ``address`` names, or that lie in the folder it names."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        folder = _snapshot(address)
        files = [Path(at, name) for at, _, names in os.walk(folder) for name in names]
        sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    else:
        api = HfApi(endpoint=constants.ENDPOINT, token=token)
        try:
            with faults(address.name):
                # A listing by pages would be asked for again and again, with a line of the Hub's client each time.
                found: Any = api.repo_info(
                    address.repository,
                    revision=address.revision,
                    repo_type=address.kind,
                    files_metadata=True,
                    timeout=_PATIENCE,
                )
                sizes = {one.rfilename: one.size or 0 for one in found.siblings or ()}
        except FaultError as fault:
            raise SourceError(f"{address.name}: {fault}. Run it again, or name the file's path here.") from fault
    return {path: size for path, size in sizes.items() if path.startswith(address.path)}


def _snapshot(address: HubAddress, files: Iterable[str] | None = None) -> Path:
    """The folder of the Hub's cache with that revision, and ``files`` of it in there; None for what is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with faults(address.name), bars(sys.stderr.isatty()):
            return Path(
                snapshot_download(
                    address.repository,
                    revision=address.revision,
                    repo_type=address.kind,
                    allow_patterns=None if files is None else [*map(glob.escape, files)],
                    local_files_only=files is None,
                )
            )
    except FaultError as fault:
        raise SourceError(f"{address.name}: {fault}. Run it again to resume.") from fault
    except LocalEntryNotFoundError:
        raise SourceError(
            f"{address.name}: offline mode is on (HF_HUB_OFFLINE) and the Hub's cache lacks it. Unset it, or give the "
            "path of a local copy."
        ) from None


def cached_address(path: Path) -> HubAddress | None:
    """What a file or folder in the Hub's cache is a copy of; None for any other."""
    parts = path.absolute().parts
    for at, name in enumerate(parts[:-2]):
        kind, *repository = name.split("--")
        if kind in _KINDS and repository and parts[at + 1] == "snapshots" and COMMIT.fullmatch(parts[at + 2]):
            return HubAddress("/".join(repository), "/".join(parts[at + 3 :]), parts[at + 2], _KINDS[kind])
    return None


def name_of(place: Path) -> str:
    """What a checkpoint is called: by its file or folder, in the Hub's cache by its repository."""
    address = cached_address(place)
    if address is None:
        return place.resolve().name
    return (address.path or address.repository).rpartition("/")[2]


def public_name(place: str) -> str:
    """What to call ``place`` where others read it: of a directory its name alone, as its place is its owner's."""
    path = Path(place)
    return name_of(path) if path.is_dir() else place


def is_cached(path: Path) -> bool:
    """Whether ``path`` is a link as the Hub's cache has one for each file: to what it keeps of that repository."""
    address = cached_address(path)
    if address is None:
        return False
    up = 2 + len(address.path.split("/"))
    return path.resolve().parent == path.absolute().parents[up - 1].resolve() / "blobs"


def neither(text: str, error: SourceError) -> SourceError:
    """``error`` of an id of the Hub that may have been meant as a path."""
    return SourceError(f"{error} There is no file {escape(text)} here.", remedies=error.remedies)


def not_here(text: str) -> str:
    """What is said of a path at which there is nothing, with the nearest name in that folder, if one is near."""
    folder, name = os.path.split(text)
    try:
        names = [found for found in os.listdir(folder or ".") if found.isprintable()]
    except OSError:
        names = []
    path = text.startswith(("/", ".", "~"))
    what = nearest(name, names) or " Check the path."
    no_id = "" if path else "; nor is it ORG/NAME of the Hugging Face Hub, or a file in one, ORG/NAME/FILE"
    return f"{escape(text)}: cannot be opened: No such file or directory{no_id}.{what}"
