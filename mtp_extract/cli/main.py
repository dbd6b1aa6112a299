"""``mtp``: every command by one name, ``mtp extract …`` as ``mtp-extract …``."""

from __future__ import annotations

import sys
from typing import Any

import click

from mtp_extract.cli import COMMANDS, module_of
from mtp_extract.cli._command import SETTINGS, STANDARD, epilog_of, run

_EXAMPLES = {
    "mtp extract gemma-4-E4B-it.litertlm": "Writes the drafter to a directory that transformers, vLLM and SGLang load.",
    "mtp validate gemma-4-E4B-it-mtp-drafter --base google/gemma-4-E4B-it": "Measures how many drafts are accepted.",
}


class _Commands(click.Group):
    """All of them, each imported when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # What click suggests for a misspelt name.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        app: click.Command | None = module_of(cmd_name).app if cmd_name in COMMANDS else None
        return app

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = _Commands(
    help="Take Gemma 4's multi-token-prediction drafter out of LiteRT bundles; check, convert, tune and measure it.",
    params=[*STANDARD],
    epilog=epilog_of(_EXAMPLES),
    context_settings=dict(SETTINGS),
    no_args_is_help=True,
)


def main(called: str = "mtp") -> None:
    """Run the command that is named; ``called`` is what the user called this by."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        module_of(name).main(called=f"{called} {name}", arguments=sys.argv[2:])
    run(app, called=called)
