"""Sampled text has the base's distribution, by the rule for one round and end to end; and a defect would be seen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from helpers.chi_square import chi_square
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import Pair, random_base, random_drafter
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtp_extract.errors import DrafterError
from mtp_extract.speculate import loop
from mtp_extract.speculate.drafts import AdaptiveDrafts, Drafts, DraftTree
from mtp_extract.speculate.loop import Sampling, SpeculativeGenerator, accept_drafts, draw

ROUNDS, DRAFTS = 5_000, 2
CALM = 1e-3  # the p-value that a right rule stays above; seeds are fixed
SAMPLES, LENGTH = 1000, 4
SAMPLING = Sampling(temperature=1.1, top_k=3, top_p=0.95)
PROMPT = (1, 2, 3)
Exact = dict[tuple[int, ...], float]


def toy(vocabulary: int = 6) -> tuple[Tensor, Tensor]:
    """Distributions p [K + 1, V] and q [K, V] that differ a good deal; some tokens are impossible in one of them."""
    g = torch.Generator().manual_seed(5)
    p = torch.randn(DRAFTS + 1, vocabulary, generator=g).mul(1.2).softmax(-1)
    q = torch.randn(DRAFTS, vocabulary, generator=g).mul(1.2).softmax(-1)
    p[:, 0], q[:, 1] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def test_acceptance_is_one_minus_the_distance() -> None:
    """The chance of acceptance is the overlap of p and q: the rule rejects no more than it must."""
    p, q = toy()
    random = torch.Generator().manual_seed(3)
    drafts = draw(q[0].expand(ROUNDS, -1), random)[:, None]
    held = sum(int(accept_drafts(p[:2], one, [q[:1]], random)[0]) for one in drafts) / ROUNDS
    assert held == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=0.025)


def test_equal_distributions_accept_everything() -> None:
    p, _ = toy()
    rows = [row[None] for row in p[:DRAFTS]]
    for seed in range(50):
        accepted, _ = accept_drafts(p, torch.tensor([2, 3]), rows, torch.Generator().manual_seed(seed))
        assert int(accepted) == DRAFTS


@pytest.mark.parametrize("who", ["drafter", "base"])
def test_logits_that_are_no_numbers_are_an_error_where_tokens_are_drawn(who: str) -> None:
    base = random_base()
    drafter = random_drafter(base)
    damaged = drafter.final_norm.weight if who == "drafter" else base.model.norm.weight
    with torch.no_grad():
        damaged.fill_(torch.nan)
    with pytest.raises(DrafterError, match="finite logits"):
        SpeculativeGenerator(base, drafter).generate([3, 4, 5], max_new_tokens=8, drafts=2, temperature=1.0)


def test_draw_never_takes_an_impossible_token() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    random = torch.Generator().manual_seed(0)
    found = torch.bincount(draw(weights.expand(5_000, -1), random), minlength=5)
    assert found[[0, 2, 4]].sum() == 0
    assert chi_square(found.tolist(), weights.tolist()) > CALM
    assert draw(torch.tensor([[0.0, 1e-30, 0.0]]), random).tolist() == [1]


def test_warping_is_that_of_transformers() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1)) * 3
    scores = TopPLogitsWarper(0.6)(None, TopKLogitsWarper(9)(None, TemperatureLogitsWarper(1.3)(None, logits)))
    torch.testing.assert_close(Sampling(1.3, 9, 0.6).compute_probabilities(logits), scores.softmax(-1))
    torch.testing.assert_close(Sampling(2).compute_probabilities(logits), (logits / 2).softmax(-1))


@pytest.mark.parametrize("temperature", [1e-8, 5e-324])
def test_near_zero_is_greedy(pair: Pair, temperature: float) -> None:
    prompt = pair.prompts()[0]
    result = pair.generator.generate(prompt, max_new_tokens=12, temperature=temperature, top_k=3, top_p=0.9)
    assert result.tokens == pair.alone(prompt, 12)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": -1}, {"top_p": 1.5}],
    ids=str,
)
def test_options_out_of_range(pair: Pair, wrong: dict[str, Any]) -> None:
    """As transformers has them."""
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}"):
        pair.generator.generate((2, 3), **{"temperature": 1.0, **wrong})


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
def compute_exact() -> Exact:
    """The base's probability of every continuation, from plain forwards over all prefixes."""
    base = generator("mtp").base
    probabilities: Exact = {(): 1.0}
    for _ in range(LENGTH):
        longer: Exact = {}
        texts = torch.tensor([PROMPT + prefix for prefix in probabilities])
        with torch.inference_mode():
            rows = SAMPLING.compute_probabilities(base.logits(base.feed(texts).hidden[:, -1]))
        for (prefix, reached), row in zip(probabilities.items(), rows, strict=True):
            for token in row.nonzero().flatten().tolist():
                longer[(*prefix, token)] = reached * float(row[token])
        probabilities = longer
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    return probabilities


def compute_p_value(kind: str, drafts: Drafts) -> float:
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(SAMPLES):
        made = generator(kind).generate(
            PROMPT, max_new_tokens=LENGTH, drafts=drafts, **dataclasses.asdict(SAMPLING), stop_token_ids=[], seed=seed
        )
        seen[made.tokens] += 1
        accepted += made.accepted
    assert set(seen) <= set(compute_exact()), "a continuation the base gives no probability"
    assert 0.05 * SAMPLES < accepted < 2 * SAMPLES, "drafts are to be accepted and rejected"
    common = [tokens for tokens, share in compute_exact().items() if share * SAMPLES >= 5]
    rare = [tokens for tokens in compute_exact() if tokens not in set(common)]
    observed = [seen[tokens] for tokens in common] + [sum(seen[tokens] for tokens in rare)]
    expected = [compute_exact()[tokens] for tokens in common] + [sum(compute_exact()[tokens] for tokens in rare)]
    assert len(common) > 8
    total = sum(expected)
    return chi_square(observed, [share / total for share in expected])


@pytest.mark.parametrize("drafts", [3, DraftTree.parse("3x2"), AdaptiveDrafts(most=3, cost_ratio=0.05)], ids=str)
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_sampled_text_has_the_distribution_of_the_base(kind: str, drafts: Drafts) -> None:
    assert compute_p_value(kind, drafts) > 1e-3


def test_drafts_not_drawn_from_their_distribution_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: drafts are the drafter's argmax, but judged as if drawn."""
    draft = loop._GrowingText._draft

    def draft_likeliest(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(loop, "draw", lambda weights, random: weights.argmax(-1))
            return draft(*arguments)

    monkeypatch.setattr(loop._GrowingText, "_draft", draft_likeliest)
    assert compute_p_value("mtp", 3) < 1e-6
