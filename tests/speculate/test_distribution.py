"""Sampled generation end to end: the output has the base's distribution, and a defect would be seen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache

import pytest
import torch
from helpers.chi_square import chi_square
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import random_base, random_drafter

from mtp_extract.speculate import loop
from mtp_extract.speculate.adaptive import AdaptiveDrafts
from mtp_extract.speculate.loop import Drafts, SpeculativeGenerator
from mtp_extract.speculate.sampling import Sampling
from mtp_extract.speculate.trees import DraftTree

SAMPLES, LENGTH = 1000, 4
SAMPLING = Sampling(temperature=1.1, top_k=3, top_p=0.95)
PROMPT = (1, 2, 3)
Exact = dict[tuple[int, ...], float]


@cache
def generator(kind: str) -> SpeculativeGenerator:
    """Of six tokens and two layers; a random EAGLE-3 head cannot propose one of them."""
    base = random_base(
        tie_word_embeddings=False,
        vocab_size=6,
        vocab_size_per_layer_input=6,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
    )
    if kind == "mtp":
        return SpeculativeGenerator(base, random_drafter(base))
    head = random_head(head_config(vocab_size=6, draft_vocab_size=5, base_layers=(0, 1, 2)))
    return SpeculativeGenerator(base, head)


@cache
def exact() -> Exact:
    """The base's probability of every continuation, from plain forwards over all prefixes."""
    base = generator("mtp").base
    probabilities: Exact = {(): 1.0}
    for _ in range(LENGTH):
        longer: Exact = {}
        texts = torch.tensor([PROMPT + prefix for prefix in probabilities])
        with torch.inference_mode():
            rows = SAMPLING.probabilities(base.logits(base.feed(texts).hidden[:, -1]))
        for (prefix, reached), row in zip(probabilities.items(), rows, strict=True):
            for token in row.nonzero().flatten().tolist():
                longer[(*prefix, token)] = reached * float(row[token])
        probabilities = longer
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    return probabilities


def p_value(kind: str, drafts: Drafts) -> float:
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(SAMPLES):
        made = generator(kind).generate(
            PROMPT, max_new_tokens=LENGTH, drafts=drafts, **dataclasses.asdict(SAMPLING), stop_token_ids=[], seed=seed
        )
        seen[made.tokens] += 1
        accepted += made.accepted
    assert set(seen) <= set(exact()), "a continuation the base gives no probability"
    assert 0.05 * SAMPLES < accepted < 2 * SAMPLES, "drafts are to be accepted and rejected"
    common = [tokens for tokens, share in exact().items() if share * SAMPLES >= 5]
    rare = [tokens for tokens in exact() if tokens not in set(common)]
    observed = [seen[tokens] for tokens in common] + [sum(seen[tokens] for tokens in rare)]
    expected = [exact()[tokens] for tokens in common] + [sum(exact()[tokens] for tokens in rare)]
    assert len(common) > 8
    total = sum(expected)
    return chi_square(observed, [share / total for share in expected])[1]


@pytest.mark.parametrize("drafts", [3, DraftTree.parse("3x2"), AdaptiveDrafts(most=3, cost_ratio=0.05)], ids=str)
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_sampled_text_has_the_distribution_of_the_base(kind: str, drafts: Drafts) -> None:
    assert p_value(kind, drafts) > 1e-3


def test_drafts_not_drawn_from_their_distribution_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: drafts are the drafter's argmax, but judged as if drawn."""
    monkeypatch.setattr(loop, "draw", lambda weights, random: weights.argmax(-1))
    assert p_value("mtp", 3) < 1e-6
