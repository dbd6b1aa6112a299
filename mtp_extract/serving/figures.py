"""Figures of a benchmark: speed, latency and drafts of what was asked, with intervals over texts.

Of one answer, *tokens per second* is the tokens after those of the first text, by the server's own count, over the time
from the first text to the last event; of several, both are added up first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

import numpy as np

from mtp_extract.evaluate.intervals import Interval, ratio_interval, share_interval
from mtp_extract.io.typed import Figure
from mtp_extract.serving.client import Answer
from mtp_extract.serving.counters import Counters
from mtp_extract.serving.result import Figures, Latency, Request, Side, Window


def figures(windows: Mapping[str, Sequence[Window]], names: Collection[str], compared: bool) -> Figures:
    """Of the workloads ``names``.

    Args:
        windows: by side, all that was asked.
        compared: whether texts are to be those of the baseline.
    """
    asked = {side: asked_of(done, names) for side, done in windows.items()}
    fast, slow = (_timed(asked.get(side, ())) for side in ("server", "baseline"))
    both = sorted(fast.keys() & slow.keys())
    would_take = [slow[prompt][1] / slow[prompt][0] * fast[prompt][0] for prompt in both]
    takes = [fast[prompt][1] for prompt in both]
    theirs = texts_of(windows.get("baseline", ()))
    return Figures(
        texts=len(asked["server"]),
        sides={side: side_of(done, names) for side, done in windows.items()},
        speedup=_ratio(would_take, takes, len(both), ratio_interval(would_take, takes)),
        identical=sum(one.answer.text == theirs[one.prompt] for one in asked["server"]) if compared else None,
    )


def side_of(windows: Sequence[Window], names: Collection[str]) -> Side:
    """What one server did for the workloads ``names``."""
    asked = asked_of(windows, names)
    answers, timed = [request.answer for request in asked], list(_timed(asked).values())
    after, seconds = [tokens for tokens, _ in timed], [time for _, time in timed]
    listed = [answer.tokens for answer in answers]
    tokens = None if None in listed else sum(filter(None, listed))
    wall = sum(window.wall_s for window in windows) if len(asked) == len(asked_of(windows)) else None
    drafts, pages = counted(windows, names, "drafted"), [window.page for window in windows]
    rounds = counted(windows, names, "drafted", "rounds")
    drafted, accepted = ([getattr(one, name) for _, one in drafts] for name in ("drafted", "accepted"))
    made, stood = ([getattr(one, name) for _, one in rounds] for name in ("rounds", "accepted"))
    most = max((-(-(one.drafted or 0) // one.rounds) for _, one in rounds if one.rounds), default=0)
    length = share_interval([count / most for count in stood], made) if most else None
    return Side(
        tokens=tokens,
        tokens_per_s=_ratio(after, seconds, sum(after), ratio_interval(after, seconds)),
        output_throughput=tokens / wall if wall and tokens is not None else None,
        ttft_ms=_latency(answer.first_s for answer in answers if answer.first_s is not None),
        tpot_ms=_latency(time / tokens for tokens, time in timed),
        counted=sum(requests for requests, _ in drafts),
        drafted=sum(drafted) if drafts else None,
        accepted=sum(accepted) if drafts else None,
        rounds=sum(made) if rounds else None,
        acceptance=_ratio(accepted, drafted, sum(drafted), share_interval(accepted, drafted)),
        # No round accepts more than rounds drafted on the mean of any text.
        tokens_per_round=_ratio(
            [a + b for a, b in zip(made, stood, strict=True)], made, sum(made), length and length.scaled(most, 1.0)
        ),
        acceptance_by_position=_by_position(pages) if wall is not None else None,
    )


def asked_of(windows: Iterable[Window], names: Collection[str] | None = None) -> list[Request]:
    """All that was asked of the workloads ``names``, or of all."""
    return [one for window in windows for one in window.requests if names is None or one.workload in names]


def texts_of(windows: Iterable[Window]) -> dict[int, str]:
    """What was answered, by the number of the prompt."""
    return {one.prompt: one.answer.text for one in asked_of(windows)}


def counted(windows: Iterable[Window], names: Collection[str] | None, *needed: str) -> list[tuple[int, Counters]]:
    """Answers and their counters, by what is independent: each text, or a window where only the page has ``needed``.

    A page says nothing of one workload among several.
    """
    found = list[tuple[int, Counters]]()
    for window in windows:
        asked = asked_of([window], names)
        own = [one.answer.counted for one in asked if one.answer.counted is not None]
        whole = [window.page] if window.page is not None and len(asked) == len(window.requests) else []
        for counters, answers in ((own, 1), (whole, len(asked))):
            if len(counters) * answers == len(asked) and all(_has(one, *needed, "accepted") for one in counters):
                found += [(answers, one) for one in counters]
                break
    return found


def _has(counters: Counters, *names: str) -> bool:
    return all(getattr(counters, name) is not None for name in names)


def _ratio(sums: Sequence[float], sizes: Sequence[float], count: int, interval: Interval | None) -> Figure:
    return Figure(sum(sums) / sum(sizes) if sum(sizes) else None, count, list(interval) if interval else None)


def _timed(asked: Iterable[Request]) -> dict[int, tuple[int, float]]:
    """By prompt: tokens after those of the first text, and seconds; none of an answer that took no measurable time."""

    def after(answer: Answer) -> int:
        return (answer.tokens or 0) - answer.first_tokens

    return {
        one.prompt: (after(one.answer), one.answer.seconds)
        for one in asked
        if after(one.answer) > 0 and one.answer.seconds > 0
    }


def _latency(seconds: Iterable[float]) -> Latency | None:
    values = [1e3 * value for value in seconds]
    return Latency(float(np.mean(values)), float(np.percentile(values, 99))) if values else None


def _by_position(pages: Sequence[Counters | None]) -> list[Figure] | None:
    """Accepted drafts by position, over rounds; None unless each page has them, and rounds in which they can be."""
    found = [page for page in pages if page is not None and page.positions and page.rounds is not None]
    made = [page.rounds or 0 for page in found]
    places = [list(column) for column in zip_longest(*(page.positions or () for page in found), fillvalue=0)]
    if len(found) < len(pages) or any(not 0 <= a <= b for hits in places for a, b in zip(hits, made, strict=True)):
        return None
    return [_ratio(hits, made, sum(made), share_interval(hits, made)) for hits in places]
