"""``mtp-schema``: print the JSON schema of a record."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli.terminal import write_json
from mtp_extract.schemas import RecordName, build_schema


def schema_command(
    *,
    name: Annotated[RecordName, typer.Argument(metavar="NAME", help="Record whose schema is printed.")],
    version: Version = False,
) -> None:
    """Print the JSON schema of extraction.json, report.json, or what mtp-bench or mtp-doctor prints with --json."""
    write_json(build_schema(name))


_EXAMPLES = {
    "mtp-schema extraction": "Explains every field of extraction.json.",
    "mtp-schema report": "Explains what mtp-validate --report writes.",
}

app, main = make_command(schema_command, _EXAMPLES, is_short=True)
