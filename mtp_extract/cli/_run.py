"""Running a command: errors become one message on stderr and an exit status, never a traceback."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from mtp_extract.cli import render
from mtp_extract.errors import MtpExtractError

if TYPE_CHECKING:
    import typer

__all__ = ["run", "run_lean"]


# What a command adds to an error of the library, by the error's name: importing its class would cost time.
_OPTIONS = {"NoRangesError": " The option for that is --download."}


class _Stopped(BaseException):
    """A signal asked the program to stop. Typer lets it pass; it would turn KeyboardInterrupt into a bare exit."""


def _stopped(number: int, frame: FrameType | None) -> NoReturn:
    # Leave through the finally blocks that remove half-written output.
    raise _Stopped(number)


def run(app: typer.Typer) -> None:
    """Run ``app`` and exit: 0, 1 for an error of ours, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM."""
    signal.signal(signal.SIGTERM, _stopped)
    # A shell that starts a job in the background has it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stopped)
    try:
        app()
    except MtpExtractError as error:
        render.error(f"{error}{_OPTIONS.get(type(error).__name__, '')}")
        status = 1
    except _Stopped as stop:
        render.error("interrupted; nothing was kept.")
        status = 128 + int(stop.args[0])
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does: nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        # Files have been dealt with where they are opened: this is stdout, on a full disk.
        render.error(f"the result cannot be printed: {error.strerror}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except MemoryError:
        render.error("out of memory. Close other programs, or use a machine with more.")
        status = 1
    else:
        status = 0
    sys.exit(status)


def run_lean(app: typer.Typer) -> None:
    """:func:`run` for a command that is done in less than a second and uses NumPy for tables only."""
    # OpenBLAS starts a thread per core when NumPy is imported, and each spins for tens of milliseconds.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # What is collected would be freed at the end anyway.
    gc.disable()
    run(app)
