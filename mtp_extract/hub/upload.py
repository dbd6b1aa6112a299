"""Publishing a checkpoint directory on the Hugging Face Hub.

Nothing is sent before everything that can be checked here was checked: the directory against its
``extraction.json``, the card's metadata, the name, the token, and what the repository already holds.
Afterwards every file is compared, by hash, with what the Hub says it has. The directory stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, get_session, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not in __all__
    build_hf_headers,
    hf_raise_for_status,
    validate_repo_id,
)

from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.errors import CheckpointError, HubError, escape, few
from mtp_extract.formats import weights_of
from mtp_extract.formats.gguf import FORMAT
from mtp_extract.hub.pairing import Pair, paired
from mtp_extract.io.http_library import HUB_STATUSES, bars, hide_queries, http_library
from mtp_extract.io.regular import open_regular
from mtp_extract.pipeline.check import changed_card, files_in, verify
from mtp_extract.pipeline.staging import CARD, RECORD
from mtp_extract.pipeline.unexpected import LEGAL
from mtp_extract.report.card import UNSAID, CardWords, model_card
from mtp_extract.report.tables import REPORT, REPORT_FILES

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
        git: the hash by which git knows it, hexadecimal.
        content: where it is read from: a path, or the bytes themselves where the directory has none like it.
    """

    path: str
    size: int
    sha256: str
    git: str
    content: Path | bytes = field(repr=False)

    @classmethod
    def of(cls, path: str, content: Path | bytes) -> HubFile:
        """Read ``content`` once, for its hashes."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        for piece in _pieces(content):
            sha256.update(piece)
            git.update(piece)
        return cls(path, size, sha256.hexdigest(), git.hexdigest(), content)


def _pieces(content: Path | bytes) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with open_regular(content) as file:
        while piece := file.read(_CHUNK):
            yield piece


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
        notes: that the card was changed since it was written, and of a base whose name is another.
        pairs: with ``beside``, which base llama.cpp takes with which drafter.
    """

    repository: str
    url: str
    commit: str | None
    private: bool
    dry_run: bool
    created: bool | None
    sent: tuple[str, ...]
    files: tuple[HubFile, ...]
    notes: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()


def plan_upload(
    directory: str | os.PathLike[str], words: CardWords = UNSAID
) -> tuple[tuple[HubFile, ...], tuple[str, ...]]:
    """Check a directory; the files that would be published from it, and notes on its card.

    The card is made anew where ``words`` are to be on it, or the figures of a ``report.json``; one that is not the one
    that the record lists is sent as it is. The directory stays as it is.

    Raises:
        CheckpointError: the directory does not match its record, or the report cannot be read.
        HubError: the card's metadata is not what the Hub accepts, or ``words`` are given and the card was changed.
    """
    folder = Path(directory)
    record = verify(folder, allowed=REPORT_FILES).record
    contents: dict[str, Path | bytes] = {path: folder / path for path in files_in(folder)}
    ours = {*record["files"], RECORD, CARD, *REPORT_FILES}
    if odd := [path for path in contents if path not in ours and not any(fnmatchcase(path, name) for name in LEGAL)]:
        raise CheckpointError(
            f"{escape(folder)}: {escape(odd[0])} belongs neither to the checkpoint nor to a report, and would be "
            "published with it. Move it elsewhere."
        )
    notes: tuple[str, ...] = ()
    report = read_object(folder / REPORT, "Validate again.") if REPORT in contents else None
    if changed_card(folder) is not None:
        if words != UNSAID:
            raise HubError(
                f"{escape(folder / CARD)}: expected the card that mtp-extract wrote, to put words on it, found "
                "one that was changed. Write them into it, or delete it: it is then made anew."
            )
        notes = (f"{CARD} was changed since mtp-extract wrote it, and is sent as it is.",)
    elif report is not None or words != UNSAID or CARD not in contents:
        try:
            contents[CARD] = model_card(record, report, words).encode()
        except CheckpointError as error:
            raise CheckpointError(f"{escape(folder)}: {error}") from error
    files = tuple(HubFile.of(path, contents[path]) for path in sorted(contents))
    _check_card(folder / CARD, _card_text(files))
    return files, notes


def _card_text(files: tuple[HubFile, ...]) -> str:
    card = next(file.content for file in files if file.path == CARD)
    return b"".join(_pieces(card)).decode("utf-8", "replace")


def _check_card(path: Path, text: str) -> None:
    """The part of the Hub's check of a card's metadata that can be done here."""
    if REGEX_YAML_BLOCK.search(text) is None:
        raise HubError(f"{escape(path)}: expected metadata between two lines of --- at its head, found none.")
    try:
        data = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    except Exception as error:  # a YAML error, or whatever the metadata classes raise for a field
        raise HubError(f"{escape(path)}: the metadata is not valid: {escape(error)}.") from error
    if not data.get("license"):
        raise HubError(f"{escape(path)}: the metadata states no licence. Extract again.")


def upload(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    beside: bool = False,
    force: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    card: CardWords = UNSAID,
    progress: bool = True,
) -> UploadResult:
    """Publish a checkpoint directory.

    An upload that was interrupted is resumed by running it again: large files that arrived are not sent
    twice. The files appear in one commit, all or none.

    Args:
        directory: what mtp-extract wrote, with a validation report or without.
        repo_id: ``org/name``.
        private: visibility of a repository that has to be created; one that exists keeps its own.
        beside: send the one file of a GGUF into the repository of its base, where llama.cpp finds it by its name;
            what is there stays, its card too.
        force: write into a repository that holds other content: files of the same name are replaced (the
            history keeps them), others stay.
        dry_run: check and list, and ask nobody; with ``beside``, only what the repository holds.
        token: None for the one that ``hf auth login`` or ``HF_TOKEN`` left.
        card: what the card is to say.
        progress: show huggingface_hub's progress bars.

    Raises:
        CheckpointError: the directory does not match its ``extraction.json``.
        HubError: bad name, no token, no permission, no network, other content, no base that the drafter would be
            taken with, or not what was sent has arrived.
    """
    _check_name(repo_id)
    files, notes = plan_upload(directory, card)
    sidecar = weights_of(FORMAT, (file.path for file in files)) if beside else None
    if sidecar is not None:
        files = tuple(file for file in files if file.path == sidecar)
    elif beside:
        raise HubError(f"{escape(directory)}: expected a GGUF, as llama.cpp finds it, found none. Convert it first.")
    if beside and card != UNSAID:
        raise HubError("The card of the base stays as it is. Leave out what a card is to say.")
    url = f"{constants.ENDPOINT}/{repo_id}"
    pairs: tuple[Pair, ...] = ()
    if dry_run and not beside:
        return UploadResult(repo_id, url, None, private, True, None, tuple(file.path for file in files), files, notes)
    secret = _token(token)
    with bars(progress), _explained(repo_id, secret):
        hide_queries()
        api = HfApi(token=secret, library_name="mtp-extract")
        if not beside:
            _ask_about_card(_card_text(files), secret)
        held = _repository_files(api, repo_id)
        if sidecar is not None:
            pairs, notes = paired(repo_id, held or {}, sidecar)
            held = {path: entry for path, entry in (held or {}).items() if path == sidecar}
        sent = _differing(repo_id, files, held or {}, force)
        if dry_run:
            return UploadResult(repo_id, url, None, private, True, False, sent, files, notes, pairs)
        if held is None:
            api.create_repo(repo_id, private=private)
        commit: str | None = None
        if sent:
            operations = [
                CommitOperationAdd(file.path, str(file.content) if isinstance(file.content, Path) else file.content)
                for file in files
            ]
            commit = api.create_commit(repo_id, operations, commit_message="Upload MTP drafter with mtp-extract").oid
        commit = commit or str(api.repo_info(repo_id).sha)
        _verify(api, repo_id, commit, files)
    return UploadResult(repo_id, url, commit, private, False, held is None, sent, files, notes, pairs)


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        reason = "letters, digits, '-', '_' and '.', at most 96 of them, not '--' or '..', not ending in .git"
        raise HubError(f"{escape(repo_id)}: not a name the Hub accepts ({reason}).") from None
    if repo_id.count("/") != 1:
        raise HubError(f"{escape(repo_id)}: expected ORG/NAME, with the user or organization that it belongs to.")


def _token(token: str | None) -> str:
    if constants.HF_HUB_OFFLINE:
        raise HubError("Offline mode is on (HF_HUB_OFFLINE), so nothing can be uploaded. Unset it.")
    found = token or get_token()
    if not found:
        raise HubError("No token for the Hub was found: log in with 'hf auth login', or set HF_TOKEN.")
    return found


def _matches(entry: Any, file: HubFile) -> bool:
    """Whether the repository's ``entry`` is ``file``: by SHA-256 for one in LFS or Xet, by git's hash for others."""
    same = entry.lfs.sha256 == file.sha256 if entry.lfs else entry.blob_id == file.git
    return bool(same) and entry.size == file.size


def _entries(listing: Any) -> dict[str, Any]:
    return {entry.path: entry for entry in listing if isinstance(entry, RepoFile)}


def _ask_about_card(card: str, token: str) -> None:
    """The Hub's own check of the metadata, before there is a repository that would lack its card.

    The same request as ``ModelCard.validate`` makes, which in older releases goes past ``HF_ENDPOINT``.
    """
    response = get_session().post(
        f"{constants.ENDPOINT}/api/validate-yaml",
        json={"content": card, "repoType": "model"},
        headers=build_hf_headers(token=token, library_name="mtp-extract"),
    )
    if response.status_code == 400:
        reason = escape(response.text.replace(token, "…"))
        raise HubError(f"The Hub does not accept the metadata of {CARD}: {reason}. Nothing was sent.")
    hf_raise_for_status(response)


def _repository_files(api: Any, repo_id: str) -> dict[str, Any] | None:
    """What the repository holds; None if there is no such repository."""
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


def _differing(repo_id: str, files: tuple[HubFile, ...], held: Mapping[str, Any], force: bool) -> tuple[str, ...]:
    same = {file.path for file in files if file.path in held and _matches(held[file.path], file)}
    other = sorted(set(held) - same - _HUB_OWN)
    if other and not force:
        raise HubError(
            f"{repo_id}: the repository holds other files, {few(other)}. Nothing was sent. "
            "Choose another name, or write into it all the same: its history keeps what is replaced.",
            remedies=("force",),
        )
    return tuple(file.path for file in files if file.path not in same)


def _verify(api: Any, repo_id: str, commit: str, files: tuple[HubFile, ...]) -> None:
    arrived = _entries(api.get_paths_info(repo_id, [file.path for file in files], revision=commit))
    for file in files:
        entry = arrived.get(file.path)
        if entry is None:
            raise HubError(f"{repo_id}: {escape(file.path)} is missing from commit {commit[:12]}. Upload again.")
        if not _matches(entry, file):
            raise HubError(
                f"{repo_id}: {escape(file.path)} in commit {commit[:12]} is not what was sent (expected "
                f"{file.size} bytes, SHA-256 {file.sha256}; found {entry.size} bytes, "
                f"{entry.lfs.sha256 if entry.lfs else entry.blob_id}). Upload again."
            )


@contextmanager
def _explained(repo_id: str, token: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into a :class:`HubError`, without the token or signed URLs."""
    try:
        yield
    except (HubError, CheckpointError):
        raise
    except Exception as error:  # noqa: BLE001 - a token may stand in any message; it goes no further
        raise HubError(f"{repo_id}: {_reason(error, token)}") from None


def _reason(error: BaseException, token: str) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return f"{_STATUSES.get(status, f'the Hub answered {status}. {_AGAIN}')}."
    if any(isinstance(cause, http_library().TransportError) for cause in causes):
        return f"the Hub cannot be reached, or the connection was lost. {_AGAIN}."
    text = str(causes[-1]).replace(token, "…") or type(causes[-1]).__name__
    text = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text).strip().rstrip(".")
    return f"the upload failed: {escape(text)}. {_AGAIN}."


_AGAIN = "Run it again: it resumes"
_STATUSES: Mapping[int, str] = {
    **HUB_STATUSES,
    400: "the Hub refuses the request; the card's metadata may not be what it accepts",
    403: "the token may not write there. Choose a name of yours, or a token with write permission for it",
    404: "the Hub does not know it: check the name",
    409: "it exists, but this token does not see it. Choose another name",
    413: "the Hub refuses it as too large",
    429: f"the Hub limits the rate of requests. Wait a little. {_AGAIN}",
}
