"""The large figures at the head of a validation's page, out of the content of ``report.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtp_extract.report.page import Headline, measured, within
from mtp_extract.report.tables import best_methods, method
from mtp_extract.validate.acceptance.generation import FASTER

_NO_BASE = "it was run beside no base"
_TOKENS = "Drafts that stand in a round, and the base's own token; 1 without a drafter."
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
    drafter = (report["drafters"] or (None,))[0]
    if drafter is None:
        names = {"Tokens a round": _TOKENS, "Speedup": _SPEEDUP, "Same text": _TEXT}
        yield from (measured(name, None, "", _NO_BASE, means) for name, means in names.items())
        return
    name = best_methods(drafter)[0]
    found = drafter["generation"][name]
    mean, interval = found["mean_accepted_length"], found["mean_accepted_length_ci95"]
    tokens = None if mean is None else f"{mean:.2f}"
    yield measured(
        "Tokens a round", tokens, f"{method(name)}; {within(interval)}", "no text left anything to draft", _TOKENS
    )
    yield _speedup(report, drafter, name)
    part, worst = min(drafter["generation"].items(), key=lambda item: item[1]["identical_prompts"])
    whole = worst["identical_prompts"] == worst["prompts"]
    rounds = any(found["rounds"] for found in drafter["generation"].values())
    same = f"{worst['identical_prompts']} of {worst['prompts']}" if rounds else None
    of = f"greedy, in {report['base']['dtype']}; {'whatever is drafted' if whole else method(part) + ', the worst'}"
    text = measured("Same text", same, of, "no round drafted anything", _TEXT)
    wrong = any(not d["tie"] for found in drafter["generation"].values() for d in found["divergences"])
    yield text._replace(standing="bad" if wrong else "good" if rounds and whole else "")


def _speedup(report: Mapping[str, Any], drafter: Mapping[str, Any], name: str) -> Headline:
    arithmetic = drafter["arithmetic"]
    speedup, base_ms = arithmetic["speedups"][name]["measured"], arithmetic["base_ms"]
    why_not = "no text was timed"
    if speedup is not None and any(
        None not in (part["verify_ms"], part["draft_ms"]) and part["verify_ms"] + part["draft_ms"] < FASTER * base_ms
        for part in drafter["generation"].values()
    ):
        speedup, why_not = None, "something else used the machine meanwhile"
    where = ", ".join(report["base"]["devices"])
    of = f"{method(name)}; {arithmetic['timed_prompts']} texts, one at a time, on {where}; no interval"
    return measured("Speedup", None if speedup is None else f"{speedup:.2f}×", of, why_not, _SPEEDUP)
