"""The folder in which a tuning keeps text, state and log, from which an interrupted one resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from mtp_extract.errors import OutputError, escape


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """``folder``, which is made, kept from other runs. The lock goes with the process, however it ends; OutputError
    where another run is at work there, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock").acquire(timeout=0)
    except OSError as error:
        raise _build_output_error(folder, error) from error
    with lock:
        yield


@contextmanager
def replace_file(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """The file at ``path``, cut to ``size`` bytes, to be written on; without a size one that replaces it when whole.
    OutputError where it cannot be written."""
    part = path.with_suffix(".part") if size is None else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab") as file:
            file.truncate(size or 0)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        # What torch makes of a full disk says nothing of one; the cause is its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise _build_output_error(path, cause) from error


def _build_output_error(place: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{escape(place)}: expected a place for text and state of this run alone, found one in use or that cannot be "
        f"written: {error.strerror or escape(error)}. Wait, make room there, or choose another place.",
        remedies=("work",),
    )
