"""A diagnosis for readers: in line, or below and why, or that it cannot be told; what to do next; and its tables.

A fault is named where acceptance is below what is expected, the fault is surely the likeliest of all, and what it
expects is near what was served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtp_extract.doctor.counts import sure
from mtp_extract.doctor.faults import FAULTS, SOUND
from mtp_extract.doctor.result import Diagnosis, Fit, Outcome, Serving, TextFit
from mtp_extract.evaluation.intervals import undecided
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Table

_NOTICED = 0.005  # accepted drafts a token, by which acceptance has to be below where a fault is surely the likeliest
_PLAIN = 0.02  # the same, at 95 %, where none is
_IN_LINE = 0.05  # as above, that may be missing at most where it is called in line
_NEAR = 0.10  # as above, between what a suspect expects and what was served
_OWN = 0.97  # of tokens that are the base's argmax: less is another base's
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
    "have the server take the temperature of the request, which is 0",
    "compare its text with that of the server without a drafter (mtp-bench --baseline): drafting may change it",
    "give the very base that is served: its revision, its quantization, its adapter merged",
    "if that base was tuned or quantized since, tune the drafter on what it writes (mtp-tune)",
)
_ELSEWHERE = (
    "serve the same directory in another engine or version: where it is in line there, it is the engine",
    "report it to the engine, with what --json prints",
)


def judge(found: Diagnosis) -> Diagnosis:
    """Add the verdict: does the pair fit, is there something to compare, is the text this base's, which fault is it."""
    serving, said = found.serving, _rates(found)
    if wrong := "; ".join(f"{check.name}: {check.found}" for check in found.checks if check.passed is False):
        return _say(found, "does not fit", f"Drafter and base do not fit: {wrong}.", [_FITTING])
    if serving is not None and serving.drafted == 0:
        what = f"{serving.name} drafted nothing: it was started without a drafter, or does not use it."
        return _say(found, "nothing drafted", what, [_STARTING])
    if found.expected is None:
        return _say(found, "cannot tell", "Cannot tell: no text was long enough to draft along.", [_MORE])
    first = found.expected.steps[0].value if found.expected.steps else None
    steps = [_TUNING] if first is not None and first < _LOW else []
    if serving is None:
        return _say(found, "not served", f"Expected of this pair: {said}.", steps)
    if found.text is not None and (ends := found.text.likeliest.ci95) is not None and ends[1] < _OWN:
        return _another_text(found, found.text)
    if found.served is None:
        what = f"Cannot tell: {serving.name} reports nothing of its drafts; {said}."
        return _say(found, "cannot tell", what, [_COUNTING])
    if unsteady := _unsteady(found, serving):
        return _say(found, "cannot tell", f"Cannot tell: {said}; {unsteady}.", [_STEADY])
    (sound,) = (fit for fit in found.fits if fit.name == SOUND)
    if sound.missing.ci95 is None or sound.missing.value is None:
        return _say(found, "cannot tell", f"Cannot tell: {said}; {undecided(sound.missing.n)}.", [_MORE])
    low, high = sound.missing.ci95
    found.findings.append(f"{in_100_tokens(sound)} accepted drafts missing in 100 tokens")
    named = found.fits[0] is not sound and sure(found.fits, sound.missing.n)
    # A fault that is surely the likeliest shows a loss that the mean over so different texts does not.
    if sound.missing.value > _NOTICED if named else low > _PLAIN:
        return _below(found, named)
    if high < _IN_LINE:
        return _say(found, "in line", f"In line: {said}.", steps)
    return _say(found, "cannot tell", f"Cannot tell: {said}; too few texts to say.", [_MORE])


def _say(
    found: Diagnosis, outcome: Outcome, verdict: str, following: Sequence[str], suspect: str | None = None
) -> Diagnosis:
    found.outcome, found.verdict, found.next, found.suspect = outcome, verdict, list(following), suspect
    return found


def _another_text(found: Diagnosis, text: TextFit) -> Diagnosis:
    """Then nothing can be said of its drafts."""
    said = f"{100 * (text.likeliest.value or 0.0):.1f} % of the served tokens are the base's likeliest"
    found.findings.append(said)
    if text.prompts_alike is not None and text.prompts_alike < _MOSTLY:
        what = f"{100 * (1 - text.prompts_alike):.0f} % of the prompts are other tokens there"
        return _say(found, "another text", f"Another prompt: {said}; {what}.", [_PROMPTING], "template")
    sentence = f"The served text is not this base's own, so its drafts cannot be judged: {said}."
    return _say(found, "another text", sentence, _REBASING)


def _unsteady(found: Diagnosis, serving: Serving) -> str:
    """Why what is expected of K drafts a round cannot be held against what was served; empty where it can."""
    drafts, per_round = found.settings["drafts"], serving.per_round
    if not found.settings["drafts_known"]:
        return "how many drafts a round the engine makes is not reported"
    if per_round is None or abs(per_round / drafts - 1) <= _CONSTANT:
        return ""
    return f"{per_round:.2f} drafts a round on the mean, not the {drafts} expected: it stops early, or adapts"


def _below(found: Diagnosis, named: bool) -> Diagnosis:
    """Below what is expected: of what?"""
    said, likeliest = f"Below: {_rates(found)}", found.fits[0]
    if len(found.fits) == 1:
        why = "no fault that is known changes it here" if found.convention else "faults are known of MTP drafters only"
        return _say(found, "below", f"{said}; {why}.", _ELSEWHERE)
    what, other = (FAULTS[fit.name][0] if fit.name in FAULTS else "a sound stack" for fit in found.fits[:2])
    low, high = likeliest.missing.ci95 or (0.0, 0.0)
    if low > _NEAR or high < -_NEAR:
        found.findings.append(
            f"{what}, the likeliest, leaves {in_100_tokens(likeliest)} drafts in 100 tokens unexplained"
        )
        why = "no fault that is known explains it"
    else:
        found.findings.append(f"{what} is likelier than {other} by e^{found.fits[1].behind:.2f} a text")
        if named:
            steps = (f"look at {FAULTS[likeliest.name][1]}", *_ELSEWHERE)
            return _say(found, "below", f"{said}. Suspect: {what}.", steps, likeliest.name)
        why = f"{what} and {other} are too alike"
    return _say(found, "below", f"{said}. Cannot tell why: {why}.", (_MORE, *_ELSEWHERE))


def _rates(found: Diagnosis) -> str:
    """Expected and served tokens per round, as far as they are known."""
    rates = {"served": found.served, "expected": found.expected}
    said = ", ".join(f"{side} {mean(of.tokens_per_round)}" for side, of in rates.items() if of is not None)
    return f"{said} tokens per round, of at most {found.settings['drafts'] + 1}"


def in_100_tokens(fit: Fit) -> str:
    """Accepted drafts that ``fit`` expects and that were not served, of 100 tokens."""
    ends = fit.missing.ci95 and [100 * end for end in fit.missing.ci95]
    return number(100 * (fit.missing.value or 0), "+.1f", ends, between=" to ")


def tables(found: Diagnosis) -> Iterator[Table]:
    """For the terminal: what to do, what is expected and served, does the pair fit, and what the counters are like."""
    if found.next:
        yield Table("What to do next", ("",), [(step,) for step in found.next])
    drafts, rows = found.settings["drafts"], list[tuple[str | int, ...]]()
    for side, rates in (("expected", found.expected), ("served", found.served)):
        if rates is not None:
            counts = (side, rates.texts, f"{rates.rounds:.0f}", f"{rates.accepted:.0f}", mean(rates.tokens_per_round))
            rows.append((*counts, *(map(rate, rates.steps) if rates.steps else [DASH] * drafts)))
    if rows:
        steps = (f"step {at + 1} %" for at in range(drafts))
        yield Table("Drafts", ("", "texts", "rounds", "accepted", "tokens per round", *steps), rows)
    if found.checks:
        passed = {True: "yes", False: "NO", None: "?"}
        checks = [(check.name, passed[check.passed], check.found) for check in found.checks]
        yield Table("Does the pair fit", ("what has to agree", "does", "found"), checks)
    if len(found.fits) > 1:
        columns = ("fault", "log-likelihood", "behind, a text", "at least", "missing drafts in 100 tokens")
        figures = [
            (fit.name, f"{fit.log_likelihood:.1f}", f"{fit.behind:.2f}", number(fit.behind_at_least, ".2f"))
            for fit in found.fits
        ]
        rows = [(*row, in_100_tokens(fit)) for row, fit in zip(figures, found.fits, strict=True)]
        yield Table("What the counters are like", columns, rows)
