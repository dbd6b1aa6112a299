"""Agreement: whose text is drafted for, how it is counted, and what its intervals are."""

from __future__ import annotations

import pytest
import torch
from helpers.stepping import teacher_forced_by_stepping

from mtp_extract.errors import PairError
from mtp_extract.evaluation.agreement import measure_agreements, summarize_agreement
from mtp_extract.evaluation.base_texts import Continuations
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.io.typed import Figure
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement, Text

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

STEPS = 3


def measure(generator: SpeculativeGenerator, continuations: Continuations) -> Agreement:
    return measure_agreements(generator.base, [(generator.drafter, STEPS, False)], continuations, batch=3)[0]


@pytest.fixture(scope="module")
def agreement(generator: SpeculativeGenerator, continuations: Continuations) -> Agreement:
    return measure(generator, continuations)


def test_order_and_batches_change_nothing(
    generator: SpeculativeGenerator, continuations: Continuations, agreement: Agreement
) -> None:
    stepped = teacher_forced_by_stepping(generator.base, generator.drafter, list(continuations.texts), STEPS)
    order = torch.argsort(agreement.text * 10_000 + agreement.anchor)
    for name in ("text", "anchor", "drafts", "targets"):
        assert torch.equal(getattr(agreement, name)[order], getattr(stepped, name))


def test_figures_by_hand() -> None:
    drafts = torch.tensor([[1, 2], [1, 9], [9, 2], [1, 2]])
    targets = torch.tensor([[1, 2], [1, 2], [1, 2], [1, -1]])
    workload = summarize_agreement(
        Agreement(torch.tensor([0, 0, 1, 1]), torch.arange(4), drafts, targets, torch.tensor([[4, 5]] * 4))
    )
    first, second = workload.steps
    assert (first.top1.value, first.top1.n) == (3 / 4, 4)
    assert (first.top5.value, second.top5.value) == (1, 0)
    assert (second.top1.value, second.top1.n) == (2 / 3, 3)
    assert (second.conditional.value, second.conditional.n) == (1 / 2, 2)
    # Of the three rounds that have both targets: 2, 1 and 0 drafts.
    assert workload.teacher_forced == Figure(1 + 3 / 3, 3)
    assert (workload.texts, workload.n) == (2, 4)


def test_nothing_to_draft_from(generator: SpeculativeGenerator) -> None:
    short = Continuations((Prompt("w", "a"),), (Text((2, 3), 1),))
    with pytest.raises(PairError, match="generate longer continuations"):
        measure(generator, short)


def test_a_text_that_repeats_another_is_not_counted(
    generator: SpeculativeGenerator, continuations: Continuations
) -> None:
    """Neither in shares and lengths, nor in their intervals."""
    twice = Continuations(continuations.prompts * 2, continuations.texts * 2)
    assert continuations.usable == twice.usable == list(range(7))
    assert summarize_agreement(measure(generator, continuations)) == summarize_agreement(measure(generator, twice))
