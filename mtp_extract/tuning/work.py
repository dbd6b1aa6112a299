"""The folder in which a tuning keeps text, state and log, from which an interrupted one resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from mtp_extract.errors import OutputError, escape


def locked(folder: Path) -> AbstractContextManager[Any]:
    """Held by a run that keeps its state in ``folder``, which is made. The lock goes with the process, however it ends.

    Raises:
        OutputError: another run is at work there, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / "lock").acquire(timeout=0)
    except Timeout as error:
        raise OutputError(
            f"{escape(folder)}: expected a place of its own for this run's text and state, found another run at work "
            "there. Wait for it, or choose another place.",
            remedies=("work",),
        ) from error
    except OSError as error:
        raise _unwritable(folder, error) from error


@contextmanager
def added_to(path: Path, size: int) -> Iterator[BinaryIO]:
    """The file at ``path``, cut to ``size`` bytes, to be written on; its folder is made.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.truncate(size)
            yield file
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        # What torch makes of a full disk says nothing of one; the cause is its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise _unwritable(path, cause) from error


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is at ``path`` when the block has ended, whole, or is not there; errors as of :func:`added_to`.

    What was there before stays until then.
    """
    part = path.with_suffix(".part")
    with added_to(part, 0) as file:
        yield file
    try:
        os.replace(part, path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(place: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{escape(place)}: expected a place to keep text and state, found that it cannot be written: "
        f"{error.strerror or escape(error)}. Make room there, or choose another place.",
        remedies=("work",),
    )
