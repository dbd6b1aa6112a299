"""``mtp-extract``: from a bundle to a directory that engines load."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from mtp_extract.cli._options import Download, SlidingWindow
from mtp_extract.cli._run import run_lean

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Format(str, Enum):
    """Layouts."""

    transformers = "transformers"
    litert = "litert"


class Dtype(str, Enum):
    """Types of the numbers written."""

    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"


@app.command()
def extract(
    source: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Argument(
            metavar="SOURCE",
            help="A .litertlm, a drafter's .tflite, hf://org/repo/file.litertlm[@revision], or an https:// URL.",
        ),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--out", metavar="DIR", help="Where to write; by default SOURCE's name + -mtp-drafter."),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        Format,
        typer.Option(help="transformers: what engines load. litert: one F32 tensor per stored constant."),
    ] = Format.transformers,
    dtype: Annotated[
        Optional[Dtype],  # noqa: UP045
        typer.Option(help="Type of the numbers: bf16 (default; f32 for litert), f16, or f32 (exact)."),
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes", help="Also write the stored integers, scales and zero points.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DIR if it is such a checkpoint.")] = False,
    sliding_window: SlidingWindow = None,
    download: Download = False,
    sample: Annotated[bool, typer.Option("--sample", help="Extract the sample that comes with mtp-extract.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Extract the multi-token-prediction drafter of a LiteRT bundle into a checkpoint that engines load."""
    if (source is None) != sample:
        raise typer.BadParameter("name a SOURCE, or --sample; one of the two.")
    if format is Format.litert and dtype not in (None, Dtype.f32):
        raise typer.BadParameter("the litert layout is F32; leave --dtype out.")

    from mtp_extract.bundle import open_bundle
    from mtp_extract.cli import render
    from mtp_extract.data import sample_bundle
    from mtp_extract.extraction import default_directory
    from mtp_extract.extraction import extract as run_extraction

    path = str(sample_bundle()) if source is None else source
    with (
        render.progress(quiet=as_json) as progress,
        open_bundle(path, download=download, progress=progress) as opened,
    ):
        result = run_extraction(
            opened,
            out or default_directory(path),
            format=format.value,
            dtype=dtype.value if dtype else None,
            codes=codes,
            overwrite=overwrite,
            sliding_window=sliding_window,
            progress=progress,
        )
    render.extraction(result, as_json)


def main() -> None:
    """Entry point."""
    run_lean(app)
