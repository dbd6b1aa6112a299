"""How figures of reports are drawn: each as PNG and SVG, one panel, narrow enough to be read on a phone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtp_extract.errors import escape
from mtp_extract.report.colours import light

Draw = Callable[[Mapping[str, Any], Any], Any]
"""Of a report, with matplotlib's pyplot: the figure, or None where there is nothing to draw."""

_WIDTH = 4.6
OTHERS = ("orange", "sky", "green", "purple", "vermilion", "brown", "faint")
MARKERS = ("s", "^", "v", "D", "P", "X", "*")
_LONGEST = 28  # characters of a label
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": light("line"),
    "axes.axisbelow": True,
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    # Text stays text: also what looks like mathematics in a name.
    "svg.fonttype": "none",
    "text.parse_math": False,
}


def draw(drawings: Mapping[str, Draw], report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what ``report`` has data for into ``folder``; names without an ending, in the order of ``drawings``."""
    import matplotlib

    plots = pyplot()
    drawn = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A picture has boxes for letters that the font lacks; the SVG has the letters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for name, drawing in drawings.items():
            figure = drawing(report, plots)
            if figure is None:
                continue
            figure.savefig(folder / f"{name}.png")
            # The same data gives the same file.
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plots.close(figure)
            drawn.append(name)
    return drawn


def pyplot() -> Any:
    """Matplotlib's drawing functions, for files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plots

    return plots


def panel(plots: Any, height: float) -> tuple[Any, Any]:
    """A figure of ``height`` inches with one pair of axes."""
    figure, axes = plots.subplots(figsize=(_WIDTH, height), layout="constrained")
    return figure, axes


def short(name: str) -> str:
    """As a label."""
    name = escape(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2 - 1]}…{name[-_LONGEST // 2 :]}"


def bars(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """How far error bars reach below and above; not at all where there is no interval."""
    pairs = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    return [
        [max(0.0, value - low) for value, (low, _) in zip(values, pairs, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(values, pairs, strict=True)],
    ]


def legend(figure: Any, columns: int = 1) -> None:
    """Under the panel."""
    figure.legend(loc="outside lower left", ncols=columns)


class Line(NamedTuple):
    """Shares by step, from the first."""

    name: str
    shares: Sequence[float]
    intervals: Sequence[Sequence[float] | None]
    look: Mapping[str, Any]


def by_step(plots: Any, lines: Sequence[Line], step: str, rate: str) -> Any:
    """A figure of them in percent; ``step`` and ``rate`` name its axes. None without lines."""
    if not lines:
        return None
    figure, axes = panel(plots, 3.2 + 0.2 * len(lines))
    for index, (name, shares, intervals, look) in enumerate(lines):
        # Beside each other: bars of those that are nearly alike would hide one another.
        places = [at + 1 + 0.08 * (index - (len(lines) - 1) / 2) for at in range(len(shares))]
        values = [100 * share for share in shares]
        ends = bars(values, [interval and [100 * end for end in interval] for interval in intervals])
        axes.errorbar(places, values, yerr=ends, label=name, capsize=2.5, elinewidth=1, markersize=5, **look)
    axes.set_xlabel(step)
    axes.set_ylabel(rate)
    axes.set_xticks(range(1, max(len(line.shares) for line in lines) + 1))
    axes.set_ylim(top=103)
    legend(figure)
    return figure


def by_row(axes: Any, labels: Sequence[str]) -> None:
    """A row for each of ``labels``, the first one on top, at the greatest height."""
    axes.set_yticks(range(len(labels) - 1, -1, -1), labels)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.locator_params(axis="x", nbins=6)


def dots(axes: Any, value: float, interval: Sequence[float] | None, place: float, **style: Any) -> None:
    """A value with its interval, in the row at ``place``."""
    axes.errorbar([value], [place], xerr=bars([value], [interval]), capsize=3, linestyle="none", **style)


def beside_bars(axes: Any, labels: Sequence[str], ends: Sequence[float], texts: Sequence[str]) -> None:
    """Name the rows of horizontal bars, and write beside each what it comes to."""
    by_row(axes, labels)
    axes.set_xlim(0, 1.32 * max(ends))
    for place, end, text in zip(range(len(labels) - 1, -1, -1), ends, texts, strict=True):
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=10)
