"""Rounds that follow from what is accepted at every anchor are those of the loop that serves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.beside import beside
from helpers.random_pairs import PROMPTS, random_base, random_drafter

from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Altered, Convention
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.evaluation.intervals import difference_bounds, over_texts, ratio_bounds, share_bounds
from mtp_extract.evaluation.measured import (
    Change,
    Measured,
    compare,
    difference_over_texts,
    of_agreement,
    saving,
    share_over_texts,
)
from mtp_extract.speculate.loop import Generation, SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement, Text, teacher_forced
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.train import measured as measured_of

K = 3


def whole_rounds(result: Generation) -> list[int]:
    """Drafts accepted in each round that had room for all: of a text one token shorter, these begin where an anchor
    has all targets."""
    return [one.accepted for one in result.rounds if one.drafted == K]


def text_of(result: Generation) -> Text:
    return Text((*result.prompt_tokens, *result.tokens[:-1]), len(result.prompt_tokens))


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS])
def test_greedy_rounds_are_those_of_the_loop(extracted: Path, base: Path, convention: Convention) -> None:
    loaded = load_base(str(base), "cpu")
    drafter = Altered(load_drafter(extracted), convention)
    generator = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    results = [generator.generate(prompt, max_new_tokens=50, drafts=K) for prompt in PROMPTS]
    measured = of_agreement(teacher_forced(generator.base, drafter, [text_of(one) for one in results], K))
    for index, result in enumerate(results):
        accepted, own = whole_rounds(result), measured.of([index])
        assert (own.advance[own.begins == 1] - 1).tolist() == accepted
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
    taken = torch.tensor([len(whole_rounds(one)) for one in results], dtype=torch.double)
    texts = [text_of(one) for one in results]
    plan = TuningPlan(None, "base", draft_steps=K, temperature=temperature, batch=64)
    measured = measured_of(beside(plan, generator.base, drafter), drafter, texts)
    blind = Measured.over(measured.text, measured.anchor, measured.stands)

    def apart(found: Measured) -> torch.Tensor:
        return taken - torch.stack([found.begins[found.text == index].sum() for index in range(len(texts))])

    assert 10 < float(taken.mean()) < 20
    error = apart(measured)
    assert abs(float(error.mean())) < 2 * float(error.std()) / math.sqrt(len(texts))
    assert float(error.std()) < 0.8 * float(apart(blind).std())


def naive(accepted: list[int]) -> list[int]:
    begins, at = [0] * len(accepted), 0
    while at < len(accepted):
        begins[at] = 1
        at += 1 + accepted[at]
    return begins


def test_a_walk_by_hand() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 7, 30)
    accepted = torch.randint(K + 1, (sum(lengths),), generator=generator)
    text = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    stands = (accepted[:, None] > torch.arange(K)).double()
    measured = Measured.over(text, torch.arange(len(text)) + 5, stands)
    rows = [accepted[text == index].tolist() for index in range(3)]
    assert measured.begins.tolist() == [begin for row in rows for begin in naive(row)]
    assert measured.advance.tolist() == (1 + accepted).tolist()
    assert Measured.over(text[:0], text[:0], stands[:0]).rounds == 0


def test_half_a_chance_is_half_a_round() -> None:
    """One draft that stands every other time: after a round of one token or two, two rounds of three anchors."""
    along = torch.tensor([[0.5], [0.0], [1.0]])
    text = torch.zeros(3, dtype=torch.long)
    measured = Measured.over(text, torch.arange(3), torch.ones(3, 1), along)
    assert measured.begins.tolist() == [1, 0.5, 1]
    assert measured.tokens_per_round == (1.5 + 0.5 + 2) / 2.5


def test_more_drafts_may_stand_in_more_rounds() -> None:
    """What is gained where no round begins is nothing gained."""
    text, anchor = torch.arange(20).repeat_interleave(10), torch.arange(200) % 10
    even, two = (anchor % 2 == 0)[:, None], torch.ones(200, 2, dtype=torch.double)
    before = Measured.over(text, anchor, two * even * torch.tensor([1, 0]))
    after = Measured.over(text, anchor, two * ~even)
    assert compare(before, after).better
    assert (before.rounds, after.rounds) == (5 * 20, 6 * 20)
    found = saving(before, after)
    assert (round(found.ratio, 3), found.better) == (0.833, False)
    assert saving(after, before).better
    same = saving(before, before)
    assert (same.ratio, same.interval, same.better) == (1, (1, 1), False)
    assert saving(before.of([0, 1]), after.of([0, 1])).interval is None


def test_differences_by_hand() -> None:
    """Text by text, over the rounds that have both targets."""
    text, anchor = torch.tensor([0, 0, 1, 1]), torch.arange(4)
    targets = torch.tensor([[1, 2], [1, 2], [1, 2], [1, -1]])

    def of(drafts: list[list[int]]) -> Measured:
        return of_agreement(Agreement(text, anchor, torch.tensor(drafts), targets, torch.zeros(4, 2).long()))

    before, after = of([[1, 9], [9, 2], [1, 2], [1, 2]]), of([[1, 2], [9, 2], [1, 9], [9, 9]])
    assert before.teacher_forced == pytest.approx(1 + (1 + 0 + 2) / 3)
    assert compare(before, after).mean == pytest.approx((1 + 0 - 1) / 3)
    assert not (compare(before, after).better or compare(before, after).worse)


def test_an_interval_stays_within_what_can_be() -> None:
    """Few texts that differ much say little: not that a round of 3 drafts may have -5 or 13 tokens."""
    stands = torch.tensor([[0.0, 0, 0]] * 12 + [[1.0, 1, 1]] * 12, dtype=torch.double)
    text = torch.arange(6).repeat_interleave(4)
    interval = Measured.over(text, torch.arange(24), stands).interval
    assert interval is not None
    assert 1 < interval.low < 1.6 and 3.4 < interval.high < 4
    assert Measured.over(text[:16], torch.arange(16), stands[:16]).interval is None


def test_what_too_few_texts_compare_is_not_decided() -> None:
    """Two texts that both get worse by as much gave an interval of no width, and a verdict."""
    before, after = (torch.full((24, 2), value, dtype=torch.double) for value in (1.0, 0.0))
    found = {}
    for count in (2, 24):
        text = torch.arange(count).repeat_interleave(24 // count)
        found[count] = compare(*(Measured.over(text, torch.arange(24), stands) for stands in (before, after)))
    assert found[2] == Change(-2, None, 2)
    assert not found[2].worse and not found[2].better
    assert found[24].worse


def test_an_interval_of_a_mean_is_over_texts() -> None:
    """One value a text is one draw a text, and the same value many times in a text says no more than once."""
    values = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 0.75])
    found = share_over_texts(torch.arange(6), values)
    assert found is not None and found == over_texts(share_bounds, values.tolist(), [1] * 6)
    repeated = share_over_texts(torch.arange(6).repeat_interleave(50), values.repeat_interleave(50))
    assert repeated is not None and repeated == pytest.approx(found, abs=0.08)
    assert share_over_texts(torch.arange(4).repeat_interleave(5), torch.ones(20)) is None
    gap = difference_over_texts(torch.arange(6), values - 0.5)
    assert gap == over_texts(difference_bounds, [0.5, 0, 0, 0.5, 0, 0.25], [0, 0.5, 0, 0, 0.25, 0], [1] * 6)


@pytest.mark.parametrize("texts", [5, 20, 50])
def test_the_ratio_of_rounds_holds_the_truth(texts: int) -> None:
    """In 93 % of measurements at least: each text has a rate of its own, the second drafter mostly 0.95 of it."""
    generator = np.random.default_rng(texts)
    rate, strength = 0.8, 9.0  # a correlation of 0.1 within a text

    def rounds(rates: np.ndarray, tokens: int = 96) -> np.ndarray:
        at, found = np.zeros(rates.shape, int), np.zeros(rates.shape, int)
        while (at < tokens).any():
            accepted = (generator.random((K, *rates.shape)) < rates).cumprod(0).sum(0)
            found, at = found + (at < tokens), at + 1 + accepted
        return found

    def both(count: int) -> tuple[np.ndarray, np.ndarray]:
        first, other = (generator.beta(m * strength, (1 - m) * strength, (count, texts)) for m in (rate, 0.95 * rate))
        return rounds(first), rounds(np.where(generator.random(first.shape) < 0.7, 0.95 * first, other))

    before, after = both(30000 // texts)
    low, high = ratio_bounds(*both(1000))
    truth = before.mean() / after.mean()
    assert ((low <= truth) & (truth <= high)).mean() > 0.93
    # It has about 6 % more rounds: better it is called by chance, if at all.
    assert (low > 1).mean() < 0.01
