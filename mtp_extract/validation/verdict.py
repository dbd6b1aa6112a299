"""From figures to words: the four large figures, the verdict, and what to know of the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import structs

from mtp_extract.errors import several
from mtp_extract.evaluation.agreement import Change
from mtp_extract.evaluation.intervals import undecided
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.card import MEASURED, NAMED, PROVEN, verdict_word
from mtp_extract.report.numbers import format_number, format_rate
from mtp_extract.report.page import Headline
from mtp_extract.validation.controls import ControlResult
from mtp_extract.validation.plan import ADAPTIVE
from mtp_extract.validation.result import BaseFacts, DrafterFigures, Validation
from mtp_extract.validation.worth import Worth

_MEANS = {
    "Tokens per round": "Drafts that stand, and the base's own token; 1 without a drafter.",
    "Speedup": "Tokens a second with the drafter, over the base alone.",
    "Same text": "Texts that are what the base alone writes, to the last token.",
}


Evidence = Literal["proven", "measured", "named"]
_IDENTITY = {
    PROVEN: f"{verdict_word(PROVEN)}: its weights, settings and outputs are those of the file.",
    MEASURED: "Its weights are those of the file, and its outputs for the inputs that were tried.",
    NAMED: "Its weights are those of the file; its outputs were not compared.",
}


def concluded(validation: Validation) -> Validation:
    """``validation`` with its verdict: whether it is verified or refuted, and what was measured, in a few sentences."""
    names = _names(validation)
    validation.refuted = bool(names[False])
    validation.verified = not names[False] and {*names[True]}.issuperset(NEEDED)
    validation.evidence = _evidence(validation, names)

    identity, *measured = headlines(validation)
    if validation.drafters and validation.drafters[0].worth:
        words = (f"{headline.name.lower()} {headline.value} ({headline.of})" for headline in measured)
        drafting = f"Measured: {'; '.join(words)}"
    else:
        why = "it ended before that" if validation.base else "it was run beside none"
        drafting = f"Not measured: how well it drafts for a base ({why})"
    sentences = (f"{identity.value}: {_reason(validation, names)}", drafting, *findings(validation))
    return structs.replace(validation, verdict=" ".join(f"{sentence}." for sentence in sentences))


def _reason(validation: Validation, names: Mapping[bool | None, Sequence[str]]) -> str:
    """Why the verdict is what it is."""
    source = validation.source
    if validation.refuted:
        refuted = [check for check in validation.checks if check.passed is False]
        return ", and ".join(f"{check.name}: {check.evidence}" for check in refuted)
    if validation.verified:
        return f"the checkpoint is the drafter of {source} ({', '.join(names[True])})"
    if validation.evidence is not None:
        # Everything but the graph was compared.
        open_function = next(check.evidence for check in validation.checks if check.name == "function")
        if validation.evidence == NAMED:
            return f"the weights are those of {source}; {open_function}"
        inputs = several(validation.inputs or 0, "input")
        return f"Google's interpreter computes the same of {source} for {inputs}; {open_function}"
    if validation.checks:
        return f"that this is the drafter of {source} (not checked: {', '.join(names[None])})"
    return "that this is the function of a .litertlm file (it was compared with none)"


def _names(validation: Validation) -> dict[bool | None, list[str]]:
    """Of the checks that were passed, that refute, and that were left open."""
    return {
        answer: [check.name for check in validation.checks if check.passed is answer] for answer in (True, False, None)
    }


def _evidence(validation: Validation, names: Mapping[bool | None, Sequence[str]]) -> Evidence | None:
    """For what it is shown that this is the drafter of the file."""
    if validation.verified:
        return PROVEN
    if validation.refuted or not {*names[True], "function"}.issuperset(NEEDED):
        return None
    return MEASURED if "interpreter" in names[True] else NAMED


def headlines(validation: Validation) -> list[Headline]:
    """Is it the file's drafter? Tokens per round and speedup of the best chain; and does the text stay?"""
    identity = _identity_headline(validation)
    if validation.base is None or not (validation.drafters and validation.drafters[0].worth):
        why = "it was run beside no base" if validation.base is None else "it ended before that"
        return [identity, *(Headline(name, "", why, means) for name, means in _MEANS.items())]

    first = validation.drafters[0]
    best = first.worth[first.best]
    return [
        identity,
        *_best_chain_headlines(validation.base, drafts_of(first.best, best), best),
        _same_text_headline(validation.base, validation.drafters),
    ]


def _identity_headline(validation: Validation) -> Headline:
    names = _names(validation)
    counted = f"{len(names[True])} of {len(validation.checks)} checks against {validation.source} passed"
    for word, answer in (("refuted", False), ("not checked", None)):
        if names[answer]:
            counted += f", {word}: {', '.join(names[answer])}"
    return Headline(
        "Verdict",
        verdict_word(PROVEN if validation.verified else validation.evidence, is_refuted=validation.refuted),
        counted if validation.checks else "compared with no file",
        _IDENTITY.get(validation.evidence or "", _IDENTITY[PROVEN]),
        "bad" if validation.refuted else "good" if validation.verified else "",
    )


def _best_chain_headlines(base: BaseFacts, chain: str, worth: Worth) -> Iterator[Headline]:
    length = format_number(worth.tokens_per_round.value, ".2f")
    ends = worth.tokens_per_round.ci95
    interval = f"95 %: {ends[0]:.2f}–{ends[1]:.2f}" if ends else "no interval"
    yield Headline("Tokens per round", length, f"{chain}; {interval}", _MEANS["Tokens per round"])

    speedup = format_number(worth.measured_speedup, ".2f", unit="×")
    timed = f"{several(base.timed, 'text')}, one at a time, on {', '.join(base.devices)}; no interval"
    yield Headline("Speedup", speedup, f"{chain}; {timed}", _MEANS["Speedup"])


def _same_text_headline(base: BaseFacts, drafters: Sequence[DrafterFigures]) -> Headline:
    """Of all that was drafted, what left the fewest texts as the base alone writes them."""
    drafted = [(name, worth) for drafter in drafters for name, worth in drafter.worth.items()]
    name, worth = min(drafted, key=lambda pair: pair[1].same_text)
    all_same = worth.same_text == base.timed
    drafts = "whatever is drafted" if all_same else f"{drafts_of(name, worth)}, the worst"
    text = f"greedy, in {base.dtype}; {drafts}"
    same = f"{worth.same_text} of {base.timed}"
    return Headline("Same text", same, text, _MEANS["Same text"], "good" if all_same else "")


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
        by = format_change(change)
        yield f"Beside it, in teacher-forced tokens per round on the same texts: {other.name} {by}{few}"
    if validation.controls:
        yield _what_controls_say(validation.controls, validation.drafters[0].agreement.texts)


def _what_controls_say(controls: Sequence[ControlResult], texts: int) -> str:
    if all(control.difference.ci95 is None for control in controls):
        return f"What the controls say is {undecided(texts)}"
    above = [control for control in controls if control.standing == "above"]
    if above:
        leading = min(above, key=lambda control: control.difference.value or 0.0)
        return f"The control {leading.name} scores above it: look at {leading.suspect}"
    below = sum(control.standing == "below" for control in controls)
    return f"{below} of {len(controls)} controls score below it, none above, so they point at no suspect"


def format_change(change: Change) -> str:
    """A difference with its interval, ``+0.12 (+0.05 to +0.19)``."""
    return format_number(change.mean, "+.2f", change.interval, between=" to ")


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
