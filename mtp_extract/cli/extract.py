"""``mtp-extract``: write a bundle's drafter as a checkpoint that engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import AsJson, Codes, Dtype, Format, Overwrite, Quantize
from mtp_extract.cli._written import describe_place, show_written
from mtp_extract.cli.terminal import TerminalReporter
from mtp_extract.errors import escape


def extract_command(
    *,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A .litertlm or a drafter's .tflite: a path, a URL, or ORG/NAME[@REVISION][/FILE] of the Hub.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Directory to write; by default SOURCE's name + -mtp-drafter."),
    ] = None,
    format: Format = None,  # noqa: A002 - the field's name
    dtype: Dtype = None,
    codes: Codes = False,
    quantize: Quantize = None,
    overwrite: Overwrite = False,
    sliding_window: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Length of the sliding window; needed only if the file leaves it to the runtime."
        ),
    ] = None,
    unproven: Annotated[
        bool, typer.Option("--unproven", help="Where the graph cannot be proven, extract what can be read of it.")
    ] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Extract the sample that comes with mtp-extract.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print the proof, sizes and files, too.")] = False,
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Extract the multi-token-prediction drafter of a LiteRT bundle into a checkpoint that engines load."""
    if (source is None) != sample:
        raise typer.BadParameter("name a SOURCE, or --sample; one of the two.")

    from mtp_extract.api import extract
    from mtp_extract.data import sample_bundle
    from mtp_extract.litertlm.published import find_base_model

    with TerminalReporter(quiet=print_json) as reporter:
        result = extract(
            sample_bundle() if source is None else source,
            out,
            format=format,
            dtype=dtype,
            codes=codes,
            quantize=quantize,
            overwrite=overwrite,
            sliding_window=sliding_window,
            unproven=unproven,
            reporter=reporter,
        )
    bundle, base = result.record["source"], find_base_model(result.record)
    section, shape = bundle["section"], result.record["known_as"]
    head = f"MTP drafter of {escape(bundle['name'])} ({describe_place(section['index'], section['found_by'])})"
    head += f", for {base}" if base else f", of {shape}'s shape" if shape else ""
    show_written(result, format, head, verbose=verbose, print_json=print_json)


_EXAMPLES = {
    "mtp-extract litert-community/gemma-4-E4B-it-litert-lm": "Extracts from the Hub, for most engines, in BF16.",
    "mtp-extract --sample -o drafter --for llama.cpp": "Extracts the sample in the format that llama.cpp loads.",
}

app, main = make_command(extract_command, _EXAMPLES, is_short=True)
