"""From numbers to words: the verdict in one sentence, the findings one by one, and what to know of the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from mtp_extract.evaluate.agreement import Continuations
from mtp_extract.evaluate.measured import Change
from mtp_extract.evaluate.texts import repeats_note, undecided
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.numbers import mean, rate, signed
from mtp_extract.validation.acceptance.controls import ControlResult, Drafted
from mtp_extract.validation.acceptance.drafters import DrafterFigures
from mtp_extract.validation.acceptance.drafting import ADAPTIVE
from mtp_extract.validation.acceptance.trivial import TrivialResult
from mtp_extract.validation.acceptance.worth import Worth
from mtp_extract.validation.result import Validation

_MOST_REPEATED = 0.25


def concluded(found: Validation) -> Validation:
    """``found`` with its verdict: whether it is verified or refuted, the sentence and the findings."""
    passed = {check.name for check in found.checks if check.passed}
    wrong = [f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False]
    verified = passed.issuperset(NEEDED) and not wrong
    refuted = [*wrong, *(_worse_than_trivial(trivial) for trivial in found.trivial if trivial.better)]
    source = f"the checkpoint is the drafter of {found.source}"
    named = {
        "refuted": refuted,
        "verified": [f"{source} ({', '.join(c.name for c in found.checks if c.passed)})"] if verified else [],
        "measured": list(_measured(found)),
        "not verified": list(_missing(found, verified or bool(wrong))),
    }
    parts = [f"{name}: {', and '.join(items)}" for name, items in named.items() if items]
    text = "; ".join([*parts, *([_suspect(found)] if found.controls else [])])
    return structs.replace(
        found,
        verified=verified,
        refuted=bool(refuted),
        findings=[*refuted, *_findings(found)],
        verdict=f"{text[:1].upper()}{text[1:]}.",
    )


def _measured(found: Validation) -> Iterator[str]:
    if not found.drafters:
        return
    first, *others = found.drafters
    generation, top1 = first.generation, first.agreement.steps[0].top1
    best = generation.worth[generation.best]
    if best.tokens_per_round.value is not None:
        timed = best.measured_speedup is not None and not generation.disturbed
        speed = f", {best.measured_speedup:.2f} times the base's speed" if timed else ""
        yield f"{mean(best.tokens_per_round)} tokens per round with a {drafts_of(generation.best, best)}{speed}"
    few = "" if top1.ci95 else f" ({undecided(first.agreement.texts)})"
    yield f"its first draft is the base's own token at {rate(top1)} % of {top1.n} positions{few}"
    if others:
        changes = ", ".join(f"{drafter.facts.name} {_change(drafter.change)}" for drafter in others)
        yield f"beside it, in teacher-forced tokens per round on the same texts, {changes}"
    if best.rounds:
        drafted = [(name, worth, d.facts.name) for d in found.drafters for name, worth in d.generation.worth.items()]
        name, worst, whose = min(drafted, key=lambda one: one[1].same_text)
        which = f"with a {drafts_of(name, worst)}{f' of {whose}' if others else ''}, the worst"
        yield (
            f"the loop's text is the base's own for {worst.same_text} of {worst.prompts} prompts"
            f"{f' in {found.base.dtype}' if found.base else ''}, "
            f"{'whatever is drafted' if worst.same_text == worst.prompts else which}"
        )


def _missing(found: Validation, decided: bool) -> Iterator[str]:
    if not found.checks:
        yield "that this is the function of a .litertlm file (it was compared with none)"
    elif not decided:
        left = ", ".join(check.name for check in found.checks if check.passed is None)
        yield f"that this is the drafter of {found.source} (not checked: {left})"
    if not found.drafters:
        yield "how well it drafts for a base (it was run beside none)"
    yield from (_undecided(trivial) for trivial in found.trivial if not (trivial.better or trivial.worse))
    if found.drafters and not any(worth.rounds for worth in found.drafters[0].generation.worth.values()):
        yield "that drafts leave the base's greedy text as it is (no round drafted any)"


def drafts_of(name: str, worth: Worth) -> str:
    """What was drafted: ``chain of 3``, ``tree 4x2x1``, ``adaptive chain``."""
    if worth.tree is None:
        return f"chain of {name}"
    return f"{name} chain" if worth.tree == ADAPTIVE else f"tree {name}"


def _change(found: Change) -> str:
    return signed(found.mean, found.interval) + ("" if found.interval else f" ({undecided(found.texts)})")


def _worse_than_trivial(result: TrivialResult) -> str:
    return (
        f"its first drafts are worse than those of a trivial drafter ({result.name}: {100 * result.top1:.1f} % on "
        f"the same text, the difference {rate(result.difference)} points)"
    )


def _undecided(result: TrivialResult) -> str:
    why = f"the difference is {rate(result.difference)} points, over {result.texts} texts"
    return (
        f"that its first drafts are better than those of a trivial drafter ({result.name}; "
        f"{why if result.difference.ci95 else undecided(result.texts)})"
    )


def _suspect(found: Validation) -> str:
    """Which part of the drafter's inputs the controls point at."""
    ran = [(result, result.difference) for result in found.controls if result.difference is not None]
    if not ran:
        return "no control could be run"
    if all(gap.ci95 is None for _, gap in ran):
        return f"what the controls say is {undecided(found.drafters[0].agreement.texts)}"
    above = [(gap.value or 0.0, result) for result, gap in ran if result.standing == "above"]
    if not above:
        below = sum(result.standing == "below" for result, _ in ran)
        return f"{below} of {len(ran)} controls score below it, none above, so they point at no suspect"
    _, leading = min(above, key=lambda one: one[0])
    return f"the controls point at {leading.suspect} ({leading.name} {_counts(leading)})"


def _counts(result: ControlResult) -> str:
    return f"changed {result.changed} first drafts: {result.better} better, {result.worse} worse"


_STANDING = {
    "below": "below the real drafter",
    "above": "above the real drafter",
    "same": "within 5 points of the real drafter, so it matters little here",
    "undecided": "too few texts to tell it from the real drafter",
}


def why(result: ControlResult) -> str:
    """In words, what a control's score means."""
    if result.agreement is None or result.difference is None:
        return f"not run: {result.skipped}"
    few = result.standing == "undecided" and result.difference.ci95 is None
    standing = undecided(result.agreement.texts) if few else _STANDING[str(result.standing)]
    return f"{standing}: {_counts(result)}{f'; look at {result.suspect}' if result.standing == 'above' else ''}"


def _findings(found: Validation) -> Iterator[str]:
    """What a reader should not miss and nothing is refuted by, most important first."""
    for trivial in found.trivial:
        if not (trivial.better or trivial.worse):
            yield f"it was not shown {_undecided(trivial)}"
    for result in found.controls:
        if result.standing in ("above", "same"):
            yield f"{result.name} ({result.what}): {why(result)}"
    for drafter in found.drafters[1:]:
        if drafter.change.worse:
            yield f"{drafter.facts.name} drafts worse: {_change(drafter.change)} teacher-forced tokens per round"
    for drafter in found.drafters:
        for name, worth in drafter.generation.worth.items():
            for parted in worth.divergences:
                apart = f", {parted.margin:.3g} logits apart" if parted.margin is not None else ""
                yield (
                    f"with a {drafts_of(name, worth)} of {drafter.facts.name}, the text of prompt {parted.prompt + 1} "
                    f"leaves the base's at token {parted.token + 1}{apart}; no drafter can change text: where the two "
                    "tokens nearly tie the base's rounding decides, else the loop is at fault"
                )


def notes_of(drafters: Sequence[DrafterFigures], written: Continuations, drafted: Drafted) -> Iterator[str]:
    """What to know of the figures: prompts that a drafter may have seen, text that says little, what did not run."""
    if tuned := [drafter.facts.name for drafter in drafters if drafter.facts.made == "tuned"]:
        yield (
            f"tuned: {', '.join(tuned)}; on prompts that a drafter was tuned on it does better than on others, and the "
            "shipped ones are those that tuning takes by default: its extraction.json has what texts held out showed"
        )
    if written.repeated > _MOST_REPEATED:
        yield (
            f"{100 * written.repeated:.0f} % of the runs of eight tokens that the base writes stand earlier in the "
            "same text: loops, which are easy to draft, so controls may do as well."
        )
    yield from repeats_note(len(written.texts), len(written.repeats))
    positions = len(drafted.agreements[0].anchor)
    if not drafted.controls:
        yield "Nothing was broken on purpose beside it: the controls are those of an MTP drafter."
    elif drafted.positions < positions:
        yield (
            f"Controls drafted at {drafted.positions} of {positions} positions, spread over all texts, and are held "
            "against the drafter there."
        )
    if disturbed := [drafter.facts.name for drafter in drafters if drafter.generation.disturbed]:
        yield (
            f"Times and speedups mean nothing here ({', '.join(disturbed)}): rounds took less time than a single token "
            "of the base alone, so something else used the machine meanwhile. Lengths and texts do not depend on it."
        )
