"""From what was found to a verdict: in line, or below and why, or that it cannot be told; and what to do next.

:data:`_RULES` are asked in order, and the first that has something to say says it. A suspect in the serving stack is
named where acceptance is below what is to be expected, its pattern is the likeliest of all, that of a sound stack among
them, in 95 % of draws of texts, and what it expects is near what was served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mtp_extract.doctor.faults import FAULTS, POSITION
from mtp_extract.doctor.fields import Diagnosis, Outcome
from mtp_extract.doctor.likelihood import SOUND
from mtp_extract.report.numbers import number, percent
from mtp_extract.speculate.intervals import Interval
from mtp_extract.speculate.texts import LEAST_TEXTS

UNFIT: Final = "does not fit"
EXPECTED: Final = "not served"
IDLE: Final = "nothing drafted"
IN_LINE: Final = "in line"
BELOW: Final = "below"
OTHER_TEXT: Final = "another text"
UNTOLD: Final = "cannot tell"

_SURE = 0.95  # support of a suspect
_NOTICED = 0.005  # accepted drafts a token, by which acceptance has to be below where a fault is the likeliest
_PLAIN = 0.02  # the same, surely and over texts, where none is; of one share, of drafts
_IN_LINE = 0.05  # as above, that may be missing at most where it is called in line
_NEAR = 0.10  # as above, between what a suspect expects and what was served
_OWN = 0.97  # of tokens that are the base's argmax, in greedy text: less is another base's
_ALIKE = 0.05  # the same at a temperature, from what is expected there
_MOSTLY = 0.5  # of prompts: where fewer have as many tokens there as here, they are written otherwise
_CONSTANT = 0.1  # of K drafts in a round, more or fewer: the engine makes another number than the reference
_LOW = 0.5  # of drafts, at the first step, below which a drafter does little for its base

_FITTING = ("take the drafter of this very base, or serve the base that this one was made for",)
_STARTING = ("start the engine as the model card says, with its speculative options",)
_GIVING = ("give the base, so that there is something to hold it against",)
_COUNTING = ("serve the same directory in an engine that counts drafts by answer, so that patterns can be held apart",)
_SAYING = ("say how many drafts a round the engine makes",)
_STEADY = (
    "have the engine draft a constant number a round, without a least probability, or say its number; ask again",
)
_PROMPTING = ("ask with the chat template that the server applies, or have it apply the base's",)
_HEATING = ("have the server take the temperature of the request, or say the one it samples at",)
_REBASING = (
    "serve it once more without a drafter, as the baseline: where that writes other text, drafting changes the text",
    "give the very base that is served: its revision, its quantization, its adapter merged",
    "if that base was tuned or quantized since, tune the drafter on what it writes (mtp-tune): others gained 13 "
    "points of acceptance where the base had moved; what it gains here, its held-out texts say",
)
_MORE = ("give more prompts, or longer answers",)
_ELSEWHERE = (
    "serve the same directory in another engine or version: where it is in line there, it is the engine",
    "report it to the engine with doctor.json",
)


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    sentence: str
    next: tuple[str, ...] = ()  # what to do
    findings: tuple[str, ...] = ()  # what it rests on
    suspect: str | None = None  # name of a fault, or "temperature" or "template"
    certainty: float | None = None  # of a fault: its support


def judge(found: Diagnosis) -> Verdict:
    """The verdict."""
    verdict = next(said for rule in _RULES if (said := rule(found)) is not None)
    return replace(verdict, findings=(*verdict.findings, *_of_baseline(found)))


def _unfit(found: Diagnosis) -> Verdict | None:
    wrong = "; ".join(f"{check.name}: {check.found}" for check in found.checks if check.passed is False)
    return Verdict(UNFIT, f"Drafter and base do not fit: {wrong}.", _FITTING) if wrong else None


def _unserved(found: Diagnosis) -> Verdict | None:
    if found.serving is not None:
        return None
    if found.expected is not None:
        return Verdict(EXPECTED, f"To be expected of this pair: {_expected(found)}.", tuple(_of_drafter(found)))
    what = f"{found.identity.name}: a drafter in the {found.identity.format} format, {found.identity.made}"
    if found.base is None:
        return Verdict(EXPECTED, f"{what}; without its base nothing was measured.", ("give the base",))
    return Verdict(EXPECTED, f"{what}; no text was long enough to draft along.", _MORE)


def _idle(found: Diagnosis) -> Verdict | None:
    if found.serving is None or found.serving.drafted != 0:
        return None
    sentence = f"{found.serving.name} drafted nothing: it was started without a drafter, or does not use it."
    return Verdict(IDLE, sentence, _STARTING)


def _unmeasured(found: Diagnosis) -> Verdict | None:
    if found.expected is not None:
        return None
    if found.base is None:
        return Verdict(UNTOLD, f"{_served(found)}; what is to be expected was not measured.", _GIVING)
    return Verdict(UNTOLD, f"Cannot tell: {_served(found)}; no text can be counted along.", _MORE)


def _another_text(found: Diagnosis) -> Verdict | None:
    """Where the server's texts are not what this base would write, there is no telling of its drafts."""
    text = found.text
    if text is None or text.likeliest.interval is None:
        return None
    interval = Interval(*text.likeliest.interval)
    said, greedy = text.likeliest.value, text.expected == 1.0
    near = abs(said - text.expected) <= _ALIKE or interval.low <= text.expected <= interval.high
    if interval.high >= _OWN if greedy else near:
        return None
    told = f"{100 * said:.1f} % of the served tokens are the base's likeliest, {100 * text.expected:.1f} % are expected"
    other = text.other_template
    if other is not None and other > interval.high and other >= (_OWN if greedy else text.expected - _ALIKE):
        what = f"with prompts written the other way, as chat or not, it is {100 * other:.1f} %"
        return Verdict(OTHER_TEXT, f"Another prompt: {told}; {what}.", _PROMPTING, (told, what), "template")
    if text.prompts_alike is not None and text.prompts_alike < _MOSTLY:
        what = f"{100 * (1 - text.prompts_alike):.0f} % of the prompts have another number of tokens there"
        return Verdict(OTHER_TEXT, f"Another prompt: {told}; {what}.", _PROMPTING, (told, what), "template")
    if greedy and text.at_one is not None and abs(said - text.at_one) < _ALIKE:
        what = f"as it would be at temperature 1, where it is {100 * text.at_one:.1f} %"
        steps = (*_HEATING, *_REBASING)
        return Verdict(OTHER_TEXT, f"Probably sampled, not greedy: {told}; {what}.", steps, (told, what), "temperature")
    sentence = f"The served text is not this base's own, so its drafts cannot be judged: {told}."
    return Verdict(OTHER_TEXT, sentence, _REBASING, (told,))


def _unsteady(found: Diagnosis) -> Verdict | None:
    """What is expected holds for K drafts a round."""
    assert found.serving is not None
    drafts, per_round = found.settings["drafts"], found.serving.per_round
    if found.serving.rates is None and found.serving.acceptance is None:
        return Verdict(UNTOLD, f"Cannot tell: {found.serving.name} tells nothing of its drafts.", _COUNTING)
    if not found.settings["drafts_known"]:
        what = "how many drafts a round were made is not told"
        return Verdict(UNTOLD, f"Cannot tell: {_both(found)}; {what}.", _SAYING, (what,))
    if per_round is None or abs(per_round / drafts - 1) <= _CONSTANT:
        return None
    what = f"{per_round:.2f} drafts a round on the mean, where {drafts} were expected: it stops early, or adapts"
    return Verdict(UNTOLD, f"Cannot tell: {_both(found)}; {what}.", _STEADY, (what,))


def _by_rate(found: Diagnosis) -> Verdict | None:
    """One share of all drafts has no pattern: it can be in line or below, and says not why."""
    assert found.expected is not None and found.serving is not None
    served, mean = found.serving.acceptance, found.expected.mean_accepted_length
    if found.serving.rates is not None or served is None:
        return None
    steps = found.settings["drafts"]
    wanted = (mean.value - 1) / steps
    interval = Interval(*mean.interval).scaled(1 / steps, -1 / steps) if mean.interval else None
    told = f"served {percent(served, None)} % of drafts, to be expected {percent(wanted, interval)} %"
    if interval is not None and served < interval.low - _PLAIN:
        return Verdict(BELOW, f"Below: {told}. One number does not say why.", _COUNTING)
    if interval is not None and served >= wanted - _IN_LINE:
        return Verdict(IN_LINE, f"In line: {told}.", tuple(_of_drafter(found)))
    return Verdict(UNTOLD, f"Cannot tell: {told}; too few texts to say.", _MORE)


def _by_pattern(found: Diagnosis) -> Verdict:
    assert found.expected is not None
    (sound,) = (fit for fit in found.fits if fit.name == SOUND)
    if sound.gap is None:
        why = f"{found.expected.texts} texts, at least {LEAST_TEXTS} are needed"
        return Verdict(UNTOLD, f"Cannot tell: {_both(found)}; {why}.", _MORE)
    (low, high), mean, ends = sound.gap, sum(sound.gap) / 2, [100 * end for end in sound.gap]
    apart = f"{number(100 * mean, '+.1f', ends, between=' to ')} accepted drafts in 100 tokens from what is expected"
    faults = [fit for fit in found.fits if fit.name != SOUND]
    # A pattern that is plainly a fault's shows a loss that the mean over so different texts does not.
    likely = any(fit.support >= _SURE for fit in faults)
    if mean < -_NOTICED if likely else high < -_PLAIN:
        return _suspected(found, apart)
    if low > -_IN_LINE:
        return Verdict(IN_LINE, f"In line: {_both(found)}.", tuple(_of_drafter(found)), (apart,))
    return Verdict(UNTOLD, f"Cannot tell: {_both(found)}; too few texts to say.", _MORE, (apart,))


def _suspected(found: Diagnosis, apart: str) -> Verdict:
    """Acceptance is below: of what?"""
    told, best = f"Below: {_both(found)}", next((fit for fit in found.fits if fit.name != SOUND), None)
    if best is None:
        why = "no fault that is known changes it here" if found.untold else "faults are known of MTP drafters alone"
        return Verdict(BELOW, f"{told}; {why}.", _ELSEWHERE, (apart,))
    rest = next(fit for fit in found.fits if fit is not best)
    what, next_best = _WHAT[best.name], _WHAT[rest.name]
    assert best.gap is not None  # of the same texts as the sound one's
    low, high = best.gap
    if not (low < _NEAR and high > -_NEAR):
        ends = f"{-100 * high:+.1f} to {-100 * low:+.1f}"
        how = f"even {what}, the likeliest, expects {ends} drafts in 100 tokens otherwise"
        why = "no fault that is known explains it"
    else:
        factor = f"next is {next_best}, by a factor of e^{best.log_likelihood - rest.log_likelihood:.0f}"
        how = f"{what}: 20 times as likely as anything else in {100 * best.support:.0f} % of draws of texts; {factor}"
        why = f"{what} and {next_best} are too alike"
        if best.support >= _SURE:
            where = (f"this drafter drafts best with its query at {found.convention}",) * (best.name == POSITION)
            (suspect,) = (fault.suspect for fault in FAULTS if fault.name == best.name)
            steps = (f"look at {suspect}", *_ELSEWHERE)
            return Verdict(BELOW, f"{told}. Suspect: {what}.", steps, (apart, how, *where), best.name, best.support)
    return Verdict(BELOW, f"{told}. Cannot tell why: {why}.", (*_MORE, *_ELSEWHERE), (apart, how))


_RULES: tuple[Callable[[Diagnosis], Verdict | None], ...] = (
    _unfit,
    _unserved,
    _idle,
    _unmeasured,
    _another_text,
    _unsteady,
    _by_rate,
    _by_pattern,
)
_WHAT = {SOUND: "a sound stack", **{fault.name: fault.what for fault in FAULTS}}


def _of_baseline(found: Diagnosis) -> Iterator[str]:
    if found.serving is not None and found.serving.identical is not None:
        same, among = found.serving.identical, found.serving.compared
        rest = "" if same == among else ": drafting changed the others, or rounding where two tokens nearly tie"
        yield f"{same} of {among} answers are the baseline's{rest}"


def _of_drafter(found: Diagnosis) -> Iterator[str]:
    """What would help where the reference itself drafts little."""
    assert found.expected is not None
    first = found.expected.conditional[0].value if found.expected.conditional else 1.0
    if first >= _LOW:
        return
    yield "in the reference it drafts little, too: validate the directory (mtp-validate), then tune it (mtp-tune)"
    if any(check.name == "made for this base" and check.passed is None for check in found.checks):
        yield "compare it with the base it was made for; where that is much better, this base has moved"
    if found.identity.made == "extracted":
        official = f" ({found.identity.made_for} has an official assistant)" if found.identity.known_as else ""
        yield f"compare it with the official assistant{official}, whose weights are not INT4 and INT8"


def _both(found: Diagnosis) -> str:
    return f"{_served(found)}; to be expected: {_expected(found)}"


def _expected(found: Diagnosis) -> str:
    assert found.expected is not None
    return _rates(found.expected.mean_accepted_length.value, found.expected.mean_accepted_length.interval, found)


def _served(found: Diagnosis) -> str:
    assert found.serving is not None
    if found.serving.rates is None:
        rate = found.serving.acceptance
        return "drafts are not told" if rate is None else f"served: {percent(rate, None)} % of drafts accepted"
    length = found.serving.rates.mean_accepted_length
    return f"served: {_rates(length.value, length.interval, found)}"


def _rates(value: float, interval: Sequence[float] | None, found: Diagnosis) -> str:
    return f"{number(value, '.2f', interval)} tokens per round, of at most {found.settings['drafts'] + 1}"
