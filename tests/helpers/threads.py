"""How many threads PyTorch computes with, for the conftest.py of folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> Iterator[None]:
    """Small matrices are too little work for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
