"""The record of a validation, written as ``report.json``, and its summary in words.

The words are the four headlines, the verdict, the findings and the notes; page and terminal show them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import field

from mtp_extract.errors import format_count
from mtp_extract.evaluation.agreement import Change, Workload
from mtp_extract.evaluation.intervals import explain_undecided
from mtp_extract.io.typed import Count, Record, Tool
from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.card import MEASURED, NAMED, PROVEN, describe_verdict
from mtp_extract.report.numbers import format_number, format_rate
from mtp_extract.report.page import Headline
from mtp_extract.validation.controls import ControlResult
from mtp_extract.validation.plan import ADAPTIVE
from mtp_extract.validation.worth import Worth, choose_best_chain

_IDENTITY = {
    PROVEN: f"{describe_verdict(PROVEN)}: its weights, settings and outputs are those of the file.",
    MEASURED: "Its weights are those of the file, and its outputs for the inputs that were tried.",
    NAMED: "Its weights are those of the file; its outputs were not compared.",
}
_MEANS = {
    "Tokens per round": "Accepted drafts, and the base's own token; 1 without a drafter.",
    "Speedup": "Tokens per second with the drafter, over the base alone.",
    "Same text": "Texts that are exactly what the base alone writes.",
}


class RunFacts(Record):
    """When and how a validation was measured, to repeat it."""

    when: str  #: start, in UTC
    command: str | None  #: as typed, but with names in place of local paths; null if called from Python
    prompts_sha256: str | None  #: of the file of prompts; null if none was read
    versions: dict[str, str]  #: of Python and the installed packages that compute


class BaseFacts(Record):
    """The base, how it ran, and its times without drafts, one text at a time."""

    name: str  #: directory or Hub id
    dtype: str  #: of its weights
    devices: list[str]  #: that it ran on
    chat_template: bool  #: whether prompts went through its chat template
    timed: Count  #: texts generated to take times, by the base alone and with every chain and tree
    tokens_per_s: float | None  #: after the first token of each text
    forward_ms: float | None  #: mean time of a forward over one token


class DrafterFigures(Record):
    """Acceptance and speed of a drafter with the base."""

    name: str  #: in the report
    tuned: str | None  #: mode of tuning, by its record; null if none is recorded
    agreement: Workload  #: over all texts
    workloads: dict[str, Workload]  #: the same by workload
    worth: dict[str, Worth]  #: by shape of drafts: `3` is a chain of three, `4x2x1` a tree; chains first
    best: str  #: the chain with the highest predicted speedup
    change: Change  #: of teacher-forced tokens per round from the first drafter to this one; 0 for the first
    changes: dict[str, Change]  #: the same by workload


class Validation(Record, kw_only=True):
    """A validation. Parts that were not asked for are null or empty."""

    version: int = 8  #: version of this record's form
    tool: Tool  #: the tool that wrote it
    run: RunFacts | None = None  #: when and how it was measured
    verdict: str = ""  #: the result in a sentence
    verified: bool = False  #: whether this is the drafter of the file: all needed checks were passed, none failed
    refuted: bool = False  #: whether a check failed
    #: how it is known that this is the drafter of the file: `proven` for every input, `measured` for the inputs of
    #: Google's interpreter, `named` if only weights were compared; null if it was refuted or not checked
    evidence: Literal["proven", "measured", "named"] | None = None
    inputs: Count | None = None  #: number of inputs that Google's interpreter ran; null if it did not run
    drafter: str  #: the directory
    source: str | None = None  #: name of the bundle that it was compared with
    base: BaseFacts | None = None  #: the base and how it ran
    settings: dict[str, Any] = field(default_factory=dict)  #: to repeat the run: prompts, lengths, seeds
    notes: list[str] = field(default_factory=list)  #: remarks that are not errors
    checks: list[Check] = field(default_factory=list)  #: against the bundle
    #: this drafter, then the one compared with it, on the same texts
    drafters: list[DrafterFigures] = field(default_factory=list)
    #: this drafter with one thing broken at a time
    controls: list[ControlResult] = field(default_factory=list)
    pair: dict[str, Any] | None = None  #: base and drafter as the parts of one model, as in `pair.json`


def conclude(validation: Validation) -> Validation:
    """Fill in the best chain of each drafter and the verdict, and return ``validation``."""
    for drafter in validation.drafters:
        drafter.best = choose_best_chain(drafter.worth) if drafter.worth else ""
    passed = _list_check_names(validation, True)
    validation.refuted = bool(_list_check_names(validation, False))
    validation.verified = not validation.refuted and {*passed}.issuperset(NEEDED)
    validation.evidence = _find_evidence(validation, passed)

    identity, *measured = list_headlines(validation)
    if validation.drafters and validation.drafters[0].worth:
        figures = (f"{headline.name.lower()} {headline.value} ({headline.of})" for headline in measured)
        drafting = f"Measured: {'; '.join(figures)}"
    else:
        why = "it ended before that" if validation.base else "it was run beside none"
        drafting = f"Not measured: how well it drafts for a base ({why})"
    sentences = (f"{identity.value}: {_explain_verdict(validation)}", drafting, *describe_findings(validation))
    validation.verdict = " ".join(f"{sentence}." for sentence in sentences)
    return validation


def _list_check_names(validation: Validation, answer: bool | None) -> list[str]:
    """List the checks that passed (True), failed (False) or stayed open (None)."""
    return [check.name for check in validation.checks if check.passed is answer]


def _find_evidence(validation: Validation, passed: Sequence[str]) -> Literal["proven", "measured", "named"] | None:
    if validation.verified:
        return PROVEN
    if validation.refuted or not {*passed, "function"}.issuperset(NEEDED):
        return None
    return MEASURED if "interpreter" in passed else NAMED


def _explain_verdict(validation: Validation) -> str:
    source = validation.source
    if validation.refuted:
        refuted = [check for check in validation.checks if check.passed is False]
        return ", and ".join(f"{check.name}: {check.evidence}" for check in refuted)
    if validation.verified:
        return f"the checkpoint is the drafter of {source} ({', '.join(_list_check_names(validation, True))})"
    if validation.evidence is not None:
        # All checks passed but that of the function, which stayed open.
        open_function = next(check.evidence for check in validation.checks if check.name == "function")
        if validation.evidence == NAMED:
            return f"the weights are those of {source}; {open_function}"
        inputs = format_count(validation.inputs or 0, "input")
        return f"Google's interpreter computes the same of {source} for {inputs}; {open_function}"
    if validation.checks:
        return f"that this is the drafter of {source} (not checked: {', '.join(_list_check_names(validation, None))})"
    return "that this is the function of a .litertlm file (it was compared with none)"


def list_headlines(validation: Validation) -> list[Headline]:
    """List the four headlines: verdict, tokens per round and speedup of the best chain, same text."""
    identity = _build_identity_headline(validation)
    base = validation.base
    if base is None or not (validation.drafters and validation.drafters[0].worth):
        why = "it was run beside no base" if base is None else "it ended before that"
        return [identity, *(Headline(name, "", why, means) for name, means in _MEANS.items())]

    first = validation.drafters[0]
    best = first.worth[first.best]
    return [
        identity,
        *_list_chain_headlines(base, describe_drafts(first.best, best), best),
        _build_same_text_headline(base, validation.drafters),
    ]


def _list_chain_headlines(base: BaseFacts, chain: str, worth: Worth) -> Iterator[Headline]:
    length = format_number(worth.tokens_per_round.value, ".2f")
    ends = worth.tokens_per_round.ci95
    interval = f"95 %: {ends[0]:.2f}–{ends[1]:.2f}" if ends else "no interval"
    yield Headline("Tokens per round", length, f"{chain}; {interval}", _MEANS["Tokens per round"])

    speedup = format_number(worth.measured_speedup, ".2f", unit="×")
    timed = f"{format_count(base.timed, 'text')}, one at a time, on {', '.join(base.devices)}; no interval"
    yield Headline("Speedup", speedup, f"{chain}; {timed}", _MEANS["Speedup"])


def _build_identity_headline(validation: Validation) -> Headline:
    passed = len(_list_check_names(validation, True))
    counted = f"{passed} of {len(validation.checks)} checks against {validation.source} passed"
    for word, answer in (("refuted", False), ("not checked", None)):
        if names := _list_check_names(validation, answer):
            counted += f", {word}: {', '.join(names)}"
    return Headline(
        "Verdict",
        describe_verdict(PROVEN if validation.verified else validation.evidence, is_refuted=validation.refuted),
        counted if validation.checks else "compared with no file",
        _IDENTITY.get(validation.evidence or "", _IDENTITY[PROVEN]),
        "bad" if validation.refuted else "good" if validation.verified else "",
    )


def _build_same_text_headline(base: BaseFacts, drafters: Sequence[DrafterFigures]) -> Headline:
    """Report the chain or tree with the fewest texts that are what the base alone writes."""
    plans = [(name, worth) for drafter in drafters for name, worth in drafter.worth.items()]
    name, worth = min(plans, key=lambda plan: plan[1].same_text)
    all_same = worth.same_text == base.timed
    drafts = "whatever is drafted" if all_same else f"{describe_drafts(name, worth)}, the worst"
    text = f"greedy, in {base.dtype}; {drafts}"
    same = f"{worth.same_text} of {base.timed}"
    return Headline("Same text", same, text, _MEANS["Same text"], "good" if all_same else "")


def describe_drafts(name: str, worth: Worth) -> str:
    """Return ``chain of 3``, ``tree 4x2x1`` or ``adaptive chain``."""
    if worth.tree is None:
        return f"chain of {name}"
    return f"{name} chain" if worth.tree == ADAPTIVE else f"tree {name}"


def describe_findings(validation: Validation) -> Iterator[str]:
    """Yield what the headlines leave out, in sentences: the first draft, the other drafter, and the controls."""
    for drafter in validation.drafters[:1]:
        top1 = drafter.agreement.steps[0].top1
        few = "" if top1.ci95 else f" ({explain_undecided(drafter.agreement.texts)})"
        yield f"Its first draft is the base's own token at {format_rate(top1)} % of {top1.n} positions{few}"
    for compared in validation.drafters[1:]:
        change = compared.change
        few = "" if change.interval else f" ({explain_undecided(change.texts)})"
        difference = format_change(change)
        yield f"Beside it, in teacher-forced tokens per round on the same texts: {compared.name} {difference}{few}"
    if validation.controls:
        yield _describe_controls(validation.controls, validation.drafters[0].agreement.texts)


def _describe_controls(controls: Sequence[ControlResult], texts: int) -> str:
    if all(control.difference.ci95 is None for control in controls):
        return f"What the controls say is {explain_undecided(texts)}"
    above = [control for control in controls if control.standing == "above"]
    if above:
        leading = min(above, key=lambda control: control.difference.value or 0.0)
        return f"The control {leading.name} scores above it: look at {leading.suspect}"
    below = sum(control.standing == "below" for control in controls)
    return f"{below} of {len(controls)} controls score below it, none above, so they point at no suspect"


def format_change(change: Change) -> str:
    """Format a difference with its interval: ``+0.12 (+0.05 to +0.19)``."""
    return format_number(change.mean, "+.2f", change.interval, between=" to ")


def list_notes(validation: Validation) -> Iterator[str]:
    """Yield what limits the figures, and whether any text differs from the base's own."""
    if not validation.controls:
        yield "Nothing was broken on purpose beside it: the controls are those of an MTP drafter."
    for drafter in validation.drafters:
        if drafter.tuned:
            yield (
                f"{drafter.name} was tuned. On prompts that a drafter was tuned on it does better than on others, and "
                "the shipped ones are those that tuning takes by default: its extraction.json has what held-out texts "
                "showed."
            )
        if validation.base and any(worth.same_text < validation.base.timed for worth in drafter.worth.values()):
            yield (
                f"Some text with drafts of {drafter.name} is not the base's own. No drafter can change text: where two "
                "tokens nearly tie the base's rounding decides, else the loop is at fault."
            )
