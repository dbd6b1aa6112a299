"""Teacher forcing the slow way: one token of the base and K of the drafter at a time, with a cache.

It shares no mask and no batching with ``teacher_forced``, and is what that is checked against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mtp_extract.drafter.protocol import Drafter, RoundStart
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Text, gather_targets


@torch.inference_mode()
def teacher_forced_by_stepping(base: Base, drafter: Drafter, texts: Sequence[Text], steps: int) -> Agreement:
    parts = [part for index, text in enumerate(texts) for part in _stepping(base, drafter, index, text, steps)]
    return Agreement.from_parts(parts)


def _stepping(base: Base, drafter: Drafter, index: int, text: Text, steps: int) -> Iterator[Agreement]:
    if not text.anchors:
        return
    first = text.anchors[0]
    layers, cache = drafter.needs.layers, base.build_cache()
    tokens = torch.tensor([text.tokens], device=base.device)
    fed = base.keep(cache, base.feed(tokens[:, :first], layers, cache), range(first))
    previous = None
    for anchor in text.anchors:
        position = torch.tensor([[anchor]])
        aim = gather_targets([text], position, steps)
        pending = tokens[:, anchor : anchor + 1]
        state = drafter.start(RoundStart(fed, position.to(base.device), base.embed, previous))
        previous = state
        drafts, ranks, token = [], [], pending
        for target in aim.unbind(-1):
            logits, state = drafter.step(state, token)
            token = logits.argmax(-1)
            drafts.append(int(token))
            likeliest = logits[0, 0].sort(descending=True, stable=True).indices.tolist()
            drawable = target.item() >= 0 and logits[0, 0, target.item()] > -torch.inf
            never = torch.iinfo(torch.int64).max if target.item() >= 0 else -1
            ranks.append(likeliest.index(target.item()) if drawable else never)
        yield Agreement(torch.tensor([index]), position[0], torch.tensor([drafts]), aim[0], torch.tensor([ranks]))
        fed = base.keep(cache, base.feed(pending, layers, cache), [0])
