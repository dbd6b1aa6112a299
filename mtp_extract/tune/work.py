"""The folder where text, state and log are kept between runs."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mtp_extract.errors import OutputError, escape

_LOCK = "lock"


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Around whatever writes into ``folder``, which is made if it is missing.

    Raises:
        OutputError: it cannot be written. What was in it before is still there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        place = escape(error.filename if error.filename is not None else folder)
        raise OutputError(
            f"{place}: expected a place to keep text and state, found that it cannot be written: "
            f"{error.strerror or escape(error)}. Make room there, or choose another place.",
            remedies=("work",),
        ) from error


class _Written(io.BufferedWriter):
    """A file for torch, which makes of a full disk a RuntimeError that does not say so; ``error`` says it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """All of ``data``."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def save_whole(state: Mapping[str, Any], path: Path) -> None:
    """``state``, as ``torch.save`` writes it, at ``path`` whole or not at all; no copy of it is made in memory.

    Raises:
        OutputError: it cannot be written. What was there before still is.
    """
    import torch

    part = path.with_suffix(".part")
    with writing_to(path.parent):
        with _Written(io.FileIO(part, "wb")) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                if file.error is None:
                    raise
                raise file.error from error
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Around a run that keeps its state in ``folder``. The lock goes with the process, however that ends.

    Raises:
        OutputError: another run is at work there, or it cannot be written.
    """
    lock, was_there = FileLock(folder / _LOCK), folder.exists()
    with writing_to(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise OutputError(
                f"{escape(folder)}: expected a place of its own for this run's text and state, found another run at "
                "work there. Wait for it, or choose another place.",
                remedies=("work",),
            ) from error
    try:
        yield
    finally:
        # Nothing was kept.
        with suppress(OSError):
            if os.listdir(folder) == [_LOCK]:
                (folder / _LOCK).unlink()
                if not was_there:
                    folder.rmdir()
        lock.release()
