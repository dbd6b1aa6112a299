"""``mtp``: every command by one name, ``mtp extract …`` as ``mtp-extract …``."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from mtp_extract.cli import COMMANDS, import_command
from mtp_extract.cli._command import SETTINGS, Version, format_examples, run

_EXAMPLES = {
    "mtp extract gemma-4-E4B-it.litertlm": "Writes the drafter to a directory that transformers, vLLM and SGLang load.",
    "mtp validate gemma-4-E4B-it-mtp-drafter --base google/gemma-4-E4B-it": "Measures how many drafts are accepted.",
}


class _Commands(TyperGroup):
    """The group of all commands, each imported when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Typer lists these names, and suggests one for a misspelt name.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return get_command(import_command(cmd_name).app) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(context_settings=SETTINGS, no_args_is_help=True, epilog=format_examples(_EXAMPLES))
def _commands(version: Version = False) -> None:
    """Take Gemma 4's multi-token-prediction drafter out of LiteRT bundles; check, convert, tune and measure it."""


def main(called: str = "mtp") -> None:
    """Run the command that the first argument names; the user called this process ``called``."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        import_command(name).main(called=f"{called} {name}", arguments=sys.argv[2:])
    run(app, called=called)
