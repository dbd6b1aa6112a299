"""The pictures of reports, drawn with matplotlib as SVG, narrow enough to be read on a phone.

Colours are after Okabe and Ito, told apart by readers of every colour vision.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.report.numbers import Ends

BLUE, PALE, GREY, INK, GRID = "#0072b2", "#9cc9e6", "#555555", "#000000", "#e3e3e3"
_LOOKS = (
    (BLUE, "o"),
    ("#d55e00", "s"),
    ("#009e73", "^"),
    (GREY, "D"),
    ("#cc79a7", "v"),
    ("#c48800", "P"),
    ("#3596d0", "X"),
    ("#8c6d1f", "*"),
)
_WIDTH = 4.6  # inches
_LONGEST = 28  # characters of a label
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
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
    with _drawing() as plots:
        figure, axes = plots.subplots(figsize=(_WIDTH, 0.8 + 0.5 * len(rows)), layout="constrained")
        for place, (name, (value, ends), text) in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
            colour = GREY if ends is None and place == len(rows) - 1 else BLUE if name == strong else PALE
            axes.barh(place, value, color=colour, height=0.34)
            axes.annotate(_short(name), (0, place), (0, 10), textcoords="offset points", va="bottom", fontsize=10)
            if ends:
                axes.errorbar([value], [place], xerr=_arms([(value, ends)]), color=INK, elinewidth=1, capsize=3)
            end = ends[1] if ends else value
            axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=10)
        axes.set(xlabel=label, yticks=[], ylim=(-0.4, len(rows) - 0.2))
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
        return _address(figure, plots)


def dots(series: Mapping[str, Mapping[str, Point]], label: str, left: float = 0.0) -> str:
    """A row a name, the first on top; in it of each of ``series`` the value with its interval."""
    names = list(dict.fromkeys(name for rows in series.values() for name in rows))
    with _drawing() as plots:
        height = 1.2 + (0.36 + 0.14 * len(series)) * len(names)
        figure, axes = plots.subplots(figsize=(_WIDTH, height), layout="constrained")
        for index, (which, rows) in enumerate(series.items()):
            places = [len(names) - 1 - names.index(name) + 0.6 * (0.5 - (index + 0.5) / len(series)) for name in rows]
            values, arms = [value for value, _ in rows.values()], _arms(list(rows.values()))
            axes.errorbar(values, places, xerr=arms, linestyle="none", **_look(index, which))
        axes.set_yticks(range(len(names) - 1, -1, -1), [_short(name) for name in names])
        axes.set(xlabel=f"{label}; bars: 95 % intervals", ylim=(-0.6, len(names) - 0.4))
        axes.set_xlim(left=left)
        axes.grid(visible=False, axis="y")
        axes.locator_params(axis="x", nbins=6)
        if len(series) > 1:
            figure.legend(loc="outside lower left")
        return _address(figure, plots)


def lines(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Shares by draft step, from the first, in percent; a line for each of ``series``."""
    with _drawing() as plots:
        figure, axes = plots.subplots(figsize=(_WIDTH, 3.2 + 0.2 * len(series)), layout="constrained")
        for index, (name, points) in enumerate(series.items()):
            # Beside each other: bars of those that are nearly alike would hide one another.
            places = [at + 1 + 0.08 * (index - (len(series) - 1) / 2) for at in range(len(points))]
            scaled = [(100 * value, ends and [100 * end for end in ends]) for value, ends in points]
            axes.errorbar(places, [value for value, _ in scaled], yerr=_arms(scaled), **_look(index, name))
        axes.set(xlabel="draft step; bars: 95 % intervals", ylabel=label, ylim=(0, 103))
        axes.set_xticks(range(1, max(map(len, series.values())) + 1))
        figure.legend(loc="outside lower left", ncols=2 if len(series) > 4 else 1)
        return _address(figure, plots)


def draw_progress(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Of a training: loss by step, and teacher-forced tokens per round on the watched texts, as a PNG."""
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    lengths = [(entry["step"], entry["mean_accepted_length"]) for entry in history if "loss" not in entry]
    with _drawing() as plots:
        figure, panels = plots.subplots(1, 2, figsize=(10, 4), layout="constrained")
        titles = ("loss of a step", "teacher-forced tokens per round, watched texts")
        for axes, points, title in zip(panels, (losses, lengths), titles, strict=True):
            axes.plot(*zip(*points, strict=True) if points else ([], []), color=BLUE, linewidth=1.2)
            axes.set_title(title, loc="left")
            axes.set_xlabel("step")
        figure.savefig(path, dpi=120)
        plots.close(figure)


@contextmanager
def _drawing() -> Iterator[Any]:
    """Matplotlib's drawing functions, for files alone, in our style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plots

    with plots.rc_context(_STYLE), warnings.catch_warnings():
        # It is the reader's font that has the letters, or has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield plots


def _address(figure: Any, plots: Any) -> str:
    """A figure as the address of a picture, which a page can hold."""
    file = BytesIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    plots.close(figure)
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _look(index: int, name: str) -> dict[str, Any]:
    colour, marker = _LOOKS[index % len(_LOOKS)]
    return {"color": colour, "marker": marker, "markersize": 5, "label": _short(name), "capsize": 2.5, "elinewidth": 1}


def _arms(points: Sequence[Point]) -> list[list[float]]:
    """How far error bars reach below and above; not at all where there is no interval."""
    reach = [(value - ends[0], ends[1] - value) if ends else (0.0, 0.0) for value, ends in points]
    return [[max(0.0, pair[side]) for pair in reach] for side in (0, 1)]


def _short(name: str) -> str:
    """As a label."""
    name = escape(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2 - 1]}…{name[-_LONGEST // 2 :]}"
