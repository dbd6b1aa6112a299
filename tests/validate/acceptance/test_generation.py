"""Speculative decoding in the report: the same text, counted over all prompts, and a different one noticed."""

from __future__ import annotations

import dataclasses

import pytest

from mtp_extract.engines import LocalEngine
from mtp_extract.speculate import SpeculativeGenerator, Text
from mtp_extract.validate.acceptance.agreement import Continuations
from mtp_extract.validate.acceptance.generation import GenerationResult, measure_generation

NEW_TOKENS = 24  # As the continuations were made.


def run(generator: SpeculativeGenerator, continuations: Continuations) -> GenerationResult:
    engine = LocalEngine(generator, batch=4)
    return measure_generation(engine, generator.base, continuations, (1, 4), [0.8] * 4, new_tokens=NEW_TOKENS, timed=2)


@pytest.fixture(scope="module")
def result(generator: SpeculativeGenerator, continuations: Continuations) -> GenerationResult:
    return run(generator, continuations)


def test_text_is_the_bases_own(result: GenerationResult, continuations: Continuations) -> None:
    for length in result.lengths:
        assert length.identical
        assert (length.identical_prompts, length.prompts) == (len(continuations.texts), len(continuations.texts))
        assert length.divergences == ()


def test_counts(result: GenerationResult, continuations: Continuations) -> None:
    written = sum(len(text.tokens) - text.prompt_length - 1 for text in continuations.texts)
    for length in result.lengths:
        # A round emits what it accepts and one token more; rounds that draft nothing emit one.
        assert length.accepted + length.rounds <= written <= length.accepted + length.rounds + length.prompts
        assert length.acceptance == length.accepted / length.drafted
        assert length.mean_accepted_length == 1 + length.accepted / length.rounds
        assert length.drafted <= length.drafts * length.rounds
        assert {buffer.name for buffer in length.buffers} >= {"target_hidden", "candidate_tokens", "draft_logits"}
    assert result.lengths[0].acceptance > result.lengths[1].acceptance > 0.3
    assert result.best_drafts in (0, 1, 4)


def test_another_text_is_noticed(generator: SpeculativeGenerator, continuations: Continuations) -> None:
    text = continuations.texts[2]
    at = text.prompt_length + 5
    tokens = list(text.tokens)
    tokens[at] = (tokens[at] + 7) % 500
    texts = (*continuations.texts[:2], Text(tuple(tokens), text.prompt_length), *continuations.texts[3:])
    found = run(generator, dataclasses.replace(continuations, texts=texts))
    for length in found.lengths:
        assert not length.identical
        assert length.identical_prompts == length.prompts - 1
        (divergence,) = length.divergences
        assert (divergence.prompt, divergence.token, divergence.tie) == (2, 5, False)
        # The altered text holds what the base would not say, so the other token has the larger logit.
        assert divergence.margin is not None
        assert divergence.margin < 0
