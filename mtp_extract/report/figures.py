"""The figures of a report, drawn from what ``report.json`` holds; and that of a training.

The real drafter is drawn heavier, and direct labels stand where a legend would cover data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_extract.report.colours import light
from mtp_extract.report.drawing import (
    MARKERS,
    OTHERS,
    Draw,
    Line,
    bars,
    beside_bars,
    by_row,
    by_step,
    dots,
    legend,
    panel,
    pyplot,
    short,
)
from mtp_extract.report.tables import FIGURES, best_methods, method, summary_rows


def _percents(steps: Sequence[Mapping[str, Any]], rate: str) -> tuple[list[int], list[float], list[list[float] | None]]:
    """The steps that have a rate, the rate and its interval, in percent; None where there is none."""
    known = [step for step in steps if step[rate] is not None]
    values, intervals = [100 * step[rate] for step in known], [step["ci95"][rate] for step in known]
    return [step["step"] for step in known], values, [found and [100 * end for end in found] for found in intervals]


def _line(axes: Any, steps: Sequence[Mapping[str, Any]], rate: str, **style: Any) -> None:
    places, values, intervals = _percents(steps, rate)
    axes.errorbar(places, values, yerr=bars(values, intervals), capsize=2.5, elinewidth=1, **style)


def _by_step(axes: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xlabel("draft step")
    axes.set_xticks([step["step"] for step in steps])


def _methods(report: Mapping[str, Any], plots: Any) -> Any:
    """What a round yields: of the only drafter by all that it drafted, of several by the best of each."""
    drafters = report["drafters"] or []
    rows = [row for row in summary_rows(drafters) if row["mean_accepted_length"] is not None]
    if not rows:
        return None
    figure, axes = panel(plots, 1.3 + 0.5 * len(rows))
    best = best_methods(drafters[0])[0]
    _bar(axes, len(rows), "the base alone", 1.0, None, "1", "faint")
    for place, row in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
        mean, speedup = row["mean_accepted_length"], row["speedups"]["measured"]
        label = (f"{short(row['drafter']['name'])}: " if len(drafters) > 1 else "") + method(short(row["method"]))
        text = f"{mean:.2f}" + ("" if speedup is None else f", {speedup:.2f}×")
        stands_above = row["method"] == best and row["drafter"] is drafters[0]
        interval = row["mean_accepted_length_ci95"]
        _bar(axes, place, label, mean, interval, text, "blue" if stands_above else "pale")
    axes.set_ylim(-0.4, len(rows) + 0.8)
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    axes.set_yticks([])
    axes.spines["left"].set_color(light("faint"))
    axes.set_xlabel("tokens a round, and the measured speedup")
    return figure


def _bar(
    axes: Any, place: int, label: str, value: float, interval: Sequence[float] | None, text: str, colour: str
) -> None:
    """A bar from 0 with its label above and what it comes to beside it."""
    axes.barh(place, value, color=light(colour), height=0.34)
    axes.annotate(label, (0, place), (0, 10), textcoords="offset points", va="bottom", fontsize=10)
    if interval:
        dots(axes, value, interval, place, color=light("ink"), elinewidth=1)
    end = (interval or [value])[-1]
    axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=10)


_RATES = {
    "top5": ("faint", "D", "top-5: the base's token is among five"),
    "conditional": ("green", "^", "conditional acceptance"),
    "top1": ("blue", "o", "top-1: the draft is the base's token"),
    "unconditional": ("vermilion", "s", "unconditional acceptance"),
}


def _acceptance(report: Mapping[str, Any], plots: Any) -> Any:
    """The drafter's rates by step."""
    if report["agreement"] is None:
        return None
    steps = report["agreement"]["steps"]
    figure, axes = panel(plots, 4.2)
    for rate, (colour, marker, label) in _RATES.items():
        places, values, intervals = _percents(steps, rate)
        axes.plot(places, values, color=light(colour), marker=marker, markersize=5, label=label)
        below, above = bars(values, intervals)
        low, high = ([v + d for v, d in zip(values, ends, strict=True)] for ends in ([-b for b in below], above))
        axes.fill_between(places, low, high, color=light(colour), alpha=0.18, linewidth=0)
    axes.set_ylabel("rate (%); bands: 95 % intervals")
    axes.set_ylim(0, 103)
    _by_step(axes, steps)
    legend(figure)
    return figure


def _controls(report: Mapping[str, Any], plots: Any) -> Any:
    """Its top-1 beside every control's."""
    controls = {name: found["steps"] for name, found in (report["controls"] or {}).items() if found["steps"]}
    if not controls:
        return None
    real = report["agreement"]["steps"]
    figure, axes = panel(plots, 4.6)
    # Wide and light, underneath: a control that scores as well is then seen, not covered.
    style: dict[str, Any] = {"color": light("pale"), "marker": "o", "linewidth": 7, "markersize": 11, "zorder": 1}
    _line(axes, real, "top1", label="real drafter", **style)
    for index, (name, steps) in enumerate(controls.items()):
        colour, marker = light(OTHERS[index % len(OTHERS)]), MARKERS[index % len(MARKERS)]
        label = name.replace("_", " ")
        _line(axes, steps, "top1", label=label, color=colour, marker=marker, linewidth=1.2, markersize=4.5)
    axes.set_ylabel("top-1 agreement (%)")
    axes.set_ylim(0, 103)
    _by_step(axes, real)
    legend(figure, 2)
    return figure


def _rows(agreement: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The workloads that have a position, and all."""
    return {name: found for name, found in (*agreement["workloads"].items(), ("all", agreement)) if found["n"]}


def _look(index: int) -> dict[str, Any]:
    """Of one drafter among several; the first is the one that is validated."""
    colours, markers = ("blue", *OTHERS), ("o", *MARKERS)
    return {"color": light(colours[index % len(colours)]), "marker": markers[index % len(markers)]}


def _lengths(report: Mapping[str, Any], plots: Any) -> Any:
    """Mean accepted length by workload, of every drafter."""
    drafters = report["drafters"]
    if not drafters or all(drafter["agreement"]["mean_accepted_length"] is None for drafter in drafters):
        return None
    rows = _rows(drafters[0]["agreement"])
    figure, axes = panel(plots, 1.2 + (0.36 + 0.14 * len(drafters)) * len(rows))
    for index, drafter in enumerate(drafters):
        found = _rows(drafter["agreement"])
        shift = 0.6 * (0.5 - (index + 0.5) / len(drafters))
        for place, name in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
            mean, interval = found[name]["mean_accepted_length"], found[name]["mean_accepted_length_ci95"]
            if mean is not None:
                dots(axes, mean, interval, place + shift, markersize=5, **_look(index))
        if len(drafters) > 1:
            axes.plot([], [], linestyle="none", label=short(drafter["name"]), **_look(index))
    by_row(axes, [short(name) for name in rows])
    axes.set_xlabel(f"tokens a round, {len(drafters[0]['agreement']['steps'])} drafts; bars: 95 % intervals")
    axes.set_xlim(left=1)
    if len(drafters) > 1:
        legend(figure)
    return figure


def _drafters(report: Mapping[str, Any], plots: Any) -> Any:
    """Conditional acceptance by step, a line a drafter."""
    drafters = report["drafters"] or []
    if len(drafters) < 2:
        return None
    lines = []
    for index, drafter in enumerate(drafters):
        known = [step for step in drafter["agreement"]["steps"] if step["conditional"] is not None]
        shares, intervals = [step["conditional"] for step in known], [step["ci95"]["conditional"] for step in known]
        lines.append(Line(short(drafter["name"]), shares, intervals, _look(index)))
    return by_step(plots, lines, "draft step", "conditional acceptance (%)")


def _measured(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By what was drafted, where it was timed."""
    return {name: found for name, found in (report["generation"] or {}).items() if found["draft_ms"] is not None}


def _speeds(report: Mapping[str, Any], plots: Any) -> Any:
    """Tokens a second, by what was drafted."""
    measured = _measured(report)
    if not measured:
        return None
    base = next(iter(measured.values()))["base_tokens_per_s"]
    speeds = [base, *(found["speculative_tokens_per_s"] for found in measured.values())]
    figure, axes = panel(plots, 0.9 + 0.36 * len(speeds))
    colours = [light("faint"), *([light("blue")] * len(measured))]
    axes.barh(range(len(speeds) - 1, -1, -1), speeds, color=colours, height=0.62)
    axes.axvline(base, color=light("faint"), linewidth=1, linestyle="--")
    texts = [f"{base:.3g}", *(f"{speed:.3g}, {speed / base:.2f}×" for speed in speeds[1:])]
    beside_bars(axes, ["base alone", *map(method, map(short, measured))], speeds, texts)
    axes.set_xlabel("tokens a second, batch of one")
    return figure


def _rounds(report: Mapping[str, Any], plots: Any) -> Any:
    """Where the time of a round goes, and what it yields."""
    measured = _measured(report)
    if not measured:
        return None
    base = report["arithmetic"]["base_ms"]
    verify = [base, *(found["verify_ms"] for found in measured.values())]
    draft = [0.0, *(found["draft_ms"] for found in measured.values())]
    figure, axes = panel(plots, 1.3 + 0.36 * len(verify))
    places = range(len(verify) - 1, -1, -1)
    axes.barh(places, verify, color=light("vermilion"), height=0.62, label="verify: the base")
    axes.barh(places, draft, left=verify, color=light("blue"), height=0.62, label="draft: the drafter")
    texts = ["1 token", *(f"{found['mean_accepted_length']:.2f} tokens" for found in measured.values())]
    ends = [first + second for first, second in zip(verify, draft, strict=True)]
    beside_bars(axes, ["base alone", *map(method, map(short, measured))], ends, texts)
    axes.set_xlabel("time of a round (ms)")
    legend(figure, 2)
    return figure


_DRAWN = (_methods, _acceptance, _controls, _lengths, _speeds, _rounds, _drafters)
DRAWINGS: Mapping[str, Draw] = dict(zip(FIGURES, _DRAWN, strict=True))
"""How each of :data:`FIGURES` is drawn."""


def draw_progress(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Of a training: loss by step, and mean accepted length on the watched texts where it was measured, as a PNG."""
    plots = pyplot()
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    lengths = [(entry["step"], entry["mean_accepted_length"]) for entry in history if "loss" not in entry]
    figure, (left, right) = plots.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, points, colour, marker, title in (
        (left, losses, "blue", "", "loss of a step"),
        (right, lengths, "vermilion", "o", "mean accepted length, watched texts"),
    ):
        axes.plot(*zip(*points, strict=True) if points else ([], []), color=light(colour), marker=marker, linewidth=1.2)
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.grid(color=light("line"))
    figure.savefig(path, dpi=120)
    plots.close(figure)
