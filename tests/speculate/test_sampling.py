"""The rule that accepts and replaces drafts preserves the base's distribution, and the test would see if it did not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.chi_square import chi_square
from helpers.random_pairs import random_base, random_drafter
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtp_extract.errors import DrafterError, MtpExtractError
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.sampling import Sampling, Verdict, draw, verify_greedy, verify_sampled

ROWS = 600_000
DRAFTS = 3
CALM, ALARM = 1e-3, 1e-6
"""p-values: a right rule stays above the first (seeds are fixed), a planted defect falls below the second."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]


def toy(vocabulary: int = 8) -> tuple[Tensor, Tensor]:
    """Distributions p [K + 1, V] and q [K, V] that differ a good deal; some tokens are impossible in one of them."""
    g = torch.Generator().manual_seed(5)
    p = torch.randn(DRAFTS + 1, vocabulary, generator=g).mul(1.2).softmax(-1)
    q = torch.randn(DRAFTS, vocabulary, generator=g).mul(1.2).softmax(-1)
    p[:, 0], q[:, 1] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def p_values(rule: Rule, seed: int = 0) -> list[float]:
    """Of the token at each place of a round, among the rounds that got there; place 0 is reached by all."""
    p, q = toy()
    g = torch.Generator().manual_seed(seed)
    uniform = torch.rand(ROWS, 2 * DRAFTS + 1, generator=g, dtype=torch.float64)
    drafts = torch.stack([draw(q[i].expand(ROWS, -1), uniform[:, i]) for i in range(DRAFTS)], dim=1)
    limits = torch.full((ROWS,), DRAFTS)
    verdict = rule(p.expand(ROWS, -1, -1), q.expand(ROWS, -1, -1), drafts, limits, uniform[:, DRAFTS:])
    tokens = torch.cat((drafts, torch.zeros(ROWS, 1, dtype=torch.long)), dim=1)
    tokens.scatter_(1, verdict.accepted[:, None], verdict.following[:, None])
    results = []
    for place in range(DRAFTS + 1):
        reached = tokens[verdict.accepted >= place, place]
        results.append(chi_square(torch.bincount(reached, minlength=p.shape[1]).tolist(), p[place].tolist())[1])
    return results


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_output_has_the_distribution_of_the_base(seed: int) -> None:
    assert min(p_values(verify_sampled, seed)) > CALM


def test_acceptance_is_one_minus_the_distance() -> None:
    """The chance of acceptance is the overlap of p and q: the rule rejects no more than it must."""
    p, q = toy()
    g = torch.Generator().manual_seed(3)
    uniform = torch.rand(ROWS, 3, generator=g, dtype=torch.float64)
    drafts = draw(q[0].expand(ROWS, -1), uniform[:, 0])[:, None]
    verdict = verify_sampled(
        p[:2].expand(ROWS, -1, -1), q[:1].expand(ROWS, -1, -1), drafts, torch.ones(ROWS), uniform[:, 1:]
    )
    overlap = float(torch.minimum(p[0], q[0]).sum())
    assert float(verdict.accepted.float().mean()) == pytest.approx(overlap, abs=3e-3)


def lenient(p: Tensor, q: Tensor, drafts: Tensor, limits: Tensor, uniform: Tensor) -> Verdict:
    """Accepts with min(1, p / 0.97 q): about one token in a hundred comes out wrong."""
    return verify_sampled(p, q, drafts, limits, torch.cat((uniform[:, :-1] * 0.97, uniform[:, -1:]), dim=1))


def no_residual(p: Tensor, q: Tensor, drafts: Tensor, limits: Tensor, uniform: Tensor) -> Verdict:
    """Replaces a rejected draft by a draw from p instead of max(0, p - q)."""
    accepted = verify_sampled(p, q, drafts, limits, uniform).accepted
    return Verdict(accepted, draw(p[torch.arange(len(p)), accepted], uniform[:, -1]))


def test_a_defect_of_one_percent_is_seen() -> None:
    p, q = toy()
    excess = torch.minimum(q[0], p[0] / 0.97) - torch.minimum(q[0], p[0])
    rejected = 1 - torch.minimum(p[0], q[0]).sum()
    residual = (p[0] - q[0]).clamp(min=0) / rejected
    distance = float((excess - excess.sum() * residual).abs().sum() / 2)
    assert 0.003 < distance < 0.011, "the planted defect is to be one of about 1 % at most"
    assert p_values(lenient)[0] < ALARM


def test_a_missing_residual_is_seen() -> None:
    assert p_values(no_residual)[0] < ALARM


def test_argmax_drafts_judged_as_drawn_are_seen() -> None:
    """Drafts must be drawn from q for the rule to hold. transformers 5.22 takes q's argmax with this drafter."""

    def judged(p: Tensor, q: Tensor, drafts: Tensor, limits: Tensor, uniform: Tensor) -> Verdict:
        drafts.copy_(q.argmax(-1))
        return verify_sampled(p, q, drafts, limits, uniform)

    assert p_values(judged)[0] < ALARM


def test_drafts_beyond_the_limit_do_not_count() -> None:
    """With a limit of 1 the token after an accepted draft is drawn from p, not from a residual; at most 1 stands."""
    p, q = toy()
    g = torch.Generator().manual_seed(4)
    uniform = torch.rand(ROWS, 2 * DRAFTS + 1, generator=g, dtype=torch.float64)
    drafts = torch.stack([draw(q[i].expand(ROWS, -1), uniform[:, i]) for i in range(DRAFTS)], dim=1)
    verdict = verify_sampled(
        p.expand(ROWS, -1, -1), q.expand(ROWS, -1, -1), drafts, torch.ones(ROWS), uniform[:, DRAFTS:]
    )
    assert int(verdict.accepted.max()) == 1
    second = verdict.following[verdict.accepted == 1]
    assert chi_square(torch.bincount(second, minlength=8).tolist(), p[1].tolist())[1] > CALM


def test_equal_distributions_accept_everything() -> None:
    p, _ = toy()
    uniform = torch.full((1, DRAFTS + 1), 1 - 2**-53, dtype=torch.float64)
    drafts = torch.tensor([[2, 3, 4]])
    verdict = verify_sampled(p[None], p[None, :DRAFTS], drafts, torch.tensor([DRAFTS]), uniform)
    assert verdict.accepted.tolist() == [DRAFTS]


def test_greedy_accepts_the_agreeing_prefix() -> None:
    choices = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 7]])
    verdict = verify_greedy(choices, drafts, torch.tensor([3, 3, 3, 1]))
    assert verdict.accepted.tolist() == [3, 1, 0, 1]
    assert verdict.following.tolist() == [8, 6, 5, 6]
    none = verify_greedy(choices[:, :1], drafts[:, :0], torch.zeros(4))
    assert (none.accepted.tolist(), none.following.tolist()) == ([0] * 4, [5] * 4)


@pytest.mark.parametrize("who", ["drafter", "base"])
def test_logits_that_are_no_numbers_are_an_error_where_tokens_are_drawn(who: str) -> None:
    base = random_base()
    drafter = random_drafter(base)
    damaged = drafter.final_norm.weight if who == "drafter" else base.model.norm.weight
    with torch.no_grad():
        damaged.fill_(torch.nan)
    generator = SpeculativeGenerator(base, drafter)
    with pytest.raises(DrafterError, match="no numbers"):
        generator.generate_batch([[3, 4, 5]], Options(8, 2, Sampling(1.0), stop_token_ids=[]))


def test_draw_never_takes_an_impossible_token() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniform = torch.tensor([0.0, 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert set(draw(weights.expand(4, -1), uniform).tolist()) == {1, 3}
    assert draw(weights[None] * 1e-30, torch.tensor([0.9])).tolist() == [1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, None, None), (1.3, 5, None), (1, None, 0.8), (2, 9, 0.6)]
)
def test_warping_is_that_of_transformers(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1)) * 3
    scores = TemperatureLogitsWarper(float(temperature))(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p else scores
    torch.testing.assert_close(Sampling(temperature, top_k, top_p).probabilities(logits), scores.softmax(-1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.5},
    ],
)
def test_options_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(MtpExtractError, match=f"expected .*{next(iter(wrong))}"):
        Sampling(**wrong)  # type: ignore[arg-type]
