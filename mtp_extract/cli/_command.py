"""How a command is made of its function, its options and examples, and how it is run.

Errors become one line on stderr and an exit status, never a traceback, unless ``MTP_EXTRACT_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from mtp_extract._version import __version__
from mtp_extract.cli import terminal
from mtp_extract.errors import MtpExtractError, PlanError, escape
from mtp_extract.io.threads import Interrupted, forget_interruptions, interrupt

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of the context of every command."""

_DEBUG = "MTP_EXTRACT_DEBUG"
_LONGEST_MESSAGE = 4000
_OUT_OF_MEMORY = (
    "out of memory. If you trust the file, close other programs or use a machine with more; a damaged file may ask for "
    "any amount."
)


# --- made


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mtp-extract {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, expose_value=False, callback=_show_version, help="Print the version."),
]
"""Of every command."""


class _Command(TyperCommand):
    """A command for which a plan that cannot be made is wrong usage, and ``~/`` the user's home."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of a command line."""
        return super().parse_args(ctx, [_from_home(word) for word in args])

    def invoke(self, ctx: Any) -> Any:
        """Call the function; BadParameter where what it is to do is out of bounds, or does not go together."""
        try:
            return super().invoke(ctx)
        except PlanError as error:
            named = [flag for name in error.remedies if (flag := flag_of(self, name))]
            # Where its message begins with the name of a field, that is spelled as the option is.
            message = re.sub(r"^\w+", lambda name: flag_of(self, name[0]) or name[0], str(error))
            hint = ", ".join(f"'{flag}'" for flag in named)
            raise typer.BadParameter(message, ctx, param_hint=hint or None) from None


def _from_home(word: str) -> str:
    """``word`` with the user's home for ``~/``, which bash leaves in ``--out=~/DIR``, to make a folder named ``~``."""
    return re.sub(r"^(--[\w-]+=)?~(?=/|$)", lambda start: (start[1] or "") + os.path.expanduser("~"), word)


def flag_of(command: TyperCommand, name: str) -> str | None:
    """How ``command`` spells the option for the argument ``name`` of its function; None where it has none."""
    for parameter in command.params:
        if parameter.name == name and parameter.param_type_name == "option":
            return max(parameter.opts, key=len)
    return None


def command_of(
    function: Callable[..., None], examples: Mapping[str, str], *, no_arguments_is_help: bool = True, **how: Any
) -> tuple[typer.Typer, Callable[..., None]]:
    """The command of a function, whose docstring is its help, and what runs it.

    Args:
        examples: for the help: a command line → what that does.
        no_arguments_is_help: whether the command by itself prints its help; else it has all it needs.
        how: it is to be run, as :func:`run` explains it.
    """
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    decorate = app.command(
        cls=_Command, context_settings=SETTINGS, epilog=epilog_of(examples), no_args_is_help=no_arguments_is_help
    )
    decorate(function)
    return app, partial(run, app, **how)


def epilog_of(examples: Mapping[str, str]) -> str:
    """An epilog of examples, as they are: typer folds no paragraph that begins with a backspace."""
    return "\n".join(["\b\nExamples:", *(f"  {line}\n      {what}" for line, what in examples.items())])


# --- run


def command_line() -> str:
    """What was typed, for a report that others read: of a path that is here its name alone, as its place is private."""
    words = [os.path.basename(sys.argv[0])]
    for argument in map(_from_home, sys.argv[1:]):
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        is_path = os.path.isabs(value) or os.path.lexists(value)
        words.append(f"{flag}{equals}{os.path.basename(os.path.normpath(value)) if is_path else value}")
    return shlex.join(words)


def run(
    app: typer.Typer,
    *,
    kept: str = "nothing was kept",
    is_short: bool = False,
    called: str | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run ``app`` and exit: 0, 1 for an error of ours, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        app: the command.
        kept: what is left when it is interrupted.
        is_short: whether it is done in less than a second and uses NumPy for tables only.
        called: what the user called it by, and
        arguments: what followed that; both of this process by default.
    """
    if is_short:
        # OpenBLAS starts a thread per core when NumPy is imported, and each spins for tens of milliseconds.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # What is collected would be freed at the end anyway.
        gc.disable()
    _handle_signals()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, and leads nowhere
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    status = 0
    try:
        try:
            app(args=arguments, prog_name=called)
        except SystemExit:
            sys.stdout.flush()
            raise
    except Interrupted as stop:
        status = _failed(f"interrupted; {kept}.", 128 + int(stop.args[0]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends in one line
        status = _status_of(error, app)
    forget_interruptions()
    sys.exit(status)


def _handle_signals() -> None:
    """Leave by an exception at Ctrl-C, SIGTERM and SIGHUP, unless the command was started to ignore them."""
    signal.signal(signal.SIGTERM, interrupt)
    # A terminal that closes is ignored under `nohup`, Ctrl-C by a job that a shell starts in the background.
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, interrupt)


def _status_of(error: Exception, app: typer.Typer) -> int:
    """The exit status of ``app``, once a line says what went wrong."""
    if isinstance(error, MtpExtractError):
        return _failed(_naming_options(error, app))
    if isinstance(error, MemoryError):
        return _failed(_OUT_OF_MEMORY)
    if isinstance(error, OSError):
        return _system_failed(error)
    what = f"{type(error).__name__}: {escape(error)}".removesuffix(": ")
    report = "This is a fault of mtp-extract: please report it, with what is shown when"
    return _failed(f"{what}. {report} {_DEBUG}=1 is set.")


def _system_failed(error: OSError) -> int:
    """No permission on the way to a file, a name that is too long, a disk that fails: the system says it."""
    where = "a file or standard output" if error.filename is None else escape(error.filename)
    # The reader of our output went away, as `| head` does: nothing is to be said.
    status = 1 if error.errno == errno.EPIPE else _failed(f"{where}: {error.strerror or error}.")
    if error.filename is None:
        _give_up_stdout()
    return status


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str, status: int = 1) -> int:
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    if os.environ.get(_DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:
        # What went wrong is worth more than that this cannot be printed.
        _give_up_stdout()
    terminal.error(message)
    return status


def _naming_options(error: MtpExtractError, app: typer.Typer) -> str:
    """The message, with the options of ``app`` for the arguments that would help: "… choose another place (--out)."."""
    command: Any = get_command(app)
    named = []
    for remedy in error.remedies:
        name, _, value = remedy.partition("=")
        # Of a command that writes nothing but a report, that is what may be put elsewhere.
        flag = flag_of(command, name) or (flag_of(command, "report") if name == "out" else None)
        if flag is not None:
            named.append(f"{flag} {value}".rstrip())
    if not named:
        return str(error)
    text = str(error)
    end = "." if text.endswith(".") else ""
    return f"{text.removesuffix('.')} ({', '.join(named)}){end}"
