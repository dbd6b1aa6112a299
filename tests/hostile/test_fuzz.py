"""Seeded mutation fuzz: a damaged drafter is read as its bytes say, or ends in an error of ours, within bounds.

``fuzz_cases`` makes and judges the cases. A failure prints the kind and number of a case, and
``run(kind, number, number + 1)`` repeats it. ``--nightly`` runs all cases.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.fuzz_cases import KINDS, run

CASES = {"header": 8000, "structure": 8000, "data": 3000, "wiring": 1500}
DAILY = {"header": 500, "structure": 500, "data": 250, "wiring": 500}
BATCHES = 2
"""Batches of a kind in a daily run; a nightly run has more batches of the same size."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "batch" in metafunc.fixturenames:
        nightly = metafunc.config.getoption("nightly")
        batches = [batch for kind in CASES for batch in batches_of(kind, CASES[kind] if nightly else DAILY[kind])]
        metafunc.parametrize("batch", batches, ids=[f"{kind}-{first}" for kind, first, _ in batches])


def batches_of(kind: str, cases: int) -> Iterator[tuple[str, int, int]]:
    size = DAILY[kind] // BATCHES
    return ((kind, first, first + size) for first in range(0, cases, size))


def test_there_are_enough() -> None:
    assert set(CASES) == set(DAILY) == set(KINDS)
    assert sum(CASES.values()) >= 20_000


def test_every_case_ends_well(batch: tuple[str, int, int]) -> None:
    outcome = run(*batch)
    assert not outcome.failures, f"{len(outcome.failures)} cases failed:\n" + "\n".join(outcome.failures[:5])
    cases = batch[2] - batch[1]
    assert sum(outcome.counts.values()) == cases
    # Damage that is never noticed, or always, would test nothing.
    assert cases // 100 < outcome.counts["ok"] < cases * 9 // 10
