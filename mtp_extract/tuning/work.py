"""The work folder: text, state and log of a tuning, from which an interrupted run resumes."""

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
    """Create ``folder`` and lock it against other runs; the lock ends with the process, however that ends.

    Raises:
        OutputError: another run uses the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock").acquire(timeout=0)
    except OSError as error:
        raise _build_output_error(folder, error) from error
    with lock:
        yield


@contextmanager
def replace_file(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """Open the file at ``path``, cut to ``size`` bytes, to append to it; without ``size``, replace it once complete.

    Raises:
        OutputError: it cannot be written.
    """
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
        # On a full disk torch raises a RuntimeError that does not say so; its context is the OSError.
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
