"""From what was found to a verdict: in line, or below and why, or that it cannot be told; and what to do next.

A fault is named where acceptance is below what is expected, the fault is surely the likeliest of all, and what it
expects is near what was served.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from mtp_extract.doctor.faults import FAULTS
from mtp_extract.doctor.likelihood import SOUND, sure
from mtp_extract.doctor.result import Diagnosis, Fit, Outcome, Serving, TextFit
from mtp_extract.evaluate.texts import undecided
from mtp_extract.report.numbers import mean, number

_NOTICED = 0.005  # accepted drafts a token, by which acceptance has to be below where a fault is surely the likeliest
_PLAIN = 0.02  # the same, at 95 %, where none is
_IN_LINE = 0.05  # as above, that may be missing at most where it is called in line
_NEAR = 0.10  # as above, between what a suspect expects and what was served
_OWN = 0.97  # of tokens that are the base's argmax, in greedy text: less is another base's
_ALIKE = 0.05  # the same at a temperature, from what is expected there
_MOSTLY = 0.5  # of prompts: where fewer are read there as here, the texts differ by them
_CONSTANT = 0.1  # of K drafts in a round, more or fewer: the engine makes another number than the reference
_LOW = 0.5  # of drafts, at the first step, below which a drafter does little for its base

_FITTING = "take the drafter of this very base, or serve the base that this one was made for"
_STARTING = "start the engine as the model card says, with its speculative options"
_COUNTING = "serve the same directory in an engine that counts drafts by answer, so that faults can be told apart"
_STEADY = "have the engine draft a constant number a round, without a least probability, or say its number; ask again"
_PROMPTING = "ask with the chat template that the server applies, or have it apply the base's"
_TUNING = "in the reference it drafts little, too: validate the directory (mtp-validate), then tune it (mtp-tune)"
_MORE = "give more prompts, or longer answers"
_REBASING = (
    "have the server take the temperature of the request",
    "compare its text with that of the server without a drafter (mtp-bench --baseline): drafting may change it",
    "give the very base that is served: its revision, its quantization, its adapter merged",
    "if that base was tuned or quantized since, tune the drafter on what it writes (mtp-tune)",
)
_ELSEWHERE = (
    "serve the same directory in another engine or version: where it is in line there, it is the engine",
    "report it to the engine with doctor.json",
)
_WHAT = {SOUND: "a sound stack", **{fault.name: fault.what for fault in FAULTS}}
_SUSPECT = {fault.name: fault.suspect for fault in FAULTS}


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    sentence: str
    next: tuple[str, ...] = ()  # what to do
    findings: tuple[str, ...] = ()  # what it rests on
    suspect: str | None = None  # name of a fault, or "template"


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
    """Does the pair fit, is there something to compare, is the text this base's, what are the counters like."""
    serving, steps = found.serving, (_TUNING,) if _drafts_little(found) else ()
    if wrong := "; ".join(f"{check.name}: {check.found}" for check in found.checks if check.passed is False):
        return Verdict("does not fit", f"Drafter and base do not fit: {wrong}.", (_FITTING,))
    if serving is not None and serving.drafted == 0:
        said = f"{serving.name} drafted nothing: it was started without a drafter, or does not use it."
        return Verdict("nothing drafted", said, (_STARTING,))
    if found.expected is None:
        return Verdict("cannot tell", "Cannot tell: no text was long enough to draft along.", (_MORE,))
    if serving is None:
        return Verdict("not served", f"Expected of this pair: {_rates(found)}.", steps)
    if found.text is not None and (other := _another_text(found.text)) is not None:
        return other
    if found.served is None:
        said = f"Cannot tell: {serving.name} reports nothing of its drafts; {_rates(found)}."
        return Verdict("cannot tell", said, (_COUNTING,))
    if unsteady := _unsteady(found, serving):
        return Verdict("cannot tell", f"Cannot tell: {_rates(found)}; {unsteady}.", (_STEADY,))
    (sound,) = (fit for fit in found.fits if fit.name == SOUND)
    if sound.missing.ci95 is None or sound.missing.value is None:
        return Verdict("cannot tell", f"Cannot tell: {_rates(found)}; {undecided(sound.missing.n)}.", (_MORE,))
    low, high = sound.missing.ci95
    missing = f"{_in_100_tokens(sound)} accepted drafts missing in 100 tokens"
    named = found.fits[0] is not sound and sure(found.fits, sound.missing.n)
    # A fault that is surely the likeliest shows a loss that the mean over so different texts does not.
    if sound.missing.value > _NOTICED if named else low > _PLAIN:
        return _below(found, named, missing)
    if high < _IN_LINE:
        return Verdict("in line", f"In line: {_rates(found)}.", steps, (missing,))
    return Verdict("cannot tell", f"Cannot tell: {_rates(found)}; too few texts to say.", (_MORE,), (missing,))


def _drafts_little(found: Diagnosis) -> bool:
    first = found.expected.steps[0].value if found.expected is not None and found.expected.steps else None
    return first is not None and first < _LOW


def _another_text(text: TextFit) -> Verdict | None:
    """Where the server's texts are not what this base would write, nothing can be said of its drafts."""
    share, ends, greedy = text.likeliest.value, text.likeliest.ci95, text.expected == 1.0
    if share is None or ends is None:
        return None
    near = abs(share - text.expected) <= _ALIKE or ends[0] <= text.expected <= ends[1]
    if ends[1] >= _OWN if greedy else near:
        return None
    said = (
        f"{100 * share:.1f} % of the served tokens are the base's likeliest, {100 * text.expected:.1f} % are expected"
    )
    if text.prompts_alike is not None and text.prompts_alike < _MOSTLY:
        what = f"{100 * (1 - text.prompts_alike):.0f} % of the prompts are other tokens there"
        return Verdict("another text", f"Another prompt: {said}; {what}.", (_PROMPTING,), (said, what), "template")
    sentence = f"The served text is not this base's own, so its drafts cannot be judged: {said}."
    return Verdict("another text", sentence, _REBASING, (said,))


def _unsteady(found: Diagnosis, serving: Serving) -> str:
    """Why what is expected of K drafts a round cannot be held against what was served; empty where it can."""
    drafts, per_round = found.settings["drafts"], serving.per_round
    if not found.settings["drafts_known"]:
        return "how many drafts a round the engine makes is not reported"
    if per_round is None or abs(per_round / drafts - 1) <= _CONSTANT:
        return ""
    return f"{per_round:.2f} drafts a round on the mean, where {drafts} were expected: it stops early, or adapts"


def _below(found: Diagnosis, named: bool, missing: str) -> Verdict:
    """Below what is expected: of what?"""
    said, likeliest = f"Below: {_rates(found)}", found.fits[0]
    if len(found.fits) == 1:
        why = "no fault that is known changes it here" if found.untold else "faults are known of MTP drafters only"
        return Verdict("below", f"{said}; {why}.", _ELSEWHERE, (missing,))
    what, other = (_WHAT[fit.name] for fit in found.fits[:2])
    low, high = likeliest.missing.ci95 or (0.0, 0.0)
    if low > _NEAR or high < -_NEAR:
        why = "no fault that is known explains it"
        how = f"{what}, the likeliest, leaves {_in_100_tokens(likeliest)} drafts in 100 tokens unexplained"
        return Verdict("below", f"{said}. Cannot tell why: {why}.", (_MORE, *_ELSEWHERE), (missing, how))
    how = f"{what} is likelier than {other} by e^{found.fits[1].behind:.2f} a text"
    if named:
        steps = (f"look at {_SUSPECT[likeliest.name]}", *_ELSEWHERE)
        return Verdict("below", f"{said}. Suspect: {what}.", steps, (missing, how), likeliest.name)
    why = f"{what} and {other} are too alike"
    return Verdict("below", f"{said}. Cannot tell why: {why}.", (_MORE, *_ELSEWHERE), (missing, how))


def _rates(found: Diagnosis) -> str:
    """Expected and served tokens per round, as far as they are known."""
    rates = {"served": found.served, "expected": found.expected}
    said = ", ".join(f"{side} {mean(of.tokens_per_round)}" for side, of in rates.items() if of is not None)
    return f"{said} tokens per round, of at most {found.settings['drafts'] + 1}"


def _in_100_tokens(fit: Fit) -> str:
    ends = fit.missing.ci95 and [100 * end for end in fit.missing.ci95]
    return number(100 * (fit.missing.value or 0), "+.1f", ends, between=" to ")
