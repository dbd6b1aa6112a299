"""Seeded mutation fuzz: every damaged drafter ends in what its bytes say, or in an error of ours, within bounds.

``fuzz_cases`` makes the cases and says what must be true; here they are dealt out to processes. A failure prints the
kind and number of the case, and ``run(kind, number, number + 1)`` is that case alone.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from helpers.fuzz_cases import KINDS, run

CASES = {"header": 8000, "structure": 8000, "data": 3000, "wiring": 1500}
BATCH = 250


def test_there_are_enough() -> None:
    assert set(CASES) == set(KINDS)
    assert sum(CASES.values()) >= 20_000


@pytest.mark.parametrize("kind", CASES)
def test_every_case_ends_well(kind: str) -> None:
    firsts = range(0, CASES[kind], BATCH)
    workers = min(4, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(run, [kind] * len(firsts), firsts, [first + BATCH for first in firsts]))
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    assert not failures, f"{len(failures)} cases failed:\n" + "\n".join(failures[:5])
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    assert sum(counts.values()) == CASES[kind]
    # Damage that is never noticed, or always, would test nothing.
    assert counts["ok"] > CASES[kind] // 100
    assert counts["ok"] < CASES[kind] * 9 // 10
