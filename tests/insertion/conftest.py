"""Checkpoints of the sample, and of the variants, to put back into them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import variant
from safetensors.numpy import load_file, save_file

from mtp_extract import extract
from mtp_extract.checkpoint.codes import CODES_FILE

Changes = Mapping[str, np.ndarray | Callable[[np.ndarray], np.ndarray]]


@pytest.fixture(scope="session")
def exact(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's checkpoint in F32, without codes."""
    return extract(sample, tmp_path_factory.mktemp("exact") / "out", dtype="f32").directory


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, in F32 and with codes; made once, and not to be changed."""

    @cache
    def extracted(name: str) -> Path:
        return extract(variant(name), tmp_path_factory.mktemp(name) / "own", dtype="f32", codes=True).directory

    return extracted


def _rewritten(source: Path, out: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A copy of a checkpoint whose tensors are changed, by name: the floats alone, since codes beside them would be
    others, and the record is of other weights."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(Path(CODES_FILE).parent.name, "extraction.json"))
    tensors = {key: change(key, old) for key, old in load_file(out / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture
def changed(exact: Path, tmp_path: Path) -> Callable[[Changes], Path]:
    """A copy of it with some tensors changed, by name."""

    def change(changes: Changes, name: str = "changed", source: Path = exact) -> Path:
        def new(key: str, old: np.ndarray) -> np.ndarray:
            made = changes.get(key, old)
            return np.asarray(made(old) if callable(made) else made, np.float32)

        return _rewritten(source, tmp_path / name, new)

    return change


@pytest.fixture(scope="session")
def noisy(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It with every tensor a little different, as training leaves it."""
    rng = np.random.default_rng(3)
    out = tmp_path_factory.mktemp("noisy") / "out"
    return _rewritten(exact, out, lambda _, old: (old * rng.uniform(0.9, 1.1, old.shape)).astype(np.float32))
