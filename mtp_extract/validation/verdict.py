"""From figures to words: the four large figures, the verdict, and what to know of the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import structs

from mtp_extract.errors import several
from mtp_extract.evaluation.intervals import undecided
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.card import MEASURED, NAMED, PROVEN
from mtp_extract.report.numbers import format_number, format_rate
from mtp_extract.report.page import Headline
from mtp_extract.validation.plan import ADAPTIVE
from mtp_extract.validation.result import Validation
from mtp_extract.validation.worth import Worth

_MEANS = {
    "Tokens per round": "Drafts that stand, and the base's own token; 1 without a drafter.",
    "Speedup": "Tokens a second with the drafter, over the base alone.",
    "Same text": "Texts that are what the base alone writes, to the last token.",
}


Evidence = Literal["proven", "measured", "named"]
_NOT_PROVEN = {MEASURED: "Measured, not proven", NAMED: "Named, not proven"}
_IDENTITY = {
    PROVEN: "Verified: its weights, settings and outputs are those of the file.",
    MEASURED: "Its weights are those of the file, and its outputs for the inputs that were tried.",
    NAMED: "Its weights are those of the file; its outputs were not compared.",
}


def concluded(validation: Validation) -> Validation:
    """``validation`` with its verdict: whether it is verified or refuted, and what was measured, in a few sentences."""
    names = _names(validation)
    validation.refuted, validation.verified = bool(names[False]), not names[False] and {*names[True]}.issuperset(NEEDED)
    validation.evidence = _evidence(validation, names)
    if validation.refuted:
        reason = ", and ".join(
            f"{check.name}: {check.evidence}" for check in validation.checks if check.passed is False
        )
    elif validation.verified:
        reason = f"the checkpoint is the drafter of {validation.source} ({', '.join(names[True])})"
    elif validation.evidence == MEASURED:
        inputs = several(validation.inputs or 0, "input")
        same = f"Google's interpreter computes the same of {validation.source} for {inputs}"
        reason = f"{same}; {_open_function(validation)}"
    elif validation.evidence == NAMED:
        reason = f"the weights are those of {validation.source}; {_open_function(validation)}"
    elif validation.checks:
        reason = f"that this is the drafter of {validation.source} (not checked: {', '.join(names[None])})"
    else:
        reason = "that this is the function of a .litertlm file (it was compared with none)"
    identity, *figures = headlines(validation)
    why = "it ended before that" if validation.base else "it was run beside none"
    measured = f"Not measured: how well it drafts for a base ({why})"
    if validation.drafters and validation.drafters[0].worth:
        words = (f"{headline.name.lower()} {headline.value} ({headline.of})" for headline in figures)
        measured = f"Measured: {'; '.join(words)}"
    sentences = (f"{identity.value}: {reason}", measured, *findings(validation))
    return structs.replace(validation, verdict=" ".join(f"{sentence}." for sentence in sentences))


def _names(validation: Validation) -> dict[bool | None, list[str]]:
    """Of the checks that were passed, that refute, and that were left open."""
    return {
        answer: [check.name for check in validation.checks if check.passed is answer] for answer in (True, False, None)
    }


def _evidence(validation: Validation, names: Mapping[bool | None, Sequence[str]]) -> Evidence | None:
    """For what it is shown that this is the drafter of the file."""
    if validation.verified:
        return "proven"
    if validation.refuted or not {*names[True], "function"}.issuperset(NEEDED):
        return None
    return "measured" if "interpreter" in names[True] else "named"


def _verdict_word(validation: Validation) -> str:
    """The verdict in a word or two: never a stronger one than what was checked."""
    if validation.refuted:
        return "Refuted"
    if validation.verified:
        return "Verified"
    return _NOT_PROVEN.get(validation.evidence or "", "Not verified")


def _open_function(validation: Validation) -> str:
    """Why the graph is not proven."""
    return next(check.evidence for check in validation.checks if check.name == "function")


def headlines(validation: Validation) -> list[Headline]:
    """Is it the file's drafter? Tokens per round and speedup of the best chain; and does the text stay?"""
    names = _names(validation)
    of = f"{len(names[True])} of {len(validation.checks)} checks against {validation.source} passed"
    for word, some in (("refuted", names[False]), ("not checked", names[None])):
        of += f", {word}: {', '.join(some)}" if some else ""
    identity = Headline(
        "Verdict",
        _verdict_word(validation),
        of if validation.checks else "compared with no file",
        _IDENTITY.get(validation.evidence or "", _IDENTITY["proven"]),
        "bad" if validation.refuted else "good" if validation.verified else "",
    )
    if validation.base is None:
        return [identity, *(Headline(name, "", "it was run beside no base", means) for name, means in _MEANS.items())]
    if not (validation.drafters and validation.drafters[0].worth):
        return [identity, *(Headline(name, "", "it ended before that", means) for name, means in _MEANS.items())]
    base, first = validation.base, validation.drafters[0]
    best = first.worth[first.best]
    chain, ends = drafts_of(first.best, best), best.tokens_per_round.ci95
    drafted = [
        (worth.same_text, drafts_of(name, worth)) for of in validation.drafters for name, worth in of.worth.items()
    ]
    same, worst = min(drafted, key=lambda pair: pair[0])
    interval = f"95 %: {ends[0]:.2f}–{ends[1]:.2f}" if ends else "no interval"
    timed = f"{several(base.timed, 'text')}, one at a time, on {', '.join(base.devices)}; no interval"
    all_same = same == base.timed
    text = f"greedy, in {base.dtype}; {'whatever is drafted' if all_same else f'{worst}, the worst'}"
    length, speedup = (
        format_number(best.tokens_per_round.value, ".2f"),
        format_number(best.measured_speedup, ".2f", unit="×"),
    )
    return [
        identity,
        Headline("Tokens per round", length, f"{chain}; {interval}", _MEANS["Tokens per round"]),
        Headline("Speedup", speedup, f"{chain}; {timed}", _MEANS["Speedup"]),
        Headline("Same text", f"{same} of {base.timed}", text, _MEANS["Same text"], "good" if all_same else ""),
    ]


def drafts_of(name: str, worth: Worth) -> str:
    """What was drafted: ``chain of 3``, ``tree 4x2x1``, ``adaptive chain``."""
    if worth.tree is None:
        return f"chain of {name}"
    return f"{name} chain" if worth.tree == ADAPTIVE else f"tree {name}"


def findings(validation: Validation) -> Iterator[str]:
    """What the large figures do not say, in sentences: the first draft, the drafter beside it, and the controls."""
    for drafter in validation.drafters[:1]:
        top1 = drafter.agreement.steps[0].top1
        few = "" if top1.ci95 else f" ({undecided(drafter.agreement.texts)})"
        yield f"Its first draft is the base's own token at {format_rate(top1)} % of {top1.n} positions{few}"
    for other in validation.drafters[1:]:
        change = other.change
        few = "" if change.interval else f" ({undecided(change.texts)})"
        by = format_number(change.mean, "+.2f", change.interval, between=" to ")
        yield f"Beside it, in teacher-forced tokens per round on the same texts: {other.name} {by}{few}"
    if not validation.controls:
        return
    above = [control for control in validation.controls if control.standing == "above"]
    if all(control.difference.ci95 is None for control in validation.controls):
        yield f"What the controls say is {undecided(validation.drafters[0].agreement.texts)}"
    elif above:
        leading = min(above, key=lambda control: control.difference.value or 0.0)
        yield f"The control {leading.name} scores above it: look at {leading.suspect}"
    else:
        below = sum(control.standing == "below" for control in validation.controls)
        yield f"{below} of {len(validation.controls)} controls score below it, none above, so they point at no suspect"


def notes_of(validation: Validation) -> Iterator[str]:
    """What makes a figure worth less than it seems, and where text parts."""
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
