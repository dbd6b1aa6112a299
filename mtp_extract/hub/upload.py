"""Publishing a checkpoint directory on the Hugging Face Hub.

Nothing is sent before everything that can be checked here was checked: the directory against its
``extraction.json``, the card's metadata, the name, the token, and what the repository already holds.
Afterwards every file is compared, by hash, with what the Hub says it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mtp_extract.errors import CheckpointError, HubError, escape
from mtp_extract.hub.card import model_card

__all__ = ["RECORD", "REPORT", "HubFile", "UploadResult", "check_files", "plan_upload", "upload"]

RECORD = "extraction.json"
REPORT = "report.json"
CARD = "README.md"

_UNLISTED = (RECORD, REPORT, "report.md", "*.png", "*.svg", "figures/*.png", "figures/*.svg")
"""What need not be listed in the record of a directory: the record itself, and a validation report."""

_HUB_OWN = frozenset({".gitattributes"})
"""What the Hub puts into a new repository by itself."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """One file to be published.

    Attributes:
        path: in the directory and in the repository, with ``/``.
        size: bytes.
        sha256: of the content, hexadecimal.
        content: the content, if it is not that of the file on disk (yet).
    """

    path: str
    size: int
    sha256: str
    content: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class UploadResult:
    """What was published, or with ``dry_run`` what would be.

    Attributes:
        repository: ``org/name``.
        url: of the repository's page.
        commit: that holds the files; None for a dry run.
        private: the visibility of a repository created by this upload.
        created: the repository did not exist; None for a dry run, which asks nobody.
        sent: paths that were not there before.
        files: everything the repository now holds of the directory.
    """

    repository: str
    url: str
    commit: str | None
    private: bool
    dry_run: bool
    created: bool | None
    sent: tuple[str, ...]
    files: tuple[HubFile, ...]


def check_files(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Check that a checkpoint directory is what its ``extraction.json`` says, and holds nothing else.

    A validation report may be there besides; hidden files are never published and so never looked at.

    Returns:
        The record.

    Raises:
        CheckpointError: no record, or a file that is missing, changed or added.
    """
    from mtp_extract.checkpoint.check import verify

    folder = Path(directory)
    record = verify(folder).record
    for present in _present(folder):
        if present not in record["files"] and not any(fnmatchcase(present, pattern) for pattern in _UNLISTED):
            raise CheckpointError(
                f"{escape(folder / present)}: not listed in {RECORD}, so it does not belong to the extraction. "
                "Move it elsewhere."
            )
    return record


def _present(folder: Path) -> Iterator[str]:
    """Files below ``folder``, hidden ones left out, as the record writes them."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(root, name).relative_to(folder).as_posix()


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def plan_upload(directory: str | os.PathLike[str]) -> tuple[HubFile, ...]:
    """Check a directory and list what would be published from it.

    With a ``report.json`` in the directory the model card is the one that states its figures, and the record
    lists that card; both are returned as ``content`` where the files on disk are still the old ones.

    Raises:
        CheckpointError: the directory does not match its record, or the report cannot be read.
        HubError: the card's metadata is not what the Hub accepts.
    """
    folder = Path(directory)
    record = check_files(folder)
    card = _card(folder, record)
    renewed: dict[str, bytes] = {}
    if card is not None and (folder / CARD).read_bytes() != card:
        record["files"][CARD] = {"size": len(card), "crc32": f"{zlib.crc32(card):08x}"}
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        renewed = {CARD: card, RECORD: text.encode("utf-8", "backslashreplace")}
    _check_card(folder, renewed.get(CARD))
    files = []
    for path in sorted({*_present(folder), *renewed}):
        content = renewed.get(path)
        if content is None:
            files.append(HubFile(path, (folder / path).stat().st_size, _sha256(folder / path)))
        else:
            files.append(HubFile(path, len(content), hashlib.sha256(content).hexdigest(), content))
    return tuple(files)


def _card(folder: Path, record: dict[str, Any]) -> bytes | None:
    """The card with the figures of the report in ``folder``; None without a report."""
    path = folder / REPORT
    try:
        report = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{escape(path)}: cannot be read as JSON: {escape(error)}. Validate again.") from error
    try:
        return model_card(record, report).encode()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{escape(folder)}: {RECORD} or {REPORT} lacks what the model card states "
            f"({escape(repr(error))}). Extract or validate again."
        ) from error


def _check_card(folder: Path, content: bytes | None) -> None:
    """The part of the Hub's check of a card's metadata that can be done here."""
    from huggingface_hub import ModelCard

    path = folder / CARD
    if content is None and not path.is_file():
        raise CheckpointError(f"{escape(folder)}: no {CARD} in it. Extract again.")
    try:
        data = ModelCard((content if content is not None else path.read_bytes()).decode("utf-8")).data.to_dict()  # type: ignore[no-untyped-call]
    except Exception as error:  # a YAML error, or whatever the metadata classes raise for a field
        raise HubError(f"{escape(path)}: the metadata is not valid: {escape(error)}.") from error
    if not data.get("license"):
        raise HubError(f"{escape(path)}: the metadata states no licence. Extract again.")


def upload(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    force: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    progress: bool = True,
) -> UploadResult:
    """Publish a checkpoint directory.

    An upload that was interrupted is resumed by running it again: large files that arrived are not sent
    twice. The files appear in one commit, all or none.

    Args:
        directory: what mtp-extract wrote, with a validation report or without.
        repo_id: ``org/name``.
        private: visibility of a repository that has to be created; one that exists keeps its own.
        force: write into a repository that holds other content: files of the same name are replaced (the
            history keeps them), others stay.
        dry_run: check and list, and ask nobody.
        token: None for the one that ``hf auth login`` or ``HF_TOKEN`` left.
        progress: show huggingface_hub's progress bars.

    Raises:
        CheckpointError: the directory does not match its ``extraction.json``.
        HubError: bad name, no token, no permission, no network, other content, or not what was sent has
        arrived.
    """
    _check_name(repo_id)
    folder = Path(directory)
    files = plan_upload(folder)
    if dry_run:
        paths = tuple(file.path for file in files)
        return UploadResult(repo_id, _url(repo_id), None, private, True, None, paths, files)
    secret = _token(token)
    files = _settle(folder, files)
    with _quiet(progress), _Refusals(repo_id, secret):
        from huggingface_hub import CommitOperationAdd, HfApi

        from mtp_extract.io.http import hide_queries

        hide_queries()
        api = HfApi(token=secret, library_name="mtp-extract")
        _ask_about_card((folder / CARD).read_text("utf-8"), secret)
        held = _held(api, repo_id)
        sent = _to_send(repo_id, folder, files, held or {}, force)
        if held is None:
            api.create_repo(repo_id, private=private)
        if sent:
            commit = api.create_commit(
                repo_id,
                [CommitOperationAdd(file.path, str(folder / file.path)) for file in files],
                commit_message="Upload MTP drafter with mtp-extract",
            ).oid
        else:
            commit = str(api.repo_info(repo_id).sha)
        _verify(api, repo_id, commit, folder, files)
    return UploadResult(repo_id, _url(repo_id), commit, private, False, held is None, sent, files)


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        reason = "letters, digits, '-', '_' and '.', at most 96 of them, not '--' or '..', not ending in .git"
        raise HubError(f"{escape(repo_id)}: not a name the Hub accepts ({reason}).") from None
    if repo_id.count("/") != 1:
        raise HubError(f"{escape(repo_id)}: expected ORG/NAME, with the user or organization that it belongs to.")


def _url(repo_id: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo_id}"


def _token(token: str | None) -> str:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("Offline mode is on (HF_HUB_OFFLINE), so nothing can be uploaded. Unset it.")
    found = token or get_token()
    if not found:
        raise HubError("No token for the Hub was found: log in with 'hf auth login', or set HF_TOKEN.")
    return found


def _settle(folder: Path, files: tuple[HubFile, ...]) -> tuple[HubFile, ...]:
    """Write the contents that the plan changes, so that the directory is what the Hub will hold."""
    settled = []
    for file in sorted(files, key=lambda file: file.path == RECORD):
        if file.content is not None:
            _replace(folder / file.path, file.content)
        settled.append(HubFile(file.path, file.size, file.sha256))
    return tuple(sorted(settled, key=lambda file: file.path))


def _replace(path: Path, content: bytes) -> None:
    try:
        mode = path.stat().st_mode & 0o777
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), mode)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise HubError(
            f"{escape(path)}: the figures of {REPORT} cannot be written into it: {error.strerror}."
        ) from error


@dataclass(frozen=True)
class _Held:
    """A file in a repository: its size, and the hash the Hub knows it by."""

    size: int
    sha256: str | None
    blob: str | None

    def is_(self, path: Path, file: HubFile) -> bool:
        """Whether it is ``file``: by SHA-256 for one in LFS or Xet, by git's hash for others."""
        if self.sha256 is not None:
            return (self.size, self.sha256) == (file.size, file.sha256)
        return self.size == file.size and self.blob == _git_hash(path)


def _git_hash(path: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _entries(listing: Any) -> dict[str, _Held]:
    from huggingface_hub.hf_api import RepoFile

    return {
        entry.path: _Held(entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in listing
        if isinstance(entry, RepoFile)
    }


def _ask_about_card(card: str, token: str) -> None:
    """The Hub's own check of the metadata, before there is a repository that would lack its card.

    The same request as ``ModelCard.validate`` makes, which in older releases goes past ``HF_ENDPOINT``.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not in __all__
        build_hf_headers,
        hf_raise_for_status,
    )

    response = get_session().post(
        f"{constants.ENDPOINT}/api/validate-yaml",
        json={"content": card, "repoType": "model"},
        headers=build_hf_headers(token=token, library_name="mtp-extract"),
    )
    if response.status_code == 400:
        reason = escape(response.text.replace(token, "…"))
        raise HubError(f"The Hub does not accept the metadata of {CARD}: {reason}. Nothing was sent.")
    hf_raise_for_status(response)


def _held(api: Any, repo_id: str) -> dict[str, _Held] | None:
    """What the repository holds; None if there is no such repository."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError

    try:
        return _entries(api.list_repo_tree(repo_id, recursive=True))
    except (RevisionNotFoundError, EntryNotFoundError):
        return {}
    except HfHubHTTPError as error:
        # Also what the Hub says of a private repository of somebody else; creating it then fails, with
        # nothing sent.
        if error.response is None or error.response.status_code != 404:
            raise
        return None


def _to_send(
    repo_id: str, folder: Path, files: tuple[HubFile, ...], held: Mapping[str, _Held], force: bool
) -> tuple[str, ...]:
    by_path = {file.path: file for file in files}
    same = {path for path, entry in held.items() if path in by_path and entry.is_(folder / path, by_path[path])}
    other = sorted(set(held) - same - _HUB_OWN)
    if other and not force:
        named = ", ".join(escape(path) for path in other[:5]) + (", …" if len(other) > 5 else "")
        raise HubError(
            f"{repo_id}: the repository holds other content ({len(other)} files: {named}). Nothing was sent. "
            "Choose another name, or write into it with --force (the history keeps what is replaced)."
        )
    return tuple(path for path in by_path if path not in same)


def _verify(api: Any, repo_id: str, commit: str, folder: Path, files: tuple[HubFile, ...]) -> None:
    arrived = _entries(api.get_paths_info(repo_id, [file.path for file in files], revision=commit))
    for file in files:
        entry = arrived.get(file.path)
        if entry is None:
            raise HubError(f"{repo_id}: {escape(file.path)} is missing from commit {commit[:12]}. Upload again.")
        if not entry.is_(folder / file.path, file):
            raise HubError(
                f"{repo_id}: {escape(file.path)} in commit {commit[:12]} is not what was sent (expected "
                f"{file.size} bytes, SHA-256 {file.sha256}; found {entry.size} bytes, "
                f"{entry.sha256 or entry.blob}). Upload again."
            )


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not in __all__
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


class _Refusals:
    """Turns what huggingface_hub raises into a :class:`HubError`, without the token or signed URLs."""

    def __init__(self, repo_id: str, token: str) -> None:
        self._repo_id = repo_id
        self._token = token

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (HubError, CheckpointError)):
            raise HubError(f"{self._repo_id}: {self._text(error)}") from None

    def _text(self, error: BaseException) -> str:
        from mtp_extract.io.http import http_library

        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        for cause in causes:
            response = getattr(cause, "response", None)
            status = getattr(response, "status_code", None)
            if status is not None:
                return _BY_STATUS.get(status, f"the Hub answered {status}. {_AGAIN}")
        if any(isinstance(cause, http_library().TransportError) for cause in causes):
            return f"the Hub cannot be reached, or the connection was lost. {_AGAIN}"
        return f"the upload failed: {self._safe(causes[-1])}. {_AGAIN}"

    def _safe(self, error: BaseException) -> str:
        text = str(error).replace(self._token, "…") or type(error).__name__
        return escape(re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text).strip().rstrip("."))


_AGAIN = "Run it again: it resumes."
_BY_STATUS: Mapping[int, str] = {
    400: "the Hub refuses the request; the card's metadata may not be what it accepts.",
    401: "the Hub does not accept the token. Log in again (hf auth login) or set HF_TOKEN.",
    403: "the token may not write there. Choose a name of yours, or a token with write permission for it.",
    404: "the Hub does not know it: check the name.",
    409: "it exists, but this token does not see it. Choose another name.",
    413: "the Hub refuses it as too large.",
    429: f"the Hub limits the rate of requests. Wait a little. {_AGAIN}",
}
