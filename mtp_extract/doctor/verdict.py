"""Judge a diagnosis: acceptance is in line, below (and why), or cannot be told; say what to do next; list the tables.

A fault is named if acceptance is below what is expected, the fault is surely the likeliest of all, and the counts that
it expects are near what was served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtp_extract.doctor.counts import is_surely_likeliest
from mtp_extract.doctor.faults import FAULTS, SOUND
from mtp_extract.doctor.result import Diagnosis, Fit, Outcome, Serving, TextFit
from mtp_extract.evaluation.intervals import explain_undecided
from mtp_extract.report.numbers import DASH, format_mean, format_number, format_rate
from mtp_extract.report.page import ReportTable

# Accepted drafts per token that may be missing:
_NOTICED = 0.005  # least mean loss that counts as below, if a fault is surely the likeliest
_PLAIN = 0.02  # the same if none is; the lower end of the interval at 95 %
_IN_LINE = 0.05  # largest upper end of the interval that is called in line
_NEAR = 0.10  # largest difference between what a suspect expects and what was served
# Shares:
_OWN = 0.97  # of tokens that are the base's argmax; with fewer the text is another base's
_MOSTLY = 0.5  # of prompts that the server read as here; with fewer the texts differ because of the prompts
_CONSTANT = 0.1  # of K drafts per round, more or fewer; beyond it the engine does not draft as the reference does
_LOW = 0.5  # of drafts accepted at the first step; with fewer a drafter does little for its base

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
    """Add the verdict: does the pair fit, did the server draft, is the text this base's, which fault is likeliest."""
    serving = diagnosis.serving
    wrong = "; ".join(f"{check.name}: {check.found}" for check in diagnosis.checks if check.passed is False)
    if wrong:
        return _conclude(diagnosis, "does not fit", f"Drafter and base do not fit: {wrong}.", [_FITTING])
    if serving is not None and serving.drafted == 0:
        sentence = f"{serving.name} drafted nothing: it was started without a drafter, or does not use it."
        return _conclude(diagnosis, "nothing drafted", sentence, [_STARTING])
    if diagnosis.expected is None:
        return _conclude(diagnosis, "cannot tell", "Cannot tell: no text was long enough to draft along.", [_MORE])
    if serving is None:
        return _conclude(
            diagnosis, "not served", f"Without a server: {_describe_rates(diagnosis)}.", _advise_tuning(diagnosis)
        )
    return _judge_served(diagnosis, serving)


def _advise_tuning(diagnosis: Diagnosis) -> list[str]:
    """Advise tuning if the drafter does little in the reference too, or more prompts to make sure; else nothing."""
    first = next(iter(diagnosis.expected.steps or ()), None) if diagnosis.expected else None
    if first is None or first.value is None or first.value >= _LOW:
        return []
    return [_TUNING if first.ci95 else _MORE]


def _judge_served(diagnosis: Diagnosis, serving: Serving) -> Diagnosis:
    """Judge what a server did: is the text this base's, can its counts be compared, and are they as expected."""
    rates = _describe_rates(diagnosis)
    text = diagnosis.text
    if text is not None and text.likeliest.ci95 is not None and text.likeliest.ci95[1] < _OWN:
        return _conclude_another_text(diagnosis, text)
    if diagnosis.served is None:
        sentence = f"Cannot tell: {serving.name} reports nothing of its drafts; {rates}."
        return _conclude(diagnosis, "cannot tell", sentence, [_COUNTING])
    if unsteady := _explain_unsteady_drafts(diagnosis.settings, serving):
        return _conclude(diagnosis, "cannot tell", f"Cannot tell: {rates}; {unsteady}.", [_STEADY])

    return _judge_counts(diagnosis)


def _judge_counts(diagnosis: Diagnosis) -> Diagnosis:
    """Judge counts that can be compared with what is expected."""
    rates = _describe_rates(diagnosis)
    (sound,) = (fit for fit in diagnosis.fits if fit.name == SOUND)
    missing = sound.missing
    if missing.ci95 is None or missing.value is None:
        return _conclude(diagnosis, "cannot tell", f"Cannot tell: {rates}; {explain_undecided(missing.n)}.", [_MORE])
    low, high = missing.ci95
    diagnosis.findings.append(f"{format_missing_per_100(sound)} accepted drafts missing in 100 tokens")
    is_named = diagnosis.fits[0] is not sound and is_surely_likeliest(diagnosis.fits, missing.n)
    # If a fault is surely the likeliest, even a loss that is small against the spread of the texts is real.
    if missing.value > _NOTICED if is_named else low > _PLAIN:
        return _conclude_below(diagnosis, is_named)
    if high < _IN_LINE:
        return _conclude(diagnosis, "in line", f"In line: {rates}.", _advise_tuning(diagnosis))
    return _conclude(diagnosis, "cannot tell", f"Cannot tell: {rates}; too few texts to say.", [_MORE])


def _conclude(
    diagnosis: Diagnosis, outcome: Outcome, verdict: str, following: Sequence[str], suspect: str | None = None
) -> Diagnosis:
    diagnosis.outcome = outcome
    diagnosis.verdict = verdict
    diagnosis.next = list(following)
    diagnosis.suspect = suspect
    return diagnosis


def _conclude_another_text(diagnosis: Diagnosis, text: TextFit) -> Diagnosis:
    """Conclude that the text is not this base's, so that nothing can be said about its drafts."""
    share = f"{100 * (text.likeliest.value or 0.0):.1f} % of the served tokens are the base's likeliest"
    diagnosis.findings.append(share)
    if text.prompts_alike is not None and text.prompts_alike < _MOSTLY:
        unlike = f"{100 * (1 - text.prompts_alike):.0f} % of the prompts are other tokens there"
        return _conclude(diagnosis, "another text", f"Another prompt: {share}; {unlike}.", [_PROMPTING], "template")
    sentence = f"The served text is not this base's own, so its drafts cannot be judged: {share}."
    return _conclude(diagnosis, "another text", sentence, _REBASING)


def _explain_unsteady_drafts(settings: Mapping[str, Any], serving: Serving) -> str:
    """Explain why the server's rounds cannot be compared with rounds of K drafts; empty if they can."""
    drafts = settings["drafts"]
    per_round = serving.per_round
    if not settings["drafts_known"]:
        return "how many drafts a round the engine makes is not reported"
    if per_round is None or abs(per_round / drafts - 1) <= _CONSTANT:
        return ""
    return f"{per_round:.2f} drafts a round on the mean, not the {drafts} expected: it stops early, or adapts"


def _conclude_below(diagnosis: Diagnosis, is_named: bool) -> Diagnosis:
    """Conclude that acceptance is below, and name the fault if ``is_named``: if one is surely the likeliest."""
    below = f"Below: {_describe_rates(diagnosis)}"
    if len(diagnosis.fits) == 1:
        is_mtp = diagnosis.convention is not None
        why = "no fault that is known changes it here" if is_mtp else "faults are known of MTP drafters only"
        return _conclude(diagnosis, "below", f"{below}; {why}.", _ELSEWHERE)

    likeliest, second = diagnosis.fits[:2]
    suspect = _describe_fault(likeliest)
    low, high = likeliest.missing.ci95 or (0.0, 0.0)
    if low > _NEAR or high < -_NEAR:
        missing = format_missing_per_100(likeliest)
        diagnosis.findings.append(f"{suspect}, the likeliest, leaves {missing} drafts in 100 tokens unexplained")
        why = "no fault that is known explains it"
    else:
        next_likely = _describe_fault(second)
        diagnosis.findings.append(f"{suspect} is likelier than {next_likely} by e^{second.behind:.2f} a text")
        if is_named:
            steps = (f"look at {FAULTS[likeliest.name][1]}", *_ELSEWHERE)
            return _conclude(diagnosis, "below", f"{below}. Suspect: {suspect}.", steps, likeliest.name)
        why = f"{suspect} and {next_likely} are too alike"
    return _conclude(diagnosis, "below", f"{below}. Cannot tell why: {why}.", (_MORE, *_ELSEWHERE))


def _describe_fault(fit: Fit) -> str:
    return FAULTS[fit.name][0] if fit.name in FAULTS else "a sound stack"


def _describe_rates(diagnosis: Diagnosis) -> str:
    """Describe served and expected tokens per round, if they are known."""
    by_side = {"served": diagnosis.served, "expected": diagnosis.expected}
    lengths = ", ".join(f"{side} {format_mean(rates.tokens_per_round)}" for side, rates in by_side.items() if rates)
    return f"{lengths} tokens per round, of at most {diagnosis.settings['drafts'] + 1}"


def format_missing_per_100(fit: Fit) -> str:
    """Format the accepted drafts per 100 tokens that ``fit`` expects and that were not served."""
    ends = fit.missing.ci95 and [100 * end for end in fit.missing.ci95]
    return format_number(100 * (fit.missing.value or 0), "+.1f", ends, between=" to ")


def list_diagnosis_tables(diagnosis: Diagnosis) -> Iterator[ReportTable]:
    """List the tables for the terminal: what to do, drafts expected and served, checks of the pair, and faults."""
    if diagnosis.next:
        yield ReportTable("What to do next", ("",), [(step,) for step in diagnosis.next])
    if diagnosis.expected is not None or diagnosis.served is not None:
        yield _tabulate_drafts(diagnosis)
    if diagnosis.checks:
        passed = {True: "yes", False: "NO", None: "?"}
        checks = [(check.name, passed[check.passed], check.found) for check in diagnosis.checks]
        yield ReportTable("Does the pair fit", ("what has to agree", "does", "found"), checks)
    if len(diagnosis.fits) > 1:
        columns = ("fault", "log-likelihood", "behind, a text", "at least", "missing drafts in 100 tokens")
        rows = list[tuple[str, ...]]()
        for fit in diagnosis.fits:
            leads = (f"{fit.log_likelihood:.1f}", f"{fit.behind:.2f}", format_number(fit.behind_at_least, ".2f"))
            rows.append((fit.name, *leads, format_missing_per_100(fit)))
        yield ReportTable("What the counters are like", columns, rows)


def _tabulate_drafts(diagnosis: Diagnosis) -> ReportTable:
    drafts = diagnosis.settings["drafts"]
    rows = list[tuple[str | int, ...]]()
    for side, rates in (("expected", diagnosis.expected), ("served", diagnosis.served)):
        if rates is not None:
            counts = (f"{rates.rounds:.0f}", f"{rates.accepted:.0f}", format_mean(rates.tokens_per_round))
            steps = map(format_rate, rates.steps) if rates.steps else [DASH] * drafts
            rows.append((side, rates.texts, *counts, *steps))
    titles = (f"step {index + 1} %" for index in range(drafts))
    return ReportTable("Drafts", ("", "texts", "rounds", "accepted", "tokens per round", *titles), rows)
