"""From numbers to words: the verdict in one sentence, the findings one by one, and why a control scored as it did."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from mtp_extract.evaluate.measured import Change
from mtp_extract.evaluate.texts import undecided
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.numbers import mean, rate, signed
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import Worth
from mtp_extract.validate.acceptance.trivial import TrivialResult
from mtp_extract.validate.result import Validation


def concluded(found: Validation) -> Validation:
    """``found`` with its verdict: whether it is verified or refuted, the sentence and the findings."""
    passed = {check.name for check in found.checks if check.passed}
    failed = any(check.passed is False for check in found.checks)
    judged = structs.replace(
        found,
        verified=passed.issuperset(NEEDED) and not failed,
        refuted=failed or any(trivial.better for trivial in found.trivial),
        findings=list(_findings(found)),
    )
    return structs.replace(judged, verdict=_verdict(judged))


def _verdict(found: Validation) -> str:
    """One sentence: what was refuted, verified, measured, not verified, and where the controls point."""
    refuted = [f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False]
    refuted += [_worse_than_trivial(result) for result in found.trivial if result.better]
    verified = ", ".join(check.name for check in found.checks if check.passed)
    named = (
        ("refuted", refuted),
        ("verified", [f"the checkpoint is the drafter of {found.source} ({verified})"] if found.verified else []),
        ("measured", list(_measured(found))),
        ("not verified", list(_missing(found))),
    )
    parts = [f"{name}: {', and '.join(items)}" for name, items in named if items]
    if found.controls:
        parts.append(_suspect(found))
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."


def _measured(found: Validation) -> Iterator[str]:
    if not found.drafters:
        return
    first, *others = found.drafters
    name, best = first.generation.best, first.generation.worth[first.generation.best]
    top1 = first.agreement.steps[0].top1
    if best.tokens_per_round.value is not None:
        timed = best.measured_speedup is not None and not first.generation.disturbed
        speed = f", {best.measured_speedup:.2f} times the base's speed" if timed else ""
        yield f"{mean(best.tokens_per_round)} tokens per round with a {drafts_of(name, best)}{speed}"
    few = "" if top1.ci95 else f" ({undecided(first.agreement.texts)})"
    yield f"its first draft is the base's own token at {rate(top1)} % of {top1.n} positions{few}"
    if others:
        changes = ", ".join(f"{drafter.facts.name} {_change(drafter.change)}" for drafter in others)
        yield f"beside it, in teacher-forced tokens per round on the same texts, {changes}"
    if best.rounds:
        yield text_of(found)


def _missing(found: Validation) -> Iterator[str]:
    if not found.checks:
        yield "that this is the function of a .litertlm file (it was compared with none)"
    elif not found.verified and all(check.passed is not False for check in found.checks):
        left = ", ".join(check.name for check in found.checks if check.passed is None)
        yield f"that this is the drafter of {found.source} (not checked: {left})"
    if not found.drafters:
        yield "how well it drafts for a base (it was run beside none)"
    for result in found.trivial:
        if not (result.better or result.worse):
            yield _undecided(result)
    if found.drafters and not any(worth.rounds for worth in found.drafters[0].generation.worth.values()):
        yield "that drafts leave the base's greedy text as it is (no round drafted any)"


def text_of(found: Validation) -> str:
    """For how many texts the loop wrote what the base alone writes, whatever was drafted, in words."""
    dtype = f" in {found.base.dtype}" if found.base else ""
    name, worst = min(_drafted(found), key=lambda drafted: drafted[1].same_text)
    where = "whatever is drafted" if worst.same_text == worst.prompts else f"with a {name}, the worst"
    return f"the loop's text is the base's own for {worst.same_text} of {worst.prompts} prompts{dtype}, {where}"


def _drafted(found: Validation) -> list[tuple[str, Worth]]:
    """All that any drafter drafted, and what to call it."""
    several = len(found.drafters) > 1
    return [
        (drafts_of(name, worth) + (f" of {drafter.facts.name}" if several else ""), worth)
        for drafter in found.drafters
        for name, worth in drafter.generation.worth.items()
    ]


def drafts_of(name: str, worth: Worth) -> str:
    """What was drafted: ``chain of 3``, ``tree 4x2x1``, ``adaptive chain``."""
    if worth.paths:
        return f"tree {name}"
    return f"{name} chain" if worth.tree else f"chain of {name}"


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
    ran = [result for result in found.controls if result.difference is not None]
    above = [result for result in ran if result.standing == "above"]
    if not ran:
        return "no control could be run"
    if all(result.difference.ci95 is None for result in ran if result.difference):
        return f"what the controls say is {undecided(found.drafters[0].agreement.texts)}"
    if not above:
        below = sum(result.standing == "below" for result in ran)
        return f"{below} of {len(ran)} controls score below it, none above, so they point at no suspect"
    leading = min(above, key=lambda result: (result.difference and result.difference.value) or 0.0)
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
    if result.skipped or result.agreement is None or result.difference is None:
        return f"not run: {result.skipped}"
    look = f"; look at {result.suspect}" if result.standing == "above" else ""
    few = result.standing == "undecided" and result.difference.ci95 is None
    standing = undecided(result.agreement.texts) if few else _STANDING[str(result.standing)]
    return f"{standing}: {_counts(result)}{look}"


def _findings(found: Validation) -> Iterator[str]:
    """Each thing that a reader should not miss, most important first."""
    yield from (f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False)
    for trivial in found.trivial:
        if trivial.better:
            yield _worse_than_trivial(trivial)
        elif not trivial.worse:
            yield f"it was not shown {_undecided(trivial)}"
    for result in found.controls:
        if result.standing in ("above", "same"):
            yield f"{result.name} ({result.what}): {why(result)}"
    for drafter in found.drafters[1:]:
        if drafter.change.worse:
            yield f"{drafter.facts.name} drafts worse: {_change(drafter.change)} teacher-forced tokens per round"
    for drafter in found.drafters:
        yield from _divergences(drafter)


def _divergences(drafter: DrafterFigures) -> Iterator[str]:
    """Where text left the base's. No drafter can do that: it is the loop's fault, or that of the base's arithmetic."""
    for name, worth in drafter.generation.worth.items():
        for parted in worth.divergences:
            apart = f", {parted.margin:.3g} logits apart" if parted.margin is not None else ""
            fault = "" if parted.tie else "; no drafter can change text: the loop or the base's arithmetic is at fault"
            yield (
                f"with a {drafts_of(name, worth)} of {drafter.facts.name}, the text of prompt {parted.prompt + 1} "
                f"leaves the base's at token {parted.token + 1}{apart}{fault}"
            )
