"""Choosing tokens: the distribution they are drawn from, the draw, and the rule that accepts or rejects drafts.

Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): a draft x, *drawn
from* the drafter's distribution q, is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced
by a draw from max(0, p - q), normalized. What comes out is then distributed as p, whatever q is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

NOT_DRAWN = -1  # in place of a token, where weights are no numbers


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the same for base and drafter. transformers raises ValueError for what is out of range."""

    temperature: float = 0.0  # logits are divided by it. 0 is greedy: the argmax, and nothing is random.
    top_k: int | None = None  # keep the k most likely tokens; None keeps all
    top_p: float | None = None  # keep the smallest set of most likely tokens whose mass reaches it; None keeps all

    @property
    def greedy(self) -> bool:
        """Whether nothing is random. Logits of Gemma 4 are below 30: the likeliest token then has all probability."""
        return 0 <= self.temperature < 1e-5

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that tokens are drawn from: F32 [n, vocabulary], of ``logits`` of the same shape.

        By transformers' own warpers: temperature, then top-k, then top-p. Not where greedy.
        """
        warp: Any = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        warp += [] if self.top_k is None else [TopKLogitsWarper(self.top_k)]
        warp += [] if self.top_p is None else [TopPLogitsWarper(float(self.top_p))]
        no_text: Any = None  # these warpers do not look at it
        warped: Tensor = warp(no_text, logits.float())
        return warped.softmax(-1)

    def choose(self, logits: Tensor, random: torch.Generator) -> Tensor:
        """A token for each row of ``logits`` [n, vocabulary]: int64 [n]."""
        return logits.argmax(-1) if self.greedy else draw(self.probabilities(logits), random)


def draw(weights: Tensor, random: torch.Generator) -> Tensor:
    """A token for each row of ``weights`` [n, vocabulary], of any sum: int64 [n].

    The least of exponential waiting times, each of its weight's rate. No weight is looked at in Python, which would
    wait for the device; where their sum is no number above 0, the token is :data:`NOT_DRAWN`.
    """
    token = (weights / torch.empty_like(weights).exponential_(generator=random)).argmax(-1)
    total = weights.sum(-1)
    return torch.where((total > 0) & total.isfinite(), token, NOT_DRAWN)


def accept_drafts(p: Tensor, drafts: Tensor, q: Sequence[Tensor], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """How many drafts of a chain stand, and the token after them: int64 [] each.

    Args:
        p: [K + 1, vocabulary], the base's distribution after the pending token and after each draft.
        drafts: int64 [K].
        q: of each draft, [1, vocabulary], the distribution it was drawn from.
    """
    # After the last draft nothing was drawn that could be rejected.
    drawn_from = torch.cat((*q, torch.zeros_like(p[:1])))
    index = drafts[:, None]
    chance = torch.rand(len(drafts), 1, generator=random, device=p.device)
    accepted = (chance * drawn_from[:-1].gather(1, index) < p[:-1].gather(1, index)).cumprod(0).sum()
    residual = (p[accepted] - drawn_from[accepted]).clamp(min=0)
    # p <= q everywhere means p = q: the residual then vanishes but for rounding, and p is its limit. Where q is no
    # number, neither is it, and nothing is drawn.
    return accepted, draw(torch.where(residual.sum() <= 0, p[accepted], residual)[None], random)[0]
