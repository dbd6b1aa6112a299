"""From numbers to words: the verdict in one sentence, the findings one by one, and why a control scored as it did."""

from __future__ import annotations

import dataclasses

from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.parity.compare import Parity
from mtp_extract.validate.report.tables import share
from mtp_extract.validate.result import Validation

__all__ = ["findings", "verdict", "why"]

_REACHED = ("same", "above")
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def verdict(found: Validation) -> str:
    """One sentence: what was refuted, proven, measured, not proven, and where the controls point."""
    refuted: list[str] = []
    proven: list[str] = []
    measured: list[str] = []
    missing: list[str] = []
    if found.parity is None:
        missing.append("that this is the function of a .litertlm file (it was compared with none)")
    elif found.parity.proven:
        proven.append(
            f"the checkpoint computes what Google's interpreter does with {found.source} ({_parity(found.parity)})"
        )
    else:
        where = f"; first apart at {found.parity.first_apart}" if found.parity.first_apart else ""
        refuted.append(
            f"the checkpoint does not compute what Google's interpreter does with {found.source} "
            f"({_parity(found.parity)}{where})"
        )
    if found.agreement is None:
        missing.append("how well it drafts for a base (it was run beside none)")
    else:
        first, most = found.agreement.steps[0].top1, 1 + len(found.agreement.steps)
        measured.append(
            f"its first draft is the base's own token at {share(first.value, dataclasses.astuple(first.interval))} % "
            f"of {first.trials} positions, mean accepted length {found.agreement.mean_accepted_length:.2f} of at most "
            f"{most}"
        )
    if found.generation is not None:
        lengths = found.generation.lengths
        ks = ", ".join(str(result.drafts) for result in lengths)
        worst = min(lengths, key=lambda result: result.identical_prompts)
        differing = worst.prompts - worst.identical_prompts
        # Text is the same in one dtype: in BF16 two tokens may tie that F32 tells apart.
        dtype = f", in {_DTYPES.get(found.base.dtype, found.base.dtype)}" if found.base else ""
        if not differing:
            proven.append(
                f"greedy text is the base's own for all {worst.prompts} prompts with {ks} drafts a round{dtype}"
            )
        elif all(divergence.tie for result in lengths for divergence in result.divergences):
            measured.append(
                f"greedy text is the base's own for all but {differing} of {worst.prompts} prompts with {worst.drafts} "
                f"drafts a round{dtype}, and these leave it only where two tokens of the base tie"
            )
        else:
            refuted.append(
                f"greedy text differs from the base's for {differing} of {worst.prompts} prompts with {worst.drafts} "
                f"drafts a round{dtype}"
            )
    named = (("refuted", refuted), ("proven", proven), ("measured", measured), ("not proven", missing))
    parts = [f"{name}: {', and '.join(items)}" for name, items in named if items]
    if found.controls:
        parts.append(_pointed(found))
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."


def _parity(parity: Parity) -> str:
    emulated = parity.emulated
    return (
        f"with its rounding emulated, logits within {emulated.max_of_range:.1e} of their range, the same top token in "
        f"{round(emulated.top1 * emulated.n)} of {emulated.n} samples"
    )


def _pointed(found: Validation) -> str:
    ran = [result for result in found.controls if result.standing]
    reached = [result for result in ran if result.standing in _REACHED]
    if not ran:
        return "no control could be run"
    if not reached:
        below = sum(result.standing in ("clear", "below") for result in ran)
        open_ = f", {len(ran) - below} leave it open for want of positions" if below < len(ran) else ""
        return f"{below} of {len(ran)} controls score below it{open_}, so they point at no suspect"
    suspects = [result for result in reached if _suspicious(result, found)]
    if not suspects:
        names = " and ".join(result.control.name for result in reached)
        return f"the controls point at no suspect, though {names} cannot be told from it, for reasons given below"
    leading = min(suspects, key=lambda result: result.difference or 0.0)
    verb = "scores better than it" if leading.standing == "above" else "cannot be told from it"
    return f"the controls point at {leading.control.suspect} ({leading.control.name} {verb})"


def _settled(result: ControlResult, found: Validation) -> bool:
    """Whether parity shows that the file itself computes with what the control breaks."""
    return result.control.drafter is not None and found.parity is not None and found.parity.proven


def _suspicious(result: ControlResult, found: Validation) -> bool:
    """Whether the score is one that something wrong would explain, and nothing else does."""
    if result.standing not in _REACHED or _settled(result, found):
        return False
    return result.standing == "above" or result.control.mild is None


def why(result: ControlResult, found: Validation) -> str:
    """In words, what a control's score means."""
    if result.skipped:
        return f"not run: {result.skipped}"
    if result.standing == "clear":
        return "below the real drafter, intervals apart"
    if result.standing == "below":
        return "below the real drafter at the same positions, though the intervals of the two overlap"
    if result.standing == "undecided":
        return "too few positions to tell it from the real drafter"
    balance = "as often for the better as for the worse" if result.standing == "same" else "more of them for the better"
    effect = f"it changes {100 * (result.changed or 0.0):.1f} % of the first drafts, {balance}"
    if _settled(result, found):
        return f"{effect}; parity shows that the file computes as this drafter does, so it matters little to it"
    if not _suspicious(result, found):
        return f"{effect}; {result.control.mild}"
    return f"{effect}; look at {result.control.suspect}"


def findings(found: Validation) -> list[str]:
    """Each thing that a reader should not miss, most important first."""
    listed = []
    parity = found.parity
    if parity and parity.weights.different:
        names = ", ".join(parity.weights.different)
        listed.append(f"tensors of the checkpoint that are not the file's, not even rounded: {names}")
    if parity and not parity.proven:
        apart = parity.first_apart or "none that can be read"
        listed.append(f"parity fails: {_parity(parity)}; the first operator apart is that of {apart}")
    listed += [
        f"{result.control.name} ({result.control.what}) scores "
        f"{'better than' if result.standing == 'above' else 'as well as'} the real drafter: {why(result, found)}"
        for result in found.controls
        if result.standing in _REACHED
    ]
    for result in found.generation.lengths if found.generation else ():
        for divergence in result.divergences:
            apart = f", {divergence.margin:.3g} logits apart" if divergence.margin is not None else ""
            listed.append(
                f"with {result.drafts} drafts a round, the text of prompt {divergence.prompt + 1} leaves the base's at "
                f"token {divergence.token + 1}{apart}"
            )
    return listed
