"""``mtp``: every command by one name, ``mtp extract …`` as ``mtp-extract …``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mtp_extract.cli import COMMANDS, module_of
from mtp_extract.cli._help import Commands, epilog_of, settings, version_option
from mtp_extract.cli._run import run

_EXAMPLES = {
    "extract gemma-4-E4B-it.litertlm": "The drafter, in a directory that transformers, vLLM and SGLang load.",
    "validate gemma-4-E4B-it-mtp-drafter --base google/gemma-4-E4B-it": "How many of its drafts the base takes.",
}

app = typer.Typer(cls=Commands, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(context_settings=settings(), no_args_is_help=True, epilog=epilog_of(_EXAMPLES))
def _commands(version: Annotated[bool, version_option()] = False) -> None:
    """Take Gemma 4's multi-token-prediction drafter out of LiteRT bundles, prove it, convert it, fit it, serve it."""


def main(called: str = "mtp") -> None:
    """Run the command that is named; ``called`` is what the user called this by."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        module_of(name).main(called=f"{called} {name}", arguments=sys.argv[2:])
    run(app, called=called)
