"""Teacher forcing the slow way: one token of the base and K of the drafter at a time, with a cache.

It shares no mask and no batching with ``teacher_forced``, and is what that is checked against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from mtp_extract.drafter.protocol import BaseState, Drafter, DraftState
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Text, draft, targets

__all__ = ["teacher_forced_by_stepping"]


@torch.inference_mode()
def teacher_forced_by_stepping(base: Base, drafter: Drafter, texts: Sequence[Text], steps: int) -> Agreement:
    parts = [part for index, text in enumerate(texts) for part in _stepping(base, drafter, index, text, steps)]
    return Agreement(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Agreement)))


def _stepping(base: Base, drafter: Drafter, index: int, text: Text, steps: int) -> Iterator[Agreement]:
    if not text.anchors:
        return
    first = text.anchors[0]
    layers, cache = drafter.needs.layers, base.new_cache()
    tokens = torch.tensor([text.tokens], device=base.device)
    fed = base.keep(cache, base.feed(tokens[:, :first], cache, layers), range(first))
    previous: DraftState = None
    for anchor in text.anchors:
        position = torch.tensor([[anchor]])
        aim = targets([text], position, steps)
        pending = tokens[:, anchor : anchor + 1]
        state = drafter.start(BaseState.after(fed, position.to(base.device), base.embed, previous))
        previous = state if drafter.needs.own_cache else None
        drafts, top5 = draft(drafter, state, pending, aim, steps)
        yield Agreement(torch.tensor([index]), position[0], drafts[0], aim[0], top5[0])
        fed = base.keep(cache, base.feed(pending, cache, layers), [0])
