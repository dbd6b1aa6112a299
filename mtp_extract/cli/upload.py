"""``mtp-upload``: publish a checkpoint directory on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_extract.cli._run import run

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def upload(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What mtp-extract wrote.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hub.")],
    private: Annotated[
        bool,
        typer.Option(
            "--private/--public",
            help="Visibility of a repository that is created; one that exists keeps its own.",
        ),
    ] = True,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write into a repository that holds other content (its history keeps that)."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check and list what would go, with sizes and hashes; send nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Publish a checkpoint directory on the Hugging Face Hub, and verify what arrived.

    The directory is checked against its extraction.json first. With a report.json in it, the model card states the
    figures. An upload that was interrupted is resumed by running it again. The token is the one that 'hf auth login'
    or HF_TOKEN left.
    """
    from mtp_extract.cli import render
    from mtp_extract.hub.upload import upload as publish

    result = publish(directory, repository, private=private, force=force, dry_run=dry_run, progress=not as_json)
    render.upload(result, as_json)


def main() -> None:
    """Entry point."""
    run(app)
