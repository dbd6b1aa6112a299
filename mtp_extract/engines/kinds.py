"""What each kind of server says, and where: how it is recognised, what to ask it for, and the names of its counters.

Names were read in the sources of llama.cpp 0c1e57098 (``server_slot_stats::to_json``, ``to_metrics``), mlx-vlm 0.7.10
(``GenerationTimings``), SGLang 0.5.23 (``SpecTokensDetails``, ``metrics_collector.py``) and vLLM 0.33.0
(``SpeculativeDecodingMetrics``, ``SpecDecodingProm``, ``loggers.py``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import add, sub
from typing import Any

from mtp_extract.errors import ServerError, escape

_LARGEST = 1 << 53  # JSON and Prometheus write larger numbers inexactly
_SHORTEST = 1e-3  # milliseconds, of what was computed
_MOST_A_ROUND = 1 << 10  # drafts, of the widest trees
_MOST_CUT = 64  # drafts that the last round accepts beyond the last token that was asked for
_USAGE = {"include_usage": True}


@dataclass(frozen=True)
class Counters:
    """What a server counted; None for what it does not tell."""

    requests: int | None = None  # answered
    tokens: int | None = None  # generated
    rounds: int | None = None  # verifications of drafts by the base
    drafted: int | None = None  # drafts it judged
    accepted: int | None = None  # of these
    ms: float | None = None  # its own time of generation, in milliseconds
    positions: tuple[int, ...] | None = None  # of the accepted drafts, those in each place of a round, from the first

    def __sub__(self, other: Counters) -> Counters:
        return self._with(other, sub)

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, add)

    def is_of(self, asked: Counters) -> bool:
        """Whether counters moved by what was asked, in requests, or in tokens where these are not counted; and up."""
        moved, wanted = self._of_requests(asked)
        same = moved is not None and moved == wanted
        return same and 0 <= (self.accepted or 0) <= (self.drafted or 0) and (self.rounds or 0) >= 0

    def exceeds(self, asked: Counters) -> bool:
        """Whether they moved by more than that."""
        moved, wanted = self._of_requests(asked)
        return (moved or 0) > (wanted or 0)

    def _of_requests(self, asked: Counters) -> tuple[int | None, int | None]:
        return (self.tokens, asked.tokens) if self.requests is None else (self.requests, asked.requests)

    def _with(self, other: Counters, what: Any) -> Counters:
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        found: dict[str, Any] = {
            name: None if None in pair else what(*pair) for name, pair in pairs.items() if name != "positions"
        }
        positions = None
        if self.positions is not None and other.positions is not None:
            places = zip_longest(self.positions, other.positions, fillvalue=0)
            positions = tuple(what(a, b) for a, b in places)
        return Counters(**found, positions=positions)


@dataclass(frozen=True)
class Kind:
    """One kind of server, by the name that users call it."""

    name: str
    owner: str = ""  # ``owned_by`` of its models
    header: str = ""  # how its ``Server`` header begins
    version: tuple[str, ...] = ()  # where it says its version: path of the page, and the keys that lead to it
    request: Mapping[str, Any] = field(default_factory=lambda: {"stream_options": _USAGE})  # beyond OpenAI's fields
    answer: tuple[str, ...] = ()  # keys that lead to the counters of one answer, in an event of its stream
    counts: Mapping[str, str] = field(default_factory=dict)  # our names of these counters → the server's
    none_is_zero: bool = False  # the counters of an answer lack those of drafts where nothing was drafted
    page: Mapping[str, str] = field(default_factory=dict)  # the same of its counters since its start, on ``/metrics``
    positions: str = ""  # what accepted drafts by their place in a round are called there
    ids: Mapping[str, Any] = field(default_factory=dict)  # what to ask for, so that an answer has its token ids
    exact_below: int = _LARGEST  # what the page writes of larger counts is rounded, and not taken

    def of_answer(self, event: Mapping[str, Any]) -> Counters | None:
        """The counters in one event of a stream; None where it has none.

        Raises:
            ServerError: one is not a count.
        """
        sent = at(event, *self.answer) if self.answer else None
        if not isinstance(sent, Mapping) or not any(key in sent for key in self.counts.values()):
            return None
        found: dict[str, Any] = {name: _count(key, sent.get(key)) for name, key in self.counts.items() if name != "ms"}
        drafts = [name for name in ("rounds", "drafted", "accepted") if name in found]
        if self.none_is_zero and all(found[name] is None for name in drafts):
            found |= dict.fromkeys(drafts, 0)
        time = sent.get(self.counts.get("ms", ""))
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not _SHORTEST <= time < _LARGEST:
            time = None
        return Counters(ms=time, **found)

    def of_page(self, text: str) -> Counters:
        """The counters on a page in Prometheus' format, added up over their labels.

        Raises:
            ServerError: one is not a count.
        """
        names = {metric: name for name, metric in self.page.items()}
        found: dict[str, int] = {}
        places: dict[int, int] = {}
        for line in text.splitlines():
            named = _METRIC.match(line)
            if named is None or named[0] not in {*names, self.positions}:
                continue
            value: list[str] = line[named.end() :].rpartition("}")[2].split()
            try:
                number = float(value[0])
                whole: object = int(number) if number.is_integer() else value[0]
            except (ValueError, OverflowError, IndexError):
                whole = value[0] if value else "nothing"
            count = _count(named[0], whole) or 0
            if named[0] == self.positions:
                if (place := _PLACE.search(line)) is not None:
                    places[int(place[1])] = places.get(int(place[1]), 0) + count
                continue
            found[names[named[0]]] = found.get(names[named[0]], 0) + count
        known: dict[str, Any] = {name: count for name, count in found.items() if count < self.exact_below}
        # Those of all places are all that were accepted, or tell of something else.
        by_place = tuple(places.get(place, 0) for place in range(max(places, default=-1) + 1))
        return Counters(**known, positions=by_place if by_place and sum(by_place) == known.get("accepted") else None)


_PLACE = re.compile(r'position="([0-9]{1,3})"')
_METRIC = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ServerError(f"expected a count for {name}, found {escape(value, 40)}")
    return value


def impossible(counted: Counters, asked: int, answers: int = 1, seconds: float | None = None) -> tuple[str, ...]:
    """What in ``counted`` cannot be of ``answers`` answers of at most ``asked`` tokens each; empty where all can.

    Every round writes at least one token; the last one's drafts may reach beyond the end.

    Args:
        seconds: that an answer may take.
    """
    most = asked * answers
    bounds = (
        ("tokens", counted.tokens, most),
        ("rounds", counted.rounds, most + answers),
        ("drafts", counted.drafted, most * _MOST_A_ROUND),
        ("accepted drafts", counted.accepted, most + _MOST_CUT * answers),
        ("accepted drafts", counted.accepted, counted.drafted),
        ("accepted drafts", counted.accepted, 0 if counted.rounds == 0 else None),
        ("ms", counted.ms, None if seconds is None else 1e3 * seconds * answers),
    )
    found = (
        f"{escape(value, 24)} {name} where at most {bound} can be"
        for name, value, bound in bounds
        if value is not None and bound is not None and not 0 <= value <= bound
    )
    return tuple(dict.fromkeys(found))


def at(value: Any, *keys: str) -> Any:
    """What ``keys`` lead to in nested JSON objects; None where they lead nowhere."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


# Usage in every event says how many tokens came with the first.
_ALL_USAGE = {"stream_options": {**_USAGE, "continuous_usage_stats": True}}

_LLAMA_TIMES = {"tokens": "predicted_n", "drafted": "draft_n", "accepted": "draft_n_accepted", "ms": "predicted_ms"}

OTHER = Kind("unknown")
"""Any server that speaks OpenAI's protocol: it tells text and tokens, and no counters."""

KINDS = (
    Kind(
        "llama-server",
        owner="llamacpp",
        header="llama.cpp",
        version=("/props", "build_info"),
        # A prompt that is found in the cache is computed otherwise than one that is not, and rounded otherwise.
        request={"stream_options": _USAGE, "cache_prompt": False},
        answer=("timings",),
        counts=_LLAMA_TIMES,
        none_is_zero=True,
        page={
            "tokens": "llamacpp:tokens_predicted_total",
            "rounds": "llamacpp:spec_decode_num_drafts_total",
            "drafted": "llamacpp:spec_decode_num_draft_tokens_total",
            "accepted": "llamacpp:spec_decode_num_accepted_tokens_total",
        },
        positions="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        exact_below=10**6,  # it writes six digits
    ),
    Kind(
        "mlx-vlm",
        header="mlx_vlm",
        answer=("timings",),
        counts={**_LLAMA_TIMES, "rounds": "draft_rounds"},
        none_is_zero=True,
    ),
    Kind(
        "SGLang",
        owner="sglang",
        version=("/server_info", "version"),
        request={**_ALL_USAGE, "return_spec_tokens_details": True},
        answer=("sglext", "spec_tokens_details"),
        counts={
            "rounds": "spec_verify_ct",
            "drafted": "spec_num_proposed_drafts",
            "accepted": "spec_num_correct_drafts",
        },
        page={
            "requests": "sglang:num_requests_total",
            "tokens": "sglang:generation_tokens_total",
            "rounds": "sglang:spec_verify_calls_total",
        },
    ),
    Kind(
        "vLLM",
        owner="vllm",
        version=("/version", "version"),
        request=_ALL_USAGE,
        ids={"return_token_ids": True},
        answer=("metrics", "speculative_decoding"),
        counts={
            "rounds": "num_spec_steps",
            "drafted": "num_draft_tokens",
            "accepted": "num_accepted_draft_tokens",
        },
        page={
            "requests": "vllm:request_success_total",
            "tokens": "vllm:generation_tokens_total",
            "rounds": "vllm:spec_decode_num_drafts_total",
            "drafted": "vllm:spec_decode_num_draft_tokens_total",
            "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        },
        positions="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
)
"""Every kind whose counters are known."""


def recognise(header: str, owners: Iterable[Any]) -> Kind:
    """The kind of a server, by its ``Server`` header and by ``owned_by`` of its models."""
    known = {owner for owner in owners if isinstance(owner, str) and owner}
    for kind in KINDS:
        if kind.owner in known or (kind.header and header.startswith(kind.header)):
            return kind
    return OTHER
