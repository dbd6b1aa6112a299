"""A process that is killed at its n-th change of the file system: by no signal that it could answer, as ``kill -9``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CALLS", "KILLED", "die_at", "killed_at"]

CALLS = (
    *("mkdir", "open", "rename", "replace", "unlink", "rmdir", "fsync", "utime", "truncate"),
    *("posix_fallocate", "ftruncate", "pwrite", "write", "copy_file_range"),
)
KILLED = 137


def die_at(number: int, count_into: Path | None = None) -> None:
    """From now on, end this process instead of making change ``number`` (from 1); 0 counts them alone.

    Args:
        number: of the call in :data:`CALLS`, from any thread; of ``os.open``, those that may write.
        count_into: a file to which the name of every call is added.
    """
    done = 0
    real_open, real_write = os.open, os.write

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            reads = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not reads:
                done += 1
                if count_into is not None:
                    fd = real_open(count_into, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                    real_write(fd, f"{name}\n".encode())
                    os.close(fd)
                if done == number:
                    os._exit(KILLED)
            return call(*arguments, **named)

        return instead

    for name in CALLS:
        if hasattr(os, name):
            setattr(os, name, wrapped(name, getattr(os, name)))
    # Of the library's own, by which files are opened and written at once.
    Path.write_bytes = wrapped("write_bytes", Path.write_bytes)  # type: ignore[method-assign]
    Path.write_text = wrapped("write_text", Path.write_text)  # type: ignore[method-assign]


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Whether ``work``, in a process of its own, was killed at its change ``number``; else it has come to its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            die_at(number)
            work()
            status = 0
        except BaseException as error:  # noqa: BLE001 - said by the status
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), status
    return status == KILLED
