"""The base's own text in batches: that of each prompt alone, in order, and drawn anew in every batch."""

from __future__ import annotations

import pytest
import torch
from helpers.random_pairs import base_alone, random_base
from helpers.reporters import Recorder

from mtp_extract.evaluation.base_texts import continue_prompts, group_by_length
from mtp_extract.speculate.target import Base

PROMPTS = ((1,), tuple(range(17)), (7, 3, 5, 9), (2, 2), (5, 4, 3))


@pytest.fixture(scope="module")
def base() -> Base:
    return Base(random_base(tie_word_embeddings=False))


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_a_text_is_what_the_base_writes_alone(base: Base, batch: int) -> None:
    reporter = Recorder()
    texts = continue_prompts(base, PROMPTS, new_tokens=20, batch=batch, reporter=reporter)
    assert texts == [base_alone(base.model, prompt, 20) for prompt in PROMPTS]
    batches = len(group_by_length([0] * 5, batch))
    assert reporter.parts == [("the base's text", done + 1, batches) for done in range(batches)]
    assert continue_prompts(base, [], new_tokens=20, batch=batch) == []


def test_a_text_ends_with_its_stop_token(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    full_text = [base_alone(base.model, prompt, 20) for prompt in PROMPTS]
    stop = full_text[1][3]
    monkeypatch.setattr(base.model.generation_config, "eos_token_id", stop)
    texts = continue_prompts(base, PROMPTS, new_tokens=20, batch=8)
    assert texts == [text[: text.index(stop) + 1] if stop in text else text for text in full_text]
    assert len({len(text) for text in texts}) > 1


def test_the_same_prompt_is_drawn_anew_and_the_same_from_a_seed(base: Base) -> None:
    before = torch.random.get_rng_state()
    texts, again = (
        continue_prompts(base, [PROMPTS[2]] * 6, new_tokens=12, batch=2, temperature=1.0, seed=3) for _ in range(2)
    )
    assert len(set(texts)) == 6
    assert texts == again
    assert torch.equal(torch.random.get_rng_state(), before)


def test_groups_leave_no_text_alone() -> None:
    assert group_by_length([3, 1, 2, 5, 4], 2) == [[1, 2], [0, 4, 3]]
    assert group_by_length([1], 4) == [[0]]
    assert sorted(i for group in group_by_length(list(range(10)), 3) for i in group) == list(range(10))
