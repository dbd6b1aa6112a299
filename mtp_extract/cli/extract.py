"""``mtp-extract``: from a bundle to a directory that engines load."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from click import Argument, BadParameter, IntRange, Option

from mtp_extract.cli._command import Command, run
from mtp_extract.cli._options import AS_JSON, OVERWRITE, PATH, WRITING
from mtp_extract.cli._reporter import TerminalReporter
from mtp_extract.cli._written import found_in, show_written
from mtp_extract.errors import escape

_OPTIONS = (
    Argument(
        ["source"],
        required=False,
        metavar="[SOURCE]",
        help="A .litertlm or a drafter's .tflite: a path, a URL, or ORG/NAME[@REVISION][/FILE] of the Hub.",
    ),
    Option(
        ["-o", "--out"], type=PATH, metavar="DIR", help="Directory to write; by default SOURCE's name + -mtp-drafter."
    ),
    *WRITING,
    OVERWRITE,
    Option(
        ["--sliding-window"],
        type=IntRange(1),
        metavar="N",
        help="Length of the sliding window; needed only if the file leaves it to the runtime.",
    ),
    Option(["--unproven"], is_flag=True, help="Where the graph cannot be proven, extract what can be read of it."),
    Option(["--sample"], is_flag=True, help="Extract the sample that comes with mtp-extract."),
    Option(["-v", "--verbose"], is_flag=True, help="Print the proof, sizes and files, too."),
    AS_JSON,
)


def extract_command(
    source: str | None, out: Path | None, *, sample: bool, verbose: bool, print_json: bool, **values: Any
) -> None:
    """Extract the multi-token-prediction drafter of a LiteRT bundle into a checkpoint that engines load."""
    if (source is None) != sample:
        raise BadParameter("name a SOURCE, or --sample; one of the two.")

    from mtp_extract.api import extract
    from mtp_extract.data import sample_bundle
    from mtp_extract.litertlm.published import base_model_of

    file = sample_bundle() if source is None else source
    with TerminalReporter(quiet=print_json) as reporter:
        result = extract(file, out, **values, reporter=reporter)
    source_, section = result.record["source"], result.record["source"]["section"]
    where = found_in(section["index"], section["found_by"])
    shape, base = result.record["known_as"], base_model_of(result.record)
    head = f"MTP drafter of {escape(source_['name'])} ({where})"
    head += f", for {base}" if base else f", of {shape}'s shape" if shape else ""
    show_written(result, values["format"], head, verbose=verbose, print_json=print_json)


_EXAMPLES = {
    "mtp-extract litert-community/gemma-4-E4B-it-litert-lm": "Extracts from the Hub, for most engines, in BF16.",
    "mtp-extract --sample -o drafter --for llama.cpp": "Extracts the sample in the format that llama.cpp loads.",
}

app = Command(extract_command, _OPTIONS, _EXAMPLES)
main = partial(run, app, is_short=True)
