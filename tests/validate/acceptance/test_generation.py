"""Speculative decoding in the report: the same text, counted over all prompts, and a different one noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mtp_extract.evaluate.agreement import Continuations, figures, measure_agreement
from mtp_extract.speculate.arithmetic import expected_tokens
from mtp_extract.speculate.generate import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text
from mtp_extract.speculate.trees import Tree
from mtp_extract.validate.acceptance import generation
from mtp_extract.validate.acceptance.drafting import draftings, parse_wanted
from mtp_extract.validate.acceptance.generation import GenerationResult, measure_generation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

NEW_TOKENS = 24  # As the continuations were made.
NAMES = ("1", "4", "1x1x1x1", "3x2x1", "auto:6", "best:6")
TREES = dict(map(parse_wanted, NAMES[2:]))


def run(generator: SpeculativeGenerator, continuations: Continuations) -> GenerationResult:
    wanted = draftings(generator, (1, 4), TREES, continuations, [0.8] * 4, batch=4)
    return measure_generation(generator, continuations, wanted, batch=4, new_tokens=NEW_TOKENS, timed=2)


@pytest.fixture(scope="module")
def result(generator: SpeculativeGenerator, continuations: Continuations) -> GenerationResult:
    return run(generator, continuations)


def test_text_is_the_bases_own(result: GenerationResult, continuations: Continuations) -> None:
    for length in result.worth.values():
        assert (length.same_text, length.prompts) == (len(continuations.texts), len(continuations.texts))
        assert length.divergences == []


def test_counts(result: GenerationResult, continuations: Continuations) -> None:
    written = sum(len(text.tokens) - text.prompt_length - 1 for text in continuations.texts)
    for length in result.worth.values():
        # A round emits what it accepts and one token more; rounds that draft nothing emit one.
        assert length.accepted + length.rounds <= written <= length.accepted + length.rounds + length.prompts
        assert length.tokens_per_round.value == 1 + length.accepted / length.rounds
        assert length.tokens_per_round.n == length.rounds
        assert length.drafted <= length.depth * length.rounds
    rates = [length.accepted / length.drafted for length in result.worth.values()]
    assert rates[0] > rates[1] > 0.3
    chains = {name: length.predicted_speedup or 0.0 for name, length in result.worth.items() if name in ("1", "4")}
    assert chains[result.best] == max(chains.values())
    assert result.break_even == max((int(name) for name, gain in chains.items() if gain > 1), default=0)


def test_chains_and_trees(result: GenerationResult) -> None:
    assert tuple(result.worth) == NAMES
    found = result.worth
    sizes = {name: (length.drafts, length.depth) for name, length in found.items()}
    assert sizes | {"best:6": (6, 0)} == {
        "1": (1, 1),
        "4": (4, 4),
        "1x1x1x1": (4, 4),
        "3x2x1": (15, 3),
        "auto:6": (6, 6),
        "best:6": (6, 0),
    }
    assert sizes["best:6"][0] == 6
    kinds = {name: (length.tree, length.paths is not None) for name, length in found.items()}
    best = found["best:6"]
    assert kinds == {
        "1": (None, False),
        "4": (None, False),
        "1x1x1x1": ("1x1x1x1", True),
        "3x2x1": ("3x2x1", True),
        "auto:6": ("auto:6", False),
        "best:6": (best.tree, True),
    }
    # What was chosen can be asked for again.
    assert best.tree is not None
    assert best.tree.startswith("paths:")
    assert parse_wanted(best.tree) == (best.tree, Tree(tuple(map(tuple, best.paths or ()))))


def test_a_tree_that_is_a_chain_does_what_the_chain_does(result: GenerationResult) -> None:
    chain, tree = result.worth["4"], result.worth["1x1x1x1"]
    for name in ("accepted", "drafted", "rounds", "tokens_per_round"):
        assert getattr(chain, name) == getattr(tree, name)


def test_an_interval_stays_within_what_can_be(generator: SpeculativeGenerator, continuations: Continuations) -> None:
    """Five texts say little of a round of 3 drafts, but not that it may have -5 or 13 tokens; four say nothing."""
    for texts in (4, 5):
        few = Continuations(continuations.prompts[:texts], continuations.texts[:texts])
        (planned,) = draftings(generator, [3], {}, few, [0.5] * 3, batch=2)
        (row,) = measure_generation(generator, few, [planned], batch=5, new_tokens=24, timed=1).worth.values()
        if texts == 4:
            assert row.tokens_per_round.ci95 is None
            continue
        assert row.tokens_per_round.ci95 is not None and row.tokens_per_round.value is not None
        low, high = row.tokens_per_round.ci95
        assert 1 <= low < row.tokens_per_round.value < high <= 4


@pytest.mark.parametrize("ties", [True, False])
def test_a_text_of_its_own_in_a_batch_of_one(
    generator: SpeculativeGenerator, continuations: Continuations, monkeypatch: pytest.MonkeyPatch, ties: bool
) -> None:
    """In BF16 the base alone may write another text than in a batch: where drafting one at a time parts from *that*."""
    few = Continuations(continuations.prompts[:4], continuations.texts[:4])
    (planned,) = draftings(generator, [1], {}, few, [0.5], batch=4)
    batched = generation.generate_in_batches
    text = few.texts[0]
    with torch.inference_mode():
        logits = generator.base.logits(generator.base.full_pass(torch.tensor([text.tokens[:-2]])).hidden[:, -1])[0]
    best, second = logits.topk(2).indices.tolist()
    assert text.continuation[-2] == best
    slow = (*text.continuation[:-2], second, text.tokens[-1])

    def generated(given: SpeculativeGenerator, prompts: list[Any], options: Any, **more: Any) -> list[Any]:
        found = batched(given, prompts, options, **more)
        # The base alone, one at a time.
        return [
            dataclasses.replace(r, tokens=slow) if options.drafts == 0 and r.tokens == text.continuation else r
            for r in found
        ]

    monkeypatch.setattr(generation, "generate_in_batches", generated)
    monkeypatch.setattr(generation, "_FLOAT32_TIE", 100.0 if ties else 0.0)
    (row,) = measure_generation(generator, few, [planned], batch=4, new_tokens=NEW_TOKENS, timed=4).worth.values()
    (found,) = row.divergences
    assert (found.prompt, found.token, found.tie) == (0, len(slow) - 2, ties)
    assert found.margin == pytest.approx(float(logits[second] - logits[best]), abs=1e-3)
    assert row.wrong_text is not ties


@pytest.mark.parametrize(("moved", "most", "ties"), [(1.0, 1e9, True), (0.9, 1e9, False), (100.0, 0.0, False)])
def test_what_the_base_itself_moves_a_logit_by_is_a_tie(
    generator: SpeculativeGenerator,
    continuations: Continuations,
    monkeypatch: pytest.MonkeyPatch,
    moved: float,
    most: float,
    ties: bool,
) -> None:
    """Between a pass over a text and its last token fed by itself; up to some roundings of the head."""
    text, base = continuations.texts[0], generator.base
    before = torch.tensor([text.tokens[:-1]])
    with torch.inference_mode():
        logits = base.logits(base.full_pass(before).hidden[:, -1])[0]
        torch.testing.assert_close(generation._stepped(base, before), logits, atol=1e-3, rtol=0)
    other = int(logits.topk(2).indices[1])
    margin = float(logits[text.tokens[-1]] - logits[other])
    assert margin > 1e-2
    shifted = torch.nn.functional.one_hot(torch.tensor(other), logits.numel()) * margin * moved
    monkeypatch.setattr(generation, "_stepped", lambda *given: logits + shifted * (1 + 1e-5))
    monkeypatch.setattr(generation, "_MOST_MOVED", most)
    found = generation._divergence(base, text, 0, (*text.continuation[:-1], other))
    assert (found.token, found.margin, found.tie) == (len(text.continuation) - 1, pytest.approx(margin), ties)


def test_what_repeats_is_generated_and_not_counted(
    generator: SpeculativeGenerator, continuations: Continuations
) -> None:
    found = []
    for times in (1, 2):
        given = Continuations(continuations.prompts * times, continuations.texts * times)
        (planned,) = draftings(generator, [3], {}, given, [0.5] * 3, batch=4)
        found += measure_generation(generator, given, [planned], batch=7, new_tokens=24, timed=1).worth.values()
    once, twice = found
    assert (once.prompts, twice.prompts, twice.same_text) == (7, 14, 14)
    for name in ("accepted", "drafted", "rounds", "tokens_per_round"):
        assert getattr(once, name) == getattr(twice, name)


def test_what_is_expected(
    result: GenerationResult, generator: SpeculativeGenerator, continuations: Continuations
) -> None:
    """From teacher forcing over every position; of a tree that is a chain, what agreement says of the chain."""
    found = {name: worth.expected_tokens_per_round for name, worth in result.worth.items()}
    agreement = figures(measure_agreement(generator.base, generator.drafter, continuations, 4, batch=4))
    chain = expected_tokens([step.conditional.value or 0.0 for step in agreement.steps])
    assert found["1x1x1x1"] == pytest.approx(chain, abs=1e-12)
    assert found["4"] == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4), "by the acceptance it was told"
    shallow = expected_tokens([step.conditional.value or 0.0 for step in agreement.steps[:3]])
    tree, best = found["3x2x1"], found["best:6"]
    assert tree is not None
    assert best is not None
    assert shallow + 0.1 < tree < 4
    assert chain < best < 7
    assert found["auto:6"] is None


def test_another_text_is_noticed(generator: SpeculativeGenerator, continuations: Continuations) -> None:
    text = continuations.texts[2]
    at = text.prompt_length + 5
    tokens = list(text.tokens)
    tokens[at] = (tokens[at] + 7) % 500
    texts = (*continuations.texts[:2], Text(tuple(tokens), text.prompt_length), *continuations.texts[3:])
    found = run(generator, dataclasses.replace(continuations, texts=texts))
    for length in found.worth.values():
        assert length.same_text == length.prompts - 1
        (divergence,) = length.divergences
        assert (divergence.prompt, divergence.token, divergence.tie) == (2, 5, False)
        # The altered text holds what the base would not say, so the other token has the larger logit.
        assert divergence.margin is not None
        assert divergence.margin < 0
