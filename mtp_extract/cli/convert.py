"""``mtp-convert``: a drafter that is already in a directory, in another format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_extract.architecture.roles import EAGLE3, GEMMA4_MTP
from mtp_extract.cli._options import AsJson
from mtp_extract.cli._run import new_app, run_lean
from mtp_extract.cli._writing import CHOICES, FORMATS_ABOUT, HEADS_ABOUT, checked_format, chosen_by, show_written
from mtp_extract.cli.terminal import progress
from mtp_extract.errors import escape
from mtp_extract.formats import EVERY, HEADS, architecture_of
from mtp_extract.options import About, Overwrite
from mtp_extract.pipeline.plan import WritingPlan


def command(
    *,
    directory: Annotated[
        Path,
        About(
            "What mtp-extract wrote, in any format, tuned or not; an official assistant; or a .gguf; or its id on "
            "the Hub.",
            metavar="DIR",
        ),
    ],
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        About(
            f"{FORMATS_ABOUT} {HEADS_ABOUT} By default what --for is best served with.",
            names=("--format",),
            choices=(*CHOICES, *HEADS),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        About("Where to write; by default DIR's name + -FORMAT.", names=("-o", "--out"), metavar="OUT"),
    ] = None,
    plan: WritingPlan,
    overwrite: Overwrite = False,
    print_json: AsJson = False,
) -> None:
    """Write a drafter that was extracted, tuned or published into another format.

    What has an extraction.json is held against it first. Integers, in DIR's own format or under codes/, are kept where
    the new format has room for them; what is written is read back and compared.
    """
    if format is None and plan.engine is None:
        raise typer.BadParameter("name a --format, or what is to serve the drafter with --for.")
    if format is not None:
        checked_format(plan, format)

    from mtp_extract.io.opening import checkpoint_here
    from mtp_extract.pipeline.check import with_record
    from mtp_extract.pipeline.conversion import convert

    directory = Path(checkpoint_here(directory))
    name = checked_format(plan, format, GEMMA4_MTP if format else architecture_of(with_record(directory)))
    with progress(quiet=print_json) as tick:
        result = convert(
            directory,
            out,
            format=name,
            **vars(plan),
            overwrite=overwrite,
            progress=tick,
        )
    show_written(result, print_json, [*_head(result.record), *chosen_by(plan, format, name)])


def _head(record: Mapping[str, Any]) -> list[str]:
    before = record["converted_from"][-1]
    head = EVERY[record["layout"]].architecture == EAGLE3
    name = "EAGLE-3 head" if head else f"{record['known_as'] or 'MTP'} drafter"
    return [f"{name} of {escape(record['source']['name'])}, from its {escape(before['layout'])} format"]


_EXAMPLES = {
    "drafter --format gguf": "For llama.cpp; with the bundle's own integers where --codes kept them.",
    "gemma-4-E4B-it-assistant --for mlx-vlm --quantize int4": "A published drafter, rounded to INT4, for mlx-vlm.",
}

app = new_app(command, _EXAMPLES)
main = partial(run_lean, app)
