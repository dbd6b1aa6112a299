"""Work shared among threads."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import time

import pytest

from mtp_extract.io.threads import map_on_all_cores


def test_results_are_in_order_and_an_error_is_raised() -> None:
    """After the error no further item is begun."""
    assert map_on_all_cores(str, range(100)) == list(map(str, range(100)))
    begun = []

    def work(item: int) -> float:
        begun.append(item)
        # On a busy machine the thread that cancels the others would wait for its turn until all items were done.
        time.sleep(0.001 if item > 50 else 0.0)
        return 1 / (item - 50)

    with pytest.raises(ZeroDivisionError):
        map_on_all_cores(work, range(100_000))
    assert len(begun) < 100_000


COUNT_FAULTS = """
import resource
import numpy as np
from mtp_extract.io.threads import map_on_all_cores

def allocate(_):
    for _ in range(50):
        arrays = [np.ones(1 << 19, np.float32) for _ in range(8)]
        del arrays

map_on_all_cores(allocate, range(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
map_on_all_cores(allocate, range(2))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such threshold")
def test_memory_of_one_chunk_is_used_again_for_the_next() -> None:
    """If the system clears its pages for each chunk, that takes half of the time of an insertion."""
    # In a new process: large arrays that others freed raise the threshold of this one.
    printed = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True).stdout
    pages = 2 * 50 * 8 * (4 << 19) // resource.getpagesize()
    assert int(printed) < pages / 16
