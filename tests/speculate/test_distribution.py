"""Sampled generation end to end: the trained pair's output has the base's distribution, and a defect would be seen."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from helpers.chi_square import chi_square
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import Pair, random_base

from mtp_extract.speculate import generate
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.sampling import Sampling
from mtp_extract.speculate.trees import AutoTree, Tree

SAMPLES, BATCH, LENGTH = 6000, 1000, 3
SAMPLING = Sampling(temperature=1.1, top_k=4, top_p=0.95)
Exact = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Case:
    """A base with a drafter, and what is continued."""

    generator: SpeculativeGenerator
    prompt: tuple[int, ...]


@pytest.fixture(scope="module")
def trained(pair: Pair) -> Case:
    return Case(pair.generator, (2, *pair.tokenizer("return ")["input_ids"]))


@pytest.fixture(scope="module")
def head() -> Case:
    """A random EAGLE-3 head that cannot propose one of six tokens."""
    base = random_base(tie_word_embeddings=False, vocab_size=6, vocab_size_per_layer_input=6)
    return Case(SpeculativeGenerator(base, random_head(head_config(vocab_size=6, draft_vocab_size=5))), (1, 2, 3))


@pytest.fixture(scope="module")
def exact(trained: Case) -> Exact:
    return probabilities_of(trained)


@pytest.fixture(scope="module")
def exact_of_head(head: Case) -> Exact:
    return probabilities_of(head)


def probabilities_of(case: Case) -> Exact:
    """The base's probability of every continuation of three tokens, from plain forwards over all prefixes."""
    base, prompt = case.generator.base, case.prompt
    probabilities: Exact = {(): 1.0}
    for _ in range(LENGTH):
        longer: Exact = {}
        texts = torch.tensor([prompt + prefix for prefix in probabilities])
        with torch.inference_mode():
            rows = SAMPLING.probabilities(base.logits(base.full_pass(texts).hidden[:, -1]))
        for (prefix, reached), row in zip(probabilities.items(), rows, strict=True):
            for token in row.nonzero().flatten().tolist():
                longer[(*prefix, token)] = reached * float(row[token])
        probabilities = longer
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    return probabilities


def p_value(case: Case, exact: Exact, drafts: int | Tree | AutoTree) -> float:
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(SAMPLES // BATCH):
        options = Options(LENGTH, drafts, SAMPLING, stop_token_ids=[], seed=seed)
        seen.update(result.tokens for result in case.generator.generate_batch([case.prompt] * BATCH, options))
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
    trained: Case, exact: Exact, drafts: int | Tree | AutoTree
) -> None:
    assert p_value(trained, exact, drafts) > 1e-3


@pytest.mark.parametrize("drafts", [2, Tree.parse("3x2"), AutoTree(4)])
def test_so_it_has_with_an_eagle3_head(head: Case, exact_of_head: Exact, drafts: int | Tree | AutoTree) -> None:
    assert p_value(head, exact_of_head, drafts) > 1e-3


def test_drafts_not_drawn_from_their_distribution_are_seen(
    trained: Case, exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted defect: drafts are the drafter's argmax, but judged as if drawn."""
    draw = generate.draw
    calls = itertools.count()

    def argmax_of_drafts(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        # A run of three tokens with one draft draws twice: the first token, from the base, and the one draft.
        first_of_run = next(calls) % 2 == 0
        return draw(weights, uniform) if first_of_run else weights.argmax(-1)

    monkeypatch.setattr(generate, "draw", argmax_of_drafts)
    assert p_value(trained, exact, drafts=1) < 1e-6


def test_a_base_that_is_asked_twice_is_seen(trained: Case, exact: Exact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: where the base does not draw its likeliest token, it draws again."""
    draw = generate.draw

    def again(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        first, likeliest = draw(weights, uniform), weights.argmax(-1)
        return torch.where((first == likeliest) | (uniform.ndim < 2), first, draw(weights, (uniform * 7) % 1))

    monkeypatch.setattr(generate, "draw", again)
    assert p_value(trained, exact, Tree.parse("1x1")) < 1e-6
