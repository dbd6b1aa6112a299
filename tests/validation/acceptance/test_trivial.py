"""Trivial drafters: what they may learn from, and that a drafter no better than they are is refuted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec import structs

from mtp_extract.evaluate.agreement import Continuations
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.io.typed import Figure
from mtp_extract.speculate.teacher import Agreement, Text
from mtp_extract.validation.acceptance.trivial import compare_trivial
from mtp_extract.validation.result import Validation
from mtp_extract.validation.verdict import concluded

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

TEXTS = ((1, 2, 1, 2, 1, 2, 1), (3, 3, 3, 3, 1, 2, 4))


def measured(drafts: list[int], tokens: tuple[tuple[int, ...], ...] = TEXTS) -> tuple[Continuations, Agreement]:
    texts = tuple(Text(row, 1) for row in tokens)
    places = [(row, at) for row, text in enumerate(texts) for at in text.anchors]
    targets = torch.tensor([[texts[row].tokens[at + 1]] for row, at in places])
    text, anchor = (torch.tensor(column) for column in zip(*places, strict=True))
    aims = torch.tensor(drafts)[:, None]
    continuations = Continuations(tuple(Prompt("w", "p") for _ in texts), texts)
    return continuations, Agreement(text, anchor, aims, targets, aims == targets)


def test_by_hand() -> None:
    frequent, bigram = compare_trivial(*measured([0] * 10))
    # Three of five in each: 1 → 2 is known from the other text, 2 → 1 outweighs its 2 → 4 only at last; 3 → 3 is
    # learned at once, and neither 3 → 1 nor 2 → 4 can be known.
    assert (frequent.name, bigram.name) == ("most frequent token", "bigram")
    assert bigram.top1 == 0.6
    assert bigram.top1 > frequent.top1
    assert frequent.difference.value == -frequent.top1
    # Two texts decide nothing, however clear they seem.
    assert (frequent.difference.ci95, bigram.difference.ci95, bigram.texts) == (None, None, 2)
    assert not frequent.better
    assert not bigram.worse


def test_a_drafter_that_knows_is_above() -> None:
    tokens = tuple((start, *range(start, start + 8)) for start in range(10, 170, 8))
    continuations, real = measured([0] * 140, tokens)
    right = dataclasses.replace(real, drafts=real.targets)
    assert all(result.worse and not result.better for result in compare_trivial(continuations, right))
    wrong = compare_trivial(*measured([0] * 140, tuple((start, *(6, 7, 8, 6, 7, 8, 6, 7)) for start in range(10, 30))))
    assert all(result.better and not result.worse for result in wrong)


def test_no_text_is_learned_from_its_own_future() -> None:
    texts = (Text((5, 6, 7, 8, 9), 1),)
    continuations = Continuations((Prompt("w", "p"),), texts)
    targets = torch.tensor([[7], [8], [9]])
    real = Agreement(torch.zeros(3).long(), torch.tensor([1, 2, 3]), targets, targets, targets > 0)
    assert [result.top1 for result in compare_trivial(continuations, real)] == [0.0, 0.0]


def test_on_the_trained_pair(validation: Validation) -> None:
    assert len(validation.trivial) == 2
    assert all(0 <= result.top1 < 1 and not result.better and result.texts == 7 for result in validation.trivial)
    worse = Figure(-0.1, 100, [-0.3, -0.01])
    found = concluded(
        structs.replace(validation, trivial=[structs.replace(r, difference=worse) for r in validation.trivial])
    )
    assert found.refuted
    assert "worse than those of a trivial drafter (most frequent token" in found.verdict
    assert any("bigram" in line for line in found.findings)


def test_few_texts_refute_nothing(validation: Validation) -> None:
    """Two prompts of eight tokens refuted a drafter that a hundred prompts measure at 75.9 %."""
    few = [structs.replace(r, difference=Figure(-0.143, 9), texts=2) for r in validation.trivial]
    found = concluded(structs.replace(validation, trivial=few))
    assert not found.refuted
    assert "refuted" not in found.verdict.lower()
    told = "(bigram; not decided: 2 texts, at least 5 are needed)"
    assert told in found.verdict
    assert any(told in line for line in found.findings)
