"""Figures of a benchmark: speed, latency and drafts of what was asked, with intervals over texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import add
from statistics import fmean, median, pstdev
from typing import Any

from msgspec import convert

from mtp_extract.bench.fields import Figures, Latency, Side
from mtp_extract.bench.windows import Asked, Window, total
from mtp_extract.speculate.intervals import Interval, ratio_interval, share_interval


def figures(
    windows: Mapping[str, Sequence[Window]],
    pairs: Sequence[tuple[str, int, str, str]],
    names: set[str],
    goodput: Mapping[str, float] | None = None,
) -> Figures:
    """Of the workloads ``names``.

    Args:
        windows: by side, all that was asked.
        pairs: workload, number of the prompt, the server's text and the baseline's.
        goodput: most milliseconds of ``ttft``, ``tpot`` and ``e2el`` that a good answer takes.
    """
    parts = {side: [window.of(names) for window in done] for side, done in windows.items()}
    chosen = {side: [part for part in found if part.asked] for side, found in parts.items()}
    speeds = {side: _speeds(found) for side, found in chosen.items()}
    compared = [ours == theirs for name, _, ours, theirs in pairs if name in names]
    both = sorted(set.intersection(*(set(speed) for speed in speeds.values()))) if len(speeds) > 1 else []
    fast, slow = speeds["server"], speeds.get("baseline", {})
    would_take = [slow[index][1] / slow[index][0] * fast[index][0] for index in both]
    takes = [fast[index][1] for index in both]
    found = {
        "texts": len({asked.prompt for window in chosen["server"] for asked in window.asked}),
        "server": side_of(chosen["server"], goodput),
        "baseline": side_of(chosen["baseline"], goodput) if "baseline" in chosen else None,
        "speedup": sum(would_take) / sum(takes) if both else None,
        "speedup_ci95": ratio_interval(would_take, takes),
        "identical": sum(compared) if compared else None,
        "compared": len(compared),
    }
    return convert(found, Figures)


def side_of(windows: Sequence[Window], goodput: Mapping[str, float] | None = None) -> Side:
    """What one server did."""
    all_asked = [asked for window in windows for asked in window.asked]
    tokens = total(asked.answer.tokens for asked in all_asked)
    after, seconds = _columns(_speeds(windows))
    rate = sum(after) / sum(seconds) if seconds else None
    told = [told for asked in all_asked if (told := asked.answer.told) and told.tokens and told.ms]
    own = sum(counters.ms or 0.0 for counters in told)
    drafts = _clusters(windows, "drafted", "accepted")
    lengths = _clusters(windows, "rounds", "accepted")
    drafted, accepted = (sum(column) for column in drafts) if drafts[0] else (None, None)
    rounds = sum(lengths[0]) if lengths[0] else None
    emitted = [a + b for a, b in zip(*lengths, strict=True)]
    walls = [window.wall for window in windows]
    wall = None if None in walls else sum(wall for wall in walls if wall is not None)
    found = {
        "requests": len(all_asked),
        "tokens": tokens,
        "seconds": sum(asked.answer.seconds for asked in all_asked),
        "tokens_per_s": rate,
        "tokens_per_s_ci95": ratio_interval(after, seconds),
        "request_throughput": len(all_asked) / wall if wall else None,
        "output_throughput": tokens / wall if wall and tokens is not None else None,
        "request_goodput": sum(_is_good(asked, goodput) for asked in all_asked) / wall if wall and goodput else None,
        **{f"{name}_ms": _latency(all_asked, name) for name in _LATENCIES},
        "server_tokens_per_s": 1e3 * sum((c.tokens or 1) - 1 for c in told) / own if own else None,
        "counted": sum(len(window.asked) for window in windows if window.by_text("drafted")),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted and accepted is not None else None,
        "acceptance_ci95": _share(drafts[1], drafts[0], windows),
        "rounds": rounds,
        "mean_accepted_length": sum(emitted) / rounds if rounds else None,
        "mean_accepted_length_ci95": _length_interval(windows),
        "acceptance_by_position": _by_position(windows),
    }
    return convert(found, Side)


def _by_position(windows: Sequence[Window]) -> list[float] | None:
    """Accepted drafts by place, over rounds; None unless each window tells them, and rounds in which they can be."""
    pages = [window.page for window in windows if window.page is not None and window.page.positions is not None]
    if not pages or len(pages) < len(windows):
        return None
    counted = reduce(add, pages)
    rounds, places = counted.rounds or 0, counted.positions or ()
    return [count / rounds for count in places] if rounds and all(0 <= count <= rounds for count in places) else None


def _ttft(asked: Asked) -> list[float]:
    first = asked.answer.first_s
    return [] if first is None else [1e3 * first]


def _tpot(asked: Asked) -> list[float]:
    answer = asked.answer
    if answer.tokens is None or answer.tokens <= answer.first_tokens or not answer.seconds:
        return []
    return [1e3 * answer.seconds / (answer.tokens - answer.first_tokens)]


def _itl(asked: Asked) -> list[float]:
    return [1e3 * gap for gap in asked.answer.gaps]


def _e2el(asked: Asked) -> list[float]:
    return [1e3 * (asked.ended_s - asked.sent_s)]


_LATENCIES = {"ttft": _ttft, "tpot": _tpot, "itl": _itl, "e2el": _e2el}
"""As ``vllm bench serve`` has them: time to first token, per output token, between texts, of all of the answer."""


def _latency(all_asked: Sequence[Asked], name: str) -> Latency | None:
    by_text: dict[int, list[float]] = {}
    for asked in all_asked:
        by_text.setdefault(asked.prompt, []).extend(_LATENCIES[name](asked))
    texts = [found for found in by_text.values() if found]
    values = sorted(chain.from_iterable(texts))
    if not values:
        return None
    found = {
        "mean": fmean(values),
        "ci95": ratio_interval([sum(found) for found in texts], [len(found) for found in texts]),
        "median": median(values),
        "std": pstdev(values),
        "p99": _percentile(values, 0.99),
    }
    return convert(found, Latency)


def _percentile(values: Sequence[float], share: float) -> float:
    """Of sorted ``values``, between the two nearest ones, as NumPy has it."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _is_good(asked: Asked, goodput: Mapping[str, float]) -> bool:
    """Whether it took no longer than wanted; what cannot be told is not good."""
    return all((found := _LATENCIES[name](asked)) and found[0] <= most for name, most in goodput.items())


def _speeds(windows: Iterable[Window]) -> dict[int, tuple[int, float]]:
    """By prompt: tokens after those of the first text, and seconds; of answers that took measurable time for them."""
    return _summed(
        (asked.prompt, asked.answer.tokens - asked.answer.first_tokens, asked.answer.seconds)
        for window in windows
        for asked in window.asked
        if asked.answer.tokens is not None
        and asked.answer.tokens > asked.answer.first_tokens
        and asked.answer.seconds > 0
    )


def _length_interval(windows: Sequence[Window]) -> Interval | None:
    """Of 1 + accepted / rounds, where no round accepts more than rounds drafted on the mean of any window."""
    rounds, accepted = _clusters(windows, "rounds", "accepted")
    most = max(map(_most_drafts, windows), default=0)
    if not most:
        return None
    found = _share([count / most for count in accepted], rounds, windows)
    return found and found.scaled(most, 1.0)


def _most_drafts(window: Window) -> int:
    """Drafts a round of it, rounded up."""
    drafted, rounds = (
        sum(getattr(counters, name) for _, counters in window.by_text(name)) for name in ("drafted", "rounds")
    )
    return math.ceil(drafted / rounds) if rounds else 0


def _share(hits: Sequence[float], sizes: Sequence[float], windows: Sequence[Window]) -> Interval | None:
    """The interval of a share; asking the same again draws no more."""
    turns = len({asked.turn for window in windows for asked in window.asked})
    return share_interval([hit / turns for hit in hits], [size / turns for size in sizes])


def _clusters(windows: Iterable[Window], first: str, second: str) -> tuple[list[int], list[int]]:
    """Two counters by what is independent."""
    return _columns(
        _summed(
            (index, getattr(counters, first), getattr(counters, second))
            for window in windows
            for index, counters in window.by_text(first)
            if getattr(counters, second) is not None
        )
    )


def _summed(rows: Iterable[tuple[int, Any, Any]]) -> dict[int, tuple[Any, Any]]:
    """By prompt, the two values of all rows added up: a text and its repeats are one."""
    found: dict[int, tuple[Any, Any]] = {}
    for index, a, b in rows:
        x, y = found.get(index, (0, 0))
        found[index] = (x + a, y + b)
    return found


def _columns(found: Mapping[int, tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [a for a, _ in found.values()], [b for _, b in found.values()]
