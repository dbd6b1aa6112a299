"""Trees of drafts, and K that is adapted: shapes, what a tree holds and leaves, and what a round yields."""

from __future__ import annotations

import doctest
import itertools
import math
from typing import Any

import pytest
import torch
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import random_base, random_drafter

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate import drafts
from mtp_extract.speculate.drafts import (
    AdaptiveDrafts,
    DraftTree,
    RunningLength,
    choose_draft_length,
    compute_expected_tokens,
)
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base

TREE = DraftTree.parse("3x2x2")


def list_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Of every node, the ranks on the way to it, level by level."""
    levels = (itertools.product(*map(range, tree.widths[:depth])) for depth in range(tree.depth + 1))
    return list(itertools.chain.from_iterable(levels))


PATHS = list_paths(TREE)


def test_a_tree_by_its_widths() -> None:
    tree = DraftTree.parse("3x2x1")
    assert (tree.drafts, tree.depth, tree.width) == (3 + 6 + 6, 3, 3)
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert tree.crop_to_depth(2) == DraftTree.parse("3x2")
    assert tree.crop_to_depth(9) == tree
    assert DraftTree.parse("1x1").sees == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("text", ["", "x", "2x", "0x1", "-1", "2.5", "2x2x2x2x2x2x2x2x2x2x2", "1025", "٣", "9" * 30])
def test_other_notations(text: str) -> None:
    with pytest.raises(MtpExtractError, match="expected a tree"):
        DraftTree.parse(text)


def test_what_stands_follows_the_ranks() -> None:
    ranks = ([], [1], [3], [0, 2], [2, 1, 2], [2, 1, 1, 0], [-1])
    assert [TREE.count_accepted(row) for row in ranks] == [0, 1, 0, 1, 2, 3, 0]
    chain = DraftTree.parse("1x1x1")
    assert [chain.count_accepted(ranks) for ranks in ([0, 0, 0], [0, 1, 0], [0, -1, -1])] == [3, 1, 1]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("tree", [DraftTree.parse("1x1x1"), TREE], ids=["chain", "wide"])
def test_a_tree_holds_the_drafter_s_choices(kind: str, tree: DraftTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every draft: the choice of its rank, where the drafter goes the way to it alone."""
    drafter: Any = random_drafter(random_base()) if kind == "mtp" else random_head(head_config())
    generator, states, fed = SpeculativeGenerator(random_base(), drafter), list[Any](), list[list[int]]()
    start, feed = drafter.start, generator.base.feed
    monkeypatch.setattr(drafter, "start", lambda known: states.append(start(known)) or states[-1])
    monkeypatch.setattr(
        generator.base, "feed", lambda *given, **more: fed.append(given[0][0].tolist()) or feed(*given, **more)
    )
    generator.generate(range(7), max_new_tokens=tree.depth + 2, drafts=tree)
    pending, *tokens = fed[1]
    for path, token in zip(list_paths(tree)[1:], tokens, strict=True):
        at, last = states[0], torch.tensor([[pending]])
        for rank in path:
            logits, at = drafter.step(at, last)
            last = logits[0, 0].sort(descending=True, stable=True).indices[rank].view(1, 1)
        assert token == int(last)


def test_the_way_down_is_the_base_s() -> None:
    """Against a walk over every node in turn; a token is its rank."""
    numbers = torch.Generator().manual_seed(0)
    tokens = [path[-1] if path else 0 for path in PATHS]
    lengths = set()
    for _ in range(300):
        choices = torch.randint(0, 4, (len(tokens),), generator=numbers).tolist()
        path, expected = tuple[int, ...](), [0]
        while (path := (*path, choices[expected[-1]])) in PATHS:
            expected.append(PATHS.index(path))
        assert TREE.find_accepted_path(tokens, choices) == expected
        lengths.add(len(expected))
    assert lengths == {1, 2, 3, 4}


@pytest.mark.parametrize("window", [5, 2])
def test_what_a_tree_leaves_is_what_a_chain_leaves(window: int) -> None:
    """After a way down is kept, K, V and states are those of a plain forward over the text."""
    base = Base(random_base(sliding_window=window))
    text, cache = torch.arange(5, 14)[None], base.build_cache()
    way = [0, PATHS.index((2,)), PATHS.index((2, 1))]
    with torch.inference_mode():
        base.keep(cache, base.feed(text, cache=cache), range(9))
        for turn in range(3):
            nodes = torch.arange(10 + turn, 10 + turn + len(PATHS))[None]
            fed = base.feed(nodes, cache=cache, tree=TREE)
            text = torch.cat((text, nodes[:, way]), dim=1)
            kept, plain = base.keep(cache, fed, way), base.feed(text)
            torch.testing.assert_close(kept.hidden, plain.hidden[:, -3:], atol=1e-5, rtol=1e-5)
            assert kept.positions.tolist() == [list(range(text.shape[1] - 3, text.shape[1]))]
            for kind, (keys, values) in kept.shared_kv.items():
                slots = keys.shape[2]
                assert slots == text.shape[1] if base.windows[kind] is None else slots > window
                for found, whole in zip((keys, values), plain.shared_kv[kind], strict=True):
                    torch.testing.assert_close(found, whole[:, :, -slots:], atol=1e-5, rtol=1e-5)


def test_examples() -> None:
    assert doctest.testmod(drafts) == (0, 3)


@pytest.mark.parametrize(("drafts", "acceptance"), [(1, 0.8), (2, 0.8), (3, 0.8), (4, 0.8), (3, 0.5), (3, 0.9)])
def test_expected_tokens_are_a_geometric_sum(drafts: int, acceptance: float) -> None:
    expected = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
    assert compute_expected_tokens([acceptance] * drafts) == pytest.approx(expected)


def test_best_draft_length() -> None:
    assert choose_draft_length([0.95, 0.9, 0.4, 0.9], draft_cost=0.3) == 2
    assert choose_draft_length([0.9] * 6, draft_cost=0) == 6
    assert choose_draft_length([0.9] * 6, draft_cost=2.0) == 0


def test_ends() -> None:
    assert compute_expected_tokens([0.0] * 5) == 1
    assert compute_expected_tokens([1.0] * 5) == 6
    assert compute_expected_tokens([]) == 1
    assert compute_expected_tokens([0.0, math.nan]) == 1, "no rate where nothing came to it"
    assert compute_expected_tokens([0.5, 0.0, math.nan]) == 1.5
    assert math.isnan(compute_expected_tokens([0.5, math.nan]))


def test_adaptive_length_follows_acceptance() -> None:
    eager = RunningLength(AdaptiveDrafts(most=6))
    for kept_length, wanted in ((True, 6), (False, 1), (True, 6)):  # a length of 1 goes on learning, and comes back
        for _ in range(60):
            eager.observe(eager.value, eager.value if kept_length else 0, eager.value * 1.0, 10.0)
        assert eager.value == wanted


def test_adaptive_length_follows_cost() -> None:
    lengths = []
    for ratio in (0.02, 0.2, 0.8):
        length = RunningLength(AdaptiveDrafts(most=8, cost_ratio=ratio))
        for _ in range(30):
            length.observe(length.value, min(2, length.value), 99.0, 1.0)
        lengths.append(length.value)
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 1
    assert max(lengths) <= 4, "the third draft is never accepted; the fourth, never tried, is taken to be like the rest"


def test_adaptive_length_judges_a_step_by_the_rounds_that_reached_it() -> None:
    length = RunningLength(AdaptiveDrafts(most=4))
    for _ in range(200):
        length.observe(4, 1, 4.0, 10.0)
        length.observe(4, 4, 4.0, 10.0)
    # The prior of 4 rounds weighs what 20 rounds are remembered.
    assert length.conditional == pytest.approx([0.97, 0.6, 0.93, 0.93], abs=0.05)
