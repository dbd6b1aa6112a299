"""Figures of a benchmark: speed, latency and drafts of what was asked, with intervals over texts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mtp_extract.evaluate.intervals import Interval, ratio_interval, share_interval
from mtp_extract.io.typed import Figure
from mtp_extract.serving.result import Figures, Latency, Request, Side, Window


def figures(windows: Mapping[str, Sequence[Window]], names: Collection[str], compared: bool) -> Figures:
    """Of the workloads ``names``.

    Args:
        windows: by side, all that was asked.
        compared: whether texts are those of the baseline.
    """
    speeds = {side: _speeds(asked_of(done, names)) for side, done in windows.items()}
    fast, slow = speeds["server"], speeds.get("baseline", {})
    both = sorted(fast.keys() & slow.keys())
    would_take = [slow[prompt][1] / slow[prompt][0] * fast[prompt][0] for prompt in both]
    takes = [fast[prompt][1] for prompt in both]
    asked = asked_of(windows["server"], names)
    texts = {(one.turn, one.prompt): one.answer.text for one in asked_of(windows.get("baseline", ()))}
    same = [one.answer.text == texts[one.turn, one.prompt] for one in asked] if compared else []
    return Figures(
        texts=len({request.prompt for request in asked}),
        sides={side: side_of(done, names) for side, done in windows.items()},
        speedup=_figure(sum(would_take), sum(takes), len(both), ratio_interval(would_take, takes)),
        identical=sum(same) if compared else None,
        compared=len(same),
    )


def side_of(windows: Sequence[Window], names: Collection[str]) -> Side:
    """What one server did for the workloads ``names``."""
    asked = asked_of(windows, names)
    after, seconds = _columns(_speeds(asked))
    listed = [request.answer.tokens for request in asked]
    tokens = sum(count for count in listed if count is not None) if None not in listed else None
    wall = sum(window.wall_s for window in windows) if len(asked) == len(asked_of(windows)) else None
    counted = [window for window in windows if counts(window, names, "drafted")]
    drafts = _clusters(windows, names, "drafted", "accepted")
    lengths = _clusters(windows, names, "rounds", "accepted")
    drafted, accepted = (sum(column) for column in drafts)
    rounds, emitted = sum(lengths[0]), sum(map(sum, lengths))
    turns = len({request.turn for request in asked})
    return Side(
        requests=len(asked),
        tokens=tokens,
        tokens_per_s=_figure(sum(after), sum(seconds), sum(after), ratio_interval(after, seconds)),
        output_throughput=tokens / wall if wall and tokens is not None else None,
        ttft_ms=_latency(request.answer.first_s for request in asked),
        tpot_ms=_latency(seconds / after for after, seconds in map(_timed, asked) if after),
        counted=sum(len(asked_of([window], names)) for window in counted),
        drafted=drafted if drafts[0] else None,
        accepted=accepted if drafts[0] else None,
        rounds=rounds if lengths[0] else None,
        acceptance=_figure(accepted, drafted, drafted, _share(drafts[1], drafts[0], turns)),
        tokens_per_round=_figure(emitted, rounds, rounds, _length_interval(windows, names, turns)),
        acceptance_by_position=_by_position(windows) if wall is not None else None,
    )


def asked_of(windows: Iterable[Window], names: Collection[str] | None = None) -> list[Request]:
    """All that was asked of the workloads ``names``, or of all."""
    return [one for window in windows for one in window.requests if names is None or one.workload in names]


def counts(window: Window, names: Collection[str] | None, *counters: str) -> list[tuple[Any, ...]]:
    """Prompt and ``counters`` of what is independent: of each text; or of the window, where its page alone tells them.

    A page tells nothing of one workload among several.
    """
    asked = asked_of([window], names)
    told = [(one.prompt, *(getattr(one.answer.told, name, None) for name in counters)) for one in asked]
    if all(None not in row for row in told):
        return told
    page = (asked[0].prompt, *(getattr(window.page, name, None) for name in counters))
    return [page] if len(asked) == len(window.requests) and None not in page else []


def _figure(sums: float, over: float, count: int, interval: Interval | None) -> Figure:
    return Figure(sums / over if over else None, count, list(interval) if interval else None)


def _timed(request: Request) -> tuple[int, float]:
    """Tokens after those of the first text, and seconds; none where they took no measurable time."""
    answer = request.answer
    after = (answer.tokens or 0) - answer.first_tokens
    return (after, answer.seconds) if after > 0 and answer.seconds > 0 else (0, 0.0)


def _speeds(asked: Iterable[Request]) -> dict[int, list[Any]]:
    """By prompt: tokens after those of the first text, and seconds."""
    return _summed((request.prompt, *_timed(request)) for request in asked if _timed(request)[0])


def _latency(seconds: Iterable[float | None]) -> Latency | None:
    values = [1e3 * value for value in seconds if value is not None]
    return Latency(float(np.mean(values)), float(np.percentile(values, 99))) if values else None


def _by_position(windows: Sequence[Window]) -> list[float] | None:
    """Accepted drafts by position, over rounds; None unless each window tells them, and rounds in which they can be."""
    pages = [window.page for window in windows if window.page is not None and window.page.positions]
    if len(pages) < len(windows):
        return None
    rounds = sum(page.rounds or 0 for page in pages)
    places = defaultdict[int, int](int)
    for page in pages:
        for place, count in enumerate(page.positions or ()):
            places[place] += count
    found = [places[place] for place in range(len(places))]
    return [count / rounds for count in found] if rounds and all(0 <= count <= rounds for count in found) else None


def _length_interval(windows: Sequence[Window], names: Collection[str], turns: int) -> Interval | None:
    """Of 1 + accepted / rounds, where no round accepts more than rounds drafted on the mean of any window."""
    rounds, accepted = _clusters(windows, names, "rounds", "accepted")
    most = 0
    for window in windows:
        made, drafted = (sum(row[1] for row in counts(window, names, name)) for name in ("rounds", "drafted"))
        most = max(most, math.ceil(drafted / made) if made else 0)
    found = _share([count / most for count in accepted], rounds, turns) if most else None
    return found and found.scaled(most, 1.0)


def _share(hits: Sequence[float], sizes: Sequence[float], turns: int) -> Interval | None:
    """The interval of a share; asking the same again draws no more."""
    return share_interval([hit / turns for hit in hits], [size / turns for size in sizes])


def _clusters(windows: Iterable[Window], names: Collection[str], *counters: str) -> list[list[int]]:
    """The ``counters``, each by what is independent."""
    return _columns(_summed(row for window in windows for row in counts(window, names, *counters)))


def _summed(rows: Iterable[tuple[Any, ...]]) -> dict[int, list[Any]]:
    """By prompt, the two values of all rows added up: a text and its repeats are one."""
    found = defaultdict[int, list[Any]](lambda: [0, 0])
    for prompt, a, b in rows:
        found[prompt][0] += a
        found[prompt][1] += b
    return dict(found)


def _columns(found: Mapping[int, list[Any]]) -> list[list[Any]]:
    return [[pair[column] for pair in found.values()] for column in (0, 1)]
