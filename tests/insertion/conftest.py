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


@pytest.fixture
def changed(exact: Path, tmp_path: Path) -> Callable[[Changes], Path]:
    """A copy of it with some tensors changed, by name."""

    def change(changes: Changes, name: str = "changed", source: Path = exact) -> Path:
        out = tmp_path / name
        # The floats alone: codes beside them would be others, and the record is of other weights.
        shutil.copytree(source, out, ignore=shutil.ignore_patterns(Path(CODES_FILE).parent.name, "extraction.json"))
        tensors = load_file(out / "model.safetensors")
        for key, new in changes.items():
            assert key in tensors
            tensors[key] = (new(tensors[key]) if callable(new) else new).astype(np.float32)
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        return out

    return change


@pytest.fixture(scope="session")
def noisy(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It with every tensor a little different, as training leaves it."""
    out = tmp_path_factory.mktemp("noisy") / "out"
    shutil.copytree(exact, out)
    rng = np.random.default_rng(3)
    tensors = {
        name: (tensor * rng.uniform(0.9, 1.1, tensor.shape)).astype(np.float32)
        for name, tensor in load_file(exact / "model.safetensors").items()
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    # Its record is of other weights.
    (out / "extraction.json").unlink()
    return out
