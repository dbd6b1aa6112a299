"""Whatever the base, the drafter and the tree: text is the base's own, and a round is drafted from the text alone."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import KINDS, base_alone, random_base, random_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.adaptive import DraftLength
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.growing import Nodes
from mtp_extract.speculate.sampling import Sampling
from mtp_extract.speculate.trees import AutoTree, Tree

BASES: dict[str, dict[str, Any]] = {
    **KINDS,
    "a window smaller than the tree": {"sliding_window": 2},
    "eager": {"attention": "eager", "final_logit_softcapping": None},
}
DRAFTERS = {
    "mtp": random_drafter,
    "eagle3": lambda _: random_head(head_config(vocab_size=6, draft_vocab_size=5)),
}
PROMPTS = ((1,), tuple(n % 6 for n in range(17)), (5, 3, 5, 0))
"""Of unequal lengths, past the windows. There are six tokens, so that trees are gone down."""
TOKENS, LONGER = 16, 36
SAMPLED = Sampling(temperature=1.0, top_k=4)


@cache
def generator(kind: str, drafter: str) -> SpeculativeGenerator:
    base = random_base(tie_word_embeddings=False, vocab_size=6, vocab_size_per_layer_input=6, **BASES[kind])
    return SpeculativeGenerator(base, DRAFTERS[drafter](base))


@cache
def alone(kind: str, sampling: Sampling) -> list[tuple[int, ...]]:
    """What the base says: by transformers' own greedy generation, or drawn without drafts."""
    ours = generator(kind, "mtp")
    if sampling.greedy:
        return [base_alone(ours.base.model, prompt, TOKENS) for prompt in PROMPTS]
    results = ours.generate_batch(PROMPTS, Options(TOKENS, 0, sampling, stop_token_ids=[], seed=5))
    return [result.tokens for result in results]


@st.composite
def trees(draw: st.DrawFn) -> Tree | AutoTree:
    if draw(st.booleans()):
        sizes = st.integers(1, 12)
        return AutoTree(draw(sizes), draw(sizes), draw(sizes))
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(paths))
        if free := [rank for rank in range(5) if (*parent, rank) not in paths]:
            paths.append((*parent, draw(st.sampled_from(free))))
    return Tree(tuple(paths[1:]))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(list(BASES)),
    drafter=st.sampled_from(list(DRAFTERS)),
    tree=trees(),
    sampling=st.sampled_from([Sampling(), SAMPLED]),
    most=st.integers(1, TOKENS),
    stops=st.lists(st.integers(0, 5), max_size=1),
)
def test_text_is_the_base_s_own(
    kind: str, drafter: str, tree: Tree | AutoTree, sampling: Sampling, most: int, stops: list[int]
) -> None:
    """Sequences end at different times; a limit or a stop token may lie inside a tree."""
    options = Options(most, tree, sampling, stop_token_ids=stops, seed=5)
    results = generator(kind, drafter).generate_batch(PROMPTS, options)
    for own, result in zip(alone(kind, sampling), results, strict=True):
        ends = min([most, *(own.index(stop) + 1 for stop in stops if stop in own)])
        assert result.tokens == own[:ends]
        assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds)
        assert all(len(r.ranks) == r.accepted <= r.drafted for r in result.rounds)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_tree_has_no_more_choices_than_there_are_tokens(drafter: str) -> None:
    """All six are looked at, also those that a head of five cannot propose; a seventh there is not."""
    ours = generator("E4B", drafter)
    options = Options(TOKENS, Tree.parse("6x2"), stop_token_ids=[])
    assert [result.tokens for result in ours.generate_batch(PROMPTS, options)] == alone("E4B", Sampling())
    with pytest.raises(MtpExtractError, match="than the 6 tokens there are, found one that looks at 7"):
        ours.generate_batch(PROMPTS, Options(TOKENS, Tree.parse("7"), stop_token_ids=[]))


CROOKED = Tree(((0,), (2,), (2, 1), (0, 0), (0, 3), (2, 1, 0), (0, 0, 0), (0, 0, 0, 1)))


class Drafted(NamedTuple):
    """What was fed of one sequence in a round, by node."""

    tokens: list[int]
    parents: list[int]
    ranks: list[int]

    def way(self, tokens: tuple[int, ...]) -> list[int]:
        """The nodes below the root that hold ``tokens``, one below the other."""
        at, way = 0, []
        for token in tokens:
            [at] = [n for n in range(1, len(self.tokens)) if self.parents[n] == at and self.tokens[n] == token]
            way.append(at)
        return way

    @property
    def depth(self) -> int:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(1 + depths[parent])
        return max(depths)


@pytest.mark.parametrize("tree", [CROOKED, AutoTree(7)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", ["E4B", "a window smaller than the tree"])
def test_a_round_is_drafted_from_the_text_alone(
    kind: str, drafter: str, tree: Tree | AutoTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the rounds before went, and whoever left: as the first round after a prompt of the same text."""
    ours = generator(kind, drafter)
    forward = ours.base.forward
    fed: list[tuple[list[int], list[Drafted]]] = []

    def noted(tokens: Tensor, starts: Tensor, *rest: Any, tree: Nodes | None = None, **more: Any) -> Any:
        if tree is not None:
            parts = (part.expand_as(tokens).tolist() for part in (tokens, tree.parent, tree.rank))
            fed.append((starts.tolist(), [Drafted(*row) for row in zip(*parts, strict=True)]))
        return forward(tokens, starts, *rest, tree=tree, **more)

    monkeypatch.setattr(ours.base, "forward", noted)
    own = [result.tokens for result in ours.generate_batch(PROMPTS, Options(LONGER, 0, stop_token_ids=[]))]
    ends = {token: [(*text, token).index(token) for text in own] for token in range(6)}
    stop = next(token for token, places in ends.items() if len(set(places)) == 3)
    prompts = [prompt for _, prompt in sorted(zip(ends[stop], PROMPTS, strict=True))]  # the first leaves first
    results = ours.generate_batch(prompts, Options(LONGER, tree, stop_token_ids=[stop]))
    depth = DraftLength(tree).most
    prefixes, found = [], []
    for turn, (starts, nodes) in enumerate(fed):
        rows = [row for row, result in enumerate(results) if len(result.rounds) > turn]
        left = [LONGER - 2 - (start - len(prompts[row])) for row, start in zip(rows, starts, strict=True)]
        if max(left) < depth:
            break  # the limit of new tokens cuts the tree
        for row, start, limit, drafted in zip(rows, starts, left, nodes, strict=True):
            text, account = prompts[row] + results[row].tokens, results[row].rounds[turn]
            way = drafted.way(text[start + 1 : start + 1 + account.accepted])
            assert account.ranks == tuple(drafted.ranks[node] for node in way)
            assert account.drafted == min(limit, drafted.depth)
            prefixes.append(text[:start])
            found.append(drafted)
    assert sum(result.accepted for result in results) > 2 and len(found) > 5
    fed.clear()
    ours.generate_batch(prefixes, Options(depth + 2, tree, stop_token_ids=[]))
    assert found == fed[0][1]
