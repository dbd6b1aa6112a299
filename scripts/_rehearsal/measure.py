"""What a process takes: time, memory of host and device, bytes read and written; its children's included.

Time comes from the kernel when it ends, bytes from ``/proc/PID/io`` before its entry is gone: what it asked the kernel
to read and write, from the page cache or not. The largest resident set is ``VmHWM`` of its status, read again and
again: what ``wait`` tells counts the process that started it as well. Pages of mapped files count as resident and not
as read. Only Linux has these figures.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_EVERY = 0.05  # seconds between samples of a tree's memory


@dataclass(frozen=True)
class Measured:
    """One process and what it started."""

    status: int
    """Exit status; negative for a signal."""
    wall_s: float
    cpu_s: float
    host: int
    """Bytes: the largest resident set of one process, or what all had together in the worst sample."""
    private: int
    """Bytes of it that are no pages of files, in the worst sample."""
    device: int
    """Bytes that the GPUs held more than before, in the worst sample."""
    read: int
    written: int
    output: str


class Running:
    """A process that is measured from its start to :meth:`finished`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._before = _device_memory()
        self._log = log
        self._host = self._private = self._device = 0
        self._done = threading.Event()
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment))
        self._start = time.monotonic()
        self._sampling = threading.Thread(target=self._sample, daemon=True)
        self._sampling.start()

    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def alive(self) -> bool:
        """Whether it has not ended."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    def stop(self) -> None:
        """Ask it to end."""
        self._process.send_signal(signal.SIGTERM)

    def finished(self) -> Measured:
        """Wait for its end."""
        pid = self._process.pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        wall = time.monotonic() - self._start
        moved = _pairs(Path(f"/proc/{pid}/io").read_text())
        self._done.set()
        self._sampling.join()
        _, ended, usage = os.wait4(pid, 0)
        self._process.returncode = status = os.waitstatus_to_exitcode(ended)
        cpu = usage.ru_utime + usage.ru_stime
        read, written = moved["rchar"], moved["wchar"]
        return Measured(status, wall, cpu, self._host, self._private, self._device, read, written, self.output())

    def _sample(self) -> None:
        while not self._done.wait(_EVERY):
            found = [_memory(pid) for pid in _tree(self._process.pid)]
            self._host = max(self._host, sum(now for now, _, _ in found), *(most for _, most, _ in found))
            self._private = max(self._private, sum(private for _, _, private in found))
            if self._before is not None:
                self._device = max(self._device, (_device_memory() or 0) - self._before)


def _tree(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for parent in found:
        found += [
            int(child) for path in Path(f"/proc/{parent}/task").glob("*/children") for child in _read(path).split()
        ]
    return found


def _read(path: Path) -> str:
    """What ``path`` says; nothing of a process or thread that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _memory(pid: int) -> tuple[int, int, int]:
    """Bytes resident now, the most so far, and those of now that are no pages of files."""
    found = {name: number << 10 for name, number in _pairs(_read(Path(f"/proc/{pid}/status"))).items()}
    private = found.get("RssAnon", 0) + found.get("RssShmem", 0)
    return private + found.get("RssFile", 0), found.get("VmHWM", 0), private


def _pairs(text: str) -> dict[str, int]:
    """The lines ``name: number …``."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.split()[:1] and value.split()[0].isdigit()}


def _device_memory() -> int | None:
    """Bytes in use on all GPUs; None where there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(int(line) << 20 for line in told.split())
