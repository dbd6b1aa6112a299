"""What all tests share: the sample and its truth, and which tests need PyTorch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.first_pair import first_base, first_bundle

# pytest-xdist tells its workers how wide the terminal is: what a command prints would be wrapped there.
os.environ.pop("COLUMNS", None)

# Folders and files; single tests elsewhere are marked where they stand.
NEED_TORCH = (
    "adversary",
    "doctor",
    "drafter",
    "evaluation",
    "speculate",
    "tuning",
    "validation",
    "formats/test_eagle3.py",
    "insertion/test_calibration.py",
    "formats/test_in_engines.py",
    "formats/test_other_tools.py",
    "cli/test_eagle3.py",
    "scripts/test_in_engines.py",
    "scripts/test_rehearse.py",
    "scripts/test_sample.py",
)

SLOW = ("adversary", "hostile")


def _under(path: Path, names: tuple[str, ...]) -> bool:
    here = Path(__file__).parent
    return any(path.is_relative_to(here / name) for name in names)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without PyTorch, what imports it is not there; the rest is the torch-free subset."""
    return True if find_spec("torch") is None and _under(collection_path, NEED_TORCH) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="every case of the fuzz, not one in twelve")
    parser.addoption("--refresh-blocks", action="store_true", help="write into README and docs what commands print")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _under(item.path, NEED_TORCH):
            item.add_marker("torch")
        if _under(item.path, SLOW):
            item.add_marker("slow")
        elif not item.get_closest_marker("xdist_group"):
            # Fixtures of a file are made in one process; what is slow has none, and is dealt out test by test.
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(scope="session")
def sample() -> Path:
    """The sample bundle."""
    return first_bundle()


@pytest.fixture(scope="session")
def base() -> Path:
    """The base model of the sample."""
    return first_base()


@pytest.fixture(scope="session")
def extracted(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample as a transformers checkpoint in F32, with codes."""
    from mtp_extract import extract

    directory = tmp_path_factory.mktemp("extracted") / "sample"
    extract(sample, directory, dtype="f32", codes=True)
    return directory
