"""What a drafter is trained for, over rows of its states, a few rows of logits at a time.

A row is a state of the drafter after its final norm that aims at a position of a text. Logits of a vocabulary of
262 144 take a megabyte a row in F32, and a batch has thousands of rows: so logits exist for a few rows at a time only,
and the gradient is made while they do, in closed form (autograd takes 1.7 to 2.1 times as long). What this needs beside
its inputs and their gradients does not grow with the rows. The base's own logits are made once for every position,
however many rows aim at it.
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

OBJECTIVES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"mixed": {"ce": 0.6, "tv": 0.4}, "ce": {"ce": 1.0}, "kl": {"kl": 1.0}, "tv": {"tv": 1.0}}
)
"""Name → the share of each loss: ``ce``, cross-entropy on the base's choice; ``kl``, the divergence from the base's
distribution; ``tv``, the probability of a rejection. The agreement that is shown is the first one's."""

_MIXED_FOR_SAMPLED = MappingProxyType({"tv": 0.7, "ce": 0.3})


def objective_for(name: str, temperature: float) -> Mapping[str, float]:
    """The objective of that name; ``mixed`` leans towards the way of serving."""
    return _MIXED_FOR_SAMPLED if name == "mixed" and temperature else OBJECTIVES[name]


def cross_entropy_gradient(logits: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """−log q(c) and whether c is the argmax, F32 [rows] each; ``logits`` become the derivative, q less one at c.

    Args:
        logits: F32 [rows, V].
        choices: int64 [rows], the base's.
    """
    row = torch.arange(len(logits), device=logits.device)
    hits = (logits.argmax(-1) == choices).float()
    logits -= logits.amax(-1, keepdim=True)
    chosen = logits[row, choices]
    logits.exp_()
    total = logits.sum(-1, keepdim=True)
    logits /= total
    logits[row, choices] -= 1
    return total.squeeze(-1).log() - chosen, hits


def divergence_gradient(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p·(log p − log q) and Σ min(p, q), F32 [rows] each; ``logits`` become the derivative, q − p.

    Args:
        logits: F32 [rows, V].
        log_p: F32 [rows, V], the base's log probabilities; overwritten.
    """
    logits -= logits.logsumexp(-1, keepdim=True)
    loss = torch.einsum("rv,rv->r", log_p.exp(), log_p - logits)
    q, p = logits.exp_(), log_p.exp_()
    overlap = torch.minimum(p, q).sum(-1)
    q -= p
    return loss, overlap


def variation_gradient(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """1 − Σ min(p, q) and Σ min(p, q), F32 [rows] each; ``logits`` become the derivative, q·(g − Σ q·g), with
    g = ½ sign(q − p).

    Args:
        logits, log_p: as of :func:`divergence_gradient`.
    """
    logits -= logits.logsumexp(-1, keepdim=True)
    q, p = logits.exp_(), log_p.exp_()
    overlap = torch.minimum(p, q).sum(-1)
    g = torch.sub(q, p, out=p).sign_().mul_(0.5)
    g -= torch.einsum("rv,rv->r", q, g)[:, None]
    q *= g
    return 1 - overlap, overlap


_GRADIENTS: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = MappingProxyType(
    {"ce": cross_entropy_gradient, "kl": divergence_gradient, "tv": variation_gradient}
)


@dataclass(frozen=True)
class Rows:
    """What N rows of states aim at. P positions of the base, V tokens."""

    where: Tensor  # int64 [N], the position that a row aims at
    choices: Tensor  # int64 [P], the base's argmax
    # int64 [n] positions → F32 [n, V], soft-capped as the base's are; made anew, as they are overwritten
    logits: Callable[[Tensor], Tensor]
    weights: Tensor  # F32 [N]
    choosing: Tensor  # bool [N], whether ``ce`` counts there

    def pieces(self, vocabulary: int, logits_at_once: int) -> Iterator[Tensor]:
        """Numbers of rows, those that aim at one position together, as many as fit."""
        order = torch.argsort(self.where, stable=True)
        _, sizes = torch.unique_consecutive(self.where[order], return_counts=True)
        most, first, last = max(1, logits_at_once // vocabulary), 0, 0
        for end in sizes.cumsum(0).tolist():
            if end - first > most and last > first:
                yield order[first:last]
                first = last
            last = end
        if last > first:
            yield order[first:last]

    def log_probabilities(self, rows: Tensor, temperature: float) -> Tensor:
        """F32 [rows, V], the base's where ``rows`` aim; made once for each position."""
        positions = self.where[rows]
        once, back = torch.unique_consecutive(positions, return_inverse=True)
        logits = self.logits(once).to(positions.device).float()
        if temperature != 1:
            logits /= temperature
        found = torch.log_softmax(logits, dim=-1)
        return found[back] if len(once) < len(positions) else found


def chunked_loss(
    states: Tensor,
    head: Tensor,
    rows: Rows,
    objective: Mapping[str, float],
    *,
    cap: float | None = None,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the losses of ``objective`` over rows, which has a gradient; and how well each row agrees.

    Args:
        states: [N, width], after the final norm.
        head: [V, width].
        cap: c of the soft cap c · tanh(x / c) on the drafter's logits.
        temperature: both distributions are those of logits divided by it; 1 for cross-entropy.
        logits_at_once: most logits held in one piece (numbers, not bytes).

    Returns:
        A number, and F32 [N]: 1 where the argmax is the base's, else 0; or, where ``kl`` or ``tv`` comes first, the
        probability that a draft drawn here is accepted.
    """
    job = _Job(rows, objective, cap, temperature, logits_at_once)
    total, agreement = _Chunked.apply(states, head, job)  # type: ignore[no-untyped-call]  # untyped in torch
    return total, agreement


@dataclass(frozen=True)
class _Job:
    rows: Rows
    objective: Mapping[str, float]
    cap: float | None
    temperature: float
    logits_at_once: int

    def gradient(self, piece: Tensor, states: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows ``piece`` with ``states``: the derivative by their logits, their loss, and their agreement."""
        # Before the drafter's logits are there: making the base's takes several times their memory.
        wanted = [self._wanted(name, piece) for name in self.objective]
        logits = (states @ head.T).float()
        bent = None
        if self.cap is not None:
            bent = logits.div_(self.cap).tanh_()
            logits = bent * self.cap
        if self.temperature != 1:
            logits /= self.temperature
        total, gradient, agreement = torch.zeros((), device=states.device), None, None
        last = len(self.objective) - 1
        for number, ((name, share), said) in enumerate(zip(self.objective.items(), wanted, strict=True)):
            own = logits if number == last else logits.clone()
            loss, agrees = _GRADIENTS[name](own, said)
            weights = share * self.rows.weights[piece]
            if name == "ce":
                weights = weights * self.rows.choosing[piece]
            total += loss @ weights
            own *= (weights / self.temperature)[:, None]
            gradient = own if gradient is None else gradient.add_(own)
            agreement = agrees if agreement is None else agreement
        assert gradient is not None and agreement is not None
        return gradient if bent is None else gradient.mul_(bent.square_().neg_().add_(1)), total, agreement

    def _wanted(self, name: str, piece: Tensor) -> Tensor:
        if name == "ce":
            return self.rows.choices[self.rows.where[piece]]
        return self.rows.log_probabilities(piece, self.temperature)


class _Chunked(torch.autograd.Function):
    """The gradient is made in the forward, piece by piece, where the logits are at hand."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        of_states, of_head = ctx.needs_input_grad[:2]
        total = torch.zeros((), device=states.device)
        agreement = torch.zeros(len(states), device=states.device)
        states_grad = torch.zeros_like(states) if of_states else None
        head_grad = torch.zeros_like(head, dtype=torch.float32) if of_head else None
        for piece in job.rows.pieces(len(head), job.logits_at_once):
            gradient, loss, agreement[piece] = job.gradient(piece, states[piece], head)
            total += loss
            if states_grad is not None:
                states_grad[piece] = gradient.to(head.dtype) @ head
            if head_grad is not None:
                head_grad.addmm_(gradient.T, states[piece].float())
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
