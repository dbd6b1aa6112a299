"""What a process takes: time, memory of host and device, bytes read and written.

Time comes from the kernel when it ends, bytes from ``/proc/PID/io`` before its entry is gone: what it asked the kernel
to read and write, from the page cache or not. The largest resident set is ``VmHWM`` of its status, read again and
again: what ``wait`` tells counts the process that started it as well. Pages of mapped files count as resident and not
as read. Only Linux has these figures. Of processes that it starts, time and bytes count, and memory does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_EVERY = 0.05  # seconds between samples of memory


@dataclass(frozen=True)
class Measured:
    """One process. Memory and files in bytes."""

    status: int  # its exit status; negative for a signal
    wall_s: float
    cpu_s: float
    host: int  # the largest resident set
    private: int  # of what is no pages of files, in the worst sample
    device: int  # that the GPUs held more than before, in the worst sample
    read: int
    written: int
    output: str


class Running:
    """A process that is measured from its start to :meth:`finished`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._before, self._log, self._done = _measure_device_memory(), log, threading.Event()
        self._host = self._private = self._device = 0
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
        self._process.terminate()

    def finished(self) -> Measured:
        """Wait for its end."""
        pid = self._process.pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        wall, moved = time.monotonic() - self._start, _read_numbers(Path(f"/proc/{pid}/io"))
        self._done.set()
        self._sampling.join()
        _, ended, usage = os.wait4(pid, 0)
        self._process.returncode = status = os.waitstatus_to_exitcode(ended)
        memory, cpu = (self._host, self._private, self._device), usage.ru_utime + usage.ru_stime
        return Measured(status, wall, cpu, *memory, moved["rchar"], moved["wchar"], self.output())

    def _sample(self) -> None:
        while not self._done.wait(_EVERY):
            numbers = _read_numbers(Path(f"/proc/{self._process.pid}/status"))
            self._host = max(self._host, numbers.get("VmHWM", 0) << 10)
            self._private = max(self._private, (numbers.get("RssAnon", 0) + numbers.get("RssShmem", 0)) << 10)
            if self._before is not None:
                self._device = max(self._device, (_measure_device_memory() or 0) - self._before)


def _read_numbers(path: Path) -> dict[str, int]:
    """Read the lines ``name: number …``; none if the process has ended meanwhile."""
    with suppress(OSError):
        return {name: int(number) for name, number in re.findall(r"^(\w+):\s*(\d+)", path.read_text(), re.MULTILINE)}
    return {}


def _measure_device_memory() -> int | None:
    """Return the bytes in use on all GPUs; None without a GPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(int(line) << 20 for line in printed.split())
