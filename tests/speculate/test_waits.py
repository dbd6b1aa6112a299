"""What a round asks of the device: one wait, no other copy, and no more operators than it has to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.dispatched import rounds_on_meta
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import random_base, random_drafter
from torch import Tensor

from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.protocol import BaseState, Fed
from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.generate import Options
from mtp_extract.speculate.growing import FixedTree, Nodes
from mtp_extract.speculate.sampling import Sampling
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.trees import AutoTree, Tree

TREE, AUTO = Tree.parse("3x2x1"), AutoTree(6, depth=3)
SAMPLED = Sampling(temperature=1.0, top_p=0.9)
Drafts = int | Tree | AutoTree


def drafter_for(name: str, base: Any) -> MtpDrafter | Eagle3Drafter:
    return random_drafter(base) if name == "mtp" else random_head(head_config())


@pytest.mark.parametrize(
    ("drafter", "drafts", "sampling", "attention", "batch"),
    [
        ("mtp", 3, Sampling(), "sdpa", 1),
        ("mtp", 3, SAMPLED, "eager", 3),
        ("mtp", TREE, SAMPLED, "sdpa", 1),
        ("mtp", AUTO, Sampling(), "eager", 3),
        ("eagle3", 3, SAMPLED, "sdpa", 1),
        ("eagle3", TREE, Sampling(), "sdpa", 3),
        ("eagle3", AUTO, Sampling(), "sdpa", 1),
    ],
)
def test_a_round_waits_once_and_copies_nothing_else(
    drafter: str, drafts: Drafts, sampling: Sampling, attention: str, batch: int
) -> None:
    base = random_base(attention=attention)
    options = Options(60, drafts, sampling, stop_token_ids=[])
    for found in rounds_on_meta(base, drafter_for(drafter, base), options, batch):
        assert (found.waits, found.copies) == (1, 0)


def test_operators_do_not_grow_with_the_text() -> None:
    base = random_base()
    first, second = rounds_on_meta(base, random_drafter(base), Options(60, 3, stop_token_ids=[]))
    assert first.operators == second.operators


@pytest.mark.parametrize(("drafts", "batch"), [(3, 1), (TREE, 3)])
def test_what_is_converted_does_not_grow_with_the_context(drafts: Drafts, batch: int) -> None:
    """Numbers that a round turns into another type: as many in a cache of 5000 slots as in one of 60."""
    counted = []
    for capacity in (60, 5000):
        base = random_base().to(torch.bfloat16)
        options = Options(capacity, drafts, stop_token_ids=[])
        counted.append([found.converted for found in rounds_on_meta(base, random_drafter(base), options, batch)])
    assert counted[0] == counted[1]
    assert 0 < counted[0][0] == counted[0][1]


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


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


Known = tuple[Base, SlotCache, Tensor, Fed]


def after_prompts(device: str = "cpu", drafts: int = 4) -> Known:
    """A base, its cache after two prompts of seven and four tokens, their lengths, and its states."""
    base = Base(random_base().to(device))
    lengths = torch.tensor([7, 4], device=device)
    cache = base.new_cache(batch=2, capacity=30, queries=1 + drafts)
    tokens = torch.arange(14, device=device).view(2, 7)
    return base, cache, lengths, base.forward(tokens, torch.zeros_like(lengths), cache, lengths, (1, 3, 5))


def verified(drafts: int, device: str = "cpu") -> Nodes:
    """Two drafts, and below the first of them the others in a chain."""
    shape = FixedTree(Tree(((1,), *((0,) * depth for depth in range(1, drafts)))), torch.device(device))
    tokens = torch.arange(2 * drafts + 2, device=device).view(2, -1)
    return Nodes(tokens, shape.depth, shape.parent, shape.rank, shape.sees)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_a_draft_step_can_be_compiled(name: str) -> None:
    """Without a break in its graph, and with the same numbers."""
    base, cache, lengths, fed = after_prompts()
    drafter = drafter_for(name, base.model)
    hidden = fed.hidden[torch.arange(2), lengths - 1]
    state = drafter.start(
        BaseState(lengths[:, None], hidden[:, None], base.embed, *base.read_kv(cache, drafter.needs.shared_kv), fed)
    )
    token = torch.tensor([[3], [5]])
    compiled = torch.compile(drafter.step, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(state, token)[:1], drafter.step(state, token)[:1], strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.inference_mode()
def test_a_verification_can_be_compiled() -> None:
    nodes = verified(4)

    def verify(known: Known) -> Tensor:
        base, cache, lengths, _ = known
        return base.forward(nodes.tokens, lengths, cache, tree=nodes).hidden

    compiled = torch.compile(verify, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(after_prompts()), verify(after_prompts()))


@torch.inference_mode()
def test_the_cache_stays_where_it_is() -> None:
    """K, V and positions are the same memory from round to round, as a captured graph has them."""
    base, cache, lengths, _ = after_prompts()

    def places() -> list[int]:
        return [part.data_ptr() for read in (cache.read, cache.read_wide) for layer in range(3) for part in read(layer)]

    kept = places()
    for _ in range(2):
        base.forward(verified(4).tokens, lengths, cache, tree=verified(4))
        cache.take(lengths, torch.tensor([[0, 2, 3, 4], [0, 1, 2, 3]]))
        lengths = lengths + 2
    assert kept == places()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_a_verification_can_be_captured() -> None:
    """In a CUDA graph, whose replay at other places says what the base says without it."""
    base, cache, lengths, _ = after_prompts("cuda")
    nodes, starts = verified(4, "cuda"), lengths.clone()
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):  # a capture wants everything set up once before
        base.forward(nodes.tokens, starts, cache, tree=nodes)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = base.forward(nodes.tokens, starts, cache, tree=nodes).hidden
    starts.sub_(1)
    nodes.tokens.add_(1)
    graph.replay()
    found = captured.clone()
    base, cache, lengths, _ = after_prompts("cuda")
    torch.testing.assert_close(found, base.forward(nodes.tokens, lengths - 1, cache, tree=nodes).hidden)
