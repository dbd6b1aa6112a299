"""The packaged pair, and a few of its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.prompt_files import few_of, write_prompts
from helpers.threads import single_thread  # noqa: F401 - a fixture

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.speculate.loop import SpeculativeGenerator


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("doctor") / "drafter"
    mtp_extract.extract(sample_bundle(), out, format="transformers", dtype="f32")
    return out


@pytest.fixture(scope="session")
def drafter(directory: Path) -> MtpDrafter:
    return load_drafter(directory)


@pytest.fixture(scope="session")
def generator(drafter: MtpDrafter) -> SpeculativeGenerator:
    loaded = load_base(str(sample_base()), "cpu")
    return SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sixth of the sample's prompts."""
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    return write_prompts(path, few_of(read_prompts(sample_prompts()), 6))


@pytest.fixture(scope="session")
def texts(prompts_file: Path) -> list[str]:
    return [prompt.content for prompt in read_prompts(prompts_file)]


@pytest.fixture(scope="session")
def encoded(prompts_file: Path, generator: SpeculativeGenerator) -> list[tuple[int, ...]]:
    return [generator.codec.encode(one.content) for one in read_prompts(prompts_file)]
