"""What the commands share: how one is made and run, and the options that more than one has.

Errors become one message on stderr and an exit status, never a traceback, unless ``MTP_EXTRACT_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, NoReturn, Optional

import typer
from typer.main import get_command

from mtp_extract.cli import terminal
from mtp_extract.errors import MtpExtractError

__all__ = ["AsJson", "Download", "SlidingWindow", "new_app", "run", "run_lean"]

SlidingWindow = Annotated[
    Optional[int],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
    typer.Option(min=1, help="Length of the window; asked for only where the file leaves it to the runtime."),
]

Download = Annotated[
    bool, typer.Option("--download", help="From a server without byte ranges, download the whole file.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]


def new_app() -> typer.Typer:
    """A program of one command."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class _Stopped(BaseException):
    """A signal asked the program to stop. Typer lets it pass; it would turn KeyboardInterrupt into a bare exit."""


def _stopped(number: int, frame: FrameType | None) -> NoReturn:
    # Leave through the finally blocks that remove half-written output.
    raise _Stopped(number)


def run(app: typer.Typer, kept: str = "nothing was kept") -> None:
    """Run ``app`` and exit: 0, 1 for an error of ours, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        app: the command.
        kept: what is left when it is interrupted.
    """
    signal.signal(signal.SIGTERM, _stopped)
    # A terminal that closes; not where `nohup` has it ignored.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _stopped)
    # A shell that starts a job in the background has it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stopped)
    try:
        app()
    except MtpExtractError as error:
        status = _failed(_with_options(error, app))
    except _Stopped as stop:
        status = _failed(f"interrupted; {kept}.", 128 + int(stop.args[0]))
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does: nothing is wrong.
        _give_up_stdout()
        status = 0
    except OSError as error:
        # Files have been dealt with where they are opened: this is stdout, on a full disk.
        status = _failed(f"the result cannot be printed: {error.strerror}.")
        _give_up_stdout()
    except MemoryError:
        status = _failed("out of memory. Close other programs, or use a machine with more.")
    else:
        status = 0
    sys.exit(status)


def _failed(message: str, status: int = 1) -> int:
    if os.environ.get("MTP_EXTRACT_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    terminal.error(message)
    return status


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_options(error: MtpExtractError, app: typer.Typer) -> str:
    """The message, with the options of ``app`` for the arguments that would help: "… choose another place (--out)."."""
    options = {parameter.name: max(parameter.opts, key=len) for parameter in get_command(app).params}
    named = []
    for name, _, value in (remedy.partition("=") for remedy in error.remedies):
        if options.get(name, "").startswith("--"):
            named.append(f"{options[name]} {value}".rstrip())
    text = str(error)
    if not named:
        return text
    return f"{text.removesuffix('.')} ({', '.join(named)}){'.' * text.endswith('.')}"


def run_lean(app: typer.Typer) -> None:
    """:func:`run` for a command that is done in less than a second and uses NumPy for tables only."""
    # OpenBLAS starts a thread per core when NumPy is imported, and each spins for tens of milliseconds.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # What is collected would be freed at the end anyway.
    gc.disable()
    run(app)
