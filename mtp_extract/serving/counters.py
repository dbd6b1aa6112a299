"""Reads servers' counters of drafts, from an answer or from ``/metrics``.

Names were read in the sources of llama.cpp 0c1e57098 (``server_slot_stats::to_json``, ``to_metrics``), mlx-vlm 0.7.10
(``GenerationTimings``), SGLang 0.5.23 (``SpecTokensDetails``, ``metrics_collector.py``) and vLLM 0.33.0
(``SpeculativeDecodingMetrics``, ``SpecDecodingProm``, ``loggers.py``). Each uses its own names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import Any

from msgspec.structs import astuple

from mtp_extract.errors import ServerError, escape
from mtp_extract.io.typed import Count, Record

_LARGEST = 1 << 53  # JSON and Prometheus write larger numbers inexactly
_MOST_BEYOND = 64  # drafts that the last round may accept beyond the limit of tokens


@dataclass(frozen=True)
class Kind:
    """A kind of server, and the request fields that only it understands."""

    name: str = "unknown"
    sign: str = "unknown"  # owner of its models, or beginning of its ``Server`` header
    request: Mapping[str, Any] = field(default_factory=dict)  # fields of each request
    stream_options: Mapping[str, Any] = field(default_factory=dict)  # further ``stream_options``
    ids: Mapping[str, Any] = field(default_factory=dict)  # fields that ask for token ids


# Adds the number of tokens so far to each event: those before the first text are thoughts that are not streamed.
_USAGE_SO_FAR = {"continuous_usage_stats": True}

KINDS = (
    # A cached prompt is computed in other batches than a new one, which rounds differently.
    Kind("llama-server", "llamacpp", {"cache_prompt": False}),
    Kind("mlx-vlm", "mlx_vlm"),
    Kind("SGLang", "sglang", {"return_spec_tokens_details": True}, _USAGE_SO_FAR),
    Kind("vLLM", "vllm", {}, _USAGE_SO_FAR, ids={"return_token_ids": True}),
)

# Our name of a counter → the servers' names.
_IN_ANSWERS = {
    "tokens": ("predicted_n",),
    "rounds": ("draft_rounds", "spec_verify_ct", "num_spec_steps"),
    "drafted": ("draft_n", "spec_num_proposed_drafts", "num_draft_tokens"),
    "accepted": ("draft_n_accepted", "spec_num_correct_drafts", "num_accepted_draft_tokens"),
}
_ON_PAGES = {
    "requests": "vllm:request_success_total|sglang:num_requests_total",
    "tokens": "(?:vllm|sglang):generation_tokens_total|llamacpp:tokens_predicted_total",
    "rounds": "(?:vllm|llamacpp):spec_decode_num_drafts_total|sglang:spec_verify_calls_total",
    "drafted": "(?:vllm|llamacpp):spec_decode_num_draft_tokens_total",
    "accepted": "(?:vllm|llamacpp):spec_decode_num_accepted_tokens_total",
    "positions": "(?:vllm|llamacpp):spec_decode_num_accepted_tokens_per_pos_total",
}
_NUMBER = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")  # float() takes more: 1_0, and ١
_LINE = r'(\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\})?[ \t]+(\S+)'  # labels and value


class Counters(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """A server's counters; null if it does not report one."""

    requests: Count | None = None  #: answered
    tokens: Count | None = None  #: generated
    rounds: Count | None = None  #: verifications of drafts by the base
    drafted: Count | None = None  #: drafts it judged
    accepted: Count | None = None  #: of these
    positions: tuple[Count, ...] | None = None  #: accepted drafts by position in a round, from the first

    def __sub__(self, before: Counters) -> Counters:
        def subtract(after: Any, old: Any) -> Any:
            if after is None or old is None:
                return None
            return tuple(map(sub, after, (*old, *[0] * len(after)))) if isinstance(after, tuple) else after - old

        return Counters(*map(subtract, astuple(self), astuple(before)))

    def fill_from(self, others: Counters) -> Counters:
        """Return these counters, with those of ``others`` where one is null."""
        pairs = zip(astuple(self), astuple(others), strict=True)
        return Counters(*(substitute if count is None else count for count, substitute in pairs))

    def are_possible(self, most_tokens: int) -> bool:
        """Return whether answers of at most ``most_tokens`` tokens in total can have these counts.

        Every round writes at least one token, and the drafts of the last round may reach beyond the end.
        """
        answers = self.requests or 1
        drafted = _LARGEST if self.drafted is None else self.drafted
        rounds = most_tokens + answers if self.rounds is None else self.rounds
        accepted = min(most_tokens + _MOST_BEYOND * answers, drafted) if rounds else 0
        bounds = [(self.tokens, most_tokens), (rounds, most_tokens + answers), (self.accepted, accepted)]
        bounds += [(hits, rounds) for hits in self.positions or ()]
        return drafted >= 0 and all(0 <= (value or 0) <= bound for value, bound in bounds)


def read_answer_counters(timings: Any, metrics: Any, sglext: Any) -> Counters | None:
    """Read the counters in these fields of an event; None without counters, ServerError if one is not a count."""
    sent = timings or get_field(metrics, "speculative_decoding") or get_field(sglext, "spec_tokens_details")
    if not isinstance(sent, dict) or not sent.keys() & {name for names in _IN_ANSWERS.values() for name in names}:
        return None
    counts = dict[str, int]()
    for ours, names in _IN_ANSWERS.items():
        for name in names:
            if sent.get(name) is not None:
                counts[ours] = _parse_count(name, _format_json_number(sent[name]))
    if timings and counts.keys() <= {"tokens"}:
        counts |= {"rounds": 0, "drafted": 0, "accepted": 0}  # servers with timings omit them if there were no drafts
    return Counters(**counts)  # type: ignore[arg-type]  # none of these names is ``positions``


def parse_page_counters(text: str) -> Counters:
    """Read the counters on a page in Prometheus' format, summed over their labels.

    A line has a name, optional labels, a value, and optionally a time or an exemplar with a value of its own.

    Raises:
        ServerError: one is not a count.
    """
    sums = Counter[str]()
    by_position = Counter[int]()
    for ours, names in _ON_PAGES.items():
        for labels, value in re.findall(f"^(?:{names}){_LINE}", text, re.MULTILINE):
            count = _parse_count(ours, value)
            sums[ours] += count
            if ours == "positions" and (place := re.search('position="([0-9]{1,3})"', labels)):
                by_position[int(place[1])] += count
    positions = tuple(by_position[place] for place in range(max(by_position, default=-1) + 1))
    counts: dict[str, Any] = {**sums, "positions": positions or None}
    return Counters(**counts)


def _format_json_number(value: Any) -> str:
    """Format a JSON value as on a page; a value that is not a number is formatted so that it is not one either."""
    return repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else f"{value!r} of JSON"


def _parse_count(name: str, value: str) -> int:
    """Parse a count; raise ServerError if ``value`` is not a whole number in ASCII."""
    count = float(value) if _NUMBER.fullmatch(value) else math.nan
    if not 0 <= count < _LARGEST or not count.is_integer():
        raise ServerError(f"expected a count for {name}, found {escape(value, 40)}")
    return int(count)


def sum_counts(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of ``counts`` is None."""
    listed = list(counts)
    return None if None in listed else sum(filter(None, listed))


def get_field(value: Any, key: str) -> Any:
    """Return ``value[key]``; None if ``value`` is not a JSON object or lacks the key."""
    return value.get(key) if isinstance(value, dict) else None
