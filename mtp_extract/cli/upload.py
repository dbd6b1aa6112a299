"""``mtp-upload``: publish a checkpoint directory on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli.terminal import format_size, say, say_notes, say_table
from mtp_extract.errors import escape, format_count
from mtp_extract.report.card import CardWords

if TYPE_CHECKING:
    from mtp_extract.hub.upload import UploadResult


def upload_command(
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that mtp-extract wrote.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hub.")],
    private: Annotated[
        bool,
        typer.Option(
            "--private/--public", help="Visibility of a repository that is created; one that exists keeps its own."
        ),
    ] = True,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside", help="Send a GGUF alone into a repository that exists, such as its base's; what is there stays."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a repository that holds other files (its history keeps them).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list what would be sent, with sizes and hashes; send nothing.")
    ] = False,
    license: Annotated[  # noqa: A002 - the field's name
        str | None, typer.Option(metavar="ID", help="Licence for the card, as the Hub calls it: apache-2.0, gemma, …")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="The base's id on the Hub, for the card.")
    ] = None,
    version: Version = False,
) -> None:
    """Publish a checkpoint directory on the Hugging Face Hub, and verify what arrived.

    The directory is checked against its extraction.json first, and stays as it is. With a report.json in it, the model
    card that is sent states the figures; one that was changed by hand is sent as it is. An upload that was interrupted
    is resumed by running it again. The token is the one that 'hf auth login' or HF_TOKEN left.
    """
    from mtp_extract.api import upload

    card = CardWords(license=license, base_model=base_model)
    result = upload(directory, repository, private=private, beside=beside, force=force, dry_run=dry_run, card=card)
    _show(result, beside=beside)


def _show(result: UploadResult, *, beside: bool) -> None:
    total = format_size(sum(file.size for file in result.files))
    visibility = "private" if result.private else "public"
    files = format_count(len(result.files), "file")
    if result.dry_run:
        # What is sent beside a base's files goes into a repository that exists.
        when_new = "" if beside else f" ({visibility} if it is new)"
        say(f"Would be sent to {result.repository}{when_new}: {files}, {total}")
    elif result.sent:
        created = f", a new {visibility} repository" if result.created else ""
        say(f"{len(result.sent)} of {files} ({total} in all) sent to {result.repository}{created}")
    else:
        say(f"{result.repository} already holds what is here, {files} ({total}); nothing was sent")
    say_table(
        [[file.path, format_size(file.size), f"{file.sha256[:16]}…"] for file in result.files],
        ["file", "size", "SHA-256"],
    )
    say_notes(result.notes)
    if not result.dry_run:
        say(f"What the Hub holds matches by hash (commit {escape(result.commit)}).")
        say(result.url)


_EXAMPLES = {
    "mtp-upload gemma-4-E4B-it-mtp-drafter me/gemma-4-E4B-it-mtp --dry-run": "Lists what would be sent.",
    "mtp-upload gemma-4-E4B-it-mtp-drafter-gguf me/gemma-4-E4B-it-GGUF --beside": "Adds a GGUF to its base's.",
}

app, main = make_command(upload_command, _EXAMPLES)
