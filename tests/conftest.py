"""What all tests share: the sample and its truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import HERE

from mtp_extract.data import sample_base, sample_bundle


@pytest.fixture(scope="session")
def sample() -> Path:
    """The sample bundle."""
    return sample_bundle()


@pytest.fixture(scope="session")
def base() -> Path:
    """The base model of the sample."""
    return sample_base()


@pytest.fixture(scope="session")
def truth() -> dict[str, dict[str, np.ndarray]]:
    """Per transformers name: q, scale, zp, … of the sample, as the quantizer computed them before packing."""
    stored = np.load(HERE / "truth" / "e2e_jax_mix48.weights.npz")
    result: dict[str, dict[str, np.ndarray]] = {}
    for key in stored.files:
        name, field = key.rsplit("/", 1)
        result.setdefault("model.embed_tokens.weight" if name == "lm_head.weight" else name, {})[field] = stored[key]
    return result


@pytest.fixture(scope="session")
def extracted(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample as a transformers checkpoint in F32, with codes."""
    from mtp_extract import extract

    directory = tmp_path_factory.mktemp("extracted") / "sample"
    extract(sample, directory, dtype="f32", codes=True)
    return directory
