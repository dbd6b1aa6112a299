"""Charts of a report, drawn with matplotlib as SVG, narrow enough to be read on a phone.

The colours, after Okabe and Ito, can be told apart with every colour vision.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.report.numbers import Ends

PALE = "#9cc9e6"
_COLOURS, _MARKERS = ("#0072b2", "#d55e00", "#009e73", "#555555", "#cc79a7", "#c48800"), "os^DvP"
_WIDTH = 4.6  # inches
_LONGEST = 28  # characters of a label
_CAPS: dict[str, Any] = {"elinewidth": 1, "capsize": 2.5}
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "legend.fontsize": 10,
    **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
    **{"axes.grid": True, "grid.color": "#e3e3e3", "axes.axisbelow": True},
    # Text stays text: also what looks like mathematics in a name.
    **{"svg.fonttype": "none", "text.parse_math": False},
    "svg.hashsalt": "mtp-extract",  # the same data gives the same file
}

Point = tuple[float, Ends]
"""A value and the ends of its interval."""


def draw_bars(series: Mapping[str, Mapping[str, Point]], label: str, *, form: str = ".2f", strong: str = "") -> str:
    """Return a chart of horizontal bars: for each row its name and below it a bar for each of ``series``.

    Args:
        series: rows by name, by the name of the series; the first row is on top.
        form: format of the numbers at the bars.
        strong: the row to highlight if there is one series.
    """
    names = list(dict.fromkeys(name for rows in series.values() for name in rows))

    def draw(axes: Any) -> None:
        for index, (which, rows) in enumerate(series.items()):
            places = [-(1 + len(series)) * names.index(name) - index for name in rows]
            colours = [PALE if strong and name != strong else _COLOURS[index] for name in rows]
            axes.barh(places, [value for value, _ in rows.values()], color=colours, height=0.8, label=_shorten(which))
            for place, (value, ends) in zip(places, rows.values(), strict=True):
                if ends:
                    axes.errorbar([value], [place], xerr=_compute_error_bars([(value, ends)]), ecolor="black", **_CAPS)
                at: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(f"{value:{form}}", (ends[1] if ends else value, place), **at, fontsize=10)
        for row, name in enumerate(names):
            axes.annotate(_shorten(name), (0, 0.46 - (1 + len(series)) * row), va="bottom", fontsize=10)
        axes.set(xlabel=f"{label}; lines: 95 % intervals", yticks=[], ylim=(0.6 - (1 + len(series)) * len(names), 1.4))
        axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
        axes.grid(visible=False, axis="y")

    return _render_svg(draw, 0.8 + (0.26 + 0.26 * len(series)) * len(names), legend=len(series) > 1)


def draw_lines(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Return a chart of percentages by draft step (from 1), with a line for each of ``series``."""

    def draw(axes: Any) -> None:
        for index, (name, points) in enumerate(series.items()):
            # Shift the series sideways: error bars of nearly equal values would hide each other.
            places = [at + 1 + 0.08 * (index - (len(series) - 1) / 2) for at in range(len(points))]
            look: dict[str, Any] = {"color": _COLOURS[index], "marker": _MARKERS[index], "markersize": 5}
            values = [value for value, _ in points]
            axes.errorbar(places, values, yerr=_compute_error_bars(points), label=_shorten(name), **_CAPS, **look)
        axes.set(xlabel="draft step; bars: 95 % intervals", ylabel=label, ylim=(0, 103))
        axes.set_xticks(range(1, max(map(len, series.values())) + 1))

    return _render_svg(draw, 3.2 + 0.2 * len(series), legend=True)


def _render_svg(draw: Callable[[Any], None], height: float, legend: bool) -> str:
    """Return the data URL of what ``draw`` draws on axes of ``height`` inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = BytesIO()
    with rc_context(_STYLE), warnings.catch_warnings():
        # Text is rendered with the reader's font, so matplotlib's font does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(axes := figure.subplots())
        if legend:
            figure.legend(loc="outside lower left", ncols=2 if len(axes.containers) > 4 else 1)
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _compute_error_bars(points: Sequence[Point]) -> list[list[float]]:
    """Return the lengths of the error bars below and above; 0 without an interval."""
    reach = [(value - ends[0], ends[1] - value) if ends else (0.0, 0.0) for value, ends in points]
    return [[max(0.0, pair[side]) for pair in reach] for side in (0, 1)]


def _shorten(name: str) -> str:
    name = escape(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2 - 1]}…{name[-_LONGEST // 2 :]}"
