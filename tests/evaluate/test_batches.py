"""Many prompts through the loop: order, batches and seeds."""

from __future__ import annotations

import pytest
import transformers
from helpers.first_pair import first_base, first_bundle

import mtp_extract
from mtp_extract.drafter.load import load_drafter
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.batches import generate_in_batches, groups
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.sampling import Sampling

PROMPTS = ("import os\n", [{"role": "user", "content": "hello"}], (2, 5, 7), "def main():\n    ", "x")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeGenerator:
    directory = tmp_path_factory.mktemp("engine") / "drafter"
    mtp_extract.extract(first_bundle(), directory, dtype="f32")
    base = transformers.Gemma4ForConditionalGeneration.from_pretrained(first_base()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(first_base())
    return SpeculativeGenerator(base, load_drafter(directory), tokenizer)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_results_are_in_order(generator: SpeculativeGenerator, batch: int) -> None:
    options = Options(max_new_tokens=20, stop_token_ids=[])
    together = generate_in_batches(generator, PROMPTS, options, batch=batch)
    alone = [generator.generate_batch([prompt], options)[0] for prompt in PROMPTS]
    assert [(r.prompt_tokens, r.bos, r.tokens) for r in together] == [(r.prompt_tokens, r.bos, r.tokens) for r in alone]
    assert generate_in_batches(generator, [], options, batch=batch) == []


def test_the_same_prompt_in_two_batches_is_sampled_twice(generator: SpeculativeGenerator) -> None:
    options = Options(max_new_tokens=12, sampling=Sampling(1.0), stop_token_ids=[], seed=3)
    found, again = (generate_in_batches(generator, [PROMPTS[0]] * 6, options, batch=2) for _ in range(2))
    assert len({result.tokens for result in found}) == 6
    assert [r.tokens for r in found] == [r.tokens for r in again]


@pytest.mark.parametrize("batch", [0, -1, 1.5])
def test_a_batch_is_a_count(generator: SpeculativeGenerator, batch: int) -> None:
    with pytest.raises(MtpExtractError, match="expected batch to be a whole number of at least 1"):
        generate_in_batches(generator, PROMPTS, Options(), batch=batch)


def test_groups_leave_no_text_alone() -> None:
    assert list(groups([3, 1, 2, 5, 4], 2)) == [[1, 2], [0, 4, 3]]
    assert list(groups([1], 4)) == [[0]]
    assert sorted(i for group in groups(list(range(10)), 3) for i in group) == list(range(10))
