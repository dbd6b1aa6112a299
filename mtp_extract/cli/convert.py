"""``mtp-convert``: a drafter that is already in a directory, in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_extract.cli._command import AsJson, program
from mtp_extract.cli._written import show_written
from mtp_extract.cli.terminal import progress
from mtp_extract.errors import escape
from mtp_extract.formats import architecture_in
from mtp_extract.options import Overwrite
from mtp_extract.pipeline.plan import WritingPlan


def convert_command(
    *,
    directory: Annotated[
        Path,
        typer.Argument(
            help="A drafter's directory in any format, tuned or not; an official assistant; a .gguf; or a Hub id.",
            metavar="DIR",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Directory to write; by default DIR's name + -FORMAT.", metavar="DIR"),
    ] = None,
    plan: WritingPlan,
    overwrite: Overwrite = False,
    print_json: AsJson = False,
) -> None:
    """Write a drafter that was extracted, tuned or published into another format.

    A DIR with an extraction.json is checked against it first. Integers, in DIR's own format or under codes/, are kept
    where the new format has room for them; what is written is read back and compared.
    """
    if plan.format is None:
        raise typer.BadParameter("name the engine that is to load it, or a format, with --for.")

    from mtp_extract.pipeline.writing import convert

    with progress(quiet=print_json) as tick:
        result = convert(directory, out, **vars(plan), overwrite=overwrite, progress=tick)
    record = result.record
    what = architecture_in(record["layout"]).title
    before = escape(record["converted_from"][-1]["layout"])
    head = f"{what} of {escape(record['source']['name'])}, from its {before} format"
    show_written(result, plan.format, head, print_json=print_json)


_EXAMPLES = {
    "mtp-convert drafter --for llama.cpp": "Writes a GGUF, with the bundle's own integers if --codes kept them.",
    "mtp-convert gemma-4-E4B-it-assistant --for mlx-vlm --quantize int4": "Rounds a published drafter to INT4.",
}

app, main = program(convert_command, _EXAMPLES, is_short=True)
