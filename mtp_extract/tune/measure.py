"""How many drafts are accepted on given texts.

Greedy serving: the drafts that agree with the base's own text, by :mod:`mtp_extract.speculate.teacher`. Sampled
serving, on text that the base drew at that temperature: a draft drawn from q is accepted with probability
min(1, p / q), and what is accepted has the base's distribution p; so along a text x drawn from p the first i drafts are
accepted with the mean of ∏ min(1, q(x) / p(x)), the last factor replaced by its mean over x, Σ min(p, q).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtp_extract.drafter.load import Network
from mtp_extract.drafter.masks import LITERT
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.measured import Measured, of_agreement
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, teacher_forced
from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.train import Rounds, aims, collate, counting, random_anchors, states_of


def measure(
    base: Base, drafter: Network, texts: Sequence[Text], steps: int, *, temperature: float, batch: int
) -> Measured:
    """Draft ``steps`` tokens after every anchor of ``texts``, ``batch`` of them at a time.

    Args:
        texts: the base's own, written at ``temperature``; those without an anchor that has all targets are left out.
        temperature: 0 for greedy serving.
    """
    none = torch.zeros(0, dtype=torch.long)
    parts = [Measured.over(none, none, torch.zeros(0, steps, dtype=torch.double))]
    usable = [index for index, text in enumerate(texts) if len(text.anchors) >= steps]
    for group in groups([len(texts[index].tokens) for index in usable], batch):
        rows = [usable[position] for position in group]
        chosen = [texts[row] for row in rows]
        part = (
            _sampled(base, drafter, chosen, steps, temperature)
            if temperature
            else of_agreement(teacher_forced(base, drafter, chosen, steps, logits_at_once=LOGITS_AT_ONCE))
        )
        parts.append(dataclasses.replace(part, text=torch.tensor(rows)[part.text]))
    return joined(parts)


def joined(parts: Sequence[Measured]) -> Measured:
    """Several as one, in order of text, then position."""
    found = Measured(
        *(torch.cat([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Measured))
    )
    order = torch.argsort(found.text * (int(found.anchor.max()) + 1 if len(found.anchor) else 1) + found.anchor)
    return found.where(order)


@torch.no_grad()
def _sampled(base: Base, drafter: Network, texts: Sequence[Text], steps: int, temperature: float) -> Measured:
    items = states_of(base, drafter.needs, texts)
    # As many as the text with the most has: all of them, in order.
    anchors, real = random_anchors(texts, max(len(text.anchors) for text in texts), torch.Generator())
    device = drafter.lm_head.weight.device
    batch = collate(items, anchors, real, device)
    states = Rounds(drafter, steps)(batch, base.embed, LITERT)
    where, whole = aims(batch, steps), counting(batch, steps, greedy=False).all(dim=0)
    following = batch.tokens.flatten()
    ratios, overlaps = torch.ones(where.shape, dtype=torch.double), torch.ones(where.shape, dtype=torch.double)
    hidden = batch.hidden.flatten(0, 1)
    for rows in _split(whole, steps, base.vocab_size):
        at = where[rows]
        p = torch.softmax(base.logits(hidden[at].to(base.device)).to(device) / temperature, dim=-1)
        q = torch.softmax(drafter.logits(states[rows]).float() / temperature, dim=-1)
        token = following[at + 1][:, None]
        there = tuple(index.cpu() for index in rows)
        ratios[there] = (q.gather(1, token) / p.gather(1, token)).clamp(max=1).squeeze(1).double().cpu()
        overlaps[there] = torch.minimum(p, q).sum(-1).double().cpu()
    along = ratios.cumprod(dim=0)
    stands = torch.cat((torch.ones_like(along[:1]), along[:-1])) * overlaps
    index = torch.arange(len(texts))[:, None].expand_as(real)
    whole = whole.cpu()
    of_rows = [column.permute(1, 2, 0)[whole] for column in (stands, along)]
    return Measured.over(index[whole], anchors[whole], *of_rows)


def _split(whole: Tensor, steps: int, vocabulary: int) -> Iterator[tuple[Tensor, ...]]:
    """Indices (step, text, anchor) of all rows of whole rounds, as many at a time as memory for logits is set aside."""
    index = whole.expand(steps, -1, -1).nonzero()
    yield from (part.unbind(1) for part in torch.split(index, max(1, LOGITS_AT_ONCE // vocabulary)))
