"""What every command says of itself: its help, and what was wrong with how it was called.

Typer reads the command line; all that a user sees of that stands here, in the words of the messages elsewhere.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from mtp_extract._version import __version__
from mtp_extract.cli import COMMANDS, module_of
from mtp_extract.cli.terminal import error
from mtp_extract.errors import either, escape, nearest

_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it
_WIDEST = 100  # columns of a help text
_NAMES = 30  # of them, the most for names
_OF_ALL = ("version", "install_completion", "show_completion", "help")
PROGRAM = "{program}"
"""In an epilog: the command, as it was called."""


class WrongUsage(typer.BadParameter):
    """Of how a command was called: said as every other error is, with how it is called instead."""

    def show(self, file: Any = None) -> None:
        error(self.message)
        if self.ctx is not None:
            sys.stderr.write(f"{self.ctx.get_usage()}   ({self.ctx.command_path} --help says more)\n")


class _Words:
    """What a command and a group of commands have in common."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = not args
        try:
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except _UsageError as wrong:
            # The help of a command that was given nothing is an error of that kind, too.
            raise (wrong if bare else WrongUsage(_in_words(wrong, ctx), ctx)) from None
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except WrongUsage:
            raise
        except typer.BadParameter as wrong:
            raise WrongUsage(wrong.message, ctx) from None

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        arguments = [_argument(one) for one in self.params if one.param_type_name == "argument"]  # type: ignore[attr-defined]
        more = ["COMMAND", "…"] if isinstance(self, TyperGroup) else []
        formatter.write_usage(ctx.command_path, " ".join(["[OPTIONS]", *arguments, *more]))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Everywhere": []}
        for one in self.get_params(ctx):  # type: ignore[attr-defined]
            if one.param_type_name == "argument":
                shown["Arguments"].append((_argument(one), one.help or ""))
            else:
                part = "Everywhere" if one.name in _OF_ALL else "Options"
                shown[part].append((_option(one), one.help or ""))
        for title, rows in shown.items():
            _write(formatter, title, rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:  # type: ignore[attr-defined]
            formatter.write(f"\n{self.epilog.replace(PROGRAM, ctx.command_path)}\n")  # type: ignore[attr-defined]


class Command(_Words, TyperCommand):
    """One command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            taken = " ".join(_argument(one).strip("[]") for one in self.params if one.param_type_name == "argument")
            raise WrongUsage(f"expected no more than {taken}, found {escape(rest[0])!r} too. Leave it out.", ctx)
        return rest


class Commands(_Words, TyperGroup):
    """All of them, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return typer.main.get_command(module_of(cmd_name).app) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise WrongUsage(f"{escape(args[0])!r}: expected {either(COMMANDS)}.{nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, "Commands", list(COMMANDS.items()))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def settings() -> dict[str, Any]:
    """Of the context of every command."""
    return {"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST, "allow_extra_args": True}


def epilog_of(shown: Mapping[str, str], more: str = "") -> str:
    """An epilog of examples: what follows the command's name → what that does; and ``more``, as it is."""
    lines = [f"  {PROGRAM} {words}\n      {about}" for words, about in shown.items()]
    return "\n".join(["Examples:", *lines, *(["", more.rstrip()] if more else [])])


def show_version(wanted: bool) -> None:
    """What ``--version`` does."""
    if wanted:
        typer.echo(f"mtp-extract {__version__}")
        raise typer.Exit


def version_option() -> Any:
    """``--version``, as typer has it."""
    return typer.Option("--version", help="Print the version.", is_eager=True, callback=show_version)


def _write(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """``rows`` of names and what they are; no word is broken, at a hyphen neither."""
    if not rows:
        return
    formatter.write(f"\n{title}:\n")
    indent = " " * min(max(len(name) for name, _ in rows) + 4, _NAMES)
    for name, about in rows:
        first = f"  {name}"
        if len(first) + 2 > len(indent):
            formatter.write(f"{first}\n")
            first = ""
        formatter.write(
            textwrap.fill(
                about or " ",
                formatter.width,
                initial_indent=first.ljust(len(indent)),
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            + "\n"
        )


def _argument(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return name if one.required or name.startswith("[") else f"[{name}]"


def _option(one: Any) -> str:
    # --in / --out, and of several names the short one first.
    names = ", ".join(sorted(one.opts, key=len))
    if one.secondary_opts:
        names += " / " + ", ".join(one.secondary_opts)
    return names if one.is_flag or not one.metavar else f"{names} {one.metavar}"


def _in_words(wrong: Any, ctx: Any) -> str:
    """What typer found wrong, as this package says it."""
    parameter = getattr(wrong, "param", None)
    if hasattr(wrong, "param_type") and parameter is not None:
        what = _argument(parameter) if parameter.param_type_name == "argument" else _option(parameter)
        return f"expected {what}, found none."
    named = getattr(wrong, "option_name", None)
    if named is None:
        return str(wrong.message)
    options: dict[str, Any] = {
        flag: one for one in ctx.command.params for flag in (*one.opts, *one.secondary_opts) if flag[0] == "-"
    }
    if named in options:
        one = options[named]
        return (
            f"{named}: expected {'no value' if one.is_flag else one.metavar}, found {'one' if one.is_flag else 'none'}."
        )
    return f"{escape(named)}: no such option.{nearest(named, options)}"
