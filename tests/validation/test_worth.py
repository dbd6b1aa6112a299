"""What drafts are worth: rounds along all texts are the loop's own, and another text is noticed."""

from __future__ import annotations

import dataclasses

import pytest

from mtp_extract.evaluation.agreement import measure_agreements
from mtp_extract.evaluation.base_texts import Continuations
from mtp_extract.speculate.drafts import AdaptiveDrafts
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import describe_drafts
from mtp_extract.validation.worth import (
    Timed,
    Worth,
    choose_best_chain,
    count_accepted_drafts,
    generate_with_base_alone,
    measure_worth,
    walk_rounds,
)

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

NEW_TOKENS = 24  # As the continuations were made.
PLANS = {
    "1": 1,
    "4": 4,
    **ValidationPlan(None, sample=True, draft_steps=(4,), trees=("1x1x1x1", "3x2x1", "adaptive")).drafts_by_name,
}


@pytest.fixture(scope="module")
def drafted(generator: SpeculativeGenerator, continuations: Continuations) -> list[Agreement]:
    """After its own drafts, and along the texts."""
    requests = [(generator.drafter, 4, along) for along in (False, True)]
    return measure_agreements(generator.base, requests, continuations, batch=4)


@pytest.fixture(scope="module")
def alone(generator: SpeculativeGenerator, continuations: Continuations) -> Timed:
    return generate_with_base_alone(generator, continuations, new_tokens=NEW_TOKENS, timed=3)


@pytest.fixture(scope="module")
def worth(
    generator: SpeculativeGenerator, continuations: Continuations, drafted: list[Agreement], alone: Timed
) -> dict[str, Worth]:
    return measure_worth(generator, continuations, *drafted, PLANS, alone, new_tokens=NEW_TOKENS)


def test_rounds_are_those_of_the_loop(
    generator: SpeculativeGenerator, continuations: Continuations, drafted: list[Agreement]
) -> None:
    """Of every text, chain and tree: what generating it drafts and accepts, round by round; of repeats nothing."""
    twice = Continuations(continuations.prompts * 2, continuations.texts * 2)
    for drafts in {**PLANS, "adaptive": AdaptiveDrafts(4, cost_ratio=0.2)}.values():
        accepted = count_accepted_drafts(drafts, *drafted)
        walks = walk_rounds(drafts, accepted, continuations, NEW_TOKENS)
        for index, walk in zip(continuations.usable, walks, strict=True):
            prompt = continuations.texts[index].prompt
            measured = generator.generate(prompt, max_new_tokens=NEW_TOKENS, drafts=drafts)
            assert walk == [(r.drafted, r.accepted) for r in measured.rounds if r.drafted]
        assert walk_rounds(drafts, accepted, twice, NEW_TOKENS) == walks


def test_counts(worth: dict[str, Worth], alone: Timed, continuations: Continuations) -> None:
    assert [continuations.prompts[row].workload for row in alone.texts] == ["code", "prose", "code"]
    written = sum(len(text.tokens) - text.prompt_length - 1 for text in continuations.texts)
    for length in worth.values():
        assert length.same_text == 3
        # A round emits what it accepts and one token more; rounds that draft nothing emit one.
        assert length.accepted + length.rounds <= written <= length.accepted + length.rounds + len(continuations.texts)
        assert length.tokens_per_round.value == 1 + length.accepted / length.rounds
        assert length.tokens_per_round.n == length.rounds
        assert length.drafted <= length.depth * length.rounds
    chains = {name: length.predicted_speedup or 0.0 for name, length in worth.items() if name in ("1", "4")}
    assert chains[choose_best_chain(worth)] == max(chains.values())
    assert [(w.drafts, w.depth) for w in worth.values()] == [(1, 1), (4, 4), (4, 4), (15, 3), (4, 4)]
    assert [w.tree for w in worth.values()] == [None, None, "1x1x1x1", "3x2x1", "adaptive"]
    assert [describe_drafts(*item) for item in worth.items()][-2:] == ["tree 3x2x1", "adaptive chain"]


def test_a_tree_that_is_a_chain_does_what_the_chain_does(worth: dict[str, Worth]) -> None:
    for name in ("accepted", "drafted", "rounds", "tokens_per_round"):
        assert getattr(worth["4"], name) == getattr(worth["1x1x1x1"], name)


def test_another_text_is_noticed(
    generator: SpeculativeGenerator, continuations: Continuations, drafted: list[Agreement], alone: Timed
) -> None:
    """Where the loop with drafts writes a token that the base alone does not, or goes on after it."""
    (one, shorter), (two, other) = list(alone.texts.items())[:2]
    ends = {one: shorter.tokens[:-1], two: (*other.tokens[:-1], other.tokens[-1] + 1)}
    changed = {row: dataclasses.replace(alone.texts[row], tokens=tokens) for row, tokens in ends.items()}
    spoilt = Timed({**alone.texts, **changed})
    measured = measure_worth(generator, continuations, *drafted, {"4": 4}, spoilt, new_tokens=NEW_TOKENS)
    assert measured["4"].same_text == 1
