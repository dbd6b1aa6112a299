"""``mtp-convert``: a drafter that is already in a directory, in another format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from click import Argument, BadParameter, Option

from mtp_extract.cli._command import Command, run
from mtp_extract.cli._options import AS_JSON, OVERWRITE, PATH, WRITING
from mtp_extract.cli._reporter import TerminalReporter
from mtp_extract.cli._written import show_written
from mtp_extract.errors import escape
from mtp_extract.formats import architecture_in

_OPTIONS = (
    Argument(
        ["directory"],
        type=PATH,
        metavar="DIR",
        help="A drafter's directory in any format, tuned or not; an official assistant; a .gguf; or a Hub id.",
    ),
    Option(["-o", "--out"], type=PATH, metavar="DIR", help="Directory to write; by default DIR's name + -FORMAT."),
    *WRITING,
    OVERWRITE,
    AS_JSON,
)


def convert_command(directory: Path, out: Path | None, *, print_json: bool, **values: Any) -> None:
    """Write a drafter that was extracted, tuned or published into another format.

    A DIR with an extraction.json is checked against it first. Integers, in DIR's own format or under codes/, are kept
    where the new format has room for them; what is written is read back and compared.
    """
    if values["format"] is None:
        raise BadParameter("name the engine that is to load it, or a format, with --for.")

    from mtp_extract.api import convert

    with TerminalReporter(quiet=print_json) as reporter:
        result = convert(directory, out, **values, reporter=reporter)
    record = result.record
    what = architecture_in(record["layout"]).title
    before = escape(record["converted_from"][-1]["layout"])
    head = f"{what} of {escape(record['source']['name'])}, from its {before} format"
    show_written(result, values["format"], head, print_json=print_json)


_EXAMPLES = {
    "mtp-convert drafter --for llama.cpp": "Writes a GGUF, with the bundle's own integers if --codes kept them.",
    "mtp-convert gemma-4-E4B-it-assistant --for mlx-vlm --quantize int4": "Rounds a published drafter to INT4.",
}

app = Command(convert_command, _OPTIONS, _EXAMPLES)
main = partial(run, app, is_short=True)
