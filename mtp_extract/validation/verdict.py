"""From figures to words: the verdict in one sentence, and what to know of the figures."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from mtp_extract.errors import several
from mtp_extract.evaluate.intervals import undecided
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.numbers import mean, rate, signed
from mtp_extract.validation.plan import ADAPTIVE
from mtp_extract.validation.result import Validation
from mtp_extract.validation.worth import Worth


def concluded(found: Validation) -> Validation:
    """``found`` with its verdict: whether it is verified or refuted, and the sentence."""
    passed = [check.name for check in found.checks if check.passed]
    wrong = [f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False]
    verified = set(passed).issuperset(NEEDED) and not wrong
    parts = {
        "refuted": wrong,
        "verified": [f"the checkpoint is the drafter of {found.source} ({', '.join(passed)})"] if verified else [],
        "measured": list(_measured(found)),
        "not verified": list(_missing(found, verified or bool(wrong))),
    }
    text = "; ".join(f"{name}: {', and '.join(items)}" for name, items in parts.items() if items)
    text += f"; {_suspect(found)}" if found.controls else ""
    return structs.replace(
        found,
        verified=verified,
        refuted=bool(wrong),
        verdict=f"{text[:1].upper()}{text[1:]}.",
    )


def drafts_of(name: str, worth: Worth) -> str:
    """What was drafted: ``chain of 3``, ``tree 4x2x1``, ``adaptive chain``."""
    if worth.tree is None:
        return f"chain of {name}"
    return f"{name} chain" if worth.tree == ADAPTIVE else f"tree {name}"


def _measured(found: Validation) -> Iterator[str]:
    if not found.drafters:
        return
    first, *others = found.drafters
    generation, top1 = first.generation, first.agreement.steps[0].top1
    best = generation.worth[generation.best]
    if best.tokens_per_round.value is not None:
        said = f"{mean(best.tokens_per_round)} tokens per round with a {drafts_of(generation.best, best)}"
        if best.measured_speedup is not None and not generation.disturbed:
            said += f", {best.measured_speedup:.2f} times the base's speed on {several(generation.timed, 'text')}"
        yield said
    few = "" if top1.ci95 else f" ({undecided(first.agreement.texts)})"
    yield f"its first draft is the base's own token at {rate(top1)} % of {top1.n} positions{few}"
    for other in others:
        change, few = other.change, "" if other.change.interval else f" ({undecided(other.change.texts)})"
        yield (
            f"beside it, in teacher-forced tokens per round on the same texts, {other.name} "
            f"{signed(change.mean, change.interval)}{few}"
        )
    if best.rounds:
        drafted = [(name, worth, one.name) for one in found.drafters for name, worth in one.generation.worth.items()]
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
    elif not any(worth.rounds for worth in found.drafters[0].generation.worth.values()):
        yield "that drafts leave the base's greedy text as it is (no round drafted any)"


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
    return (
        f"the controls point at {leading.suspect} ({leading.name} changed {leading.changed} first drafts: "
        f"{leading.better} better, {leading.worse} worse)"
    )


def notes_of(found: Validation) -> Iterator[str]:
    """What makes a figure worth less than it seems, and where text parts."""
    if not found.controls:
        yield "Nothing was broken on purpose beside it: the controls are those of an MTP drafter."
    for drafter in found.drafters:
        if drafter.tuned:
            yield (
                f"{drafter.name} was tuned. On prompts that a drafter was tuned on it does better than on others, and "
                "the shipped ones are those that tuning takes by default: its extraction.json has what held-out texts "
                "showed."
            )
        if drafter.generation.disturbed:
            yield (
                f"Times and speedups mean nothing here ({drafter.name}): rounds took less time than a single token of "
                "the base alone, so something else used the machine meanwhile. Lengths and texts do not depend on it."
            )
        for name, worth in drafter.generation.worth.items():
            places = [
                f"of prompt {parted.prompt + 1} at token {parted.token + 1}"
                + (f" ({parted.margin:.3g} logits apart)" if parted.margin is not None else "")
                for parted in worth.divergences
            ]
            if places:
                yield (
                    f"With a {drafts_of(name, worth)} of {drafter.name}, text leaves the base's: {', '.join(places)}. "
                    "No drafter can change text: where the two tokens nearly tie the base's rounding decides, else the "
                    "loop is at fault."
                )
