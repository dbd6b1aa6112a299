"""The rule that accepts and replaces drafts preserves the base's distribution, and the test would see if it did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.chi_square import chi_square
from helpers.random_pairs import Pair, random_base, random_drafter
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtp_extract.errors import DrafterError
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.sampling import Sampling, accept_drafts, draw

ROUNDS, DRAFTS = 5_000, 2
CALM = 1e-3  # the p-value that a right rule stays above; seeds are fixed


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
    with pytest.raises(DrafterError, match="no numbers"):
        SpeculativeGenerator(base, drafter).generate([3, 4, 5], max_new_tokens=8, drafts=2, temperature=1.0)


def test_draw_never_takes_an_impossible_token() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    random = torch.Generator().manual_seed(0)
    found = torch.bincount(draw(weights.expand(5_000, -1), random), minlength=5)
    assert found[[0, 2, 4]].sum() == 0
    assert chi_square(found.tolist(), weights.tolist())[1] > CALM
    assert draw(torch.tensor([[0.0, 1e-30, 0.0]]), random).tolist() == [1]


def test_warping_is_that_of_transformers() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1)) * 3
    scores = TopPLogitsWarper(0.6)(None, TopKLogitsWarper(9)(None, TemperatureLogitsWarper(1.3)(None, logits)))
    torch.testing.assert_close(Sampling(1.3, 9, 0.6).probabilities(logits), scores.softmax(-1))
    torch.testing.assert_close(Sampling(2).probabilities(logits), (logits / 2).softmax(-1))


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
