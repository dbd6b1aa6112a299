"""What a drafter is trained for, over rows of its states, a few rows of logits at a time.

A row is a state of the drafter after its final norm that aims at a position of a text. Logits of a vocabulary of
262 144 take a megabyte a row in F32, and a batch has thousands of rows: so logits exist for a few rows at a time only,
and the gradient is made while they do. What this needs beside its inputs and their gradients does not grow with the
rows. The base's own logits are made once for every position, however many rows aim at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 1 << 24
"""Numbers of a chunk of logits: 64 MiB in F32; a handful of such chunks exist at a time."""


@dataclass(frozen=True)
class Teacher:
    """What the base says at positions. P positions, V tokens."""

    choices: Tensor  # int64 [P], its argmax
    # int64 [n] positions → F32 [n, V], soft-capped as the base's are; made anew, as they are overwritten
    logits: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Losses:
    """Of N rows."""

    total: Tensor  # the sum of weight · loss; has a gradient
    # F32 [N], without a gradient: 1 where the argmax is the base's, else 0; or, for objectives over distributions, the
    # probability that a draft drawn here is accepted, Σ min(p, q)
    agreement: Tensor


Scored = tuple[Tensor, Tensor]
"""Loss and agreement, F32 [rows] each."""


@dataclass(frozen=True)
class Term:
    """A loss of rows of logits."""

    over_distributions: bool  # whether it wants the base's distribution rather than its choice
    # logits F32 [rows, V], overwritten with the loss's derivative; the base's choices int64 [rows], or its log
    # probabilities F32 [rows, V], overwritten too
    score: Callable[[Tensor, Tensor], Scored]


@dataclass(frozen=True)
class Objective:
    """Terms and the share of each in the sum; the agreement that is told is the first one's."""

    about: str  # one line for users
    terms: tuple[tuple[float, Term], ...]

    @property
    def over_distributions(self) -> bool:
        """Whether a term wants the base's distribution."""
        return any(term.over_distributions for _, term in self.terms)


def _cross_entropy(logits: Tensor, choices: Tensor) -> Scored:
    """−log q(c). Its derivative is q less one at c."""
    row = torch.arange(len(logits), device=logits.device)
    hits = (logits.argmax(-1) == choices).float()
    logits -= logits.amax(-1, keepdim=True)
    chosen = logits[row, choices]
    logits.exp_()
    total = logits.sum(-1, keepdim=True)
    logits /= total
    logits[row, choices] -= 1
    return total.squeeze(-1).log() - chosen, hits


def _divergence(logits: Tensor, teacher: Tensor) -> Scored:
    """Σ p·(log p − log q). Its derivative is q − p."""
    logits -= logits.logsumexp(-1, keepdim=True)
    loss = torch.einsum("rv,rv->r", teacher.exp(), teacher - logits)
    q, p = logits.exp_(), teacher.exp_()
    overlap = torch.minimum(p, q).sum(-1)
    q -= p
    return loss, overlap


def _variation(logits: Tensor, teacher: Tensor) -> Scored:
    """1 − Σ min(p, q). Its derivative is q·(g − Σ q·g), with g = ½ sign(q − p)."""
    logits -= logits.logsumexp(-1, keepdim=True)
    q, p = logits.exp_(), teacher.exp_()
    overlap = torch.minimum(p, q).sum(-1)
    g = torch.sub(q, p, out=p).sign_().mul_(0.5)
    g -= torch.einsum("rv,rv->r", q, g)[:, None]
    q *= g
    return 1 - overlap, overlap


_CHOICE = Term(False, _cross_entropy)
_DIVERGENCE, _VARIATION = Term(True, _divergence), Term(True, _variation)

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "mixed": Objective("ce and tv together, for both ways of serving", ((0.6, _CHOICE), (0.4, _VARIATION))),
        "ce": Objective("cross-entropy on the base's choice, for greedy text", ((1.0, _CHOICE),)),
        "kl": Objective("divergence from the base's distribution, for sampled text", ((1.0, _DIVERGENCE),)),
        "tv": Objective("the probability of a rejection, for sampled text", ((1.0, _VARIATION),)),
    }
)
"""By name."""

_MIXED_FOR_SAMPLED = Objective("tv and ce together", ((0.7, _VARIATION), (0.3, _CHOICE)))


def objective_for(name: str, temperature: float) -> Objective:
    """The objective of that name; ``mixed`` leans towards the way of serving."""
    return _MIXED_FOR_SAMPLED if name == "mixed" and temperature else OBJECTIVES[name]


def chunked_loss(
    states: Tensor,
    head: Tensor,
    teacher: Teacher,
    where: Tensor,
    weights: Tensor,
    objective: Objective,
    *,
    choosing: Tensor | None = None,
    cap: float | None = None,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Losses:
    """The weighted sum of ``objective`` over rows.

    Args:
        states: [N, width], after the final norm.
        head: [V, width].
        where: int64 [N], the teacher's position that a row aims at.
        weights: F32 [N], of the rows.
        choosing: bool [N], the rows on which the base's choice is learned; None for all. Others count only towards
            terms over distributions.
        cap: c of the soft cap c · tanh(x / c) on the drafter's logits.
        temperature: both distributions are those of logits divided by it; 1 for cross-entropy.
        logits_at_once: most logits held in one piece (numbers, not bytes).
    """
    weights = weights.float()
    chosen = weights if choosing is None else weights * choosing
    job = _Job(teacher, where, weights, chosen, objective, cap, temperature, logits_at_once)
    total, agreement = _Chunked.apply(states, head, job)  # type: ignore[no-untyped-call]  # untyped in torch
    return Losses(total, agreement)


@dataclass(frozen=True)
class _Job:
    teacher: Teacher
    where: Tensor
    weights: Tensor  # of terms over distributions
    chosen: Tensor  # of the others
    objective: Objective
    cap: float | None
    temperature: float
    logits_at_once: int

    def chunks(self, vocabulary: int) -> Iterator[Tensor]:
        """Rows, those that aim at one position together, as many as fit."""
        order = torch.argsort(self.where, stable=True)
        _, sizes = torch.unique_consecutive(self.where[order], return_counts=True)
        ends = sizes.cumsum(0).tolist()
        most = max(1, self.logits_at_once // vocabulary)
        first = last = 0
        for end in ends:
            if end - first > most and last > first:
                yield order[first:last]
                first = last
            last = end
        if last > first:
            yield order[first:last]

    def wanted(self, rows: Tensor) -> list[Tensor]:
        """What the base says where ``rows`` aim, as each term of the objective wants it; of each position once."""
        positions = self.where[rows]
        return [
            self._distributions(positions) if term.over_distributions else self.teacher.choices[positions]
            for _, term in self.objective.terms
        ]

    def _distributions(self, positions: Tensor) -> Tensor:
        once, back = torch.unique_consecutive(positions, return_inverse=True)
        logits = self.teacher.logits(once).to(positions.device).float()
        if self.temperature != 1:
            logits /= self.temperature
        logits = torch.log_softmax(logits, dim=-1)
        return logits[back] if len(once) < len(positions) else logits


def _gradient(job: _Job, rows: Tensor, chunk: Tensor, head: Tensor, total: Tensor, agreement: Tensor) -> Tensor:
    """The derivative by the logits of ``chunk``, the states of ``rows``; their loss is added to ``total``."""
    # Before the drafter's logits are there: making the base's takes several times their memory.
    wanted = job.wanted(rows)
    logits = (chunk @ head.T).float()
    bent = None
    if job.cap is not None:
        bent = logits.div_(job.cap).tanh_()
        logits = bent * job.cap
    if job.temperature != 1:
        logits /= job.temperature
    gradient: Tensor | None = None
    for number, ((share, term), said) in enumerate(zip(job.objective.terms, wanted, strict=True)):
        own = logits if number == len(job.objective.terms) - 1 else logits.clone()
        loss, agrees = term.score(own, said)
        weights = share * (job.weights if term.over_distributions else job.chosen)[rows]
        total += loss @ weights
        own *= (weights / job.temperature)[:, None]
        gradient = own if gradient is None else gradient.add_(own)
        if not number:
            agreement[rows] = agrees
    assert gradient is not None
    return gradient if bent is None else gradient.mul_(bent.square_().neg_().add_(1))


class _Chunked(torch.autograd.Function):
    """The gradient is made in the forward, chunk by chunk, where the logits are at hand."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        of_states, of_head = ctx.needs_input_grad[:2]
        total = torch.zeros((), device=states.device)
        agreement = torch.zeros(len(states), device=states.device)
        states_grad = torch.zeros_like(states) if of_states else None
        head_grad = torch.zeros_like(head, dtype=torch.float32) if of_head else None
        for rows in job.chunks(len(head)):
            chunk = states[rows]
            gradient = _gradient(job, rows, chunk, head, total, agreement)
            if states_grad is not None:
                states_grad[rows] = gradient.to(head.dtype) @ head
            if head_grad is not None:
                head_grad.addmm_(gradient.T, chunk.float())
            del gradient
        ctx.gradients, ctx.head_dtype = (states_grad, head_grad), head.dtype
        ctx.mark_non_differentiable(agreement)
        return total, agreement

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states_grad, head_grad = ctx.gradients
        # Whoever keeps the loss shall not keep these: of the head, one is as large as the head in F32.
        del ctx.gradients
        by = gradients[0]
        return (
            None if states_grad is None else states_grad.mul_(by.to(states_grad.dtype)),
            None if head_grad is None else head_grad.mul_(by).to(ctx.head_dtype),
            None,
        )
