"""The large figures at the head of a validation's page, out of the content of ``report.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtp_extract.report.page import TOKENS_A_ROUND, Headline, measured, within
from mtp_extract.report.tables import best_methods, method
from mtp_extract.validate.acceptance.generation import FASTER

_NO_BASE = "it was run beside no base"
_SPEEDUP = "Tokens a second with the drafter, over the base alone."
_TEXT = "Texts that are the base's own to the last token; drafting may change none."


def headlines(report: Mapping[str, Any]) -> list[Headline]:
    """Is it the file's drafter; and of the chain that is predicted to be worth most tokens a round and speedup; and,
    whatever is drafted, the texts that stay.
    """
    return [_standing(report), *_of_drafter(report)]


def _standing(report: Mapping[str, Any]) -> Headline:
    checks, means = report["checks"] or (), "Proven: its weights, settings and outputs are those of the file."
    passed, failed, left = ([c["name"] for c in checks if c["passed"] is answer] for answer in (True, False, None))
    of = f"{len(passed)} of {len(checks)} checks against {report['source']} passed"
    if not checks:
        of = "compared with no file"
    if left:
        of += f", not checked: {', '.join(left)}"
    if report["refuted"]:
        wrong = f"{of}, refuted: {', '.join(failed)}" if failed else f"by what it drafts; {of}"
        return Headline("Verdict", "Refuted", wrong, means, "bad")
    return Headline("Verdict", *(("Proven", of, means, "good") if report["proven"] else ("Not proven", of, means)))


def _of_drafter(report: Mapping[str, Any]) -> Iterator[Headline]:
    if not report["drafters"]:
        names = {"Tokens a round": TOKENS_A_ROUND, "Speedup": _SPEEDUP, "Same text": _TEXT}
        yield from (measured(name, None, "", "", _NO_BASE, means) for name, means in names.items())
        return
    base, drafter = report["base"], report["drafters"][0]
    generation, arithmetic = drafter["generation"], drafter["arithmetic"]
    name = best_methods(drafter)[0]
    mean, interval = (generation[name][key] for key in ("mean_accepted_length", "mean_accepted_length_ci95"))
    of = f"{method(name)}; {within(interval)}"
    yield measured("Tokens a round", mean, "{:.2f}", of, "no text left anything to draft", TOKENS_A_ROUND)
    speedup, why_not = arithmetic["speedups"][name]["measured"], "no text was timed"
    if any(
        None not in (part["verify_ms"], part["draft_ms"])
        and part["verify_ms"] + part["draft_ms"] < FASTER * (arithmetic["base_ms"] or 0)
        for part in generation.values()
    ):
        speedup, why_not = None, "something else used the machine meanwhile"
    where = ", ".join(base["devices"])
    of = f"{method(name)}; {arithmetic['timed_prompts']} texts, one at a time, on {where}; no interval"
    yield measured("Speedup", speedup, "{:.2f}×", of, why_not, _SPEEDUP)
    part, worst = min(generation.items(), key=lambda item: item[1]["identical_prompts"])
    whole = worst["identical_prompts"] == worst["prompts"]
    wrong = any(not divergence["tie"] for found in generation.values() for divergence in found["divergences"])
    drafted = any(found["rounds"] for found in generation.values())
    same = f"{worst['identical_prompts']} of {worst['prompts']}" if drafted else None
    of = f"greedy, in {base['dtype']}; {'whatever is drafted' if whole else f'{method(part)}, the worst'}"
    text = measured("Same text", same, "{}", of, "no round drafted anything", _TEXT)
    yield text._replace(standing="bad" if wrong else "good" if drafted and whole else text.standing)
