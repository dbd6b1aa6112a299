"""Publishing a checkpoint directory on the Hugging Face Hub.

Before anything is sent, everything that can be checked is: the directory against its ``extraction.json``, the name, the
token, the repository's other files, and the card's metadata by the Hub. Afterwards the hash of every file is compared
with the one that the Hub reports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__
from huggingface_hub.utils.sha import git_hash

from mtp_extract.checkpoint.documents import read_object
from mtp_extract.errors import CheckpointError, HubError, PlanError, escape, list_few
from mtp_extract.formats import find_weights_file, load_format
from mtp_extract.formats.gguf import GGUF
from mtp_extract.io.http_library import (
    STATUSES,
    get_response,
    hide_queries,
    import_http_library,
    mask_secrets,
    read_hub_message,
)
from mtp_extract.io.typed import parse_record
from mtp_extract.pipeline.check import CARD, LEGAL, RECORD, CheckpointDirectory, is_card_changed, list_directory_files
from mtp_extract.report.card import NO_CARD_WORDS, CardWords, Verdict, render_model_card
from mtp_extract.report.files import REPORT, REPORT_FILES

_AGAIN = "Run it again: it resumes"
_RIGHTS = "choose a name of yours, or a token with write permission for it"
_STATUSES: Mapping[int, str] = {
    **STATUSES,
    400: "the Hub refuses the request; the card's metadata may not be what it accepts",
    403: f"the token may not write there: {_RIGHTS}",
    404: "the Hub does not know it: check the name",
    409: "it exists, but this token does not see it. Choose another name",
    413: "the Hub refuses it as too large",
    429: f"the Hub limits the rate of requests. Wait a little. {_AGAIN}",
}


@dataclass(frozen=True)
class HubFile:
    """A published file; its path is the same in the directory and in the repository."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class UploadResult:
    """The published files, or with ``dry_run`` those that would be published."""

    repository: str  # ``org/name``
    url: str  # of the repository's page
    commit: str | None  # id of the commit that holds the files; None for a dry run
    private: bool  # the visibility of a repository created by this upload
    dry_run: bool
    created: bool | None  # the upload created the repository; None for a dry run, which does not ask the Hub
    sent: tuple[str, ...]  # paths of new or changed files
    files: tuple[HubFile, ...]  # all published files, unchanged ones too; with ``beside`` the GGUF alone
    notes: tuple[str, ...] = ()  # for example that the card was edited by hand


def plan_upload(
    directory: str | os.PathLike[str], words: CardWords = NO_CARD_WORDS
) -> tuple[list[CommitOperationAdd], tuple[str, ...]]:
    """Check a directory, and return the files to publish, sorted by path, and notes for the user.

    The card is rewritten to state ``words`` or a report's verdict; a card that was edited by hand is sent as it is.

    Raises:
        CheckpointError: the directory does not match its record, or the report cannot be read.
        HubError: ``words`` are given, but the card was edited by hand.
    """
    drafter = CheckpointDirectory.of(directory)
    contents = _collect_contents(drafter)
    report = _read_verdict(drafter.directory) if REPORT in contents else None
    notes = list[str]()
    if why := drafter.record.get("not_proven"):
        notes.append(f"It is not proven, and its card says so: {'; '.join(why)}.")
    is_changed = is_card_changed(drafter.directory, drafter.record)
    if is_changed and words != NO_CARD_WORDS:
        raise HubError(
            f"{escape(drafter.directory / CARD)}: expected the card that mtp-extract wrote, to add words to it, found "
            "one that was changed. Write the words into it, or delete it, and it is written anew."
        )
    if is_changed:
        notes.append(f"{CARD} was changed since mtp-extract wrote it, and is sent as it is.")
    elif report is not None or words != NO_CARD_WORDS or CARD not in contents:
        limits = load_format(drafter.layout).plan(drafter.checkpoint, drafter.record["dtype"]).limits
        contents[CARD] = render_model_card(drafter.record, limits, report, words).encode()
    return [CommitOperationAdd(path, contents[path]) for path in sorted(contents)], tuple(notes)


def _collect_contents(drafter: CheckpointDirectory) -> dict[str, str | bytes]:
    """Return path in the repository → local path; CheckpointError if the directory holds anything else."""
    folder = drafter.directory
    if not drafter.is_recorded:
        raise CheckpointError(
            f"{escape(folder)}: expected a directory that mtp-extract wrote, with {RECORD} in it. Convert it first."
        )
    if drafter.checkpoint.unread:
        raise CheckpointError(
            f"{escape(folder)}: expected nothing but what mtp-extract wrote there, found that "
            f"{list_few(drafter.checkpoint.unread, separator='; ')}. Move it elsewhere, or extract the drafter again."
        )
    contents: dict[str, str | bytes] = {path: str(folder / path) for path in list_directory_files(folder)}
    known_paths = {*drafter.record["files"], RECORD, CARD, *REPORT_FILES}
    for path in contents:
        if path not in known_paths and not any(fnmatchcase(path, name) for name in LEGAL):
            raise CheckpointError(
                f"{escape(folder)}: {escape(path)} belongs neither to the checkpoint nor to a report, and would be "
                "published with it. Move it elsewhere."
            )
    return contents


def _read_verdict(folder: Path) -> Verdict:
    try:
        return parse_record(read_object(folder / REPORT, "Validate again."), Verdict)
    except ValueError as error:
        problem = f"lacks what the card states: {escape(error)}. Validate anew."
        raise CheckpointError(f"{escape(folder / REPORT)}: {problem}") from error


def upload_directory(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    beside: bool = False,
    force: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    words: CardWords = NO_CARD_WORDS,
) -> UploadResult:
    """Publish a checkpoint directory; see :func:`mtp_extract.upload`. ``words`` are for its card."""
    _check_name(repo_id)
    adds, notes = plan_upload(directory, words)
    if beside:
        gguf = find_weights_file(GGUF, (add.path_in_repo for add in adds))
        if gguf is None or words != NO_CARD_WORDS:
            raise HubError(f"{escape(directory)}: expected a GGUF to be sent alone, without words on a card.")
        adds = [add for add in adds if add.path_in_repo == gguf]
        notes = tuple(note for note in notes if not note.startswith(CARD))
    files = tuple(HubFile(add.path_in_repo, add.upload_info.size, add.upload_info.sha256.hex()) for add in adds)
    paths = tuple(file.path for file in files)
    planned = UploadResult(repo_id, f"{constants.ENDPOINT}/{repo_id}", None, private, True, None, paths, files, notes)
    return planned if dry_run else _send(planned, adds, _require_token(token), beside=beside, force=force)


def _require_token(token: str | None) -> str:
    if constants.HF_HUB_OFFLINE:
        raise HubError("Offline mode is on (HF_HUB_OFFLINE), so nothing can be uploaded. Unset it.")
    if not (secret := token or get_token()):
        raise HubError("No token for the Hub was found: log in with 'hf auth login', or set HF_TOKEN.")
    return secret


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id if repo_id.count("/") == 1 else "")
    except HFValidationError as error:
        raise PlanError(
            f"repository {escape(repo_id)!r}: expected ORG/NAME: the user or organization that it belongs to, and "
            "letters, digits, '-', '_' and '.', at most 96 of them, without '--' or '..', not ending in .git."
        ) from error


def _send(
    planned: UploadResult, adds: list[CommitOperationAdd], secret: str, *, beside: bool, force: bool
) -> UploadResult:
    """Send ``adds``, create the repository if necessary, and return ``planned`` completed by the outcome."""
    repo_id = planned.repository
    with _explain_errors(repo_id, secret) as changes:
        api = HfApi(token=secret, library_name="mtp-extract")
        # Somebody else's private repository does not exist for this token; creating it fails before anything is sent.
        exists = api.repo_exists(repo_id)
        if beside and not exists:
            raise HubError(f"{repo_id}: expected a repository that exists, found none. Nothing was sent.")
        entries = _list_files(api.list_repo_tree(repo_id, recursive=True)) if exists else {}
        if beside:
            entries = {path: entry for path, entry in entries.items() if path in planned.sent}
        sent = tuple(add.path_in_repo for add in adds if not _holds(entries, add))
        # The Hub itself adds a .gitattributes to a new repository.
        unchanged = set(planned.sent) - set(sent) | {".gitattributes"}
        if not force and (other_paths := sorted(entries.keys() - unchanged)):
            raise HubError(
                f"{repo_id}: the repository holds other files, {list_few(other_paths)}. Nothing was sent. "
                "Choose another name, or write into it all the same: its history keeps what is replaced.",
                remedies=("force",),
            )

        if not exists:
            api.create_repo(repo_id, private=planned.private)
            changes.append(f"The repository was created on the way ({'private' if planned.private else 'public'}).")
        commit = _commit(api, repo_id, adds)
    return replace(planned, commit=commit, dry_run=False, created=not exists, sent=sent)


def _commit(api: HfApi, repo_id: str, adds: list[CommitOperationAdd]) -> str:
    """Send ``adds`` in one commit and return its id; HubError if the Hub then reports other contents."""
    # The Hub skips files that it already has, and makes no commit if it has all of them.
    commit = api.create_commit(repo_id, adds, commit_message="Upload MTP drafter with mtp-extract").oid
    paths = [add.path_in_repo for add in adds]
    arrived = _list_files(api.get_paths_info(repo_id, paths, revision=commit))
    if wrong := [add.path_in_repo for add in adds if not _holds(arrived, add)]:
        raise HubError(f"{repo_id}: {list_few(wrong)} in commit {commit[:12]} is not what was sent. Upload again.")
    return commit


def _list_files(listing: Any) -> dict[str, Any]:
    return {entry.path: entry for entry in listing if isinstance(entry, RepoFile)}


def _holds(entries: Mapping[str, Any], add: CommitOperationAdd) -> bool:
    """Compare ``add`` with a repository's ``entries``: by SHA-256 in LFS or Xet, else by git's hash."""
    entry = entries.get(add.path_in_repo)
    if entry is None or entry.size != add.upload_info.size:
        return False
    if entry.lfs:
        return bool(entry.lfs.sha256 == add.upload_info.sha256.hex())
    with add.as_file() as file:
        return bool(entry.blob_id == git_hash(file.read()))


@contextmanager
def _explain_errors(repo_id: str, token: str) -> Iterator[list[str]]:
    """Turn errors of huggingface_hub into a :class:`HubError` without the token or signed URLs.

    Yields a list, for sentences on what was already changed at the Hub; they are appended to the error.
    """
    changes = list[str]()
    hide_queries()
    try:
        yield changes
    except (HubError, CheckpointError):
        raise
    except Exception as error:  # noqa: BLE001 - any message may contain the token
        raise HubError(" ".join([f"{repo_id}: {_describe_failure(error, token)}.", *changes])) from None


def _describe_failure(error: Exception, token: str) -> str:
    causes: list[BaseException] = [error]
    # A ValueError says what the Hub refuses in a card; its cause does not.
    while causes[-1].__cause__ is not None and not isinstance(error, ValueError):
        causes.append(causes[-1].__cause__)
    responses = [response for cause in causes if (response := get_response(cause)) is not None]
    if responses:
        return _describe_refusal(responses[0])
    if any(isinstance(cause, import_http_library().TransportError) for cause in causes):
        return f"the Hub cannot be reached, or the connection was lost. {_AGAIN}"
    text = mask_secrets(str(causes[-1]), token).rstrip(".")
    return f"the upload failed: {text or type(causes[-1]).__name__}. {_AGAIN}"


def _describe_refusal(response: Any) -> str:
    """Explain an error response, with the Hub's own words if it has some.

    Only the words tell whether a 403 is about rights or about storage: "Private repository storage limit reached",
    "Your storage patterns tripped our internal systems" (huggingface_hub's issues 3049 and 3366).
    """
    status, words = response.status_code, read_hub_message(response)
    if status == 403 and not str(response.url).startswith(f"{constants.ENDPOINT}/"):
        return f"the Hub's storage refuses what is sent (403). {_AGAIN}"
    if status == 403 and words:
        return f"the Hub refuses it (403): {words}. If that is about rights, {_RIGHTS}"
    reason = _STATUSES.get(status, f"the Hub answered {status}. {_AGAIN}")
    return f"{reason}. The Hub says: {words}" if words else reason
