"""Expected counts against the loop itself, counters that end with their text, and the comparison of simulated ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.loop_server import played
from msgspec import structs

from mtp_extract.doctor.counts import Counts, compute_expected_counts, rank_fits
from mtp_extract.doctor.faults import FAULTS, SOUND, ExpectedCounts, break_drafter
from mtp_extract.doctor.result import Diagnosis, Identity, Rates, Serving, TextFit
from mtp_extract.doctor.run import compare_with_served
from mtp_extract.doctor.texts import Sample, count_served
from mtp_extract.doctor.verdict import judge_diagnosis
from mtp_extract.drafter.mtp import LITERT, MtpDrafter
from mtp_extract.io.typed import Figure
from mtp_extract.serving.client import Answer
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text

TEXTS, TOKENS, STEPS = 30, 60, 3
NEW_TOKENS = 32


def test_greedy_counts_are_what_the_loop_counts(
    generator: SpeculativeGenerator, drafter: MtpDrafter, encoded: list[tuple[int, ...]]
) -> None:
    """Text by text and step by step, for the drafter as it is and with each thing broken that the loop can run."""
    faulty = break_drafter(drafter, LITERT, generator.base.num_layers, 2)
    chosen = {"sound": drafter, **{name: faulty[name] for name in ("early_state", "unscaled_embedding")}}
    for name, engine in chosen.items():
        loop = SpeculativeGenerator(generator.base, engine, generator.codec.tokenizer)
        results = [loop.generate(one, max_new_tokens=NEW_TOKENS, drafts=STEPS) for one in encoded[:5]]
        along = [Text((*r.prompt_tokens, *r.tokens), len(r.prompt_tokens)) for r in results]
        (pattern,) = compute_expected_counts(generator.base, [engine], along, STEPS)
        counts = [played(result).counted for result in results]
        by_step = [[made.get(f"accepted_{step}", 0) for step in range(STEPS)] for made in counts]
        assert pattern.by_step.tolist() == by_step, name
        assert pattern.rounds.tolist() == [made["rounds"] for made in counts]
        assert (pattern.tokens == [made["tokens"] - 1 for made in counts]).all()


def test_drafts_beyond_the_end_of_a_text_do_not_count() -> None:
    """As vLLM counts: of ten tokens, the first is of the prompt's forward, and nine are of five rounds."""
    text = Text(tuple(range(14)), 4)
    assert len(text.anchors) == 9

    def counts(*positions: int, tokens: int = 10, stops: tuple[int, ...] = ()) -> tuple[float, list[float] | None]:
        told = Counters(rounds=5, drafted=15, accepted=sum(positions), positions=positions)
        found = count_served([Sample(text, Answer("", tokens, None, 0.0, counted=told))], STEPS, stops)
        assert found is not None and found.tokens.tolist() == [9] and found.rounds.tolist() == [5]
        return float(found.accepted[0]), found.by_step[0].tolist() if found.by_step is not None else None

    assert counts(2, 1, 0) == (3, [2, 1, 0]), "a round without drafts is not counted by all"
    assert counts(2, 1, 1) == (4, [2, 1, 1])
    assert counts(3, 2, 1) == (4, [3, 1, 0])
    assert counts(3, 2, 0) == (4, [3, 1, 0]) and counts(3, 2, 0, stops=(13,)) == (5, [3, 2, 0])
    assert counts(4, 2, 1, tokens=11) == (6, [4, 2, 0]), "the token that ended the text is missing in it"
    assert counts(5, 5, 5) == (4, None), "no single round has so many"


def expectation(rates: np.ndarray) -> Counts:
    """Of texts with these conditional rates, [texts, K]: as many rounds as their tokens take."""
    reached = np.cumprod(rates, axis=1)
    tokens = np.full(len(rates), float(TOKENS))
    rounds = tokens / (1 + reached.sum(1))
    return Counts(tokens, rounds, rounds * reached.sum(1), rounds[:, None] * reached)


def simulated(rates: np.ndarray, generator: np.random.Generator) -> Counts:
    """Counters of a server that drafts at these rates: round after round, until the tokens are there."""
    rounds, by_step = np.zeros(len(rates)), np.zeros(rates.shape)
    for text, chances in enumerate(rates):
        while rounds[text] + by_step[text].sum() < TOKENS:
            rounds[text] += 1
            by_step[text] += (generator.random(STEPS) < chances).cumprod()
    return Counts(np.full(len(rates), float(TOKENS)), rounds, by_step.sum(1), by_step)


@pytest.fixture(scope="module")
def rates() -> Mapping[str, np.ndarray]:
    """A pattern each: sound, and faults that take most where sound drafts do well, or elsewhere."""
    generator = np.random.default_rng(7)
    sound = generator.beta(8, 3, (TEXTS, STEPS))
    made = {SOUND: sound}
    for name in FAULTS:
        made[name] = np.clip(sound * generator.beta(6, 3, (TEXTS, STEPS)), 0.02, 0.98)
    return made


def judged(
    rates: Mapping[str, np.ndarray], served: Counts, *, steps_told: bool = True, text: TextFit | None = None
) -> Diagnosis:
    drafter, settings = Identity("pair", "transformers", None), {"drafts": STEPS, "drafts_known": True}
    found = Diagnosis(drafter=drafter, base="base", settings=settings, serving=Serving("server", "vLLM"), text=text)
    expected = ExpectedCounts(
        {name: expectation(rate) for name, rate in rates.items()}, LITERT if len(rates) > 1 else None
    )
    compare_with_served(found, expected, served if steps_told else replace(served, by_step=None))
    return judge_diagnosis(found)


@pytest.mark.parametrize(("interval", "advice"), [((0.2, 0.4), "mtp-tune"), (None, "give more prompts")])
def test_tuning_is_advised_where_texts_are_enough(interval: tuple[float, float] | None, advice: str) -> None:
    """Of fewer than five texts there is no interval, and nothing is decided of the drafter."""
    few = Rates(2, 8.0, 5.0, Figure(1.62, 8, None), [Figure(0.3, 8, interval)])
    drafter = Identity("pair", "transformers", None)
    diagnosis = judge_diagnosis(Diagnosis(drafter=drafter, base="base", settings={"drafts": STEPS}, expected=few))
    assert diagnosis.verdict == "Without a server: expected 1.62 tokens per round, of at most 4."
    assert [advice in step for step in diagnosis.next] == [True]


@pytest.mark.parametrize("steps_told", [True, False])
def test_no_suspect_in_forty_sound_runs(rates: Mapping[str, np.ndarray], steps_told: bool) -> None:
    for seed in range(40):
        verdict = judged(rates, simulated(rates[SOUND], np.random.default_rng(seed)), steps_told=steps_told)
        assert verdict.suspect is None, (seed, verdict)
        assert verdict.outcome in ("in line", "cannot tell")


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_fault_that_was_simulated_is_the_suspect(rates: Mapping[str, np.ndarray], fault: str) -> None:
    verdict = judged(rates, simulated(rates[fault], np.random.default_rng(1)))
    assert (verdict.outcome, verdict.suspect) == ("below", fault)


FIRST, SECOND = list(FAULTS)[:2]


@pytest.mark.parametrize(
    ("patterns", "rate", "said"),
    [
        (lambda rates: rates, lambda rates: np.full((TEXTS, STEPS), 0.03), "no fault that is known explains it"),
        (lambda rates: {**rates, SECOND: rates[FIRST]}, lambda rates: rates[FIRST], "too alike"),
        # As of an EAGLE-3 head.
        (lambda rates: {SOUND: rates[SOUND]}, lambda rates: rates[FIRST], "faults are known of MTP drafters only"),
    ],
)
def test_what_no_known_fault_explains_has_no_suspect(
    rates: Mapping[str, np.ndarray], patterns: Any, rate: Any, said: str
) -> None:
    verdict = judged(patterns(rates), simulated(rate(rates), np.random.default_rng(1)))
    assert (verdict.outcome, verdict.suspect) == ("below", None)
    assert said in verdict.verdict


def test_text_of_another_base_says_nothing_of_the_drafter(rates: Mapping[str, np.ndarray]) -> None:
    served = simulated(rates[FIRST], np.random.default_rng(1))
    found = judged({SOUND: rates[SOUND]}, served, text=TextFit(20, Figure(0.8, 600, [0.75, 0.85]), None))
    assert (found.outcome, found.suspect) == ("another text", None)
    # That most prompts have another number of tokens there says what it is.
    found.text = structs.replace(found.text, prompts_alike=0.1)
    assert (judge_diagnosis(found).outcome, found.suspect) == ("another text", "template")
    assert "90 % of the prompts are other tokens there" in found.verdict


def test_the_likelihood_is_of_drafts_by_step() -> None:
    """Of one text by hand: 10 rounds, 6 and then 3 drafts stand; expected 5 of 10, then 4 of 5."""
    one = (np.array([value]) for value in (19.0, 10.0, 9.0))
    expected = Counts(np.array([19.0]), np.array([10.0]), np.array([9.0]), np.array([[5.0, 4.0]]))
    served = Counts(*one, np.array([[6.0, 3.0]]))
    (fit,) = rank_fits(served, {SOUND: expected})
    first, second = (5 + 5 / 10) / 11, (4 + 4 / 5) / 6
    wanted = 6 * np.log(first) + 4 * np.log(1 - first) + 3 * np.log(second) + 3 * np.log(1 - second)
    assert fit.log_likelihood == pytest.approx(wanted)
    assert (fit.behind, fit.behind_at_least, fit.missing.value, fit.missing.ci95) == (0, None, 0, None)
