"""States made for tokens that text seldom or never leads to: those of text, moved until the token is the choice.

A state is moved along the difference of two rows of the dense head, that of the token and that of what is chosen now,
as the covariance of the drafter's states stretches it: the least move, as such states lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.ordered import Used

_LOOKS = 12  # at what the dense head chooses, between moves
_LEAST_LOOKS = 4
_PRODUCTS = 1 << 37  # multiplications that all looks may take
_GAPS_OF = 256  # states that the usual distance of the best two logits is found from
_COVARIANCE_OF = 1 << 14
_LEAST = 1e-9


def made_states(head: Tensor, used: Used, each: int, seed: int, *, sure: bool) -> Used:
    """States made for every token, in the type of ``used.states``; ``choices`` are what they were made for.

    Where the vocabulary is too large to look at what is chosen, states are moved once, past what was chosen before:
    those that must be ``sure`` are then made for a part of the tokens.

    Args:
        head: F32 [V, width], the dense head.
        used: of text; what they are made of.
        each: how many for a token, at most.
        seed: of what each is made of.
        sure: leave out those in which the dense head chooses otherwise after all. In a small vocabulary they always
            are.
    """
    tokens = torch.arange(len(head)).repeat_interleave(each)
    looks = min(_LOOKS, _PRODUCTS // (head.numel() * len(tokens)))
    if looks < _LEAST_LOOKS:
        looks = _LEAST_LOOKS if sure else 0
        tokens = tokens[:: max(1, -(-looks * head.numel() * len(tokens) // _PRODUCTS))]
    from_ = torch.randint(len(used.states), (len(tokens),), generator=torch.Generator().manual_seed(seed))
    states, rivals = used.states[from_], used.choices[from_]
    covariance = torch.cov(used.states[:: -(-len(used.states) // _COVARIANCE_OF)].float().T)
    gap = _usual_gap(head, used.states)
    right = torch.ones(len(tokens), dtype=torch.bool)
    for rows in torch.split(torch.arange(len(tokens)), max(1, LOGITS_AT_ONCE // len(head))):
        wanted, rival, state = tokens[rows], rivals[rows], states[rows].float()
        for look in range(max(1, looks)):
            axis = head[wanted] - head[rival]
            stretched = axis @ covariance
            missing = (gap - (axis * state).sum(dim=1)).clamp(min=0) / (axis * stretched).sum(dim=1).clamp(min=_LEAST)
            state += missing[:, None] * stretched
            if look < looks:
                logits = state @ head.T
                own = logits.gather(1, wanted[:, None]).squeeze(1)
                best, rival = logits.scatter(1, wanted[:, None], -torch.inf).max(dim=1)
                right[rows] = own > best
        states[rows] = state.to(states)
    return Used(states[right], tokens[right], torch.arange(int(right.sum())))


def _usual_gap(head: Tensor, states: Tensor) -> float:
    """The median distance of the best two logits."""
    best = (states[:: -(-len(states) // _GAPS_OF)].float() @ head.T).topk(2, dim=1).values
    return float((best[:, 0] - best[:, 1]).median())
