"""``mtp-convert``: write a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import AsJson, Codes, Dtype, Format, Overwrite, Quantize
from mtp_extract.cli._written import show_written
from mtp_extract.cli.terminal import TerminalReporter
from mtp_extract.errors import escape
from mtp_extract.formats import find_format_architecture


def convert_command(
    *,
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A drafter's directory in any format, tuned or not; an official assistant; a .gguf; or a Hub id.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Directory to write; by default DIR's name + -FORMAT."),
    ] = None,
    format: Format = None,  # noqa: A002 - the field's name
    dtype: Dtype = None,
    codes: Codes = False,
    quantize: Quantize = None,
    overwrite: Overwrite = False,
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Write a drafter that was extracted, tuned or published into another format.

    A DIR with an extraction.json is checked against it first. Integers, in DIR's own format or under codes/, are kept
    where the new format has room for them; what is written is read back and compared.
    """
    if format is None:
        raise typer.BadParameter("name the engine that is to load it, or a format, with --for.")

    from mtp_extract.api import convert

    with TerminalReporter(quiet=print_json) as reporter:
        result = convert(
            directory,
            out,
            format=format,
            dtype=dtype,
            codes=codes,
            quantize=quantize,
            overwrite=overwrite,
            reporter=reporter,
        )
    record = result.record
    title = find_format_architecture(record["layout"]).title
    before = escape(record["converted_from"][-1]["layout"])
    head = f"{title} of {escape(record['source']['name'])}, from its {before} format"
    show_written(result, format, head, print_json=print_json)


_EXAMPLES = {
    "mtp-convert drafter --for llama.cpp": "Writes a GGUF, with the bundle's own integers if --codes kept them.",
    "mtp-convert gemma-4-E4B-it-assistant --for mlx-vlm --quantize int4": "Rounds a published drafter to INT4.",
}

app, main = make_command(convert_command, _EXAMPLES, is_short=True)
