"""How a command is made and run.

Errors become one line on stderr and an exit status, never a traceback, unless ``MTP_EXTRACT_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.main import get_command

from mtp_extract.cli import terminal
from mtp_extract.cli._planned import planned
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.threads import Interrupted, forget_interruptions, interrupt

_DEBUG = "MTP_EXTRACT_DEBUG"
_LONGEST_MESSAGE = 4000


def new_app(command: Callable[..., None], examples: Mapping[str, str], more: str = "") -> typer.Typer:
    """A program of one command.

    Args:
        command: its parameters are as :func:`~mtp_extract.cli._planned.planned` reads them.
        examples: for its help: a command line → what that does.
        more: what the help ends with.
    """
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings=SETTINGS, no_args_is_help=True, epilog=epilog_of(examples, more))(planned(command))
    return app


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of the context of every command."""


def epilog_of(examples: Mapping[str, str], more: str = "") -> str:
    """An epilog of examples, and ``more``, as they are: typer folds no paragraph that begins with a backspace."""
    lines = [f"  {line}\n      {about}" for line, about in examples.items()]
    parts = ["\n".join(["Examples:", *lines]), *([more.rstrip()] if more else [])]
    return "\n\n".join(f"\b\n{part}" for part in parts)


def run(
    app: typer.Typer,
    kept: str = "nothing was kept",
    called: str | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run ``app`` and exit: 0, 1 for an error of ours, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        app: the command.
        kept: what is left when it is interrupted.
        called: what the user called it by, and
        arguments: what followed that; both of this process by default.
    """
    signal.signal(signal.SIGTERM, interrupt)
    # A terminal that closes; not where `nohup` has it ignored.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, interrupt)
    # A shell that starts a job in the background has it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    _open_streams()
    try:
        try:
            app(args=arguments, prog_name=called)
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except MtpExtractError as error:
        status = _failed(_with_options(error, app))
    except Interrupted as stop:
        status = _failed(f"interrupted; {kept}.", 128 + int(stop.args[0]))
    except _PrintError as error:
        _give_up_stdout()
        # The reader of our output went away, as `| head` does: nothing is wrong.
        status = 0 if error.gone else _failed(f"the result cannot be printed: {error}.")
    except MemoryError:
        status = _failed("out of memory. Close other programs, or use a machine with more.")
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends in one line
        status = _failed(_unforeseen(error))
    else:
        status = 0
    forget_interruptions()
    sys.exit(status)


def _unforeseen(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        # No permission on the way to a file, a name that is too long, a disk that fails: the system says it.
        what, fault = f"{escape(error.filename)}: {error.strerror}", "Where that is not so, it"
    else:
        what = f"{type(error).__name__}: {escape(error)}" if str(error) else type(error).__name__
        fault = "This"
    return f"{what}. {fault} is a fault of mtp-extract: please report it, with what is shown when {_DEBUG}=1 is set."


class _PrintError(Exception):
    """Standard output cannot be written, for the reason of ``error``. No OSError, of which typer takes some."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.gone = error.errno == errno.EPIPE


class _Output(io.FileIO):
    """Standard output, whose errors are told from those of other files."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _PrintError(error) from error


def _open_streams() -> None:
    """Make errors of standard output known as such, and streams that were closed lead nowhere."""
    own = sys.__stdout__
    is_own = sys.stdout is own
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    if own is None or not is_own:
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(own.fileno(), "w", closefd=False)),
        encoding=own.encoding,
        errors=own.errors,
        line_buffering=own.isatty(),
    )


def _failed(message: str, status: int = 1) -> int:
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    if os.environ.get(_DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except _PrintError:
        # What went wrong is worth more than that this cannot be printed.
        _give_up_stdout()
    terminal.error(message)
    return status


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_options(error: MtpExtractError, app: typer.Typer) -> str:
    """The message, with the options of ``app`` for the arguments that would help: "… choose another place (--out)."."""
    options = {parameter.name: max(parameter.opts, key=len) for parameter in get_command(app).params}
    # Of a command that writes nothing but a report, that is what may be put elsewhere.
    if "save" not in options:
        options.setdefault("out", options.get("report", ""))
    named = []
    for name, _, value in (remedy.partition("=") for remedy in error.remedies):
        if options.get(name, "").startswith("--"):
            named.append(f"{options[name]} {value}".rstrip())
    text = str(error)
    if not named:
        return text
    return f"{text.removesuffix('.')} ({', '.join(named)}){'.' * text.endswith('.')}"


def run_lean(app: typer.Typer, called: str | None = None, arguments: Sequence[str] | None = None) -> None:
    """:func:`run` for a command that is done in less than a second and uses NumPy for tables only."""
    # OpenBLAS starts a thread per core when NumPy is imported, and each spins for tens of milliseconds.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # What is collected would be freed at the end anyway.
    gc.disable()
    run(app, called=called, arguments=arguments)
