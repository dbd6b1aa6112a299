"""A diagnosis for readers: in line, or below and why, or that it cannot be told; what to do next; and its tables.

A fault is named where acceptance is below what is expected, the fault is surely the likeliest of all, and what it
expects is near what was served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtp_extract.doctor.counts import is_surely_likeliest
from mtp_extract.doctor.faults import FAULTS, SOUND
from mtp_extract.doctor.result import Diagnosis, Fit, Outcome, Serving, TextFit
from mtp_extract.evaluation.intervals import undecided
from mtp_extract.report.numbers import DASH, format_mean, format_number, format_rate
from mtp_extract.report.page import ReportTable

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


def judge_diagnosis(diagnosis: Diagnosis) -> Diagnosis:
    """Add the verdict: does the pair fit, is there something to compare, is the text this base's, which fault is it."""
    serving = diagnosis.serving
    wrong = "; ".join(f"{check.name}: {check.found}" for check in diagnosis.checks if check.passed is False)
    if wrong:
        return _conclude(diagnosis, "does not fit", f"Drafter and base do not fit: {wrong}.", [_FITTING])
    if serving is not None and serving.drafted == 0:
        what = f"{serving.name} drafted nothing: it was started without a drafter, or does not use it."
        return _conclude(diagnosis, "nothing drafted", what, [_STARTING])
    if diagnosis.expected is None:
        return _conclude(diagnosis, "cannot tell", "Cannot tell: no text was long enough to draft along.", [_MORE])
    if serving is None:
        return _conclude(diagnosis, "not served", f"Without a server: {_rates(diagnosis)}.", _tuning(diagnosis))
    return _judge_served(diagnosis, serving)


def _tuning(diagnosis: Diagnosis) -> list[str]:
    """The advice to tune a drafter that does little in the reference, too, or to make sure of it; else none."""
    first = next(iter(diagnosis.expected.steps or ()), None) if diagnosis.expected else None
    if first is None or first.value is None or first.value >= _LOW:
        return []
    return [_TUNING if first.ci95 else _MORE]


def _judge_served(diagnosis: Diagnosis, serving: Serving) -> Diagnosis:
    """The verdict on what a server did: is the text this base's, are its counts comparable, and as expected."""
    rates = _rates(diagnosis)
    text = diagnosis.text
    if text is not None and text.likeliest.ci95 is not None and text.likeliest.ci95[1] < _OWN:
        return _another_text(diagnosis, text)
    if diagnosis.served is None:
        what = f"Cannot tell: {serving.name} reports nothing of its drafts; {rates}."
        return _conclude(diagnosis, "cannot tell", what, [_COUNTING])
    if unsteady := _unsteady(diagnosis.settings, serving):
        return _conclude(diagnosis, "cannot tell", f"Cannot tell: {rates}; {unsteady}.", [_STEADY])

    return _judge_counts(diagnosis)


def _judge_counts(diagnosis: Diagnosis) -> Diagnosis:
    """The verdict on counts that can be compared with what is expected."""
    rates = _rates(diagnosis)
    (sound,) = (fit for fit in diagnosis.fits if fit.name == SOUND)
    missing = sound.missing
    if missing.ci95 is None or missing.value is None:
        return _conclude(diagnosis, "cannot tell", f"Cannot tell: {rates}; {undecided(missing.n)}.", [_MORE])
    low, high = missing.ci95
    diagnosis.findings.append(f"{in_100_tokens(sound)} accepted drafts missing in 100 tokens")
    is_named = diagnosis.fits[0] is not sound and is_surely_likeliest(diagnosis.fits, missing.n)
    # A fault that is surely the likeliest shows a loss that the mean over so different texts does not.
    if missing.value > _NOTICED if is_named else low > _PLAIN:
        return _below(diagnosis, is_named)
    if high < _IN_LINE:
        return _conclude(diagnosis, "in line", f"In line: {rates}.", _tuning(diagnosis))
    return _conclude(diagnosis, "cannot tell", f"Cannot tell: {rates}; too few texts to say.", [_MORE])


def _conclude(
    diagnosis: Diagnosis, outcome: Outcome, verdict: str, following: Sequence[str], suspect: str | None = None
) -> Diagnosis:
    diagnosis.outcome = outcome
    diagnosis.verdict = verdict
    diagnosis.next = list(following)
    diagnosis.suspect = suspect
    return diagnosis


def _another_text(diagnosis: Diagnosis, text: TextFit) -> Diagnosis:
    """Then nothing can be said of its drafts."""
    share = f"{100 * (text.likeliest.value or 0.0):.1f} % of the served tokens are the base's likeliest"
    diagnosis.findings.append(share)
    if text.prompts_alike is not None and text.prompts_alike < _MOSTLY:
        what = f"{100 * (1 - text.prompts_alike):.0f} % of the prompts are other tokens there"
        return _conclude(diagnosis, "another text", f"Another prompt: {share}; {what}.", [_PROMPTING], "template")
    sentence = f"The served text is not this base's own, so its drafts cannot be judged: {share}."
    return _conclude(diagnosis, "another text", sentence, _REBASING)


def _unsteady(settings: Mapping[str, Any], serving: Serving) -> str:
    """Why what is expected of K drafts a round cannot be compared with what was served; empty where it can."""
    drafts = settings["drafts"]
    per_round = serving.per_round
    if not settings["drafts_known"]:
        return "how many drafts a round the engine makes is not reported"
    if per_round is None or abs(per_round / drafts - 1) <= _CONSTANT:
        return ""
    return f"{per_round:.2f} drafts a round on the mean, not the {drafts} expected: it stops early, or adapts"


def _below(diagnosis: Diagnosis, is_named: bool) -> Diagnosis:
    """Below what is expected: by which fault? ``is_named``: whether one is surely the likeliest."""
    below = f"Below: {_rates(diagnosis)}"
    if len(diagnosis.fits) == 1:
        is_mtp = diagnosis.convention is not None
        why = "no fault that is known changes it here" if is_mtp else "faults are known of MTP drafters only"
        return _conclude(diagnosis, "below", f"{below}; {why}.", _ELSEWHERE)

    likeliest, second = diagnosis.fits[:2]
    what = _fault_in_words(likeliest)
    low, high = likeliest.missing.ci95 or (0.0, 0.0)
    if low > _NEAR or high < -_NEAR:
        missing = in_100_tokens(likeliest)
        diagnosis.findings.append(f"{what}, the likeliest, leaves {missing} drafts in 100 tokens unexplained")
        why = "no fault that is known explains it"
    else:
        other = _fault_in_words(second)
        diagnosis.findings.append(f"{what} is likelier than {other} by e^{second.behind:.2f} a text")
        if is_named:
            steps = (f"look at {FAULTS[likeliest.name][1]}", *_ELSEWHERE)
            return _conclude(diagnosis, "below", f"{below}. Suspect: {what}.", steps, likeliest.name)
        why = f"{what} and {other} are too alike"
    return _conclude(diagnosis, "below", f"{below}. Cannot tell why: {why}.", (_MORE, *_ELSEWHERE))


def _fault_in_words(fit: Fit) -> str:
    return FAULTS[fit.name][0] if fit.name in FAULTS else "a sound stack"


def _rates(diagnosis: Diagnosis) -> str:
    """Expected and served tokens per round, as far as they are known."""
    by_side = {"served": diagnosis.served, "expected": diagnosis.expected}
    lengths = ", ".join(f"{side} {format_mean(rates.tokens_per_round)}" for side, rates in by_side.items() if rates)
    return f"{lengths} tokens per round, of at most {diagnosis.settings['drafts'] + 1}"


def in_100_tokens(fit: Fit) -> str:
    """Accepted drafts that ``fit`` expects and that were not served, of 100 tokens."""
    ends = fit.missing.ci95 and [100 * end for end in fit.missing.ci95]
    return format_number(100 * (fit.missing.value or 0), "+.1f", ends, between=" to ")


def diagnosis_tables(diagnosis: Diagnosis) -> Iterator[ReportTable]:
    """For the terminal: what to do, what is expected and served, does the pair fit, and what the counters are like."""
    if diagnosis.next:
        yield ReportTable("What to do next", ("",), [(step,) for step in diagnosis.next])
    if diagnosis.expected is not None or diagnosis.served is not None:
        yield _table_of_drafts(diagnosis)
    if diagnosis.checks:
        passed = {True: "yes", False: "NO", None: "?"}
        checks = [(check.name, passed[check.passed], check.found) for check in diagnosis.checks]
        yield ReportTable("Does the pair fit", ("what has to agree", "does", "found"), checks)
    if len(diagnosis.fits) > 1:
        columns = ("fault", "log-likelihood", "behind, a text", "at least", "missing drafts in 100 tokens")
        rows = list[tuple[str, ...]]()
        for fit in diagnosis.fits:
            leads = (f"{fit.log_likelihood:.1f}", f"{fit.behind:.2f}", format_number(fit.behind_at_least, ".2f"))
            rows.append((fit.name, *leads, in_100_tokens(fit)))
        yield ReportTable("What the counters are like", columns, rows)


def _table_of_drafts(diagnosis: Diagnosis) -> ReportTable:
    drafts = diagnosis.settings["drafts"]
    rows = list[tuple[str | int, ...]]()
    for side, rates in (("expected", diagnosis.expected), ("served", diagnosis.served)):
        if rates is not None:
            counts = (f"{rates.rounds:.0f}", f"{rates.accepted:.0f}", format_mean(rates.tokens_per_round))
            steps = map(format_rate, rates.steps) if rates.steps else [DASH] * drafts
            rows.append((side, rates.texts, *counts, *steps))
    titles = (f"step {index + 1} %" for index in range(drafts))
    return ReportTable("Drafts", ("", "texts", "rounds", "accepted", "tokens per round", *titles), rows)
