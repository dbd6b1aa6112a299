"""The options by which a shell learns to complete a command, by click's own scripts."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/{}",
    "fish": "~/.config/fish/completions/{}.fish",
    "zsh": "~/.zfunc/_{}",
}
"""Shell → where it looks for the script of a command."""
_ZSH = "Have ~/.zshrc say: fpath+=~/.zfunc; autoload -Uz compinit; compinit"


def _script(ctx: click.Context) -> tuple[str, str]:
    """The user's shell, and the script that it needs."""
    shell = Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"expected the shell bash, fish or zsh in SHELL, found {shell or 'none'}.", ctx)
    name = ctx.info_name or ""
    return shell, kind(ctx.command, {}, name, f"_{name}_COMPLETE".replace("-", "_").upper()).source()


def _show(ctx: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(_script(ctx)[1])
        ctx.exit()


def _install(ctx: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        shell, script = _script(ctx)
        place = Path(_PLACES[shell].format(ctx.info_name)).expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script, encoding="utf-8")
        click.echo(f"Wrote {place}; {shell} reads it when it starts. {_ZSH if shell == 'zsh' else ''}".rstrip())
        ctx.exit()


COMPLETION = (
    click.Option(
        ["--install-completion"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_install,
        help="Install completion for the current shell.",
    ),
    click.Option(
        ["--show-completion"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show,
        help="Show completion for the current shell, to copy it or customize the installation.",
    ),
)
