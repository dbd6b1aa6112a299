"""The folder where text, state and log are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from mtp_extract.errors import OutputError, escape


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is at ``path`` when the block has ended, whole, or is not there; its folder is made.

    Raises:
        OutputError: it cannot be written. What was there before still is.
    """
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        # What torch makes of a full disk says nothing of one; the cause is its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise _unwritable(path, cause) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Around a run that keeps its state in ``folder``. The lock goes with the process, however that ends.

    Raises:
        OutputError: another run is at work there, or it cannot be written.
    """
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(
            f"{escape(folder)}: expected a place of its own for this run's text and state, found another run at work "
            "there. Wait for it, or choose another place.",
            remedies=("work",),
        ) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(place: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{escape(place)}: expected a place to keep text and state, found that it cannot be written: "
        f"{error.strerror or escape(error)}. Make room there, or choose another place.",
        remedies=("work",),
    )
