"""Rounds that follow from what is accepted at every anchor are those of the loop that serves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.random_pairs import PROMPTS, beside, random_base, random_drafter

from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, FaultyDrafter
from mtp_extract.evaluation.agreement import (
    Acceptance,
    compare_acceptance,
    compute_acceptance,
    estimate_difference,
    estimate_share,
    summarize_agreement,
)
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.evaluation.intervals import bound_difference, bound_share, compute_interval
from mtp_extract.io.typed import Figure
from mtp_extract.speculate.loop import Generation, SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement, Text, draft_teacher_forced
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.rounds import measure_acceptance as measured_of

K = 3


def list_full_rounds(result: Generation) -> list[int]:
    """Drafts accepted in each round that had room for all: of a text one token shorter, these begin where an anchor
    has all targets."""
    return [one.accepted for one in result.rounds if one.drafted == K]


def convert_to_text(result: Generation) -> Text:
    return Text((*result.prompt_tokens, *result.tokens[:-1]), len(result.prompt_tokens))


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS])
def test_greedy_rounds_are_those_of_the_loop(extracted: Path, base: Path, convention: Convention) -> None:
    loaded = load_base(str(base), "cpu")
    drafter = FaultyDrafter(load_drafter(extracted), convention)
    generator = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    results = [generator.generate(prompt, max_new_tokens=50, drafts=K) for prompt in PROMPTS]
    measured = compute_acceptance(
        draft_teacher_forced(generator.base, drafter, [convert_to_text(one) for one in results], K)
    )
    for index, result in enumerate(results):
        accepted, own = list_full_rounds(result), measured.of([index])
        assert (own.advance[own.start_probability == 1] - 1).tolist() == accepted
        assert own.rounds == len(accepted)
        assert own.tokens_per_round == (len(accepted) + sum(accepted)) / len(accepted)
    # What all anchors say is another figure.
    assert abs(measured.tokens_per_round - measured.teacher_forced) > 0.02


def test_sampled_rounds_are_expected_of_the_loop() -> None:
    """Of the very texts that the loop wrote with drafts: neither more nor fewer, and nearer than without the text."""
    model = random_base()
    drafter, temperature = random_drafter(model), 6.0  # where half of the drafts of two random networks stand
    generator = SpeculativeGenerator(model, drafter)
    options: Any = {"max_new_tokens": 30, "drafts": K, "temperature": temperature, "stop_token_ids": ()}
    results = [generator.generate((1, 2, 3), seed=seed, **options) for seed in range(100)]
    taken = torch.tensor([len(list_full_rounds(one)) for one in results], dtype=torch.double)
    texts = [convert_to_text(one) for one in results]
    plan = TuningPlan(Path("drafter"), "base", draft_steps=K, temperature=temperature, batch=64)
    measured = measured_of(beside(plan, generator.base, drafter), drafter, texts)
    without_text = Acceptance.from_stands(measured.text, measured.anchor, measured.stands)

    def subtract_expected_rounds(acceptance: Acceptance) -> torch.Tensor:
        return taken - torch.stack(
            [acceptance.start_probability[acceptance.text == index].sum() for index in range(len(texts))]
        )

    assert 10 < float(taken.mean()) < 20
    error = subtract_expected_rounds(measured)
    assert abs(float(error.mean())) < 2 * float(error.std()) / math.sqrt(len(texts))
    assert float(error.std()) < 0.8 * float(subtract_expected_rounds(without_text).std())


def walk_rounds(accepted: list[int]) -> list[int]:
    begins, anchor_index = [0] * len(accepted), 0
    while anchor_index < len(accepted):
        begins[anchor_index] = 1
        anchor_index += 1 + accepted[anchor_index]
    return begins


def test_a_walk_by_hand() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 7, 30)
    accepted = torch.randint(K + 1, (sum(lengths),), generator=generator)
    text = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    stands = (accepted[:, None] > torch.arange(K)).double()
    measured = Acceptance.from_stands(text, torch.arange(len(text)) + 5, stands)
    rows = [accepted[text == index].tolist() for index in range(3)]
    assert measured.start_probability.tolist() == [begin for row in rows for begin in walk_rounds(row)]
    assert measured.advance.tolist() == (1 + accepted).tolist()
    assert Acceptance.from_stands(text[:0], text[:0], stands[:0]).rounds == 0


def test_half_a_chance_is_half_a_round() -> None:
    """One draft that stands every other time: after a round of one token or two, two rounds of three anchors."""
    along = torch.tensor([[0.5], [0.0], [1.0]])
    text = torch.zeros(3, dtype=torch.long)
    measured = Acceptance.from_stands(text, torch.arange(3), torch.ones(3, 1), along)
    assert measured.start_probability.tolist() == [1, 0.5, 1]
    assert measured.tokens_per_round == (1.5 + 0.5 + 2) / 2.5


def test_differences_by_hand() -> None:
    """Text by text, over the rounds that have both targets."""
    text, anchor = torch.tensor([0, 0, 1, 1]), torch.arange(4)
    targets = torch.tensor([[1, 2], [1, 2], [1, 2], [1, -1]])

    def of(drafts: list[list[int]]) -> Acceptance:
        return compute_acceptance(Agreement(text, anchor, torch.tensor(drafts), targets, torch.zeros(4, 2).long()))

    before, after = of([[1, 9], [9, 2], [1, 2], [1, 2]]), of([[1, 2], [9, 2], [1, 9], [9, 9]])
    assert before.teacher_forced == pytest.approx(1 + (1 + 0 + 2) / 3)
    assert compare_acceptance(before, after).mean == pytest.approx((1 + 0 - 1) / 3)


def test_an_interval_stays_within_what_can_be() -> None:
    """Few texts that differ much say little: not that a round of 3 drafts may have -5 or 13 tokens."""
    targets, text = torch.ones(24, 3, dtype=torch.long), torch.arange(6).repeat_interleave(4)
    agreement = Agreement(text, torch.arange(24), targets * (text >= 3)[:, None], targets, 0 * targets)
    low, high = summarize_agreement(agreement).teacher_forced.ci95 or (0, 0)
    assert 1 < low < 1.6 and 3.4 < high < 4
    assert summarize_agreement(agreement.of(range(4))).teacher_forced.ci95 is None


def test_an_interval_of_a_mean_is_over_texts() -> None:
    """One value a text is one draw a text, and the same value many times in a text says no more than once."""
    values = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 0.75])
    share = estimate_share(torch.arange(6), values)
    interval = compute_interval(bound_share, values.tolist(), [1] * 6)
    assert interval is not None and share == Figure(3.5 / 6, 6, list(interval))
    repeated = estimate_share(torch.arange(6).repeat_interleave(50), values.repeat_interleave(50))
    assert repeated.ci95 == pytest.approx(share.ci95, abs=0.08)
    assert estimate_share(torch.arange(4).repeat_interleave(5), torch.ones(20)) == Figure(1, 20, None)
    gap = estimate_difference(torch.arange(6), values - 0.5)
    assert gap == compute_interval(bound_difference, [0.5, 0, 0, 0.5, 0, 0.25], [0, 0.5, 0, 0, 0.25, 0], [1] * 6)
