"""Random tiny assistants on disk, and the sample's drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.first_pair import first_bundle
from helpers.random_assistants import GEOMETRIES, Geometry, random_assistant
from safetensors.torch import save_file

import mtp_extract


@pytest.fixture(params=list(GEOMETRIES))
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return GEOMETRIES[request.param]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Writes a random assistant in the ``transformers`` layout, config as an extraction writes it."""

    def save(geometry: Geometry, seed: int = 0, **config: Any) -> Path:
        model = random_assistant(geometry, seed)
        tensors = {n: t.contiguous().clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(geometry.config() | config))
        return tmp_path

    return save


@pytest.fixture(scope="session")
def sample_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sample's drafter as extracted in both layouts, F32."""
    directories = {layout: tmp_path_factory.mktemp("sample") / layout for layout in ("transformers", "litert")}
    for layout, place in directories.items():
        mtp_extract.extract(first_bundle(), place, format=layout, dtype="f32")
    return directories
