"""``mtp-convert``: a drafter that is already in a directory, in another format."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from mtp_extract.architecture.roles import EAGLE3
from mtp_extract.cli._run import AsJson, Download, new_app, run_lean
from mtp_extract.cli._writing import (
    FORMATS_ABOUT,
    HEADS_ABOUT,
    AnyFormatName,
    BaseModel,
    Codes,
    Exact,
    For,
    License,
    Numbers,
    Overwrite,
    Quantize,
    Title,
    Tokenizer,
    card_words,
    check_usage,
    show_written,
)
from mtp_extract.cli.terminal import progress
from mtp_extract.errors import escape
from mtp_extract.formats import EVERY

app = new_app()


@app.command()
def command(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="What mtp-extract wrote, in any format, tuned or not; an official assistant; or a .gguf.",
        ),
    ],
    format: Annotated[AnyFormatName, typer.Option(help=f"{FORMATS_ABOUT} {HEADS_ABOUT}")],  # noqa: A002 - the option's name
    out: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Option("-o", "--out", metavar="OUT", help="Where to write; by default DIR's name + -FORMAT."),
    ] = None,
    engine: For = None,
    dtype: Numbers = None,
    codes: Codes = False,
    exact: Exact = False,
    quantize: Quantize = None,
    tokenizer: Tokenizer = None,
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SOURCE",
            help="The .litertlm that DIR was extracted from: run the proof again, and compare every tensor with it.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    license_: License = None,
    base_model: BaseModel = None,
    title: Title = None,
    download: Download = False,
    print_json: AsJson = False,
) -> None:
    """Write a drafter that was extracted, tuned or published into another format.

    What has an extraction.json is held against it first. Integers, in DIR's own format or under codes/, are kept where
    the new format has room for them; what is written is read back and compared.
    """
    card = card_words(license_, base_model, title)
    check_usage(format.value, engine.value if engine else None, dtype.value if dtype else None, tokenizer)

    from mtp_extract.bundle import open_bundle
    from mtp_extract.pipeline.conversion import convert

    with ExitStack() as stack:
        tick = stack.enter_context(progress(quiet=print_json))
        opened = None
        if source is not None:
            opened = stack.enter_context(open_bundle(source, download=download, progress=tick))
        result = convert(
            directory,
            out,
            format=format.value,
            engine=engine.value if engine else None,
            dtype=dtype.value if dtype else None,
            codes=codes,
            exact=exact,
            quantize=quantize.value if quantize else None,
            tokenizer=tokenizer,
            source=opened,
            overwrite=overwrite,
            card=card,
            progress=tick,
        )
    show_written(result, print_json, _head(result.record))


def _head(record: Mapping[str, Any]) -> list[str]:
    before = record["converted_from"][-1]
    head = EVERY[record["layout"]].architecture == EAGLE3
    name = "EAGLE-3 head" if head else f"{record['known_as'] or 'MTP'} drafter"
    return [f"{name} of {escape(record['source']['name'])}, from its {escape(before['layout'])} format"]


def main() -> None:
    """Entry point."""
    run_lean(app)
