"""Trees of drafts: their shapes and their worth, how they grow, and that text with them is the base's own."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import Pair, random_base, random_drafter

from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.protocol import BaseState, Drafter
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.prompts import encode_prompts, shipped_prompts
from mtp_extract.speculate.adaptive import DraftLength
from mtp_extract.speculate.generate import Options
from mtp_extract.speculate.growing import SURE, FixedTree, Nodes, grow_by_confidence, grow_fixed
from mtp_extract.speculate.sampling import Sampling, verify_tree
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, ranks_of_text
from mtp_extract.speculate.trees import AutoTree, Tree, best_tree, expected_length, parse_tree, rank_shares

Path = tuple[int, ...]
CROOKED = Tree(((0,), (2,), (2, 1), (0, 0), (0, 3), (2, 1, 0), (0, 0, 0), (0, 0, 0, 1)))
"""Leaves at every depth, ranks left out, given in no order."""
SHARES = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.7, 0.1, 0.1]]


def test_a_tree_by_its_widths() -> None:
    tree = Tree.parse("2x2x1")
    assert tree.nodes == ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0))
    assert tree.parents == (0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    assert (tree.drafts, tree.depth) == (10, 3)
    assert tree.to_depth(2) == Tree.parse("2x2")
    assert tree.to_depth(9) is tree
    assert (CROOKED.drafts, CROOKED.depth, CROOKED.to_depth(1).paths) == (8, 4, ((0,), (2,)))


def test_notations() -> None:
    assert parse_tree("4x2x1") == Tree.parse("4x2x1")
    assert parse_tree("auto:12") == AutoTree(12)


@pytest.mark.parametrize(
    "text", ["", "4x", "x", "0", "4x0", "4x-1", "auto", "auto:", "auto:0", "auto:x", "auto:9999", "99x99", "²", "4X2"]
)
def test_other_notations(text: str) -> None:
    with pytest.raises(MtpExtractError, match=r"expected .*tree|expected a budget"):
        parse_tree(text)


@pytest.mark.parametrize("paths", [(), ((0,), (0,)), ((0, 0),), ((),), ((-1,),)])
def test_no_trees(paths: tuple[Path, ...]) -> None:
    with pytest.raises(MtpExtractError, match="expected"):
        Tree(paths)


def test_expected_length_is_the_mean_of_rounds() -> None:
    numbers = random.Random(0)
    total, rounds = 0, 20_000
    for _ in range(rounds):
        at: Path = ()
        while len(at) < 3:
            rank = numbers.choices((0, 1, 2, 9), [*SHARES[len(at)], 1 - sum(SHARES[len(at)])])[0]
            if (*at, rank) not in CROOKED.paths:
                break
            at = (*at, rank)
        total += 1 + len(at)
    assert expected_length(CROOKED, SHARES) == pytest.approx(total / rounds, abs=0.02)


def test_the_best_tree_is_the_best_of_all() -> None:
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    for budget in (1, 2, 3, 4):
        trees = [
            Tree(paths)
            for paths in itertools.combinations(every, budget)
            if all(len(path) == 1 or path[:-1] in paths for path in paths)
        ]
        found = best_tree(SHARES, budget)
        assert expected_length(found, SHARES) == pytest.approx(max(expected_length(tree, SHARES) for tree in trees))
        assert found.drafts == budget
    assert best_tree(SHARES, 9, depth=1) == Tree.parse("3")
    assert best_tree([[0.5, 0.0], [0.0]], 4) == Tree.parse("1"), "nothing that is never the base's"


def test_what_a_head_cannot_draft_is_in_no_tree() -> None:
    """Of 40 tokens the head has 24, all as likely here; drafts that tie are drafted in their order."""
    base, head = Base(random_base()), random_head(head_config())
    head.lm_head.weight.zero_()
    text = Text(tuple(torch.randint(40, (60,), generator=torch.Generator().manual_seed(0)).tolist()), 2)
    ranks = ranks_of_text(base, head, [text], 1)
    targets = head.targets.tolist()
    aims = text.tokens[text.anchors.start + 1 :]
    assert {aim in targets for aim in aims} == {True, False}
    for rank, aim in zip(ranks.ranks[:, 0].tolist(), aims, strict=True):
        assert rank == targets.index(aim) if aim in targets else rank >= 1024
    known = sum(aim in targets for aim in aims) / len(aims)
    assert sum(ranks.shares(1024)[0]) == pytest.approx(known)
    assert 1 + known == pytest.approx(expected_length(best_tree(ranks.shares(1024), 1024), ranks.shares(1024)))


def test_a_tree_that_grows_holds_no_more_than_its_steps_do() -> None:
    """Eight steps of eight drafts are fewer than its budget."""
    assert (AutoTree(8).drafts, AutoTree(60).drafts, AutoTree(64).drafts, AutoTree(100).drafts) == (8, 60, 64, 64)
    assert AutoTree(100, depth=3, width=2).drafts == DraftLength(AutoTree(100, depth=3, width=2)).verified == 6


def test_ranks_are_counted_by_the_rounds_that_reached_them() -> None:
    rounds = [((0, 1), 2), ((0,), 2), ((), 2), ((1,), 1), ((), 0)]
    assert rank_shares(rounds, 2) == [[0.5, 0.25], [0.0, 0.5]]


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def drafter(request: pytest.FixtureRequest) -> MtpDrafter | Eagle3Drafter:
    return random_drafter(random_base()) if request.param == "mtp" else random_head(head_config())


@pytest.fixture(scope="module")
def state(drafter: MtpDrafter | Eagle3Drafter) -> Any:
    """Of two sequences."""
    base = Base(random_base())
    lengths = torch.tensor([7, 4])
    cache = base.new_cache(batch=2, capacity=20, queries=1)
    with torch.inference_mode():
        fed = base.forward(torch.arange(14).view(2, 7), torch.zeros_like(lengths), cache, lengths, drafter.needs.layers)
        hidden = fed.hidden[torch.arange(2), lengths - 1]
        kv = base.read_kv(cache, drafter.needs.shared_kv)
        return drafter.start(BaseState(lengths[:, None], hidden[:, None], base.embed, *kv, fed))


def by_hand(
    drafter: Drafter, state: Any, pending: int, row: int, path: Path, temperature: float = 1.0
) -> tuple[list[int], float]:
    """The tokens along a path of ranks, one query at a time, and the logarithm of its probability."""
    token, value, tokens = torch.full((2, 1), pending), 0.0, []
    for rank in path:
        logits, state = drafter.step(state, token)
        best = logits[row, 0].sort(descending=True, stable=True).indices[rank]
        value += float((logits[row, 0] / temperature).log_softmax(-1)[best])
        token = best.expand(2, 1)
        tokens.append(int(best))
    return tokens, value


def paths_of(nodes: Nodes, row: int) -> list[Path]:
    """Of each node, the ranks on the way, by its parent's."""
    found: list[Path] = [()]
    shape = nodes.parent.expand(len(nodes.tokens), -1)[row].tolist(), nodes.rank.expand(2, -1)[row].tolist()
    for parent, rank in list(zip(*shape, strict=True))[1:]:
        found.append((*found[parent], rank))
    return found


def check_shape(nodes: Nodes) -> None:
    for row in range(len(nodes.tokens)):
        paths = paths_of(nodes, row)
        assert nodes.depth.expand(2, -1)[row].tolist() == [len(path) for path in paths]
        expected = [[a[: len(b)] == b for b in paths] for a in paths]
        assert nodes.sees.expand(2, -1, -1)[row].tolist() == expected


@torch.inference_mode()
@pytest.mark.parametrize("tree", [Tree.parse("1x1x1"), Tree.parse("3x2x1"), CROOKED])
def test_a_fixed_tree_holds_the_drafter_s_choices(drafter: Drafter, state: Any, tree: Tree) -> None:
    pending = torch.tensor([3, 11])
    nodes = grow_fixed(drafter, state, pending, FixedTree(tree, pending.device))
    check_shape(nodes)
    for row in range(2):
        assert paths_of(nodes, row) == list(tree.nodes)
        for path, token in zip(tree.nodes[1:], nodes.tokens[row, 1:].tolist(), strict=True):
            assert token == by_hand(drafter, state, int(pending[row]), row, path)[0][-1]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("tree", "heat", "read_at"),
    [(AutoTree(1), 1.0, 1.0), (AutoTree(4), 2.0, 2.0), (AutoTree(7, depth=2), 0.0, SURE), (AutoTree(7), 0.1, SURE)],
)
def test_a_tree_grows_where_the_drafter_is_confident(
    drafter: Drafter, state: Any, tree: AutoTree, heat: float, read_at: float
) -> None:
    """Of all drafts there could be, those of the greatest probability: no limit on the way leaves one out."""
    pending = torch.tensor([3, 11])
    nodes = grow_by_confidence(drafter, state, pending, tree, tree.widths(tree.depth), heat)
    check_shape(nodes)
    for row in range(2):
        # One after the other the likeliest draft that can be added: the best, as none is likelier than its parent.
        values: dict[Path, float] = {(): 0.0}
        waiting: dict[Path, float] = {}
        newest: Path = ()
        while len(values) <= tree.budget:
            if len(newest) < tree.depth:
                waiting |= {
                    (*newest, rank): by_hand(drafter, state, int(pending[row]), row, (*newest, rank), read_at)[1]
                    for rank in range(tree.budget)
                }
            newest = max(waiting, key=lambda path: waiting[path])
            values[newest] = waiting.pop(newest)
        found = paths_of(nodes, row)
        assert set(found) == set(values)
        for path, token in zip(found[1:], nodes.tokens[row, 1:].tolist(), strict=True):
            assert token == by_hand(drafter, state, int(pending[row]), row, path)[0][-1]


@torch.inference_mode()
def test_a_branch_is_drafted_as_if_it_were_alone(drafter: Drafter, state: Any) -> None:
    root, level, last = torch.tensor([[3], [11]]), torch.tensor([[1, 2, 4], [5, 6, 7]]), torch.arange(20, 28).view(2, 4)
    parents = torch.tensor([[2, 0, 0, 1], [1, 1, 2, 0]])
    _, branching = drafter.step(state, root)
    _, branching = drafter.step(drafter.fork(branching, torch.zeros(2, 3, dtype=torch.long)), level)
    found, _ = drafter.step(drafter.fork(branching, parents), last)
    for branch in range(4):
        alone = state
        for token in (root, level.gather(1, parents[:, branch, None]), last[:, branch, None]):
            logits, alone = drafter.step(alone, token)
        torch.testing.assert_close(found[:, branch], logits[:, 0], atol=1e-4, rtol=1e-4)


def test_the_way_down_is_the_base_s() -> None:
    """Against a walk over every node in turn."""
    numbers = torch.Generator().manual_seed(0)
    tree = FixedTree(CROOKED, torch.device("cpu"))
    count = len(CROOKED.nodes)
    batch = 300
    # Siblings differ: a token is its rank, and a number of its own where nothing else tells them apart.
    tokens = torch.tensor([path[-1] if path else 0 for path in CROOKED.nodes]).expand(batch, -1)
    nodes = Nodes(tokens, tree.depth, tree.parent, tree.rank, tree.sees)
    choices = torch.randint(0, 4, (batch, count), generator=numbers)
    limits = torch.randint(0, 6, (batch,), generator=numbers)
    verdict, path = verify_tree(choices, nodes, limits, CROOKED.depth)
    lengths = set()
    for row in range(batch):
        at, way = 0, [0]
        while len(way) <= limits[row]:
            said = int(choices[row, at])
            below = [n for n in range(1, count) if CROOKED.parents[n] == at and int(tokens[row, n]) == said]
            if not below:
                break
            [at] = below
            way.append(at)
        assert int(verdict.accepted[row]) == len(way) - 1
        assert int(verdict.following[row]) == int(choices[row, at])
        assert path[row].tolist() == [*way, *range(len(way), CROOKED.depth + 1)]
        lengths.add(len(way))
    assert len(lengths) > 3


TREES = (Tree.parse("1x1x1"), Tree.parse("4x2x1"), CROOKED, AutoTree(8), AutoTree(20, depth=4))


@pytest.mark.parametrize(("attention", "window"), [("sdpa", 5), ("sdpa", 2), ("eager", 2)])
def test_what_a_tree_leaves_is_what_a_chain_leaves(attention: str, window: int) -> None:
    """After the accepted path is kept, K, V and the states of the path are those of a plain forward.

    In a window smaller than the tree is deep, a node does not see all its ancestors.
    """
    base = Base(random_base(attention=attention, sliding_window=window))
    text = torch.randint(0, 40, (2, 40), generator=torch.Generator().manual_seed(0))
    shape = FixedTree(CROOKED, base.device)
    lengths = torch.tensor([9, 4])
    with torch.inference_mode():
        plain = base.full_pass(text)
        cache = base.new_cache(batch=2, capacity=60, queries=1 + CROOKED.drafts)
        base.forward(text[:, :9], torch.zeros(2, dtype=torch.long), cache, lengths)
        ways = ([0, 2, 5, 7], [0, 1])
        starts = lengths.clone()
        for _ in range(3):
            tokens = torch.randint(0, 40, (2, 1 + CROOKED.drafts))
            for row, way in enumerate(ways):
                for depth, node in enumerate(way):
                    tokens[row, node] = text[row, starts[row] + depth]
            nodes = Nodes(tokens, shape.depth, shape.parent, shape.rank, shape.sees)
            states = base.forward(tokens, starts, cache, tree=nodes).hidden
            path = torch.arange(CROOKED.depth + 1).repeat(2, 1)
            for row, way in enumerate(ways):
                path[row, : len(way)] = torch.tensor(way)
                expected = plain.hidden[row, starts[row] : starts[row] + len(way)]
                torch.testing.assert_close(states[row, way], expected, atol=2e-5, rtol=2e-5)
            cache.take(starts, path)
            starts = starts + torch.tensor([len(way) for way in ways])
            kv, positions = base.read_kv(cache, base.kv_providers)
            for kind, parts in kv.items():
                reach = base.windows[kind]
                for row in range(2):
                    for position in range(0 if reach is None else max(0, int(starts[row]) - reach), int(starts[row])):
                        [slot] = (positions[kind][row] == position).nonzero().flatten().tolist()
                        for stored, whole in zip(parts, plain.shared_kv[kind], strict=True):
                            torch.testing.assert_close(
                                stored[row, :, slot], whole[row, :, position], atol=2e-5, rtol=2e-5
                            )


@pytest.fixture(scope="module")
def alone(pair: Pair) -> list[tuple[int, ...]]:
    return [pair.alone(prompt, 60) for prompt in pair.prompts()]


@pytest.mark.parametrize("drafts", TREES)
def test_trained_text_is_the_base_s_own(pair: Pair, alone: list[tuple[int, ...]], drafts: Tree | AutoTree) -> None:
    """Prompts of unequal lengths that end at different times."""
    prompts = pair.prompts()
    stop = alone[0][25]
    results = pair.generator.generate_batch(prompts, Options(60, drafts, stop_token_ids=[stop]))
    for own, result in zip(alone, results, strict=True):
        assert result.tokens == (own[: own.index(stop) + 1] if stop in own else own)
        assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds)
        assert all(0 <= r.accepted <= r.drafted <= 8 and len(r.ranks) == r.accepted for r in result.rounds)


@pytest.mark.parametrize("drafts", TREES[1:])
def test_a_hundred_prompts_in_one_batch(pair: Pair, drafts: Tree | AutoTree) -> None:
    """Every token is the base's own choice after what stands before it, by one plain forward over all of them."""
    generator = pair.generator
    short = [prompt for prompt in shipped_prompts() if len(prompt.text) < 100]
    prompts = encode_prompts(short[:100], generator.codec, chat_template=False)
    results = generator.generate_batch(prompts, Options(20, drafts))
    assert len(results) == 100 and len({len(result.prompt_tokens) for result in results}) > 10
    texts = [torch.tensor(result.prompt_tokens + result.tokens) for result in results]
    with torch.inference_mode():
        hidden = generator.base.full_pass(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)).hidden
        for result, states in zip(results, hidden, strict=True):
            first = len(result.prompt_tokens) - 1
            said = generator.base.logits(states[first : first + len(result.tokens)])
            own = said.gather(1, torch.tensor(result.tokens)[:, None]).squeeze(1)
            assert (said.amax(-1) - own).max() < 1e-3
    assert sum(result.accepted for result in results) > 1000


def test_a_tree_of_width_one_is_a_chain(pair: Pair) -> None:
    prompts = pair.prompts()
    chain, tree = (pair.generator.generate_batch(prompts, Options(40, drafts)) for drafts in (3, Tree.parse("1x1x1")))
    for a, b in zip(chain, tree, strict=True):
        assert [(r.drafted, r.accepted, r.emitted) for r in a.rounds] == [
            (r.drafted, r.accepted, r.emitted) for r in b.rounds
        ]


def test_trees_accept_more_than_chains(pair: Pair) -> None:
    """By about what their measured ranks say."""

    def measure(drafts: int | Tree | AutoTree) -> tuple[float, list[Any]]:
        results = pair.generator.generate_batch(pair.prompts(), Options(60, drafts, stop_token_ids=[]))
        rounds = [r for result in results for r in result.rounds if r.drafted == 3 or isinstance(drafts, AutoTree)]
        return 1 + sum(r.accepted for r in rounds) / len(rounds), rounds

    chain, _ = measure(3)
    wide, rounds = measure(Tree.parse("3x3x3"))
    shares = rank_shares([(r.ranks, r.drafted) for r in rounds], 3)
    assert expected_length(Tree.parse("3x3x3"), shares) == pytest.approx(wide, abs=1e-9)
    best = best_tree(shares, 14)
    tree, _ = measure(best)
    assert best.depth == 3
    assert tree > chain + 0.1
    assert tree == pytest.approx(expected_length(best, shares), abs=0.15)


@pytest.mark.parametrize("drafts", [Tree.parse("3x2"), AutoTree(5)])
def test_sampled_text_is_what_the_base_alone_draws(pair: Pair, drafts: Tree | AutoTree) -> None:
    """From the same seed, token for token, whatever is drafted."""
    sampling = Sampling(temperature=0.8, top_k=10)
    alone, trees = (
        pair.generator.generate_batch(pair.prompts(), Options(30, k, sampling, stop_token_ids=[], seed=4))
        for k in (0, drafts)
    )
    assert [result.tokens for result in trees] == [result.tokens for result in alone]
    assert sum(result.accepted for result in trees) > 40
    assert not math.isnan(trees[0].acceptance)
