"""A process that is killed at its n-th change of the file system: by no signal that it could answer, as ``kill -9``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CALLS = (
    *("mkdir", "open", "rename", "replace", "unlink", "rmdir", "fsync", "utime", "truncate"),
    *("posix_fallocate", "ftruncate", "pwrite", "write", "copy_file_range"),
)
_KILLED = 137


def _die_at(number: int) -> None:
    """From now on, end this process instead of making change ``number`` (from 1), from any thread.

    Changes are the calls in :data:`_CALLS`; of ``os.open``, those that may write.
    """
    done = 0

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                done += 1
                if done == number:
                    os._exit(_KILLED)
            return call(*arguments, **named)

        return instead

    for name in _CALLS:
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
            _die_at(number)
            work()
            status = 0
        except BaseException as error:  # noqa: BLE001 - said by the status
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, _KILLED), status
    return status == _KILLED


def killed_everywhere(prepare: Callable[[], object], work: Callable[[], object]) -> Iterator[int]:
    """After each change that ``work`` makes and was killed at, its number; ``prepare`` is called before each."""
    for number in range(1, 100):
        prepare()
        if not killed_at(number, work):
            assert number > 5
            return
        yield number
    raise AssertionError("it never came to its end")
