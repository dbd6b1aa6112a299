"""From what was found to a verdict: in line, or below and why, or that it cannot be told; and what to do next.

:data:`_RULES` are asked in order, and the first that has something to say says it. A fault is named where acceptance is
below what is expected, the fault is surely the likeliest of all, and what it expects is near what was served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import structs

from mtp_extract.doctor.faults import FAULTS
from mtp_extract.doctor.likelihood import SOUND, sure
from mtp_extract.doctor.result import Diagnosis, Fit, Outcome
from mtp_extract.evaluate.texts import undecided
from mtp_extract.report.numbers import Ends, mean, number, percent

_NOTICED = 0.005  # accepted drafts a token, by which acceptance has to be below where a fault is surely the likeliest
_PLAIN = 0.02  # the same, at 95 %, where none is
_IN_LINE = 0.05  # as above, that may be missing at most where it is called in line
_NEAR = 0.10  # as above, between what a suspect expects and what was served
_OWN = 0.97  # of tokens that are the base's argmax, in greedy text: less is another base's
_ALIKE = 0.05  # the same at a temperature, from what is expected there
_MOSTLY = 0.5  # of prompts: where fewer have as many tokens there as here, they are written otherwise
_CONSTANT = 0.1  # of K drafts in a round, more or fewer: the engine makes another number than the reference
_LOW = 0.5  # of drafts, at the first step, below which a drafter does little for its base

_FITTING = "take the drafter of this very base, or serve the base that this one was made for"
_STARTING = "start the engine as the model card says, with its speculative options"
_COUNTING = "serve the same directory in an engine that counts drafts by answer, so that faults can be told apart"
_STEADY = "have the engine draft a constant number a round, without a least probability, or say its number; ask again"
_PROMPTING = "ask with the chat template that the server applies, or have it apply the base's"
_HEATING = "have the server take the temperature of the request, or say the one it samples at"
_REBASING = (
    "compare its text with that of the server without a drafter (mtp-bench --baseline): drafting may change it",
    "give the very base that is served: its revision, its quantization, its adapter merged",
    "if that base was tuned or quantized since, tune the drafter on what it writes (mtp-tune)",
)
_MORE = "give more prompts, or longer answers"
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


def conclude(found: Diagnosis) -> Diagnosis:
    """The same with its verdict."""
    verdict = judge(found)
    return structs.replace(
        found,
        verdict=verdict.sentence,
        outcome=verdict.outcome,
        suspect=verdict.suspect,
        findings=list(verdict.findings),
        next=list(verdict.next),
    )


def judge(found: Diagnosis) -> Verdict:
    """The verdict of the first rule that has one."""
    return next(verdict for rule in _RULES if (verdict := rule(found)) is not None)


def _unfit(found: Diagnosis) -> Verdict | None:
    wrong = "; ".join(f"{check.name}: {check.found}" for check in found.checks if check.passed is False)
    return Verdict("does not fit", f"Drafter and base do not fit: {wrong}.", (_FITTING,)) if wrong else None


def _incomplete(found: Diagnosis) -> Verdict | None:
    """Where nothing is served, or nothing is expected, there is nothing to compare."""
    why = ("without its base nothing was measured", "give the base")
    if found.base is not None:
        why = ("no text was long enough to draft along", _MORE)
    if found.serving is not None and found.serving.drafted == 0:
        sentence = f"{found.serving.name} drafted nothing: it was started without a drafter, or does not use it."
        return Verdict("nothing drafted", sentence, (_STARTING,))
    if found.expected is None:
        if found.serving is not None:
            return _cannot(found, *why)
        drafter = f"{found.drafter.name}: a drafter in the {found.drafter.format} format, {found.drafter.made}"
        return Verdict("not served", f"{drafter}; {why[0]}.", (why[1],))
    if found.serving is None:
        return Verdict("not served", f"Expected of this pair: {_rates(found)}.", tuple(_of_drafter(found)))
    return None


def _another_text(found: Diagnosis) -> Verdict | None:
    """Where the server's texts are not what this base would write, nothing can be said of its drafts."""
    text = found.text
    if text is None or text.likeliest.ci95 is None or text.likeliest.value is None:
        return None
    share, (low, high), greedy = text.likeliest.value, text.likeliest.ci95, text.expected == 1.0
    near = abs(share - text.expected) <= _ALIKE or low <= text.expected <= high
    if high >= _OWN if greedy else near:
        return None
    told = (
        f"{100 * share:.1f} % of the served tokens are the base's likeliest, {100 * text.expected:.1f} % are expected"
    )
    if text.prompts_alike is not None and text.prompts_alike < _MOSTLY:
        what = f"{100 * (1 - text.prompts_alike):.0f} % of the prompts have another number of tokens there"
        return Verdict("another text", f"Another prompt: {told}; {what}.", (_PROMPTING,), (told, what), "template")
    if greedy and text.at_one is not None and abs(share - text.at_one) < _ALIKE:
        what = f"as it would be at temperature 1, where it is {100 * text.at_one:.1f} %"
        sentence = f"Probably sampled, not greedy: {told}; {what}."
        return Verdict("another text", sentence, (_HEATING, *_REBASING), (told, what), "temperature")
    sentence = f"The served text is not this base's own, so its drafts cannot be judged: {told}."
    return Verdict("another text", sentence, _REBASING, (told,))


def _unsteady(found: Diagnosis) -> Verdict | None:
    """What is expected holds for K drafts a round."""
    assert found.serving is not None
    drafts, per_round = found.settings["drafts"], found.serving.per_round
    if found.served is None:
        return Verdict("cannot tell", f"Cannot tell: {found.serving.name} tells nothing of its drafts.", (_COUNTING,))
    if not found.settings["drafts_known"]:
        return _cannot(found, "how many drafts a round were made is not told", "say how many the engine makes")
    if per_round is None or abs(per_round / drafts - 1) <= _CONSTANT:
        return None
    what = f"{per_round:.2f} drafts a round on the mean, where {drafts} were expected: it stops early, or adapts"
    return _cannot(found, what, _STEADY)


def _by_fits(found: Diagnosis) -> Verdict:
    """Counters by text: in line, or below, and which fault they are like."""
    (sound,) = (fit for fit in found.fits if fit.name == SOUND)
    if sound.missing.ci95 is None or sound.missing.value is None:
        return _cannot(found, undecided(sound.missing.n), _MORE)
    low, high = sound.missing.ci95
    missing = f"{_per_hundred(sound.missing.value, sound.missing.ci95)} accepted drafts missing in 100 tokens"
    likeliest = found.fits[0]
    named = likeliest is not sound and sure(found.fits, sound.missing.n)
    # A fault that is surely the likeliest shows a loss that the mean over so different texts does not.
    if sound.missing.value > _NOTICED if named else low > _PLAIN:
        return _below(found, likeliest, named, missing)
    if high < _IN_LINE:
        return Verdict("in line", f"In line: {_rates(found)}.", tuple(_of_drafter(found)), (missing,))
    return _cannot(found, "too few texts to say", _MORE, missing)


def _below(found: Diagnosis, likeliest: Fit, named: bool, missing: str) -> Verdict:
    """Below what is expected: of what?"""
    told = f"Below: {_rates(found)}"
    if len(found.fits) == 1:
        why = "no fault that is known changes it here" if found.untold else "faults are known of MTP drafters alone"
        return Verdict("below", f"{told}; {why}.", _ELSEWHERE, (missing,))
    what, other = (_WHAT[fit.name] for fit in found.fits[:2])
    assert likeliest.missing.ci95 is not None  # of the same texts as the sound one's
    low, high = likeliest.missing.ci95
    if low > _NEAR or high < -_NEAR:
        why = "no fault that is known explains it"
        how = f"even {what}, the likeliest, leaves {_per_hundred(None, [low, high])} drafts in 100 tokens unexplained"
    else:
        why = f"{what} and {other} are too alike"
        how = f"{what} is likelier than {other} by e^{found.fits[1].behind:.2f} a text"
        if named:
            steps = (f"look at {_SUSPECT[likeliest.name]}", *_ELSEWHERE)
            return Verdict("below", f"{told}. Suspect: {what}.", steps, (missing, how), likeliest.name)
    return Verdict("below", f"{told}. Cannot tell why: {why}.", (_MORE, *_ELSEWHERE), (missing, how))


_RULES: tuple[Callable[[Diagnosis], Verdict | None], ...] = (
    _unfit,
    _incomplete,
    _another_text,
    _unsteady,
    _by_fits,
)
_WHAT = {SOUND: "a sound stack", **{fault.name: fault.what for fault in FAULTS}}
_SUSPECT = {fault.name: fault.suspect for fault in FAULTS}


def _cannot(found: Diagnosis, why: str, step: str, *findings: str) -> Verdict:
    return Verdict("cannot tell", f"Cannot tell: {_rates(found)}; {why}.", (step,), findings)


def _of_drafter(found: Diagnosis) -> Iterator[str]:
    """What would help where the reference itself drafts little."""
    assert found.expected is not None
    first = found.expected.steps[0].value if found.expected.steps else None
    if first is not None and first < _LOW:
        yield "in the reference it drafts little, too: validate the directory (mtp-validate), then tune it (mtp-tune)"


def _rates(found: Diagnosis) -> str:
    """Expected and served tokens per round, as far as they are known."""
    rates = {"served": found.served, "expected": found.expected}
    told = [f"{side} {mean(of.tokens_per_round)}" for side, of in rates.items() if of is not None]
    most = f" tokens per round, of at most {found.settings['drafts'] + 1}" if told else ""
    said = ", ".join(told) + most
    if found.serving is None or found.served is not None:
        return said
    share = found.serving.acceptance
    return "; ".join(
        filter(None, ("drafts are not told" if share is None else f"served {percent(share)} % of drafts", said))
    )


def _per_hundred(value: float | None, ends: Ends) -> str:
    low, high = (100 * end for end in ends or (0, 0))
    return f"{low:+.1f} to {high:+.1f}" if value is None else number(100 * value, "+.1f", (low, high), between=" to ")
