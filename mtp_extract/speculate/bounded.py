"""A subprocess bounded in time and memory, for chat templates: each is a program that somebody else wrote."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

_WAIT = 45.0  # seconds after which a process that does not even compute is given up
_MEMORY = 1 << 30  # bytes, beyond those in use
_LONGEST = 1 << 28  # bytes of the answer
_PIECE = 1 << 20


def run_bounded(work: Callable[[], Sequence[str]], cpu_seconds: int) -> list[str]:
    """What ``work`` returns in a fork of this process, in which it changes nothing.

    On macOS, whose frameworks do not survive a fork, it is done in this process and not bounded.

    Args:
        work: calls no library that has threads.
        cpu_seconds: which it may take; and 1 GiB more memory than is in use.

    Raises:
        RuntimeError: it failed, and why; or it took more than that.
    """
    if sys.platform == "darwin":
        return list(work())
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The child takes no lock that another thread may hold: it computes text and ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _work_in_child(work, cpu_seconds, writer)
    os.close(writer)
    status = None
    try:
        answer = _read(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if answer is not None else None
    finally:
        os.close(reader)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"it does not come to an end within {cpu_seconds} seconds, or not within 1 GiB of memory")
    done, result = json.loads(answer)
    if not done:
        raise RuntimeError(result)
    return list(result)


def _work_in_child(work: Callable[[], Sequence[str]], cpu_seconds: int, writer: int) -> None:
    """Do ``work``, write its result or its error as JSON, and end the process."""
    try:
        gc.disable()
        pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])  # noqa: SIM115
        for limit, most in (
            (resource.RLIMIT_CPU, cpu_seconds),
            (resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY),
        ):
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
        try:
            answer = json.dumps([True, [str(text) for text in work()]])
        except BaseException as error:  # noqa: BLE001 - a template is a program, and may raise anything
            answer = json.dumps([False, str(error).strip() or type(error).__name__])
        data = memoryview(answer.encode())
        while data:
            data = data[os.write(writer, data) :]
    finally:
        # Nothing of this copy may come to an end of its own: buffers, handlers, threads.
        os._exit(0)


def _read(reader: int) -> bytes | None:
    """All that comes, until the other side closes; None where it takes too long, or is too much."""
    found = bytearray()
    end = time.monotonic() + _WAIT
    while len(found) <= _LONGEST:
        if not select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
            return None
        piece = os.read(reader, _PIECE)
        if not piece:
            return bytes(found)
        found += piece
    return None
