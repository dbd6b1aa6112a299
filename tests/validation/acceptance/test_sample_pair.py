"""The sample in the package is a pair to measure on: whatever is broken shows, and no text is a loop."""

from __future__ import annotations

import pytest
from helpers.agreement import measure_agreement

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluate.agreement import Continuations, continue_greedily
from mtp_extract.evaluate.base_model import load_base
from mtp_extract.evaluate.prompts import Prompt, encode_prompts, read_prompts
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.acceptance.controls import CONTROLS, draft_together

pytestmark = pytest.mark.xdist_group("sample pair")

EACH = 8


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeGenerator:
    directory = tmp_path_factory.mktemp("sample") / "drafter"
    mtp_extract.extract(sample_bundle(), directory, dtype="f32")
    loaded = load_base(str(sample_base()), "cpu")
    return SpeculativeGenerator(loaded.model, load_drafter(directory), loaded.tokenizer)


@pytest.fixture(scope="module")
def written(generator: SpeculativeGenerator) -> Continuations:
    prompts: list[Prompt] = []
    for prompt in read_prompts(sample_prompts()):
        if sum(other.workload == prompt.workload for other in prompts) < EACH:
            prompts.append(prompt)
    encoded = encode_prompts(prompts, generator.codec, chat_template=True)
    return continue_greedily(generator.base, prompts, encoded, new_tokens=48, batch=32)


@pytest.fixture(scope="module")
def real(generator: SpeculativeGenerator, written: Continuations) -> Agreement:
    return measure_agreement(generator.base, generator.drafter, written, 1, batch=32)


def test_the_base_writes_few_loops(written: Continuations) -> None:
    assert written.repeated < 0.25


def test_every_control_is_clearly_below(
    generator: SpeculativeGenerator, written: Continuations, real: Agreement
) -> None:
    assert isinstance(generator.drafter, MtpDrafter)
    results = draft_together(generator.base, [generator.drafter], written, 1, batch=32).controls
    assert [result.name for result in results] == [control.name for control in CONTROLS]
    for result in results:
        assert result.standing == "below", result.name
        assert result.difference is not None and result.difference.value is not None
        assert result.difference.value > 0.08, result.name
