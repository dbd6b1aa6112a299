"""The loop knows drafters by the protocol alone: one with a cache of its own, as EAGLE-3 has, drafts as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers.random_pairs import base_alone, random_base
from torch import Tensor

from mtp_extract.drafter.protocol import BaseState, Drafter, Needs
from mtp_extract.speculate.loop import Drafts, SpeculativeGenerator
from mtp_extract.speculate.trees import Tree

LAYERS = (1, 2, 4)
PROMPTS = ((1,), tuple(range(17)), (7, 3, 5, 9))
TOKENS = 40


@dataclass(frozen=True)
class Seen:
    """A sequence as the drafter has seen it: token and states of every position before the pending one."""

    tokens: tuple[int, ...]
    states: Tensor  # [length, layers, width]


@dataclass(frozen=True)
class Caching:
    """Reads three layers' hidden states, keeps them from round to round, and drafts from what it has kept.

    It knows what the base will say (``texts``), and is wrong at every third position.
    """

    texts: Sequence[tuple[int, ...]]
    rounds: list[list[Seen]] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return Needs(vocab_size=40, width=32, embedding=True, final_hidden=False, layers=LAYERS, own_cache=True)

    def start(self, base: BaseState) -> list[Seen]:
        kept = base.previous or [Seen((), torch.zeros(0, len(LAYERS), 32)) for _ in base.positions]
        states = torch.stack([base.fed.layers[layer] for layer in LAYERS], dim=2)
        seen = []
        for row, old in enumerate(kept):
            known = base.fed.positions[row] < base.positions[row]
            assert base.fed.positions[row, 0] == len(old.tokens)
            tokens = (*old.tokens, *base.fed.tokens[row][known].tolist())
            seen.append(Seen(tokens, torch.cat((old.states, states[row][known]))))
            assert len(tokens) == int(base.positions[row])
        self.rounds.append(seen)
        return seen

    def step(self, state: list[Any], token: Tensor) -> tuple[Tensor, list[Any]]:
        """``state``: of each sequence what it has seen, and below a fork that of each branch."""
        rows = [seen if isinstance(seen, list) else [seen] for seen in state]
        state = [
            [replace(s, tokens=(*s.tokens, int(token[row, query]))) for query, s in enumerate(branches)]
            for row, branches in enumerate(rows)
        ]
        logits = torch.zeros(*token.shape, 40)
        for row, branches in enumerate(state):
            for query, s in enumerate(branches):
                at = len(s.tokens)
                follows = next((text[at] for text in self.texts if text[:at] == s.tokens and at < len(text)), 0)
                # Where it is wrong, its second choice is right.
                logits[row, query, follows] = 1
                logits[row, query, (follows + (at % 3 == 0)) % 40] = 2
        return logits, state

    def fork(self, state: list[Any], parents: Tensor) -> list[Any]:
        return [[branches[at] for at in parents[row]] for row, branches in enumerate(state)]


@pytest.fixture(scope="module")
def model() -> Any:
    """Tied embeddings would make so small a base repeat its last token for ever."""
    return random_base(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def texts(model: Any) -> list[tuple[int, ...]]:
    return [prompt + base_alone(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("drafts", [4, Tree.parse("2x1x1")])
def test_a_drafter_with_a_cache_of_its_own(model: Any, texts: list[tuple[int, ...]], drafts: Drafts) -> None:
    """Texts are the base's, and what the drafter kept is what the base has at these positions."""
    drafter: Drafter = (caching := Caching(texts))
    generator = SpeculativeGenerator(model, drafter)
    results = [generator.generate(prompt, max_new_tokens=TOKENS, drafts=drafts) for prompt in PROMPTS]
    assert [result.tokens for result in results] == [t[len(p) :] for p, t in zip(PROMPTS, texts, strict=True)]
    assert 0 < sum(r.accepted for r in results) < sum(r.drafted for r in results)
    whole = {text: generator.base.full_pass(torch.tensor([text]), LAYERS).layers for text in texts}
    for seen in (one for round_ in caching.rounds for one in round_):
        layers = next(found for text, found in whole.items() if text[: len(seen.tokens)] == seen.tokens)
        expected = torch.stack([layers[layer][0, : len(seen.tokens)] for layer in LAYERS], dim=1)
        torch.testing.assert_close(seen.states, expected, atol=2e-5, rtol=2e-5)
