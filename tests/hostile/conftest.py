"""Bounds under which every hostile file must end: a test that needs more CPU time or memory than these has failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.bounds import bounded


@pytest.fixture(autouse=True)
def _bounds() -> Iterator[None]:
    with bounded(cpu_seconds=60):
        yield
