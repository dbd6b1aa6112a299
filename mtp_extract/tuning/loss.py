"""The training losses and their gradients, computed for a few rows of logits at a time.

A row is a drafter state after the final norm, with the position of a text that it should predict. With a vocabulary of
262 144, a row of F32 logits takes a megabyte, and a batch has thousands of rows. So only a few rows have logits at a
time, and their gradient is computed at once in closed form (autograd takes 1.7 to 2.1 times as long). The base's logits
are computed once for a position, however many rows predict it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor

LOGITS_AT_ONCE = 1 << 24  # numbers in a chunk of logits: 64 MiB in F32; a handful of chunks exist at a time

OBJECTIVES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"mixed": {"ce": 0.6, "tv": 0.4}, "ce": {"ce": 1.0}, "kl": {"kl": 1.0}, "tv": {"tv": 1.0}}
)
"""Share of each loss by objective: ``ce`` is the cross-entropy on the base's choice, ``kl`` the divergence from the
base's distribution, ``tv`` the probability of a rejection. The first loss defines the agreement that is reported."""


def choose_objective(name: str, temperature: float) -> Mapping[str, float]:
    """Return the losses of the objective ``name``; for sampled serving, ``mixed`` weights ``tv`` more."""
    return {"tv": 0.7, "ce": 0.3} if name == "mixed" and temperature else OBJECTIVES[name]


def compute_cross_entropy_gradient(logits: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the hits, F32 [rows] each, and overwrite ``logits`` F32 [rows, V] with the gradient.

    ``choices`` int64 [rows] are the base's argmax c. Loss: −log q(c). Gradient: q − onehot(c). Hit: argmax q = c.
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


def compute_divergence_gradient(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the overlap, F32 [rows] each, and overwrite ``logits`` F32 [rows, V] with the gradient.

    ``log_p`` F32 [rows, V] are the base's log probabilities; they are overwritten too. Loss: Σ p·(log p − log q).
    Gradient: q − p. Overlap: Σ min(p, q).
    """
    logits -= logits.logsumexp(-1, keepdim=True)
    loss = torch.einsum("rv,rv->r", log_p.exp(), log_p - logits)
    q, p = logits.exp_(), log_p.exp_()
    overlap = torch.minimum(p, q).sum(-1)
    q -= p
    return loss, overlap


def compute_variation_gradient(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """The same as :func:`compute_divergence_gradient` for another loss.

    Loss: 1 − Σ min(p, q). Gradient: q·(g − Σ q·g) with g = ½ sign(q − p). Overlap: Σ min(p, q).
    """
    logits -= logits.logsumexp(-1, keepdim=True)
    q, p = logits.exp_(), log_p.exp_()
    overlap = torch.minimum(p, q).sum(-1)
    g = torch.sub(q, p, out=p).sign_().mul_(0.5)
    g -= torch.einsum("rv,rv->r", q, g)[:, None]
    q *= g
    return 1 - overlap, overlap


def find_argmax_tokens(logits: Callable[[Tensor], Tensor], states: Tensor, vocab_size: int) -> Tensor:
    """Return the argmax of ``logits(states)`` for ``states`` [N, width], int64 [N]; computed in chunks."""
    pieces = torch.split(states, max(1, LOGITS_AT_ONCE // vocab_size))
    return torch.cat([logits(piece).argmax(-1) for piece in pieces])


_GRADIENTS = {"ce": compute_cross_entropy_gradient, "kl": compute_divergence_gradient, "tv": compute_variation_gradient}


@dataclass(frozen=True)
class TrainingRows:
    """The targets and the objective of N rows; P positions of the base, V tokens."""

    targets: Tensor  # int64 [N], the position that a row predicts
    choices: Tensor  # int64 [P], the base's argmax
    logits: Callable[[Tensor], Tensor]  # int64 [n] positions → F32 [n, V], soft-capped as the base's are; overwritten
    weight: float  # of every row
    ce_counts: Tensor  # bool [N], whether ``ce`` counts there
    objective: Mapping[str, float]  # shares of the losses
    cap: float | None = None  # c of the soft cap c · tanh(x / c) on the drafter's logits
    temperature: float = 1.0  # by which both logits are divided; 1 for cross-entropy

    def compute_weights(self, piece: Tensor, loss: str, share: float) -> Tensor:
        """Return the weight of each of the rows ``piece`` in ``loss``, which has this ``share``, F32 [n]."""
        weights = share * torch.full((len(piece),), self.weight, device=self.ce_counts.device)
        return weights * self.ce_counts[piece] if loss == "ce" else weights


@torch.no_grad()
def compute_gradient(rows: TrainingRows, states: Tensor, head: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute the loss of ``rows`` and its gradient.

    Args:
        states: [N, width], after the final norm.
        head: [V, width].

    Returns:
        The weighted loss, F32 []; the agreement of each row, F32 [N]; the gradients by ``states`` and, if it is
        trained, by ``head``. The agreement is 1 where the argmax is the base's, else 0; where ``kl`` or ``tv`` comes
        first, it is the probability that a drawn draft is accepted.
    """
    loss = torch.zeros((), device=states.device)
    agreement = torch.zeros(len(states), device=states.device)
    of_states = torch.zeros_like(states)
    of_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
    for piece in torch.split(torch.argsort(rows.targets, stable=True), max(1, LOGITS_AT_ONCE // len(head))):
        gradient, part, agreement[piece] = _compute_logits_gradient(rows, piece, states[piece], head)
        loss += part
        of_states[piece] = gradient.to(head.dtype) @ head
        if of_head is not None:
            of_head.addmm_(gradient.T, states[piece].float())
        # Free it before the next piece, which takes as much memory.
        del gradient
    return loss, agreement, [of_states] if of_head is None else [of_states, of_head.to(head.dtype)]


def _compute_logits_gradient(
    rows: TrainingRows, piece: Tensor, states: Tensor, head: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for the rows ``piece`` the gradient by their logits F32 [n, V], their loss [], and their agreement [n].

    The rows are in order of position; ``states`` [n, width] are theirs.
    """
    log_p = None
    if rows.objective.keys() != {"ce"}:
        # Before the drafter's logits exist: computing the base's takes several times their memory.
        log_p = _compute_base_log_probabilities(rows, rows.targets[piece])
    logits = (states @ head.T).float()
    tanh = None
    if rows.cap is not None:
        tanh = logits.div_(rows.cap).tanh_()
        logits = tanh * rows.cap
    logits.div_(rows.temperature)

    gradient, loss, agreement = _compute_objective_gradient(rows, piece, logits, log_p)
    if tanh is not None:
        # The derivative of c · tanh(x / c) is 1 - tanh².
        gradient.mul_(tanh.square_().neg_().add_(1))
    return gradient, loss, agreement


def _compute_objective_gradient(
    rows: TrainingRows, piece: Tensor, logits: Tensor, log_p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for ``logits`` after cap and temperature; the agreement is that of the objective's first loss."""
    loss = torch.zeros((), device=logits.device)
    gradients: list[Tensor] = []
    agreements: list[Tensor] = []
    for number, (name, share) in enumerate(rows.objective.items()):
        # A loss overwrites its logits: all but the last get a copy.
        gradient = logits.clone() if number < len(rows.objective) - 1 else logits
        aim = rows.choices[rows.targets[piece]] if log_p is None or name == "ce" else log_p
        losses, agreement = _GRADIENTS[name](gradient, aim)
        weights = rows.compute_weights(piece, name, share)
        loss += losses @ weights
        gradient *= (weights / rows.temperature)[:, None]
        gradients.append(gradient)
        agreements.append(agreement)
    return reduce(Tensor.add_, gradients), loss, agreements[0]


def _compute_base_log_probabilities(rows: TrainingRows, targets: Tensor) -> Tensor:
    """Return the base's log p at the sorted positions ``targets`` [n], F32 [n, V]; each is computed once."""
    positions, row_of = torch.unique_consecutive(targets, return_inverse=True)
    log_p = torch.log_softmax(rows.logits(positions).to(targets.device).float().div_(rows.temperature), dim=-1)
    return log_p[row_of] if len(positions) < len(targets) else log_p
