"""The bounds of hostile tests stop endless work and large allocations."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from helpers.bounds import HANG, SPIN, TooLongError, bounded, cpu_limit


def test_bounds_nest() -> None:
    with pytest.raises(TooLongError), bounded(0.4):
        with pytest.raises(TooLongError), bounded(0.1):
            exec(SPIN)
        exec(SPIN)
    assert signal.getitimer(signal.ITIMER_PROF)[0] > 30, "the bounds of every hostile test hold again"
    with bounded(5, memory=1 << 20), pytest.raises(MemoryError):
        bytearray(1 << 26)
    done = subprocess.run([sys.executable, "-c", SPIN], preexec_fn=cpu_limit(1), timeout=HANG, check=False)
    assert done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
