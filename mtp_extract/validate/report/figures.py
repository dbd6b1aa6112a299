"""The figures of a report, each as PNG and SVG.

Colours are Okabe and Ito's, told apart by readers of every colour vision; the real drafter is drawn heavier, and
direct labels stand where a legend would cover data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_extract.validate.acceptance.agreement import WorkloadFigures
from mtp_extract.validate.report.tables import FIGURES
from mtp_extract.validate.result import Validation

__all__ = ["draw_figures"]

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
_CONTROL_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#8C6D1F", "#555555")
_MARKERS = ("s", "^", "v", "D", "P", "X", "*")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    # Text stays text, and the same data gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "mtp-extract",
}


def draw_figures(validation: Validation, folder: Path) -> list[str]:
    """Draw what ``validation`` has data for into ``folder``; names without an ending, in order of the report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    with matplotlib.rc_context(_STYLE):
        for name, draw in zip(FIGURES, (_acceptance, _workloads, _generation, _drafters), strict=True):
            figure = draw(validation, pyplot)
            if figure is None:
                continue
            figure.savefig(folder / f"{name}.png")
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
            drawn.append(name)
    return drawn


def _line(
    axes: Any, figures: WorkloadFigures, label: str, rate: str = "top1", shift: float = 0.0, **style: Any
) -> None:
    steps = [step + shift for step in range(1, len(figures.steps) + 1)]
    values = [100 * getattr(step, rate).value for step in figures.steps]
    intervals = [getattr(step, rate).interval for step in figures.steps]
    errors = [
        [value - 100 * interval.low for value, interval in zip(values, intervals, strict=True)],
        [100 * interval.high - value for value, interval in zip(values, intervals, strict=True)],
    ]
    axes.errorbar(steps, values, yerr=errors, label=label, capsize=2.5, elinewidth=1, **style)


def _acceptance(validation: Validation, pyplot: Any) -> Any:
    """Left: the real drafter's rates by step. Right: its top-1 beside every control's."""
    real = validation.agreement
    if real is None:
        return None
    controls = [(r.control.name, r.figures) for r in validation.controls if r.figures]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.5, 4.4), sharey=True, layout="constrained")
    steps = range(1, len(real.steps) + 1)
    for name, colour, marker in (
        ("top5", _GREY, "D"),
        ("conditional", _GREEN, "^"),
        ("top1", _BLUE, "o"),
        ("unconditional", _ORANGE, "s"),
    ):
        proportions = [getattr(step, name) for step in real.steps]
        values = [100 * p.value for p in proportions]
        left.plot(steps, values, color=colour, marker=marker, markersize=5, label=_RATES[name])
        left.fill_between(
            steps,
            [100 * p.interval.low for p in proportions],
            [100 * p.interval.high for p in proportions],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    left.set_title("Drafter against base", loc="left")
    left.set_ylabel("rate (%)")
    # Wide and light, underneath: a control that scores as well is then seen, not covered.
    _line(right, real, "real drafter", color="#9CC9E6", marker="o", linewidth=7, markersize=11, zorder=1)
    for index, (name, figures) in enumerate(controls):
        colour, marker = _CONTROL_COLOURS[index % len(_CONTROL_COLOURS)], _MARKERS[index % len(_MARKERS)]
        _line(right, figures, name.replace("_", " "), color=colour, marker=marker, linewidth=1.2, markersize=4.5)
    right.set_title("Top-1 agreement, with one thing broken", loc="left")
    for axes in (left, right):
        axes.set_xlabel("draft step")
        axes.set_xticks(list(steps))
        axes.set_ylim(0, 103)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, frameon=False, fontsize=9)
    figure.supxlabel(f"bands and bars: 95 % intervals; {real.anchors} positions of {real.texts} texts", fontsize=8.5)
    return figure


_RATES = {
    "top1": "top-1: the draft is the base's token",
    "top5": "top-5: the base's token is among five",
    "conditional": "conditional acceptance",
    "unconditional": "unconditional acceptance",
}


def _workloads(validation: Validation, pyplot: Any) -> Any:
    """Top-1 and top-5 of the first step, and the mean accepted length, by workload."""
    if validation.agreement is None or not validation.workloads:
        return None
    rows = {**validation.workloads, "all": validation.agreement}
    names = [name for name, figures in rows.items() if figures.anchors]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10.5, 1.4 + 0.5 * len(names)), sharey=True, layout="constrained", width_ratios=(3, 2)
    )
    places = range(len(names) - 1, -1, -1)
    for place, name in zip(places, names, strict=True):
        step = rows[name].steps[0]
        for proportion, colour, marker, shift in ((step.top1, _BLUE, "o", 0.12), (step.top5, _GREY, "D", -0.12)):
            value, interval = proportion.value, proportion.interval
            left.errorbar(
                100 * value,
                place + shift,
                xerr=[[100 * (value - interval.low)], [100 * (interval.high - value)]],
                color=colour,
                marker=marker,
                capsize=3,
                linestyle="none",
            )
        mean, interval_ = rows[name].mean_accepted_length, rows[name].mean_accepted_interval
        error = [[max(0.0, mean - interval_.low)], [max(0.0, interval_.high - mean)]] if interval_ else None
        right.errorbar(mean, place, xerr=error, color=_BLUE, marker="o", capsize=3, linestyle="none")
    left.set_yticks(list(places), [f"{name}\nn = {rows[name].anchors}" for name in names])
    left.set_ylim(-0.6, len(names) - 0.4)
    left.set_xlabel("first draft agrees with the base (%)")
    left.plot([], [], color=_BLUE, marker="o", linestyle="none", label="top-1")
    left.plot([], [], color=_GREY, marker="D", linestyle="none", label="top-5")
    left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    left.set_xlim(min(left.get_xlim()[0], 90), 100.5)
    drafts = len(validation.agreement.steps)
    right.set_xlabel(f"mean accepted length, {drafts} drafts (tokens a round)")
    right.set_xlim(left=min(1.0, right.get_xlim()[0]))
    return figure


def _generation(validation: Validation, pyplot: Any) -> Any:
    """Left: tokens a second by K. Right: where the time of a round goes."""
    if validation.generation is None:
        return None
    lengths = validation.generation.lengths
    labels = [result.name for result in lengths]
    places = range(1, len(lengths) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    base = lengths[0].base_tokens_per_s
    speeds = [result.speculative_tokens_per_s for result in lengths]
    left.bar([0], [base], color=_GREY, width=0.62)
    left.bar(places, speeds, color=_BLUE, width=0.62)
    left.axhline(base, color=_GREY, linewidth=1, linestyle="--")
    for place, speed in zip((0, *places), (base, *speeds), strict=True):
        ratio = "" if place == 0 else f"\n{speed / base:.2f}×"
        left.annotate(
            f"{speed:.3g}{ratio}",
            (place, speed),
            (0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    left.set_xticks([0, *places], ["base\nalone", *labels])
    left.set_xlabel("K, drafts a round")
    left.set_ylabel("tokens a second, batch of one")
    left.set_title("Speed", loc="left")
    right.set_title("Where a round's time goes, and what it yields", loc="left")
    left.set_ylim(0, 1.2 * max(_finite([base, *speeds])))
    right.bar([0], [validation.generation.base_ms], color=_ORANGE, width=0.62)
    verify, draft = [r.verify_ms for r in lengths], [r.draft_ms for r in lengths]
    right.bar(places, verify, color=_ORANGE, width=0.62, label="verify: the base")
    right.bar(places, draft, bottom=verify, color=_BLUE, width=0.62, label="draft: the drafter")
    for place, result in zip(places, lengths, strict=True):
        right.annotate(
            f"{result.mean_accepted_length:.2f} tokens",
            (place, result.verify_ms + result.draft_ms),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    right.set_xticks([0, *places], ["base\nalone", *labels])
    right.set_xlabel("K, drafts a round")
    right.set_ylabel("time a round (ms)")
    right.set_ylim(0, 1.14 * max(_finite([a + b for a, b in zip(verify, draft, strict=True)])))
    right.legend(loc="upper left", frameon=False)
    for axes in (left, right):
        axes.grid(visible=False, axis="x")
    return figure


def _drafters(validation: Validation, pyplot: Any) -> Any:
    """Conditional acceptance by step, a line a drafter."""
    drafters = validation.drafters
    if len(drafters) < 2:
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 4.4), layout="constrained")
    colours, markers = (_BLUE, *_CONTROL_COLOURS), ("o", *_MARKERS)
    for index, drafter in enumerate(drafters):
        _line(
            axes,
            drafter.agreement,
            # A pair of dollars would be read as mathematics.
            f"{drafter.facts.name}: {drafter.agreement.mean_accepted_length:.2f} tokens a round".replace("$", r"\$"),
            "conditional",
            # Beside each other: bars of drafters that are nearly alike would hide one another.
            0.08 * (index - (len(drafters) - 1) / 2),
            color=colours[index % len(colours)],
            marker=markers[index % len(markers)],
            markersize=5,
            linewidth=1.3 if index else 2.2,
        )
    axes.set_title("Drafts accepted, of those whose predecessors were", loc="left")
    axes.set_xlabel("draft step; bars: 95 % intervals over texts")
    axes.set_ylabel("conditional acceptance (%)")
    axes.set_xticks(range(1, len(drafters[0].agreement.steps) + 1))
    axes.set_ylim(top=101)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=1, frameon=False, fontsize=9)
    return figure


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)] or [1.0]
