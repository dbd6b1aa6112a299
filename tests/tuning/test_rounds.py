"""What is trained on is what is measured, and no row sees what it is to say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, FaultyDrafter
from mtp_extract.speculate.teacher import Text, draft_teacher_forced
from mtp_extract.tuning.rounds import (
    Batch,
    Rounds,
    compute_states,
    draw_anchors,
    find_target_positions,
    mark_counted_drafts,
)

from .conftest import Tiny

STEPS = 3


def build_batch(tiny: Tiny, texts: list[Text]) -> Batch:
    states = compute_states(tiny.base, tiny.drafter.needs, texts)
    most = max(len(text.anchors) for text in texts)
    anchors, real = draw_anchors(texts, most, torch.Generator().manual_seed(0))
    return Batch.of(states, tiny.drafter.needs, anchors, real, torch.device("cpu"))


def write_by_drafter(tiny: Tiny, convention: Convention) -> Text:
    """Return a text that the drafter confirms from every third token on; a random one never confirms the base's."""
    tokens = [5, 6]
    for _ in range(5):
        # The one anchor of this text is its last token but one.
        ahead = Text((*tokens, 0), len(tokens) - 1)
        drafts = draft_teacher_forced(tiny.base, FaultyDrafter(tiny.drafter, convention), [ahead], STEPS).drafts
        tokens += drafts[0].tolist()
    return Text(tuple(tokens), 1)


@torch.no_grad()
def compute_logits(tiny: Tiny, batch: Batch, convention: Convention) -> Tensor:
    return tiny.drafter.logits(Rounds(tiny.drafter, STEPS)(batch, tiny.base.embed, convention))


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS])
def test_drafts_are_those_of_teacher_forcing(tiny: Tiny, convention: Convention) -> None:
    """At every step that counts, which means after drafts that were the text's tokens."""
    texts = [*tiny.texts, write_by_drafter(tiny, convention)]
    batch = build_batch(tiny, texts)
    drafts = compute_logits(tiny, batch, convention).argmax(-1)
    forced = draft_teacher_forced(tiny.base, FaultyDrafter(tiny.drafter, convention), texts, STEPS)
    compared = 0
    for row, at in batch.real.nonzero().tolist():
        (index,) = ((forced.text == row) & (forced.anchor == batch.anchors[row, at])).nonzero().flatten().tolist()
        for step in range(STEPS):
            assert drafts[step, row, at] == forced.drafts[index, step]
            compared += 1
            if forced.drafts[index, step] != forced.targets[index, step]:
                break
    assert compared >= batch.real.sum() + 2 * 5
    # The base's choices are the tokens of its own greedy text.
    texts = list(tiny.texts)
    batch, forced = build_batch(tiny, texts), draft_teacher_forced(tiny.base, tiny.drafter, texts, STEPS)
    where, counts = find_target_positions(batch, STEPS), mark_counted_drafts(batch, STEPS, greedy=True)
    choices = batch.choices.flatten()[where]
    following = batch.base_output.tokens.flatten()[(where + 1).clamp(max=batch.base_output.tokens.numel() - 1)]
    assert torch.equal(choices[counts], following[counts])
    assert counts.sum(dim=0)[batch.real].tolist() == (forced.targets >= 0).sum(dim=1).tolist()


def test_human_text_counts_while_the_base_agrees(tiny: Tiny) -> None:
    tokens = list(tiny.texts[0].tokens)
    tokens[10] = (tokens[10] + 1) % 40
    batch = build_batch(tiny, [Text(tuple(tokens), 3)])
    greedy, sampled = (mark_counted_drafts(batch, STEPS, greedy=flag)[:, 0] for flag in (True, False))
    at = {int(anchor): index for index, anchor in enumerate(batch.anchors[0])}
    # From 8: after 9 comes what the base would not have said, and the round has ended.
    assert greedy[:, at[8]].tolist() == [True, True, False]
    assert greedy[:, at[9]].tolist() == [True, False, False]
    assert sampled[:, at[8]].tolist() == [True, True, True]
    assert sampled.sum() > greedy.sum()
