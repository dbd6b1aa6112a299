"""Running a command: errors become one message on stderr and an exit status, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from mtp_extract.cli import render
from mtp_extract.errors import MtpExtractError

if TYPE_CHECKING:
    import typer

__all__ = ["run"]

_INTERRUPTED = 130


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    # Leave through the finally blocks that remove half-written output.
    raise SystemExit(128 + number)


def run(app: typer.Typer) -> None:
    """Run ``app`` and exit: 0, 1 for an error of ours, 2 for wrong usage, 130 for Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except MtpExtractError as error:
        render.error(str(error))
        status = 1
    except KeyboardInterrupt:
        render.error("interrupted; nothing was kept.")
        status = _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does: nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except MemoryError:
        render.error("out of memory. Close other programs, or use a machine with more.")
        status = 1
    else:
        status = 0
    sys.exit(status)
