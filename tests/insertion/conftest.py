"""Checkpoints of the sample and of the variants, for insertion into them."""

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
def extracted_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, in F32 and with codes; made once; tests must not change it."""

    @cache
    def extract_once(name: str) -> Path:
        return extract(variant(name), tmp_path_factory.mktemp(name) / "own", dtype="f32", codes=True).directory

    return extract_once


def _copy_changed(source: Path, out: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """Copy a checkpoint with changed floats, without its codes and its record, which would not match them."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(Path(CODES_FILE).parent.name, "extraction.json"))
    tensors = {key: change(key, old) for key, old in load_file(out / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture
def changed(exact: Path, tmp_path: Path) -> Callable[[Changes], Path]:
    """Copies the exact checkpoint with some tensors changed, by name."""

    def change(changes: Changes, name: str = "changed", source: Path = exact) -> Path:
        def change_tensor(key: str, old: np.ndarray) -> np.ndarray:
            changed_tensor = changes.get(key, old)
            return np.asarray(changed_tensor(old) if callable(changed_tensor) else changed_tensor, np.float32)

        return _copy_changed(source, tmp_path / name, change_tensor)

    return change


@pytest.fixture(scope="session")
def noisy(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exact checkpoint with noise on every tensor, as after training."""
    rng = np.random.default_rng(3)
    out = tmp_path_factory.mktemp("noisy") / "out"
    return _copy_changed(exact, out, lambda _, old: (old * rng.uniform(0.9, 1.1, old.shape)).astype(np.float32))
