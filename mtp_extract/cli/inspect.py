"""``mtp-inspect``: what a bundle holds, or whether a checkpoint is what it says."""

from __future__ import annotations

import os
from typing import Annotated, Optional

import typer

from mtp_extract.cli._options import Download, SlidingWindow
from mtp_extract.cli._run import run_lean

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .litertlm, a .tflite, hf://org/repo/file.litertlm[@revision], an https:// URL; or a directory "
            "that mtp-extract wrote.",
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor of the drafter.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="List every role, the evidence for it, and every other constant.")
    ] = False,
    section: Annotated[
        Optional[int],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Option(min=0, help="Describe the TFLite model in this section instead of the drafter."),
    ] = None,
    against: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SOURCE", help="For a directory: derive every tensor again and compare all bits."),
    ] = None,
    sliding_window: SlidingWindow = None,
    download: Download = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a LiteRT bundle holds (only headers are read), or re-check a checkpoint directory."""
    from mtp_extract.cli import render

    if os.path.isdir(source):
        _verify(source, against, download, as_json)
        return
    if against is not None:
        raise typer.BadParameter("--against goes with a directory that mtp-extract wrote.")

    from mtp_extract.bundle import open_bundle
    from mtp_extract.inspection import inspect as look

    with (
        render.progress(quiet=as_json) as progress,
        open_bundle(source, download=download, progress=progress) as opened,
    ):
        found = look(opened, tensors=tensors, graph=graph, section=section, sliding_window=sliding_window)
    render.inspection(found.as_json, as_json)
    if found.problem is not None:
        raise found.problem


def _verify(directory: str, against: str | None, download: bool, as_json: bool) -> None:
    from mtp_extract.bundle import open_bundle
    from mtp_extract.checkpoint.check import verify
    from mtp_extract.cli import render
    from mtp_extract.extraction import verify_against_source

    if against is None:
        render.verification(verify(directory), as_json)
        return
    with (
        render.progress(quiet=as_json) as progress,
        open_bundle(against, download=download, progress=progress) as opened,
    ):
        result = verify_against_source(directory, opened)
    render.verification(result, as_json)


def main() -> None:
    """Entry point."""
    run_lean(app)
