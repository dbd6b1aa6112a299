"""Which file of a Hub repository is meant where the repository alone is named; what a path in the cache stands for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mtp_extract.errors import SourceError, escape, few, nearest
from mtp_extract.io.address import BUNDLE, COMMIT, HubAddress
from mtp_extract.io.http_library import FaultError, faults
from mtp_extract.io.watchdog import watched

_PATIENCE = 60.0
"""Seconds that a listing may take."""
_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}


def file_of(address: HubAddress, token: str | bool | None = None) -> HubAddress:
    """The address of the one ``.litertlm`` in the repository or folder that ``address`` names.

    The Hub is asked, or where it is not to be (``HF_HUB_OFFLINE``) its cache.

    Raises:
        SourceError: there is none, or more than one: the message lists them; or the Hub does not say.
    """
    paths = [path for path in _paths(address, token) if path.startswith(address.path)]
    found = sorted(path for path in paths if path.endswith(BUNDLE))
    if len(found) == 1:
        return replace(address, path=found[0])
    if found:
        listed = few((replace(address, path=path).name for path in found), most=20)
        raise SourceError(f"{address.name}: expected one {BUNDLE}, found {len(found)}. Name one of them: {listed}.")
    raise SourceError(f"{address.name}: expected a {BUNDLE}, found none among {few(sorted(paths)) or 'no files'}.")


def _paths(address: HubAddress, token: str | bool | None) -> list[str]:
    """Of all files of the repository."""
    from huggingface_hub import HfApi, close_session, constants

    if constants.HF_HUB_OFFLINE:
        folder = _snapshot(address)
        return [Path(at, name).relative_to(folder).as_posix() for at, _, names in os.walk(folder) for name in names]
    api = HfApi(endpoint=constants.ENDPOINT, token=token)
    try:
        with faults(address.name), watched(_PATIENCE, close_session):
            return api.list_repo_files(address.repository, revision=address.revision, repo_type=address.kind)
    except FaultError as fault:
        raise SourceError(f"{address.name}: {fault}. Run it again, or name the file's path here.") from fault


def _snapshot(address: HubAddress) -> Path:
    """The folder of the Hub's cache with that revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with faults(address.name):
            return Path(
                snapshot_download(
                    address.repository, revision=address.revision, repo_type=address.kind, local_files_only=True
                )
            )
    except LocalEntryNotFoundError:
        raise SourceError(
            f"{address.name}: offline mode is on (HF_HUB_OFFLINE) and the Hub's cache lacks it. Unset it, or give the "
            "path of a local copy."
        ) from None


def cached_address(path: Path) -> HubAddress | None:
    """What a file in the Hub's cache is a copy of; None for any other file."""
    parts = path.absolute().parts
    for at, name in enumerate(parts[:-3]):
        kind, *repository = name.split("--")
        if kind in _KINDS and repository and parts[at + 1] == "snapshots" and COMMIT.fullmatch(parts[at + 2]):
            return HubAddress("/".join(repository), "/".join(parts[at + 3 :]), parts[at + 2], _KINDS[kind])
    return None


def not_here(text: str) -> str:
    """What is said of a path at which there is nothing, with the nearest name in that folder, if one is near."""
    folder, name = os.path.split(text)
    try:
        names = [found for found in os.listdir(folder or ".") if found.isprintable()]
    except OSError:
        names = []
    path = text.startswith(("/", ".", "~"))
    no_id = "" if path else "; nor is it ORG/NAME of the Hugging Face Hub, or a file in one, ORG/NAME/FILE"
    return f"{escape(text)}: cannot be opened: No such file or directory{no_id}.{nearest(name, names)}"
