"""Teacher forcing in one pass is stepping, token for token, and is what rounds of generation do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.random_pairs import Pair, random_base, random_drafter
from helpers.stepping import teacher_forced_by_stepping

from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, FaultyDrafter
from mtp_extract.errors import PairError
from mtp_extract.speculate import teacher
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Text, draft_teacher_forced

STEPS = 4


def assert_same(a: Agreement, b: Agreement) -> None:
    for field in dataclasses.fields(Agreement):
        assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.fixture(scope="module")
def texts(pair: Pair) -> list[Text]:
    """What the base writes after each prompt, of different lengths."""
    loop = pair.generator
    results = [loop.generate(prompt, max_new_tokens=45, stop_token_ids=[]) for prompt in pair.prompts()]
    return [Text(r.prompt_tokens + r.tokens[: 45 - 5 * i], len(r.prompt_tokens)) for i, r in enumerate(results)]


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS])
def test_batched_is_stepping(
    pair: Pair, texts: list[Text], convention: Convention, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pair.generator.base
    args = (base, FaultyDrafter(pair.drafter, convention), texts, STEPS)
    batched = draft_teacher_forced(*args)
    assert_same(batched, teacher_forced_by_stepping(*args))
    assert len(batched.anchor) == sum(len(text.anchors) for text in texts)
    monkeypatch.setattr(teacher, "_LOGITS_AT_ONCE", 7 * len(texts) * 512)
    assert_same(batched, draft_teacher_forced(*args))


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 2}, {"sliding_window": 64}, {"num_kv_shared_layers": 0}])
def test_batched_is_stepping_for_other_bases(changes: dict[str, Any]) -> None:
    base = Base(random_base(**changes))
    drafter = random_drafter(base.model)
    tokens = torch.randint(0, 40, (3, 30), generator=torch.Generator().manual_seed(2)).tolist()
    texts = [Text(tuple(tokens[0]), 0), Text(tuple(tokens[1][:17]), 9), Text(tuple(tokens[2][:4]), 4)]
    batched = draft_teacher_forced(base, drafter, texts, 3)
    assert_same(batched, teacher_forced_by_stepping(base, drafter, texts, 3))
    assert batched.text.tolist() == [0] * 28 + [1] * 7
    assert batched.anchor[:28].tolist() == list(range(1, 29))
    assert batched.targets[27].tolist() == [tokens[0][29], -1, -1]


def test_a_drafter_of_no_numbers_ranks_no_token() -> None:
    """Its argmax is some token, and nothing compares with what is no number."""
    base = Base(random_base())
    broken = random_drafter(base.model)
    with torch.no_grad():
        broken.final_norm.weight.fill_(torch.nan)
    found = draft_teacher_forced(base, broken, [Text(tuple(range(1, 20)), 5)], 2)
    assert (found.ranks[found.targets >= 0] >= base.vocab_size).all()
    assert (found.ranks[found.targets < 0] == -1).all()


def test_texts_too_short(pair: Pair) -> None:
    with pytest.raises(PairError, match="at least two generated tokens"):
        draft_teacher_forced(pair.generator.base, pair.drafter, [Text((1, 2, 3), 2)], 2)
