"""``mtp``: every command by one name, ``mtp extract …`` as ``mtp-extract …``."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from mtp_extract.cli import COMMANDS, module_of
from mtp_extract.cli._command import SETTINGS, Version, epilog_of, run

_EXAMPLES = {
    "mtp extract gemma-4-E4B-it.litertlm": "Writes the drafter to a directory that transformers, vLLM and SGLang load.",
    "mtp validate gemma-4-E4B-it-mtp-drafter --base google/gemma-4-E4B-it": "Measures how many drafts are accepted.",
}


class _Commands(TyperGroup):
    """All of them, each imported when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # What typer lists, and suggests for a misspelt name.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return get_command(module_of(cmd_name).app) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(context_settings=SETTINGS, no_args_is_help=True, epilog=epilog_of(_EXAMPLES))
def _commands(version: Version = False) -> None:
    """Take Gemma 4's multi-token-prediction drafter out of LiteRT bundles; check, convert, tune and measure it."""


def main(called: str = "mtp") -> None:
    """Run the command that is named; ``called`` is what the user called this by."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        module_of(name).main(called=f"{called} {name}", arguments=sys.argv[2:])
    run(app, called=called)
