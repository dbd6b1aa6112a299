"""From what was found to a verdict: in line, or below and why, or that it cannot be told; and what to do next.

A suspect in the serving stack is named where acceptance is below what is to be expected, its pattern is the likeliest
of all, that of a sound stack among them, in 95 % of draws of texts, and what it expects is near what was served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mtp_extract.doctor.diagnosis import Diagnosis, TextFit
from mtp_extract.doctor.faults import FAULTS, POSITION, Fault
from mtp_extract.doctor.likelihood import SOUND
from mtp_extract.report.columns import number, share
from mtp_extract.speculate.intervals import Interval
from mtp_extract.speculate.texts import LEAST_TEXTS

UNFIT, EXPECTED, IDLE, IN_LINE, BELOW, OTHER_TEXT, UNTOLD = (
    "does not fit",
    "not served",
    "nothing drafted",
    "in line",
    "below",
    "another text",
    "cannot tell",
)
_SURE = 0.95  # support of a suspect
_NOTICED = 0.005  # accepted drafts a token, by which acceptance has to be below where a fault is the likeliest
_PLAIN = 0.02  # the same, surely and over texts, where none is
_IN_LINE = 0.05  # as above, that may be missing at most where it is called in line
_NEAR = 0.10  # as above, between what a suspect expects and what was served
_OWN = 0.97  # of tokens that are the base's argmax, in greedy text: less is another base's
_ALIKE = 0.05  # the same at a temperature, from what is expected there
_CONSTANT = 0.9  # of K drafts, in a round: fewer mean that the engine stops early
_LOW = 0.5  # of drafts, at the first step, below which a drafter does little for its base


@dataclass(frozen=True)
class Verdict:
    outcome: str
    sentence: str
    suspect: str | None = None  # name of a fault, or "base", "temperature" or "template"
    certainty: float | None = None  # of a fault: its support
    findings: tuple[str, ...] = ()  # what it rests on
    next: tuple[str, ...] = field(default=())  # what to do


def judge(found: Diagnosis) -> Verdict:
    """The verdict."""
    wrong = [check for check in found.checks if check.passed is False]
    if wrong:
        told = "; ".join(f"{check.name}: {check.found}" for check in wrong)
        step = "take the drafter of this very base, or serve the base that this one was made for"
        return Verdict(UNFIT, f"Drafter and base do not fit: {told}.", next=(step,))
    if found.serving is None:
        return _unserved(found)
    if found.serving.drafted == 0:
        sentence = f"{found.serving.name} drafted nothing: it was started without a drafter, or does not use it."
        return Verdict(IDLE, sentence, next=("start the engine as the model card says, with its speculative options",))
    if found.expected is None:
        step = "give the base, so that there is something to hold it against"
        return Verdict(UNTOLD, f"Served: {_served(found)}; what is to be expected was not measured.", next=(step,))
    if found.serving.rates is None:
        return _by_rate(found)
    if found.text is not None and (other := _other_text(found, found.text)) is not None:
        return other
    return _by_pattern(found)


def _unserved(found: Diagnosis) -> Verdict:
    if found.expected is None:
        what = f"{found.identity.name}: a drafter in the {found.identity.format} format, {found.identity.made}"
        return Verdict(EXPECTED, f"{what}; without its base nothing was measured.", next=("give the base",))
    return Verdict(EXPECTED, f"To be expected of this pair: {_expected(found)}.", next=tuple(_of_drafter(found)))


def _by_rate(found: Diagnosis) -> Verdict:
    """One share of all drafts has no pattern: it can be in line or below, and says not why."""
    assert found.expected is not None and found.serving is not None
    served, mean = found.serving.acceptance, found.expected.mean_accepted_length
    if served is None or mean.interval is None:
        return Verdict(UNTOLD, f"{found.serving.name} tells too little of drafts, or of too few texts.", next=_MORE)
    steps = found.settings["drafts"]
    low, high = ((end - 1) / steps for end in mean.interval)
    told = f"served {100 * served:.1f} % of drafts, to be expected {100 * low:.1f} to {100 * high:.1f} %"
    if served >= low - _PLAIN:
        return Verdict(IN_LINE, f"In line: {told}.", next=tuple(_of_drafter(found)))
    step = "serve the same directory in an engine that counts drafts by answer, so that the patterns can be held apart"
    return Verdict(BELOW, f"Below: {told}. One number does not say why.", next=(step,))


def _other_text(found: Diagnosis, text: TextFit) -> Verdict | None:
    """Where the server's texts are not what this base would write, there is no telling of its drafts."""
    said, interval = text.likeliest.value, text.likeliest.interval
    if interval is None:
        return None
    greedy = text.expected == 1.0
    if not (
        interval.high < _OWN if greedy else abs(said - text.expected) > _ALIKE and not _within(text.expected, interval)
    ):
        return None
    would = f"{100 * text.expected:.1f} % are to be expected"
    told = f"{100 * said:.1f} % of the served tokens are the base's likeliest, {would}"
    if text.other_template is not None and text.other_template > interval.high:
        what = f"with prompts written the other way, as chat or not, it is {100 * text.other_template:.1f} %"
        step = "ask with the chat template that the server applies, or have it apply the base's"
        return Verdict(OTHER_TEXT, f"Another prompt: {told}; {what}.", "template", None, (told, what), (step,))
    if greedy and text.at_one is not None and abs(said - text.at_one) < _ALIKE:
        what = f"at temperature 1 it would be {100 * text.at_one:.1f} %"
        step = "have the server take the temperature of the request, or say the one it samples at"
        return Verdict(OTHER_TEXT, f"Sampled, not greedy: {told}; {what}.", "temperature", None, (told, what), (step,))
    steps = (
        "give the very base that is served: its revision, its quantization, its adapter merged",
        "if that base was tuned or quantized since, tune the drafter on what it writes (mtp-tune): others gained 13 "
        "points of acceptance where the base had moved; what it gains here, its held-out texts say",
    )
    return Verdict(OTHER_TEXT, f"The server's base is not this one: {told}.", "base", None, (told,), steps)


def _within(value: float, interval: Interval) -> bool:
    return interval.low <= value <= interval.high


def _by_pattern(found: Diagnosis) -> Verdict:
    assert found.expected is not None and found.serving is not None and found.serving.rates is not None
    (sound,) = (fit for fit in found.fits if fit.name == SOUND)
    told = f"{_served(found)}; to be expected: {_expected(found)}"
    if sound.gap is None:
        why = f"{found.expected.texts} texts, at least {LEAST_TEXTS} are needed"
        return Verdict(UNTOLD, f"Cannot tell: {told}; {why}.", next=_MORE)
    ends = [100 * end for end in sound.gap]
    apart = number(sum(ends) / 2, "+.1f", ends, between=" to ")
    apart = f"{apart} accepted drafts in 100 tokens from what is to be expected"
    per_round = found.serving.per_round
    if per_round is not None and per_round < _CONSTANT * found.settings["drafts"]:
        what = f"{per_round:.2f} drafts a round on the mean, of {found.settings['drafts']}: it stops early, or adapts"
        step = "have the engine draft a constant number a round, without a least probability, and ask again"
        return Verdict(UNTOLD, f"Cannot tell: {told}; {what}.", findings=(apart, what), next=(step,))
    likely = next((fit for fit in found.fits if fit.name != SOUND and fit.support >= _SURE), None)
    # A pattern that is plainly a fault's shows a loss that the mean over so different texts does not.
    below = sum(sound.gap) / 2 < -_NOTICED if likely else sound.gap.high < -_PLAIN
    if not below:
        if sound.gap.low > -_IN_LINE:
            return Verdict(IN_LINE, f"In line: {told}.", findings=(apart,), next=tuple(_of_drafter(found)))
        return Verdict(UNTOLD, f"Cannot tell: {told}; too few texts to say.", findings=(apart,), next=_MORE)
    return _suspected(found, told, apart)


def _suspected(found: Diagnosis, told: str, apart: str) -> Verdict:
    """Acceptance is below: of what?"""
    faults = [fit for fit in found.fits if fit.name != SOUND]
    if not faults:
        why = "faults are known of MTP drafters alone" if not found.untold else "no fault that is known changes it here"
        return Verdict(BELOW, f"Below: {told}; {why}.", findings=(apart,), next=_ELSEWHERE)
    best = faults[0]
    rest = next(fit for fit in found.fits if fit is not best)
    fault = _fault(best.name)
    how = (
        f"{fault.what}: 20 times as likely as anything else in {100 * best.support:.0f} % of draws of texts; next is "
        f"{_what(rest.name)}, by a factor of e^{best.log_likelihood - rest.log_likelihood:.0f}"
    )
    near = best.gap is not None and best.gap.low < _NEAR and best.gap.high > -_NEAR
    if best.support >= _SURE and near:
        steps = (f"look at {fault.suspect}", *_ELSEWHERE)
        sentence = f"Below: {told}. Suspect: {fault.what}."
        where = (f"this drafter drafts best with its query at {found.convention}",) * (fault.name == POSITION)
        return Verdict(BELOW, sentence, fault.name, best.support, (apart, how, *where), steps)
    if not near:
        how = f"even {fault.what}, the likeliest, expects {_signed(best.gap)} drafts in 100 tokens otherwise"
    names = f"{_what(best.name)} and {_what(rest.name)} are too alike" if near else "no fault that is known explains it"
    return Verdict(
        BELOW, f"Below: {told}. Cannot tell why: {names}.", findings=(apart, how), next=(*_MORE, *_ELSEWHERE)
    )


def _fault(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def _what(name: str) -> str:
    return "a sound stack" if name == SOUND else _fault(name).what


def _signed(gap: Interval | None) -> str:
    return "" if gap is None else f"{-100 * gap.high:+.1f} to {-100 * gap.low:+.1f}"


_MORE = ("give more prompts, or longer answers",)
_ELSEWHERE = (
    "serve the same directory in another engine or version: where it is in line there, it is the engine",
    "report it to the engine with doctor.json",
)


def _official(found: Diagnosis) -> str:
    return f" ({found.identity.made_for} has an official assistant)" if found.identity.known_as else ""


def _of_drafter(found: Diagnosis) -> Iterator[str]:
    """What would help where nothing is broken, and drafts are few."""
    assert found.expected is not None
    first = found.expected.conditional[0].value if found.expected.conditional else 1.0
    if first >= _LOW:
        return
    yield "nothing is broken, the drafter drafts no better beside this base on these prompts: tune it (mtp-tune)"
    if any(check.name == "made for this base" and check.passed is None for check in found.checks):
        yield "compare it with the base it was made for; where that is much better, this base has moved"
    if found.identity.made == "extracted":
        yield f"compare it with the official assistant{_official(found)}, whose weights are not INT4 and INT8"


def _expected(found: Diagnosis) -> str:
    assert found.expected is not None
    return _rates(found.expected.mean_accepted_length.value, found.expected.mean_accepted_length.interval, found)


def _served(found: Diagnosis) -> str:
    assert found.serving is not None
    if found.serving.rates is None:
        rate = found.serving.acceptance
        return "drafts are not told" if rate is None else f"{share(rate, None)} % of drafts accepted"
    length = found.serving.rates.mean_accepted_length
    return f"served: {_rates(length.value, length.interval, found)}"


def _rates(value: float, interval: Interval | None, found: Diagnosis) -> str:
    drafts = found.settings["drafts"]
    return f"mean accepted length {number(value, '.2f', interval)} of at most {drafts + 1}"
