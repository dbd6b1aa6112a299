"""What a round asks of the device: one wait, no other copy, and no more operators than it has to."""

from __future__ import annotations

import pytest
import torch
from helpers.dispatched import rounds_on_meta
from helpers.random_pairs import random_base, random_drafter

from mtp_extract.speculate import AutoTree, Options, Sampling, Tree

DRAFTS = (3, Tree.parse("3x2x1"), AutoTree(6, depth=3))
SAMPLED = Sampling(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(("attention", "batch"), [("sdpa", 1), ("eager", 3)])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_a_round_waits_once_and_copies_nothing_else(
    sampling: Sampling, attention: str, batch: int, drafts: int | Tree | AutoTree
) -> None:
    base = random_base(attention=attention)
    options = Options(60, drafts, sampling, stop_token_ids=[])
    for found in rounds_on_meta(base, random_drafter(base), options, batch):
        assert (found.waits, found.copies) == (1, 0)


def test_operators_do_not_grow_with_the_text() -> None:
    base = random_base()
    first, second = rounds_on_meta(base, random_drafter(base), Options(60, 3, stop_token_ids=[]))
    assert first.operators == second.operators


def test_a_step_costs_its_own_operators() -> None:
    """Masks, angles, K and V are made once a round: a further step adds what depends on the token, and no more."""
    rounds = []
    for drafts in (2, 3, 4):
        base = random_base()
        rounds.append(rounds_on_meta(base, random_drafter(base), Options(60, drafts, stop_token_ids=[]))[1].operators)
    totals = [sum(operators.values()) for operators in rounds]
    assert totals[2] - totals[1] == totals[1] - totals[0] < STEP
    for once in ("aten.cos", "aten.sin", "aten.masked_fill", "aten.le"):
        assert rounds[0][once] == rounds[2][once] > 0, once


STEP = 170
"""Operators of a step through two layers, at most."""


@torch.inference_mode()
def test_a_draft_step_can_be_compiled() -> None:
    """Without a break in its graph, and with the same numbers."""
    base = random_base()
    drafter = random_drafter(base)
    inputs = torch.randn(2, 1, 64)
    shapes = {kind: (2, layer.num_kv_heads, 9, layer.head_dim) for kind, layer in drafter.config.kv_layers.items()}
    kv = {kind: (torch.randn(shape), torch.randn(shape)) for kind, shape in shapes.items()}
    views = drafter.views(kv, torch.tensor([[7], [3]]), None)
    compiled = torch.compile(drafter.network, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(inputs, views), drafter.network(inputs, views), strict=True):
        torch.testing.assert_close(ours, theirs)
