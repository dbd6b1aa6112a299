"""How many drafts stand on text that was held out.

Greedy serving: the drafts that the base's own text confirms, by :mod:`mtp_extract.speculate.teacher`. Sampled serving,
on text the base drew at that temperature: a draft drawn from q stands with probability min(1, p / q), and what stands
has the base's distribution p; so along a text x drawn from p the first i drafts stand with the mean of
∏ min(1, q(x) / p(x)), the last factor replaced by its mean over x, Σ min(p, q).
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
from mtp_extract.tune.rounds import Rounds, States, aims, collate, counting


def measure(
    base: Base, drafter: Network, texts: Sequence[Text], steps: int, *, temperature: float, batch: int
) -> Measured:
    """Draft ``steps`` tokens after every anchor of ``texts``.

    Args:
        base: sees each text once.
        drafter: must fit it.
        texts: the base's own, written at ``temperature``.
        steps: K.
        temperature: 0 for greedy serving.
        batch: texts at a time.
    """
    parts = [_empty(steps)]
    usable = [index for index, text in enumerate(texts) if len(text.anchors) >= steps]
    for group in groups([len(texts[index].tokens) for index in usable], batch):
        rows = [usable[position] for position in group]
        chosen = [texts[row] for row in rows]
        part = (
            _sampled(base, drafter, chosen, steps, temperature)
            if temperature
            else of_agreement(teacher_forced(base, drafter, chosen, steps))
        )
        parts.append(dataclasses.replace(part, text=torch.tensor(rows)[part.text]))
    return joined(parts)


def joined(parts: Sequence[Measured]) -> Measured:
    """One of several, in order of text, then position."""
    found = Measured(
        *(torch.cat([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Measured))
    )
    order = torch.argsort(found.text * (int(found.anchor.max()) + 1 if len(found.anchor) else 1) + found.anchor)
    return Measured(found.text[order], found.anchor[order], found.stands[order])


def _empty(steps: int) -> Measured:
    none = torch.zeros(0, dtype=torch.long)
    return Measured(none, none, torch.zeros(0, steps, dtype=torch.double))


@torch.no_grad()
def _sampled(base: Base, drafter: Network, texts: Sequence[Text], steps: int, temperature: float) -> Measured:
    items = States(base, drafter.needs, (), 0, LOGITS_AT_ONCE).of(texts)
    most = max(len(text.anchors) for text in texts)
    anchors, real = torch.ones(len(texts), most, dtype=torch.long), torch.zeros(len(texts), most, dtype=torch.bool)
    for row, text in enumerate(texts):
        anchors[row, : len(text.anchors)], real[row, : len(text.anchors)] = torch.tensor(text.anchors), True
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
    before = torch.cat((torch.ones_like(ratios[:1]), ratios[:-1].cumprod(dim=0)))
    stands = (before * overlaps).permute(1, 2, 0)
    index = torch.arange(len(texts))[:, None].expand_as(real)
    whole = whole.cpu()
    return Measured(index[whole], anchors[whole], stands[whole])


def _split(whole: Tensor, steps: int, vocabulary: int) -> Iterator[tuple[Tensor, ...]]:
    """Indices (step, text, anchor) of all rows that count, a few at a time."""
    index = whole.expand(steps, -1, -1).nonzero()
    yield from (part.unbind(1) for part in torch.split(index, max(1, LOGITS_AT_ONCE // vocabulary)))
