"""What drafts are worth: rounds along all texts are the loop's own, and another text is noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.agreement import measure_agreement

from mtp_extract.evaluate.agreement import Continuations
from mtp_extract.speculate.adaptive import AdaptiveDrafts
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.verdict import drafts_of
from mtp_extract.validation.worth import Drafting, GenerationResult, draftings, measure_generation, walked

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

NEW_TOKENS = 24  # As the continuations were made.
NAMES = ("1", "4", "1x1x1x1", "3x2x1", "adaptive")
TREES = ValidationPlan(None, draft_steps=(1, 4), trees=NAMES[2:]).wanted


@pytest.fixture(scope="module")
def agreement(generator: SpeculativeGenerator, continuations: Continuations) -> Agreement:
    return measure_agreement(generator.base, generator.drafter, continuations, 4, batch=4)


@pytest.fixture(scope="module")
def planned(generator: SpeculativeGenerator, continuations: Continuations, agreement: Agreement) -> list[Drafting]:
    return draftings(generator, (1, 4), TREES, continuations, agreement, batch=4)


@pytest.fixture(scope="module")
def result(generator: SpeculativeGenerator, continuations: Continuations, planned: list[Drafting]) -> GenerationResult:
    return measure_generation(generator, continuations, planned, new_tokens=NEW_TOKENS, timed=2)


def test_rounds_are_those_of_the_loop(
    generator: SpeculativeGenerator, continuations: Continuations, planned: list[Drafting]
) -> None:
    """Of every text, chain and tree: what generating it drafts and accepts, round by round."""
    *others, adaptive = planned
    adaptive = dataclasses.replace(adaptive, what=AdaptiveDrafts(4, cost_ratio=0.2))
    for drafting in (*others, adaptive):
        for index, walk in zip(continuations.usable, walked(drafting, continuations, NEW_TOKENS), strict=True):
            prompt = continuations.texts[index].prompt
            made = generator.generate(prompt, max_new_tokens=NEW_TOKENS, drafts=drafting.what)
            assert walk == [(r.drafted, r.accepted) for r in made.rounds if r.drafted]


def test_text_is_the_bases_own(result: GenerationResult) -> None:
    for length in result.worth.values():
        assert (length.same_text, length.prompts, length.divergences) == (2, 2, [])


def test_counts(result: GenerationResult, continuations: Continuations) -> None:
    written = sum(len(text.tokens) - text.prompt_length - 1 for text in continuations.texts)
    for length in result.worth.values():
        # A round emits what it accepts and one token more; rounds that draft nothing emit one.
        assert length.accepted + length.rounds <= written <= length.accepted + length.rounds + len(continuations.texts)
        assert length.tokens_per_round.value == 1 + length.accepted / length.rounds
        assert length.tokens_per_round.n == length.rounds
        assert length.drafted <= length.depth * length.rounds
    rates = [length.accepted / length.drafted for length in result.worth.values()]
    assert rates[0] > rates[1] > 0.3
    chains = {name: length.predicted_speedup or 0.0 for name, length in result.worth.items() if name in ("1", "4")}
    assert chains[result.best] == max(chains.values())
    assert tuple(result.worth) == NAMES
    assert [(w.drafts, w.depth) for w in result.worth.values()] == [(1, 1), (4, 4), (4, 4), (15, 3), (4, 4)]
    assert [w.tree for w in result.worth.values()] == [None, None, "1x1x1x1", "3x2x1", "adaptive"]
    assert [drafts_of(*item) for item in result.worth.items()][-2:] == ["tree 3x2x1", "adaptive chain"]


def test_a_tree_that_is_a_chain_does_what_the_chain_does(result: GenerationResult) -> None:
    chain, tree = result.worth["4"], result.worth["1x1x1x1"]
    for name in ("accepted", "drafted", "rounds", "tokens_per_round"):
        assert getattr(chain, name) == getattr(tree, name)


def test_what_repeats_is_not_counted(
    generator: SpeculativeGenerator, continuations: Continuations, planned: list[Drafting]
) -> None:
    twice = Continuations(continuations.prompts * 2, continuations.texts * 2)
    assert walked(planned[1], twice, 24) == walked(planned[1], continuations, 24)


def test_another_text_is_noticed(
    generator: SpeculativeGenerator,
    continuations: Continuations,
    planned: list[Drafting],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the loop with drafts writes a token that the base alone does not."""
    generate = generator.generate

    def wrong(prompt: Any, **more: Any) -> Any:
        made = generate(prompt, **more)
        if not more["drafts"] or prompt != continuations.texts[0].prompt:
            return made
        tokens = (*made.tokens[:5], (made.tokens[5] + 7) % 500, *made.tokens[6:])
        return dataclasses.replace(made, tokens=tokens)

    monkeypatch.setattr(generator, "generate", wrong)
    for length in measure_generation(generator, continuations, planned, new_tokens=NEW_TOKENS, timed=3).worth.values():
        assert (length.same_text, length.prompts) == (2, 3)
        (divergence,) = length.divergences
        assert (divergence.prompt, divergence.token) == (0, 5)
        assert divergence.margin is not None
        assert divergence.margin > 0
