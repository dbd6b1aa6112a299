"""``mtp-schema``: the JSON schema of a record that is written."""

from __future__ import annotations

from functools import partial
from typing import get_args

from click import Argument, Choice

from mtp_extract.cli._command import Command, run
from mtp_extract.cli.terminal import write_json
from mtp_extract.schemas import RecordName, schema

_OPTIONS = (
    Argument(["name"], type=Choice(get_args(RecordName)), metavar="NAME", help="Record whose schema is printed."),
)


def schema_command(name: str) -> None:
    """Print the JSON schema of extraction.json, report.json, or what mtp-bench or mtp-doctor prints with --json."""
    write_json(schema(name))


_EXAMPLES = {
    "mtp-schema extraction": "Explains every field of extraction.json.",
    "mtp-schema report": "Explains what mtp-validate --report writes.",
}

app = Command(schema_command, _OPTIONS, _EXAMPLES)
main = partial(run, app, is_short=True)
