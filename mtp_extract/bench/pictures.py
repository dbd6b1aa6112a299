"""The pictures of a benchmark, drawn from what ``bench.json`` holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mtp_extract.report.colours import light
from mtp_extract.report.drawing import Draw, Line, by_row, by_step, dots, legend, panel, short

PICTURES: Mapping[str, str] = MappingProxyType(
    {
        "speed_by_workload": "Tokens per second, by workload",
        "acceptance_by_workload": "Accepted drafts, by workload",
        "acceptance_by_position": "Accepted drafts, by their place in a round",
        "over_time": "Output and requests in flight, over time",
    }
)
"""Every picture there may be, and what it shows."""

_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "server": {"color": light("blue"), "marker": "o"},
    "baseline": {"color": light("orange"), "marker": "s"},
}
_BINS = 60  # of the time


def drawings() -> Mapping[str, Draw]:
    """How each of :data:`PICTURES` is drawn."""
    drawn = (_speed_by_workload, _acceptance_by_workload, _acceptance_by_position, _over_time)
    return dict(zip(PICTURES, drawn, strict=True))


def _rows(report: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return {**report["workloads"], "all": report["total"]}


def _sides(report: Mapping[str, Any]) -> list[str]:
    return [side for side in _LOOKS if report["servers"][side]]


def _by_workload(report: Mapping[str, Any], plots: Any, figure: str, scale: float, label: str) -> Any:
    """A figure with its interval, a row a workload, of each server; None where nothing is known."""
    sides = [side for side in _sides(report) if report["total"][side][figure] is not None]
    rows = {name: row for name, row in _rows(report).items() if any(row[side][figure] is not None for side in sides)}
    if not rows:
        return None
    drawn, axes = panel(plots, 1.2 + 0.42 * len(rows))
    for index, side in enumerate(sides):
        shift = 0.24 * ((len(sides) - 1) / 2 - index)
        for place, row in zip(range(len(rows) - 1, -1, -1), rows.values(), strict=True):
            value, interval = row[side][figure], row[side][f"{figure}_ci95"]
            if value is not None:
                dots(axes, scale * value, interval and [scale * end for end in interval], place + shift, **_LOOKS[side])
        axes.plot([], [], linestyle="none", label=side, **_LOOKS[side])
    by_row(axes, [short(name) for name in rows])
    axes.set_xlabel(f"{label}; bars: 95 % intervals")
    axes.set_xlim(left=0)
    if len(sides) > 1:
        legend(drawn, 2)
    return drawn


def _speed_by_workload(report: Mapping[str, Any], plots: Any) -> Any:
    return _by_workload(report, plots, "tokens_per_s", 1.0, "tokens per second")


def _acceptance_by_workload(report: Mapping[str, Any], plots: Any) -> Any:
    return _by_workload(report, plots, "acceptance", 100.0, "accepted drafts (%)")


def _acceptance_by_position(report: Mapping[str, Any], plots: Any) -> Any:
    found = {side: report["total"][side]["acceptance_by_position"] for side in _sides(report)}
    known = [Line(side, shares, [None] * len(shares), _LOOKS[side]) for side, shares in found.items() if shares]
    return by_step(plots, known, "place of the draft in its round", "rounds that accept it (%)")


def _over_time(report: Mapping[str, Any], plots: Any) -> Any:
    """Of each server tokens a second, and requests in flight, while it was asked."""
    ends = [window["begun_s"] + window["wall"] for side in _sides(report) for window in report["windows"][side]]
    step = max(ends) / _BINS
    if not step:
        return None
    drawn, (above, below) = plots.subplots(2, 1, figsize=(4.6, 4.4), layout="constrained", sharex=True)
    places = [step * (at + 0.5) for at in range(_BINS)]
    for side in _sides(report):
        windows = report["windows"][side]
        look = {"color": _LOOKS[side]["color"], "linewidth": 1.3}
        flying = _spread(_flying(windows), step)
        for axes, counts, label in ((above, _spread(_writing(windows), step), side), (below, flying, None)):
            # Where the other was asked there is no line.
            axes.plot(
                places,
                [count / step if busy else math.nan for count, busy in zip(counts, flying, strict=True)],
                label=label,
                **look,
            )
    above.set_ylabel("tokens a second")
    below.set_ylabel("requests in flight")
    below.set_xlabel("seconds")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
    if len(_sides(report)) > 1:
        legend(drawn, 2)
    return drawn


_Span = tuple[float, float, float]
"""From, until, in seconds; how much there was in between."""


def _asked(windows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    return ((window["begun_s"], asked) for window in windows for asked in window["asked"])


def _writing(windows: Sequence[Mapping[str, Any]]) -> Iterator[_Span]:
    """Tokens of each answer, from its first text to its end."""
    for begun, asked in _asked(windows):
        answer = asked["answer"]
        if answer["tokens"] and answer["first_s"] is not None:
            first = begun + asked["sent_s"] + answer["first_s"]
            yield first, first + answer["seconds"], answer["tokens"]


def _flying(windows: Sequence[Mapping[str, Any]]) -> Iterator[_Span]:
    """Seconds of each request."""
    for begun, asked in _asked(windows):
        yield begun + asked["sent_s"], begun + asked["ended_s"], asked["ended_s"] - asked["sent_s"]


def _spread(spans: Iterator[_Span], step: float) -> list[float]:
    """How much of it falls into each of the bins."""
    found = [0.0] * _BINS
    for begin, end, amount in spans:
        first, last = (min(_BINS - 1, int(at / step)) for at in (begin, end))
        if first == last:
            found[first] += amount
            continue
        for at in range(first, last + 1):
            inside = min(end, step * (at + 1)) - max(begin, step * at)
            found[at] += amount * inside / (end - begin)
    return found
