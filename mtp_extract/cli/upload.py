"""``mtp-upload``: publish a checkpoint directory on the Hugging Face Hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from click import Argument, Option

from mtp_extract.cli._command import Command, run
from mtp_extract.cli._options import PATH
from mtp_extract.cli.terminal import say, say_notes, size, table
from mtp_extract.errors import escape
from mtp_extract.report.card import CardWords

if TYPE_CHECKING:
    from mtp_extract.hub.upload import UploadResult


_OPTIONS = (
    Argument(["directory"], type=PATH, metavar="DIR", help="Directory that mtp-extract wrote."),
    Argument(["repository"], metavar="ORG/NAME", help="The repository on the Hub."),
    Option(
        ["--private/--public"],
        default=True,
        help="Visibility of a repository that is created; one that exists keeps its own.",
    ),
    Option(
        ["--beside"],
        is_flag=True,
        help="Send a GGUF alone into a repository that exists, such as its base's; what is there stays.",
    ),
    Option(["--force"], is_flag=True, help="Write into a repository that holds other files (its history keeps them)."),
    Option(["--dry-run"], is_flag=True, help="Check and list what would be sent, with sizes and hashes; send nothing."),
    Option(["--license"], metavar="ID", help="Licence for the card, as the Hub calls it: apache-2.0, gemma, …"),
    Option(["--base-model"], metavar="ORG/NAME", help="The base's id on the Hub, for the card."),
)


def upload_command(
    directory: Path, repository: str, *, private: bool, beside: bool, force: bool, dry_run: bool, **card: str | None
) -> None:
    """Publish a checkpoint directory on the Hugging Face Hub, and verify what arrived.

    The directory is checked against its extraction.json first, and stays as it is. With a report.json in it, the model
    card that is sent states the figures; one that was changed by hand is sent as it is. An upload that was interrupted
    is resumed by running it again. The token is the one that 'hf auth login' or HF_TOKEN left.
    """
    from mtp_extract.api import upload

    result = upload(
        directory, repository, private=private, beside=beside, force=force, dry_run=dry_run, card=CardWords(**card)
    )
    _show(result)


def _show(result: UploadResult) -> None:
    """What was sent, or would be, file by file, and where it can be seen."""
    total = size(sum(file.size for file in result.files))
    visibility = "private" if result.private else "public"
    if result.dry_run:
        say(f"Would be sent to {result.repository} ({visibility} if it is new): {len(result.files)} files, {total}")
    elif result.sent:
        created = f", a new {visibility} repository" if result.created else ""
        say(f"{len(result.sent)} of {len(result.files)} files ({total} in all) sent to {result.repository}{created}")
    else:
        say(f"{result.repository} already holds these {len(result.files)} files ({total}); nothing was sent")
    table([[file.path, size(file.size), f"{file.sha256[:16]}…"] for file in result.files], ["file", "size", "SHA-256"])
    say_notes(result.notes)
    if not result.dry_run:
        say(f"What the Hub holds matches by hash (commit {escape(result.commit)}).")
        say(result.url)


_EXAMPLES = {
    "mtp-upload gemma-4-E4B-it-mtp-drafter me/gemma-4-E4B-it-mtp --dry-run": "Lists what would be sent.",
    "mtp-upload gemma-4-E4B-it-mtp-drafter-gguf me/gemma-4-E4B-it-GGUF --beside": "Adds a GGUF to its base's.",
}

app = Command(upload_command, _OPTIONS, _EXAMPLES)
main = partial(run, app)
