"""The rounds a drafter is trained on: from anchors of a text, K of its own steps.

Anchors, positions, masks and states are those of :mod:`mtp_extract.speculate.teacher`; an EAGLE-3 head reads its own
state, and K and V of its own. But every step reads the text's token, which is the drafter's own wherever the step
counts: in greedy text a step counts only where all before it drafted the text's tokens, in sampled text a draft that is
accepted has the base's distribution, as the text does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_extract.drafter.load import Network
from mtp_extract.drafter.masks import Convention
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.protocol import KV, BaseState, DraftState, Fed
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.states import TextStates


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at their ends. B texts, L tokens, A anchors each."""

    tokens: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]
    # the next four as in TextStates, over [B, L]
    hidden: Tensor
    shared_kv: Mapping[str, KV]
    layers: Mapping[int, Tensor]
    choices: Tensor
    anchors: Tensor  # int64 [B, A]
    real: Tensor  # bool [B, A]; False where a text has fewer anchors, and the anchor is a placeholder


def collate(items: Sequence[TextStates], anchors: Tensor, real: Tensor, device: torch.device) -> Batch:
    """``items`` side by side, on ``device``, with ``anchors`` and ``real`` [B, A]."""
    lengths = torch.tensor([len(item.text.tokens) for item in items])
    longest = int(lengths.max())

    def padded(parts: Sequence[Tensor], axis: int) -> Tensor:
        shape = list(parts[0].shape)
        shape[axis] = longest
        out = parts[0].new_zeros(len(parts), *shape, device=device)
        for row, part in enumerate(parts):
            out[row].narrow(axis, 0, part.shape[axis]).copy_(part)
        return out

    tokens = [torch.tensor(item.text.tokens) for item in items]
    kinds = items[0].shared_kv
    kv = {kind: tuple(padded([item.shared_kv[kind][i] for item in items], 1) for i in (0, 1)) for kind in kinds}
    return Batch(
        tokens=padded(tokens, 0),
        lengths=lengths.to(device),
        hidden=padded([item.hidden for item in items], 0),
        shared_kv={kind: (k, v) for kind, (k, v) in kv.items()},
        layers={layer: padded([item.layers[layer] for item in items], 0) for layer in items[0].layers},
        choices=padded([item.choices for item in items], 0),
        anchors=anchors.to(device),
        real=real.to(device),
    )


def random_anchors(texts: Sequence[Text], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` anchors of each text, none twice, in order, and which of them are real; int64 and bool [B, count].

    A text with fewer has all of them, and placeholders after them.
    """
    anchors, real = torch.ones(len(texts), count, dtype=torch.long), torch.zeros(len(texts), count, dtype=torch.bool)
    for row, text in enumerate(texts):
        chosen = torch.randperm(len(text.anchors), generator=generator)[:count].sort().values
        anchors[row, : len(chosen)] = chosen + text.anchors.start
        real[row, : len(chosen)] = True
    return anchors, real


class Rounds(nn.Module):
    """K draft steps from every anchor of a batch; a module, so that ``functional_call`` can replace its weights."""

    def __init__(self, drafter: Network, steps: int) -> None:
        super().__init__()
        self.drafter, self.steps = drafter, steps

    def forward(self, batch: Batch, embed: Callable[[Tensor], Tensor], convention: Convention) -> Tensor:
        """States after the final norm, [K, B, A, width]."""
        last_seen = (batch.anchors - 1)[..., None].expand(-1, -1, batch.hidden.shape[-1])
        slots = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        known = BaseState(
            batch.anchors,
            batch.hidden.gather(1, last_seen),
            embed,
            batch.shared_kv,
            dict.fromkeys(batch.shared_kv, slots),
            Fed(batch.tokens, slots, batch.hidden, batch.layers),
        )
        state: DraftState
        if isinstance(self.drafter, MtpDrafter):
            state = self.drafter.start(known, convention)
        else:
            state = self.drafter.start(known)
        found = []
        for step in range(self.steps):
            h, state = self.drafter.advance(state, batch.tokens.gather(1, _within(batch, batch.anchors + step)))
            found.append(h)
        return torch.stack(found)


def aims(batch: Batch, steps: int) -> Tensor:
    """int64 [K, B, A]: the position, of B · L, after whose token each step's draft comes."""
    length = batch.tokens.shape[1]
    row = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None] * length
    return torch.stack([row + _within(batch, batch.anchors + step) for step in range(steps)])


def counting(batch: Batch, steps: int, *, greedy: bool) -> Tensor:
    """bool [K, B, A]: which steps count: those whose target lies within the text.

    In ``greedy`` serving, only while the text is what the base chooses: elsewhere (in text by people) the round has
    ended before.
    """
    follows = torch.zeros_like(batch.tokens, dtype=torch.bool)
    follows[:, 1:] = (batch.tokens[:, 1:] == batch.choices[:, :-1]) if greedy else True
    reached, found = batch.real, []
    for step in range(steps):
        if step:
            reached = reached & follows.gather(1, _within(batch, batch.anchors + step))
        found.append(reached & (batch.anchors + 1 + step < batch.lengths[:, None]))
    return torch.stack(found)


def _within(batch: Batch, positions: Tensor) -> Tensor:
    return positions.clamp(max=batch.tokens.shape[1] - 1)
