"""From numbers to words: the verdict in one sentence, the findings one by one, and why a control scored as it did."""

from __future__ import annotations

import math

from mtp_extract.evaluate.measured import Change
from mtp_extract.report.columns import change, share
from mtp_extract.speculate.texts import undecided
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.generation import DraftLengthResult
from mtp_extract.validate.acceptance.trivial import TrivialResult
from mtp_extract.validate.result import Validation

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def verdict(found: Validation) -> str:
    """One sentence: what was refuted, proven, measured, not proven, and where the controls point."""
    refuted = [f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False]
    proven: list[str] = []
    measured: list[str] = []
    missing: list[str] = []
    if not found.checks:
        missing.append("that this is the function of a .litertlm file (it was compared with none)")
    elif found.proven:
        passed = [check.name for check in found.checks if check.passed]
        proven.append(f"the checkpoint is the drafter of {found.source} ({', '.join(passed)})")
    elif not refuted:
        left = [check.name for check in found.checks if check.passed is None]
        missing.append(f"that this is the drafter of {found.source} (not checked: {', '.join(left)})")
    if not found.drafters:
        missing.append("how well it drafts for a base (it was run beside none)")
    else:
        agreement = found.drafters[0].agreement
        first, most = agreement.steps[0].top1, 1 + len(agreement.steps)
        mean = agreement.mean_accepted_length
        measured.append(
            f"its first draft is the base's own token at {share(first.value, first.interval)} % of "
            f"{first.trials} positions"
            + ("" if first.interval else f" ({undecided(agreement.texts)})")
            + ("" if math.isnan(mean) else f", mean accepted length {mean:.2f} of at most {most}")
        )
        refuted += [_worse_than_trivial(result) for result in found.trivial if result.better]
        missing += [_undecided(result) for result in found.trivial if not (result.better or result.worse)]
    if beside := [f"{drafter.facts.name} {_change(drafter.change)}" for drafter in found.drafters[1:]]:
        measured.append(f"beside it, in mean accepted length on the same texts, {', '.join(beside)}")
    if found.drafters:
        if found.wrong_text or any(result.rounds for result in found.drafters[0].generation.lengths):
            (refuted if found.wrong_text else measured).append(_text(found))
        else:
            missing.append("that drafts leave the base's greedy text as it is (no round drafted any)")
    named = (("refuted", refuted), ("proven", proven), ("measured", measured), ("not proven", missing))
    parts = [f"{name}: {', and '.join(items)}" for name, items in named if items]
    if found.controls:
        parts.append(_suspect(found))
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."


def _text(found: Validation) -> str:
    """Whether the loop's text is the base's own, with every drafter and whatever it drafts."""
    # Text is the same in one dtype: in BF16 two tokens may tie that F32 tells apart.
    dtype = f", in {_DTYPES.get(found.base.dtype, found.base.dtype)}" if found.base else ""
    first, *others = found.drafters
    rows = [("", result) for result in first.generation.lengths]
    rows += [(f" of {drafter.facts.name}", result) for drafter in others for result in drafter.generation.lengths]
    # The one that shows most: text that is wrong before text that ties.
    whose, worst = max(rows, key=lambda row: (row[1].wrong_text, len(row[1].divergences)))
    differing = len(worst.divergences)
    if not differing:
        every = " of every drafter" if others else ""
        chains, trees = (
            ", ".join(result.name for result in first.generation.lengths if (result.tree is None) == straight)
            for straight in (True, False)
        )
        branching = f", and trees of {trees}" if trees else ""
        return (
            f"the loop's greedy text, whatever is drafted, is the base's own for all {worst.prompts} prompts with "
            f"{chains} drafts a round{branching}{every}{dtype}"
        )
    if worst.wrong_text:
        return (
            f"the loop's greedy text differs from the base's for {differing} of {worst.prompts} prompts with "
            f"{_drafts(worst)} a round{whose}{dtype}"
        )
    return (
        f"the loop's greedy text is the base's own for all but {differing} of {worst.prompts} prompts with "
        f"{_drafts(worst)} a round{whose}{dtype}, and these leave it only where two tokens of the base nearly tie"
    )


def _change(found: Change) -> str:
    return change(found.mean, found.interval) + ("" if found.interval else f" ({undecided(found.texts)})")


def _worse_than_trivial(result: TrivialResult) -> str:
    """That a trivial drafter drafts better on the same text."""
    return (
        f"its first drafts are worse than those of a trivial drafter ({result.name}: {100 * result.share:.1f} % on "
        f"the same text, the difference {share(result.difference, result.interval)} points)"
    )


def _undecided(result: TrivialResult) -> str:
    """That the measurement does not decide which of the two drafts better."""
    why = f"the difference is {share(result.difference, result.interval)} points, over {result.texts} texts"
    return (
        f"that its first drafts are better than those of a trivial drafter ({result.name}; "
        f"{why if result.interval else undecided(result.texts)})"
    )


def _suspect(found: Validation) -> str:
    """Which part of the drafter's inputs the controls point at."""
    ran = [result for result in found.controls if result.standing]
    above = [result for result in ran if result.standing == "above"]
    if not ran:
        return "no control could be run"
    if all(result.interval is None for result in ran):
        return f"what the controls say is {undecided(found.drafters[0].agreement.texts)}"
    if not above:
        below = sum(result.standing == "below" for result in ran)
        return f"{below} of {len(ran)} controls score below it, none above, so they point at no suspect"
    leading = min(above, key=lambda result: result.difference or 0.0)
    return f"the controls point at {leading.control.suspect} ({leading.control.name} {_counts(leading)})"


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
    if result.skipped:
        return f"not run: {result.skipped}"
    look = f"; look at {result.control.suspect}" if result.standing == "above" else ""
    few = result.standing == "undecided" and result.interval is None
    standing = undecided(result.figures.texts) if result.figures and few else _STANDING[str(result.standing)]
    return f"{standing}: {_counts(result)}{look}"


def findings(found: Validation) -> list[str]:
    """Each thing that a reader should not miss, most important first."""
    listed = [f"{check.name}: {check.evidence}" for check in found.checks if check.passed is False]
    for trivial in found.trivial:
        if trivial.better:
            listed.append(_worse_than_trivial(trivial))
        elif not trivial.worse:
            listed.append(f"it was not shown {_undecided(trivial)}")
    listed += [
        f"{result.control.name} ({result.control.what}): {why(result)}"
        for result in found.controls
        if result.standing in ("above", "same")
    ]
    for index, drafter in enumerate(found.drafters):
        name = f"{drafter.facts.name}: " if index else ""
        if index and drafter.change.worse:
            listed.append(f"{drafter.facts.name} drafts worse: {_change(drafter.change)} in mean accepted length")
        listed += [f"{name}{line}" for result in drafter.generation.lengths for line in _divergences(result)]
    return listed


def _drafts(result: DraftLengthResult) -> str:
    return f"{result.name} drafts" if result.tree is None else f"a tree of {result.name}"


def _divergences(result: DraftLengthResult) -> list[str]:
    listed = []
    for divergence in result.divergences:
        apart = f", {divergence.margin:.3g} logits apart" if divergence.margin is not None else ""
        listed.append(
            f"with {_drafts(result)} a round, the text of prompt {divergence.prompt + 1} leaves the base's at "
            f"token {divergence.token + 1}{apart}"
        )
    return listed
