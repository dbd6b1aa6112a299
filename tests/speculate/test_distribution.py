"""Sampled generation end to end: the trained pair's output has the base's distribution, and a defect would be seen."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from helpers.chi_square import chi_square
from helpers.random_pairs import Pair

from mtp_extract.speculate import AutoTree, Options, Sampling, Tree, generate

SAMPLES, BATCH, LENGTH = 6000, 1000, 3
SAMPLING = Sampling(temperature=1.1, top_k=4, top_p=0.95)
PROMPT = "return "


@pytest.fixture(scope="module")
def exact(pair: Pair) -> dict[tuple[int, ...], float]:
    """The base's probability of every continuation of three tokens, from plain forwards over all prefixes."""
    base = pair.generator.base
    prompt = (2, *pair.tokenizer(PROMPT)["input_ids"])
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        texts = torch.tensor([prompt + prefix for prefix in probabilities])
        with torch.inference_mode():
            rows = SAMPLING.probabilities(base.logits(base.full_pass(texts).hidden[:, -1]))
        for (prefix, reached), row in zip(probabilities.items(), rows, strict=True):
            for token in row.nonzero().flatten().tolist():
                longer[(*prefix, token)] = reached * float(row[token])
        probabilities = longer
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    return probabilities


def p_value(pair: Pair, exact: dict[tuple[int, ...], float], drafts: int | Tree | AutoTree) -> float:
    generator = pair.generator
    prompt = (2, *pair.tokenizer(PROMPT)["input_ids"])
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(SAMPLES // BATCH):
        options = Options(LENGTH, drafts, SAMPLING, stop_token_ids=[], seed=seed)
        seen.update(result.tokens for result in generator.generate_batch([prompt] * BATCH, options))
    assert set(seen) <= set(exact), "a continuation the base gives no probability"
    common = [tokens for tokens, share in exact.items() if share * SAMPLES >= 5]
    rare = [tokens for tokens in exact if tokens not in set(common)]
    observed = [seen[tokens] for tokens in common] + [sum(seen[tokens] for tokens in rare)]
    expected = [exact[tokens] for tokens in common] + [sum(exact[tokens] for tokens in rare)]
    assert len(common) > 15
    total = sum(expected)
    return chi_square(observed, [share / total for share in expected])[1]


@pytest.mark.parametrize("drafts", [0, 1, 2, Tree.parse("3x2"), AutoTree(4)])
def test_sampled_text_has_the_distribution_of_the_base(
    pair: Pair, exact: dict[tuple[int, ...], float], drafts: int | Tree | AutoTree
) -> None:
    assert p_value(pair, exact, drafts) > 1e-3


def test_drafts_not_drawn_from_their_distribution_are_seen(
    pair: Pair, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted defect: drafts are the drafter's argmax, but judged as if drawn."""
    draw = generate.draw
    calls = itertools.count()

    def argmax_of_drafts(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        # A run of three tokens with one draft draws twice: the first token, from the base, and the one draft.
        first_of_run = next(calls) % 2 == 0
        return draw(weights, uniform) if first_of_run else weights.argmax(-1)

    monkeypatch.setattr(generate, "draw", argmax_of_drafts)
    assert p_value(pair, exact, drafts=1) < 1e-6


def test_a_base_that_is_asked_twice_is_seen(
    pair: Pair, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted defect: where the base does not draw its likeliest token, it draws again."""
    draw = generate.draw

    def again(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        first, likeliest = draw(weights, uniform), weights.argmax(-1)
        return torch.where((first == likeliest) | (uniform.ndim < 2), first, draw(weights, (uniform * 7) % 1))

    monkeypatch.setattr(generate, "draw", again)
    assert p_value(pair, exact, Tree.parse("1x1")) < 1e-6
