"""What a validation measured, as tables: the one telling of it, in words and numbers.

The report's page, the terminal and the model card show these tables, each in its own way. They are made from the
content of ``report.json``, which is what all three have: a card is made long after the measurement, elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_extract import markdown

__all__ = ["FIGURES", "PAGE", "REPORT", "REPORT_FILES", "Table", "change", "measurements", "setting", "share", "words"]

REPORT = "report.json"
PAGE = "report.md"
FIGURES: Mapping[str, str] = {
    "acceptance_by_step": "Acceptance by draft step, and top-1 agreement beside that of the controls",
    "agreement_by_workload": "Agreement by workload",
    "generation_by_drafts": "Tokens a second, and the time of a round, by number of drafts",
    "drafters_by_step": "Acceptance by draft step of the drafters side by side",
}
"""Names of the figures, without an ending, and what they show."""

REPORT_FILES = frozenset({REPORT, PAGE, *(f"{name}.{ending}" for name in FIGURES for ending in ("png", "svg"))})
"""Everything that a report may consist of."""


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        title: a heading.
        columns: a name each; percentages say so here.
        rows: text, or whole numbers.
        about: how it was measured, in Markdown; for readers who were not there.
        after: what the numbers come to, in plain text.
        figure: of :data:`FIGURES`, if one shows the same.
        detail: only for who looks closer.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    about: str = ""
    after: str = ""
    figure: str = ""
    detail: bool = False

    def markdown(self, level: int = 2) -> str:
        """As a section with a heading of ``level``; a detail is folded away."""
        cells = markdown.table(self.columns, ([markdown.plain(cell) for cell in row] for row in self.rows))
        if self.detail:
            return f"<details><summary>{markdown.plain(self.title)}</summary>\n\n{cells}\n\n</details>"
        parts = (
            f"{'#' * level} {markdown.plain(self.title)}",
            markdown.plain(self.about),
            cells,
            markdown.plain(self.after),
        )
        return "\n\n".join(part for part in parts if part)


def share(value: float | None, interval: Sequence[float] | None) -> str:
    """A fraction in percent with its interval, without the sign: ``81.5 (80.4–82.6)``; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.1f}" + (f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else "")


def setting(report: Mapping[str, Any]) -> Table:
    """What was measured, and with what."""
    base, source = report["base"], report["source"]
    rows = [("drafter", report["drafter"])]
    if source:
        rows.append(("file", source))
    if base:
        rows += [
            ("base", f"{base['name']} ({base['dtype']}, on {', '.join(base['devices'])})"),
            ("drafter computes in", base["drafter_dtype"]),
            ("chat template", "applied" if base["chat_template"] else "not applied"),
        ]
    rows += [(name.replace("_", " "), words(value)) for name, value in report["settings"].items()]
    return Table(title="Setting", columns=("", ""), rows=tuple(rows))


def words(value: Any) -> str:
    """A setting: numbers, names, or numbers by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def measurements(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of what was measured, in the order in which they are read.

    Raises:
        KeyError, TypeError: ``report`` is not the content of a ``report.json``.
    """
    # The first reports had no checks.
    if report.get("checks"):
        yield _checks(report["checks"])
    if report["parity"] is not None:
        yield from _parity(report["parity"])
    if report["agreement"] is not None:
        yield from _agreement(report["agreement"])
    if report["controls"] is not None:
        yield _controls(report["controls"], report["agreement"], report.get("trivial", {}))
    if report["generation"] is not None:
        yield from _generation(report["generation"], report["arithmetic"])
    # Reports of earlier releases knew one drafter.
    if report.get("drafters"):
        yield from _drafters(report["drafters"])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


_RESULTS = {True: "passed", False: "refuted", None: "not run"}


def _checks(checks: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="Is it the drafter of the file?",
        columns=("check", "what is asked", "result", "evidence"),
        rows=tuple((check["name"], check["what"], _RESULTS[check["passed"]], check["evidence"]) for check in checks),
        about="Every answer is derived from the file anew. One that is refuted refutes the checkpoint.",
    )


def _parity(parity: Mapping[str, Any]) -> Iterator[Table]:
    compared = {
        "logits, float": parity["float"],
        "logits, emulated": parity["emulated"],
        "logits, emulated alone": parity["emulated_alone"],
        "state, float": parity["float"]["projected"],
        "state, emulated": parity["emulated"]["projected"],
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(parity["matrices"].items()))
    followed, weights = parity["followed_roundings"], parity["weights"]
    different, first_apart = weights["different"], parity["first_apart"]
    yield Table(
        title="Parity with Google's interpreter",
        columns=("", "n", "max. abs.", "of range", "relative", "min. cosine", "top-1 %", "top-5 %"),
        rows=tuple(
            (
                name,
                found["n"],
                _number(found["max_abs"], ".2e"),
                _number(found["max_of_range"], ".1e"),
                _number(found["relative"], ".1e"),
                _number(found["cosine"], ".7f"),
                share(found["top1"], None),
                share(found["top5"], None),
            )
            for name, found in compared.items()
        ),
        about=(
            f"`ai-edge-litert` ({parity['kernels']} kernels) runs the drafter section, the reference runs the "
            f"checkpoint, on the same {parity['float']['n']} inputs; compared are the logits and the projected state. "
            "*Float* is the checkpoint as it is. *Emulated* repeats the interpreter's rounding of activations "
            f"({kinds} matrices{', attention in integers' if parity['rounded_attention'] else ''}); "
            f"{followed['codes']} of {followed['of']} values lay so near the middle between two codes that the last "
            "bit of a sum decides, and were rounded as the interpreter did (*alone*: they were not). That explains a "
            "difference; it proves nothing."
        ),
        after=(
            f"Tensors of the checkpoint: {weights['exact']} equal to the file's, {weights['rounded']} equal once "
            f"rounded, {len(different)} different"
            + (f" ({', '.join(different)})" if different else "")
            + (f". First role apart: {first_apart}" if first_apart is not None else "")
            + "."
        ),
    )
    if parity["roles"]:
        yield Table(
            title="Operator by operator",
            columns=("role", "float, of range", "float, cosine", "emulated, of range", "emulated, cosine"),
            rows=tuple(
                (
                    role,
                    *(
                        cell
                        for found in (both["float"], both["emulated"])
                        for cell in (_number(found["max_of_range"], ".1e"), _number(found["cosine"], ".6f"))
                    ),
                )
                for role, both in parity["roles"].items()
            ),
            detail=True,
        )


_RATES = ("top1", "top5", "conditional", "unconditional")


def _rate(figures: Mapping[str, Any], name: str, step: int = 0) -> str:
    steps = figures["steps"]
    return share(steps[step][name], steps[step]["ci95"][name]) if steps else "–"


def _mean(figures: Mapping[str, Any]) -> str:
    # The first reports had no interval for a control.
    value, interval = figures["mean_accepted_length"], figures.get("mean_accepted_length_ci95")
    return _number(value, ".2f") + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def _agreement(agreement: Mapping[str, Any]) -> Iterator[Table]:
    steps = agreement["steps"]
    yield Table(
        title="Agreement with the base",
        columns=("step", "n", "top-1 %", "top-5 %", "conditional %", "unconditional %"),
        rows=tuple(
            (step["step"], step["n"], *(_rate(agreement, name, index) for name in _RATES))
            for index, step in enumerate(steps)
        ),
        about=(
            f"Teacher-forced over the base's own greedy continuation of {agreement['texts']} prompts: every position "
            "is drafted from. Conditional acceptance is accepted_i / accepted_(i−1), unconditional is accepted_i / "
            "rounds. In brackets: 95 % intervals, over texts."
        ),
        after=f"Mean accepted length (1 + accepted / rounds) at {len(steps)} drafts: {_mean(agreement)}.",
        figure="acceptance_by_step",
    )
    yield Table(
        title="By workload",
        columns=("workload", "texts", "n", "top-1 %, step 1", "top-5 %, step 1", "mean length"),
        rows=tuple(
            (name, found["texts"], found["n"], _rate(found, "top1"), _rate(found, "top5"), _mean(found))
            for name, found in (*agreement["workloads"].items(), ("all", agreement))
        ),
        figure="agreement_by_workload",
    )


def _controls(controls: Mapping[str, Any], agreement: Mapping[str, Any] | None, trivial: Mapping[str, Any]) -> Table:
    real = [("real drafter", _rate(agreement, "top1"), "", _mean(agreement), "nothing")] if agreement else []
    return Table(
        title="Controls",
        columns=("control", "top-1 %, step 1", "below by", "mean length", "what is broken: what the score says"),
        rows=(
            *real,
            *(
                (
                    name,
                    _rate(found, "top1"),
                    share(found["difference"], found["difference_ci95"]),
                    _mean(found),
                    f"{found['what']}: {found['why']}",
                )
                for name, found in controls.items()
            ),
            *(
                (
                    name,
                    share(found["top1"], None),
                    share(found["difference"], found["difference_ci95"]),
                    "",
                    "a drafter that knows nothing of the base",
                )
                for name, found in trivial.items()
            ),
        ),
        about=(
            "The same positions with one thing broken on purpose, and what trivial drafters reach there. The "
            "difference is in percentage points, with its interval over texts, which allows for there being seven "
            "controls."
        ),
    )


def _generation(generation: Mapping[str, Any], arithmetic: Mapping[str, Any]) -> Iterator[Table]:
    yield Table(
        title="Speculative decoding",
        columns=(
            "K",
            "accepted",
            "acceptance %",
            "mean length",
            "same text",
            "base tok/s",
            "tok/s",
            "verify ms",
            "draft ms",
        ),
        rows=tuple(
            (
                name,
                f"{found['accepted']}/{found['drafted']}",
                share(found["acceptance"], None),
                _number(found["mean_accepted_length"], ".2f"),
                f"{found['identical_prompts']}/{found['prompts']}",
                _number(found["base_tokens_per_s"], ".1f"),
                _number(found["speculative_tokens_per_s"], ".1f"),
                _number(found["verify_ms"], ".2f"),
                _number(found["draft_ms"], ".2f"),
            )
            for name, found in generation.items()
        ),
        about=(
            "K drafts a round. Acceptance and text, which is to be the base's own, over all prompts in batches; times "
            f"of a batch of one, over {arithmetic['timed_prompts']} prompts."
        ),
        after=(
            f"One forward of the base over one token: {_number(arithmetic['base_ms'], '.2f')} ms. By the arithmetic of "
            f"measured acceptance and cost, K = {arithmetic['best_draft_steps']} is worth most, "
            f"{_number(arithmetic['predicted_speedup'], '.2f')}×."
        ),
        figure="generation_by_drafts",
    )
    longest, found = list(generation.items())[-1]
    yield Table(
        title=f"Buffers at K = {longest}, batch of one",
        columns=("buffer", "shape", "dtype", "bytes"),
        rows=tuple((b["name"], str(list(b["shape"])), b["dtype"], f"{b['nbytes']:,}") for b in found["buffers"]),
        detail=True,
    )


_MADE = {"extracted": "extracted", "tuned": "tuned", "unknown": "no record"}


def _what(drafter: Mapping[str, Any]) -> str:
    mode, head = drafter["mode"], drafter["ordered_head"]
    parts = [_MADE[drafter["made"]] + (f" ({mode})" if mode else ""), drafter["format"]]
    if head:
        parts.append(f"ordered head, {head['top_k']} of {head['num_centroids']} clusters")
    return ", ".join(parts)


def change(mean: float | None, interval: Sequence[float] | None) -> str:
    """A difference in mean accepted length with its interval, ``+0.30 (+0.21 to +0.39)``; a dash for none."""
    if mean is None or math.isnan(mean):
        return "–"
    return f"{mean:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")


def _change(found: Mapping[str, Any]) -> str:
    return change(found["mean"], found["ci95"])


def _drafters(drafters: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    first, *others = drafters
    drafts = len(first["agreement"]["steps"])
    yield Table(
        title="Drafters side by side" if others else "What a draft step costs, and what it is worth",
        columns=(
            "drafter",
            "what it is",
            "mean length",
            *(("to the first",) if others else ()),
            "bytes a step",
            "of it the head",
            "draft ms",
            "verify ms",
            "same text",
            "best K",
            "predicted",
            "measured",
            "break-even K",
        ),
        rows=tuple(_beside(drafter, bool(others), drafter is first) for drafter in drafters),
        about=(
            f"All on the same texts of the base; mean accepted length at {drafts} drafts. Bytes of the drafter's own "
            "weights that one step reads, as its directory stores them: codes with their scales, of an ordered head "
            "the centroids and the clusters that are chosen. The base's K and V, embedding and hidden state come on "
            "top, the same for all. Times are of one step and one verification, batch of one, at the best K or, where "
            "none pays, the smallest, in this loop, which computes in floats whatever a directory stores. Predicted: "
            "the speedup at that K by the arithmetic; measured: in tokens a second. Break-even K: the largest of those "
            "tried that is predicted to be faster than the base alone."
        ),
        figure="drafters_by_step" if others else "",
    )
    if not others:
        return
    names = tuple(drafter["name"] for drafter in drafters)
    yield Table(
        title="Conditional acceptance by step, drafters side by side",
        columns=("step", *(f"{name} %" for name in names)),
        rows=tuple(
            (step + 1, *(_rate(drafter["agreement"], "conditional", step) for drafter in drafters))
            for step in range(drafts)
        ),
    )
    yield Table(
        title="Mean accepted length by workload, drafters side by side",
        columns=("workload", "texts", *names, *(f"{name}: to the first" for name in names[1:])),
        rows=tuple(
            (
                name,
                found["texts"],
                *(_mean(drafter["agreement"]["workloads"][name]) for drafter in drafters),
                *(_change(drafter["changes"][name]) for drafter in others),
            )
            for name, found in first["agreement"]["workloads"].items()
        ),
        about="Differences text by text, each with its own 95 % interval over texts.",
    )


def _beside(drafter: Mapping[str, Any], several: bool, first: bool) -> tuple[str | int, ...]:
    arithmetic, generation, reads = drafter["arithmetic"], drafter["generation"], drafter["bytes_a_step"]
    best = arithmetic["best_draft_steps"]
    drafts = best or min(found["drafts"] for found in generation.values() if found["tree"] is None)
    found = generation[str(drafts)]
    fast, base = found["speculative_tokens_per_s"], found["base_tokens_per_s"]
    step = None if found["draft_ms"] is None else found["draft_ms"] / drafts
    return (
        drafter["name"],
        _what(drafter),
        _mean(drafter["agreement"]),
        *(("" if first else _change(drafter["change"]),) if several else ()),
        f"{reads['total']:,}",
        f"{reads['head']:,}",
        _number(step, ".2f"),
        _number(found["verify_ms"], ".2f"),
        f"{sum(r['identical_prompts'] for r in generation.values())}/{sum(r['prompts'] for r in generation.values())}",
        best,
        _times(arithmetic["predicted_speedup"]),
        _times(fast / base if fast and base else None),
        arithmetic["break_even_draft_steps"],
    )


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}×"
