"""From figures to words: the verdict in one sentence, and what to know of the figures."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from mtp_extract.errors import several
from mtp_extract.evaluate.intervals import undecided
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.report.numbers import mean, rate, signed
from mtp_extract.validation.plan import ADAPTIVE
from mtp_extract.validation.result import BaseFacts, Validation
from mtp_extract.validation.worth import Worth


def concluded(found: Validation) -> Validation:
    """``found`` with its verdict: whether it is verified or refuted, and the sentence."""
    passed, left = ([check.name for check in found.checks if check.passed is answer] for answer in (True, None))
    wrong = [f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False]
    verified = set(passed).issuperset(NEEDED) and not wrong
    if wrong:
        text = f"Refuted: {', and '.join(wrong)}"
    elif verified:
        text = f"Verified: the checkpoint is the drafter of {found.source} ({', '.join(passed)})"
    elif found.checks:
        text = f"Not verified: that this is the drafter of {found.source} (not checked: {', '.join(left)})"
    else:
        text = "Not verified: that this is the function of a .litertlm file (it was compared with none)"
    if found.base is None:
        text += "; not measured: how well it drafts for a base (it was run beside none)"
    else:
        text += f"; measured: {', and '.join(_measured(found, found.base))}"
    text += f"; {_suspect(found)}" if found.controls else ""
    return structs.replace(found, verified=verified, refuted=bool(wrong), verdict=f"{text}.")


def drafts_of(name: str, worth: Worth) -> str:
    """What was drafted: ``chain of 3``, ``tree 4x2x1``, ``adaptive chain``."""
    if worth.tree is None:
        return f"chain of {name}"
    return f"{name} chain" if worth.tree == ADAPTIVE else f"tree {name}"


def _measured(found: Validation, base: BaseFacts) -> Iterator[str]:
    first, *others = found.drafters
    best, top1 = first.worth[first.best], first.agreement.steps[0].top1
    if best.rounds:
        said = f"{mean(best.tokens_per_round)} tokens per round with a {drafts_of(first.best, best)}"
        if best.measured_speedup is not None and not first.disturbed:
            said += f", {best.measured_speedup:.2f} times the base's speed on {several(base.timed, 'text')}"
        yield said
    few = "" if top1.ci95 else f" ({undecided(first.agreement.texts)})"
    yield f"its first draft is the base's own token at {rate(top1)} % of {top1.n} positions{few}"
    for other in others:
        change, few = other.change, "" if other.change.interval else f" ({undecided(other.change.texts)})"
        yield (
            f"beside it, in teacher-forced tokens per round on the same texts, {other.name} "
            f"{signed(change.mean, change.interval)}{few}"
        )
    if not best.rounds:
        yield "no round drafted any token, so whether drafts leave the text as it is was not seen"
        return
    drafted = [(name, worth, one.name) for one in found.drafters for name, worth in one.worth.items()]
    name, worst, whose = min(drafted, key=lambda one: one[1].same_text)
    which = f"with a {drafts_of(name, worst)}{f' of {whose}' if others else ''}, the worst"
    yield (
        f"the loop's text is the base's own for {worst.same_text} of {base.timed} prompts in {base.dtype}, "
        f"{'whatever is drafted' if worst.same_text == base.timed else which}"
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
    return f"{leading.name} scores above it, so the controls point at {leading.suspect}"


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
        if drafter.disturbed:
            yield (
                f"Times and speedups mean nothing here ({drafter.name}): rounds took less time than a single token of "
                "the base alone, so something else used the machine meanwhile. Lengths and texts do not depend on it."
            )
        for name, worth in drafter.worth.items():
            if worth.divergences:
                places = [f"of prompt {prompt + 1} at token {token + 1}" for prompt, token in worth.divergences]
                yield (
                    f"With a {drafts_of(name, worth)} of {drafter.name}, text leaves the base's: {', '.join(places)}. "
                    "No drafter can change text: where two tokens nearly tie the base's rounding decides, else the "
                    "loop is at fault."
                )
