"""``mtp-extract``: from a bundle to a directory that engines load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_extract.cli._drafter import found_in
from mtp_extract.cli._options import AsJson, SlidingWindow, Verbose
from mtp_extract.cli._run import new_app, run_lean
from mtp_extract.cli._writing import show_written
from mtp_extract.cli.terminal import progress
from mtp_extract.errors import escape
from mtp_extract.options import About, Overwrite
from mtp_extract.pipeline.plan import WritingPlan


def command(
    *,
    source: Annotated[
        str | None,
        About(
            "A .litertlm or a drafter's .tflite: a path, ORG/NAME[/FILE][@REVISION] of the Hugging Face Hub, or a URL.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[
        Path | None,
        About("Where to write; by default SOURCE's name + -mtp-drafter.", names=("-o", "--out"), metavar="DIR"),
    ] = None,
    plan: WritingPlan,
    overwrite: Overwrite = False,
    sliding_window: SlidingWindow = None,
    section: Annotated[
        int | None, About("Index of the drafter's section; asked for only where there are several.", least=0)
    ] = None,
    sample: Annotated[bool, About("Extract the sample that comes with mtp-extract.")] = False,
    verbose: Verbose = False,
    print_json: AsJson = False,
) -> None:
    """Extract the multi-token-prediction drafter of a LiteRT bundle into a checkpoint that engines load."""
    if (source is None) != sample:
        raise typer.BadParameter("name a SOURCE, or --sample; one of the two.")

    from mtp_extract.data import sample_bundle
    from mtp_extract.pipeline.extraction import extract

    with progress(quiet=print_json) as tick:
        result = extract(
            sample_bundle() if source is None else source,
            out,
            **vars(plan),
            overwrite=overwrite,
            sliding_window=sliding_window,
            section=section,
            progress=tick,
        )
    head, details = _head(result.record)
    show_written(result, plan.format, head, details, verbose=verbose, print_json=print_json)


def _head(record: Mapping[str, Any]) -> tuple[str, list[str]]:
    source, section, counts = record["source"], record["source"]["section"], record["counts"]
    where = found_in(section["index"], section["found_by"])
    stored = ", ".join(f"{count} {kind}" for kind, count in counts["stored"].items())
    details = [
        f"  {sum(counts['held'].values())} tensors from the graph ({stored}), {counts['names_confirmed']} confirmed by "
        "published names",
        f"  {counts['set_aside']} other constants are not weights: masks, RoPE tables, scalars (mtp-inspect --graph)",
    ]
    return f"{record['known_as'] or 'MTP'} drafter of {escape(source['name'])} ({where})", details


_EXAMPLES = {
    "mtp-extract litert-community/gemma-4-E4B-it-litert-lm": "From the Hub, for most engines, in BF16.",
    "mtp-extract --sample -o drafter --for llama.cpp": "The sample that comes along, as llama.cpp loads it best.",
}

app = new_app(command, _EXAMPLES)
main = partial(run_lean, app)
