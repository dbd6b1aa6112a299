"""``mtp-sample``: print where the sample's files are, for commands that take a bundle, a base or prompts."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.data import sample_base, sample_bundle, sample_prompts

_PATHS = {"bundle": sample_bundle, "base": sample_base, "prompts": sample_prompts}


def sample_command(
    *,
    name: Annotated[
        Literal["bundle", "base", "prompts"], typer.Argument(help="Which of its files.", show_default=True)
    ] = "bundle",
    version: Version = False,
) -> None:
    """Print the path of the sample that comes with mtp-extract: its bundle, its base model, or prompts for it."""
    typer.echo(_PATHS[name]())


_EXAMPLES = {
    'mtp-inspect "$(mtp sample)"': "Shows what the sample's bundle holds.",
    'mtp-validate DIR --base "$(mtp sample base)"': "Measures a drafter of the sample beside its base.",
}

app, main = make_command(sample_command, _EXAMPLES, no_arguments_is_help=False, is_short=True)
