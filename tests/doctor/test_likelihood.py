"""The comparison with patterns, on counters that are simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from mtp_extract.doctor.faults import FAULTS, Reference
from mtp_extract.doctor.fields import Diagnosis, Identity, Rate, Serving, TextFit
from mtp_extract.doctor.likelihood import SOUND, _beta_binomial, compare, gap
from mtp_extract.doctor.patterns import Counted
from mtp_extract.doctor.rates import rates_of
from mtp_extract.doctor.run import held_against
from mtp_extract.doctor.verdict import BELOW, IN_LINE, OTHER_TEXT, UNTOLD, Verdict, judge
from mtp_extract.drafter.masks import LITERT
from mtp_extract.speculate.intervals import Interval

TEXTS, TOKENS, STEPS = 30, 60, 3


def expectation(rates: np.ndarray) -> Counted:
    """Of texts with these conditional rates, [texts, K]: as many rounds as their tokens take."""
    reached = np.cumprod(rates, axis=1)
    tokens = np.full(len(rates), float(TOKENS))
    rounds = tokens / (1 + reached.sum(1))
    return Counted(tokens, rounds, rounds * reached.sum(1), rounds[:, None] * reached)


def simulated(rates: np.ndarray, generator: np.random.Generator) -> Counted:
    """Counters of a server that drafts at these rates: round after round, until the tokens are there."""
    rounds, by_step = np.zeros(len(rates)), np.zeros(rates.shape)
    for text, chances in enumerate(rates):
        while rounds[text] + by_step[text].sum() < TOKENS:
            rounds[text] += 1
            by_step[text] += (generator.random(STEPS) < chances).cumprod()
    return Counted(np.full(len(rates), float(TOKENS)), rounds, by_step.sum(1), by_step)


@pytest.fixture(scope="module")
def rates() -> Mapping[str, np.ndarray]:
    """A pattern each: sound, and faults that take most where sound drafts do well, or elsewhere."""
    generator = np.random.default_rng(7)
    sound = generator.beta(8, 3, (TEXTS, STEPS))
    made = {SOUND: sound}
    for fault in FAULTS:
        made[fault.name] = np.clip(sound * generator.beta(6, 3, (TEXTS, STEPS)), 0.02, 0.98)
    return made


def judged(rates: Mapping[str, np.ndarray], served: Counted, *, steps_told: bool = True) -> Verdict:
    expected = {name: expectation(rate) for name, rate in rates.items()}
    known = Reference(expected.pop(SOUND), LITERT, expected, ())
    found = Diagnosis(
        identity=Identity("pair", "transformers", "extracted", None, None),
        settings={"drafts": STEPS, "drafts_known": True},
        serving=Serving("server", "vLLM"),
        expected=rates_of(known.sound, STEPS),
    )
    return judge(held_against(found, known, served if steps_told else replace(served, by_step=None)))


@pytest.mark.parametrize("steps_told", [True, False])
def test_no_suspect_in_forty_sound_runs(rates: Mapping[str, np.ndarray], steps_told: bool) -> None:
    for seed in range(40):
        verdict = judged(rates, simulated(rates[SOUND], np.random.default_rng(seed)), steps_told=steps_told)
        assert verdict.suspect is None, (seed, verdict)
        assert verdict.outcome in (IN_LINE, UNTOLD)


@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS])
def test_the_fault_that_was_simulated_is_the_suspect(rates: Mapping[str, np.ndarray], fault: str) -> None:
    verdict = judged(rates, simulated(rates[fault], np.random.default_rng(1)))
    assert (verdict.outcome, verdict.suspect) == (BELOW, fault)
    assert verdict.certainty is not None and verdict.certainty >= 0.95


def test_what_is_below_and_like_nothing_known_has_no_suspect(rates: Mapping[str, np.ndarray]) -> None:
    """Everything rejected: below all patterns by far."""
    verdict = judged(rates, simulated(np.full((TEXTS, STEPS), 0.03), np.random.default_rng(1)))
    assert (verdict.outcome, verdict.suspect) == (BELOW, None)
    assert "no fault that is known explains it" in verdict.sentence


def test_twins_are_not_told_apart(rates: Mapping[str, np.ndarray]) -> None:
    first, second = FAULTS[0].name, FAULTS[1].name
    twins = {**rates, second: rates[first]}
    verdict = judged(twins, simulated(rates[first], np.random.default_rng(1)))
    assert verdict.suspect is None
    assert "too alike" in verdict.sentence


def test_too_few_texts_say_nothing(rates: Mapping[str, np.ndarray]) -> None:
    few = {name: rate[:4] for name, rate in rates.items()}
    verdict = judged(few, simulated(few[FAULTS[0].name], np.random.default_rng(1)))
    assert (verdict.outcome, verdict.suspect) == (UNTOLD, None)


def test_text_of_another_base_says_nothing_of_the_drafter(rates: Mapping[str, np.ndarray]) -> None:
    expected = expectation(rates[SOUND])
    found = Diagnosis(
        identity=Identity("pair", "transformers", "extracted", None, None),
        settings={"drafts": STEPS, "drafts_known": True},
        serving=Serving("server", "vLLM"),
        expected=rates_of(expected, STEPS),
        text=TextFit(20, 0, Rate(0.8, [0.75, 0.85]), 1.0, 0.3, None, None),
    )
    served = simulated(rates[FAULTS[0].name], np.random.default_rng(1))
    verdict = judge(held_against(found, Reference(expected, LITERT, {}, ()), served))
    assert (verdict.outcome, verdict.suspect) == (OTHER_TEXT, None)
    assert "mtp-tune" in " ".join(verdict.next)
    # That most prompts have another number of tokens there says what it is.
    assert found.text is not None
    found.text = structs.replace(found.text, prompts_alike=0.1)
    verdict = judge(held_against(found, Reference(expected, LITERT, {}, ()), served))
    assert (verdict.outcome, verdict.suspect) == (OTHER_TEXT, "template")
    assert "90 % of the prompts have another number of tokens there" in verdict.sentence


def test_a_drafter_without_known_faults_is_below_and_no_more(rates: Mapping[str, np.ndarray]) -> None:
    """As an EAGLE-3 head is."""
    verdict = judged({SOUND: rates[SOUND]}, simulated(rates[FAULTS[0].name], np.random.default_rng(1)))
    assert (verdict.outcome, verdict.suspect) == (BELOW, None)
    assert "faults are known of MTP drafters alone" in verdict.sentence


@pytest.mark.parametrize(("mean", "correlation"), [(0.3, 0.001), (0.3, 0.2), (0.95, 0.05)])
def test_the_beta_binomial_is_a_distribution(mean: float, correlation: float) -> None:
    """It sums to 1, and has the mean and the variance that the two numbers stand for."""
    size = 20
    hits = np.arange(size + 1.0)
    p = np.exp(_beta_binomial(hits, np.full(size + 1, float(size)), np.full(size + 1, mean), correlation))
    assert p.sum() == pytest.approx(1)
    assert (p @ hits) == pytest.approx(size * mean)
    variance = size * mean * (1 - mean) * (1 + (size - 1) * correlation)
    assert (p @ (hits - size * mean) ** 2) == pytest.approx(variance)


def test_without_correlation_it_is_the_binomial() -> None:
    hits, sizes, means = (np.array([value]) for value in (7.0, 20.0, 0.4))
    wanted = math.log(math.comb(20, 7) * 0.4**7 * 0.6**13)
    assert _beta_binomial(hits, sizes, means, 1e-6)[0] == pytest.approx(wanted, abs=1e-4)


def test_a_server_that_does_what_is_expected_has_no_gap(rates: Mapping[str, np.ndarray]) -> None:
    expected = expectation(rates[SOUND])
    assert gap(expected, expected) == Interval(0, 0)
    (best, *_) = compare(expected, {name: expectation(rate) for name, rate in rates.items()})
    assert (best.name, best.support) == (SOUND, 1.0)
