"""The sample's checkpoint and pair, and one small validation that several tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.first_pair import first_base, first_bundle
from helpers.prompt_files import write_prompts
from helpers.threads import single_thread  # noqa: F401 - a fixture

import mtp_extract
from mtp_extract.bundle import BundledDrafter
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.evaluation.base_texts import Continuations, write_texts
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import Validation
from mtp_extract.validation.run import run_validation

FEW = {
    "code": ["class Foo(object):", "def read(path):\n", "import os\n", "for line in lines:\n    if not line:\n"],
    "prose": ["The harbour was empty.", "Snow fell on the railway.", "Tell me about bridges."],
}
NEW_TOKENS = 24


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, F32."""
    directory = tmp_path_factory.mktemp("validate") / "drafter"
    mtp_extract.extract(first_bundle(), directory, format="transformers", dtype="f32")
    return directory


@pytest.fixture
def drafter(checkpoint: Path) -> MtpDrafter:
    return load_drafter(checkpoint)


@pytest.fixture(scope="module")
def source() -> Iterator[BundledDrafter]:
    with mtp_extract.open(first_bundle()) as opened:
        yield opened.read_drafter()


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "few.jsonl", FEW)


@pytest.fixture(scope="session")
def generator(checkpoint: Path) -> SpeculativeGenerator:
    loaded = load_base(str(first_base()), "cpu")
    return SpeculativeGenerator(loaded.model, load_drafter(checkpoint), loaded.tokenizer)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return [Prompt(name, text) for name, texts in FEW.items() for text in texts]


@pytest.fixture(scope="session")
def continuations(generator: SpeculativeGenerator, prompts: list[Prompt]) -> Continuations:
    sizes = {"new_tokens": NEW_TOKENS, "batch": 4}
    return write_texts(generator.base, generator.codec, prompts, **sizes, chat_template=False)


@pytest.fixture(scope="session")
def plan(checkpoint: Path, prompts_file: Path) -> ValidationPlan:
    return ValidationPlan(
        checkpoint,
        base=str(first_base()),
        source=str(first_bundle()),
        prompts=prompts_file,
        draft_steps=(1, 3),
        device="cpu",
        new_tokens=NEW_TOKENS,
        samples=4,
        timed=2,
        chat_template=False,
    )


@pytest.fixture(scope="session")
def validation(plan: ValidationPlan) -> Validation:
    """A whole run over a few prompts."""
    return run_validation(plan)
