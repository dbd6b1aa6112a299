"""The pictures of reports, drawn with matplotlib as SVG, narrow enough to be read on a phone.

Colours are after Okabe and Ito, told apart by readers of every colour vision.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.report.numbers import Ends

BLUE, PALE, GREY = "#0072b2", "#9cc9e6", "#555555"
_COLOURS, _MARKERS = (BLUE, "#d55e00", "#009e73", GREY, "#cc79a7", "#c48800", "#3596d0", "#8c6d1f"), "os^DvPX*"
_WIDTH = 4.6  # inches
_LONGEST = 28  # characters of a label
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    # Text stays text: also what looks like mathematics in a name.
    "svg.fonttype": "none",
    "text.parse_math": False,
    # The same data gives the same file.
    "svg.hashsalt": "mtp-extract",
}

Point = tuple[float, Ends]
"""A value with its interval."""


def bars(rows: Sequence[tuple[str, Point, str]], strong: str, label: str) -> str:
    """Horizontal bars from 0, each with its name above and a text beside it; the one named ``strong`` stands out."""
    with _panel(0.8 + 0.5 * len(rows)) as (axes, made):
        for place, (name, (value, ends), text) in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
            colour = GREY if ends is None and place == len(rows) - 1 else BLUE if name == strong else PALE
            axes.barh(place, value, color=colour, height=0.34)
            axes.annotate(_short(name), (0, place), (0, 10), textcoords="offset points", va="bottom", fontsize=10)
            if ends:
                axes.errorbar([value], [place], xerr=_arms([(value, ends)]), color="black", elinewidth=1, capsize=3)
            end = ends[1] if ends else value
            axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=10)
        axes.set(xlabel=label, yticks=[], ylim=(-0.4, len(rows) - 0.2))
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    return made[0]


def dots(series: Mapping[str, Mapping[str, Point]], label: str, left: float = 0.0) -> str:
    """A row a name, the first on top; in it of each of ``series`` the value with its interval."""
    names = list(dict.fromkeys(name for rows in series.values() for name in rows))
    with _panel(1.2 + (0.36 + 0.14 * len(series)) * len(names), legend=len(series) > 1) as (axes, made):
        for index, (which, rows) in enumerate(series.items()):
            places = [len(names) - 1 - names.index(name) + 0.6 * (0.5 - (index + 0.5) / len(series)) for name in rows]
            values, arms = [value for value, _ in rows.values()], _arms(list(rows.values()))
            axes.errorbar(values, places, xerr=arms, linestyle="none", **_look(index, which))
        axes.set_yticks(range(len(names) - 1, -1, -1), [_short(name) for name in names])
        axes.set(xlabel=f"{label}; bars: 95 % intervals", ylim=(-0.6, len(names) - 0.4))
        axes.set_xlim(left=left)
        axes.grid(visible=False, axis="y")
        axes.locator_params(axis="x", nbins=6)
    return made[0]


def lines(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Shares by draft step, from the first, in percent; a line for each of ``series``."""
    with _panel(3.2 + 0.2 * len(series), legend=True) as (axes, made):
        for index, (name, points) in enumerate(series.items()):
            # Beside each other: bars of those that are nearly alike would hide one another.
            places = [at + 1 + 0.08 * (index - (len(series) - 1) / 2) for at in range(len(points))]
            scaled = [(100 * value, ends and [100 * end for end in ends]) for value, ends in points]
            axes.errorbar(places, [value for value, _ in scaled], yerr=_arms(scaled), **_look(index, name))
        axes.set(xlabel="draft step; bars: 95 % intervals", ylabel=label, ylim=(0, 103))
        axes.set_xticks(range(1, max(map(len, series.values())) + 1))
    return made[0]


@contextmanager
def _panel(height: float, legend: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """Axes of ``height`` inches to draw on; and a list, which then holds the address of the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plots

    made, file = list[str](), BytesIO()
    with plots.rc_context(_STYLE), warnings.catch_warnings():
        # It is the reader's font that has the letters, or has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure, axes = plots.subplots(figsize=(_WIDTH, height), layout="constrained")
        yield axes, made
        if legend:
            figure.legend(loc="outside lower left", ncols=2 if len(axes.containers) > 4 else 1)
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
        plots.close(figure)
    made.append(f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}")


def _look(index: int, name: str) -> dict[str, Any]:
    colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5, "label": _short(name), "capsize": 2.5, "elinewidth": 1}


def _arms(points: Sequence[Point]) -> list[list[float]]:
    """How far error bars reach below and above; not at all where there is no interval."""
    reach = [(value - ends[0], ends[1] - value) if ends else (0.0, 0.0) for value, ends in points]
    return [[max(0.0, pair[side]) for pair in reach] for side in (0, 1)]


def _short(name: str) -> str:
    """As a label."""
    name = escape(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2 - 1]}…{name[-_LONGEST // 2 :]}"
