"""What servers count of their drafts, and where they say it: in an answer, or on ``/metrics``.

Names were read in the sources of llama.cpp 0c1e57098 (``server_slot_stats::to_json``, ``to_metrics``), mlx-vlm 0.7.10
(``GenerationTimings``), SGLang 0.5.23 (``SpecTokensDetails``, ``metrics_collector.py``) and vLLM 0.33.0
(``SpeculativeDecodingMetrics``, ``SpecDecodingProm``, ``loggers.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import Any

from msgspec.structs import astuple

from mtp_extract.errors import ServerError, escape
from mtp_extract.io.typed import Count, Record

_LARGEST = 1 << 53  # JSON and Prometheus write larger numbers inexactly
_MOST_BEYOND = 64  # drafts that the last round accepts beyond the last token that was asked for
_LABELS = r'(\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\})?'
_POSITION = re.compile(r'position="([0-9]{1,3})"')


class Counters(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """What a server counted; null for what it does not report."""

    requests: Count | None = None  #: answered
    tokens: Count | None = None  #: generated
    rounds: Count | None = None  #: verifications of drafts by the base
    drafted: Count | None = None  #: drafts it judged
    accepted: Count | None = None  #: of these
    positions: tuple[Count, ...] | None = None  #: accepted drafts by position in a round, from the first

    def __sub__(self, before: Counters) -> Counters:
        def less(after: Any, old: Any) -> Any:
            if after is None or old is None:
                return None
            return tuple(map(sub, after, (*old, *[0] * len(after)))) if isinstance(after, tuple) else after - old

        return Counters(*map(less, astuple(self), astuple(before)))

    def filled(self, page: Counters) -> Counters:
        """These, and from ``page`` what these do not say."""
        return Counters(*(b if a is None else a for a, b in zip(astuple(self), astuple(page), strict=True)))

    def possible(self, most_tokens: int) -> bool:
        """Whether answers of at most ``most_tokens`` tokens together can have come to it.

        Every round writes at least one token; the last one's drafts may reach beyond the end.
        """
        answers, drafted = self.requests or 1, _LARGEST if self.drafted is None else self.drafted
        accepted = 0 if self.rounds == 0 else min(most_tokens + _MOST_BEYOND * answers, drafted)
        bounds = (self.tokens, most_tokens), (self.rounds, most_tokens + answers), (self.accepted, accepted)
        return drafted >= 0 and all(0 <= (value or 0) <= bound for value, bound in bounds)


@dataclass(frozen=True)
class Kind:
    """A row of :data:`KINDS`: how a server is recognised, what to ask it for, and the names of its counters."""

    name: str = "unknown"
    owner: str = ""  # ``owned_by`` of its models
    header: str = ""  # how its ``Server`` header begins
    version: tuple[str, str] | None = None  # page and key; without, the header says it
    request: Mapping[str, Any] = field(default_factory=lambda: {"stream_options": {"include_usage": True}})
    ids: Mapping[str, Any] = field(default_factory=dict)  # fields of one whose answer is to have its token ids
    answer: tuple[str, ...] = ()  # keys that lead to the counters in an event of an answer
    counts: Mapping[str, str] = field(default_factory=dict)  # our names of these counters → the server's
    page: Mapping[str, str] = field(default_factory=dict)  # the same on ``/metrics``
    exact_below: int = _LARGEST  # larger counts are rounded on its page, and not taken

    def of_answer(self, event: Mapping[str, Any]) -> Counters | None:
        """The counters in one event of an answer; None where it has none.

        Raises:
            ServerError: one is not a count.
        """
        sent = at(event, *self.answer)
        if not isinstance(sent, dict) or not sent.keys() & set(self.counts.values()):
            return None
        found = {ours: _count(name, sent[name]) for ours, name in self.counts.items() if sent.get(name) is not None}
        if self.answer == ("timings",) and not found.keys() & {"rounds", "drafted", "accepted"}:
            found |= {ours: 0 for ours in self.counts if ours != "tokens"}  # left out where there were no drafts
        return Counters(**found)  # type: ignore[arg-type]  # none of these names is ``positions``

    def of_page(self, text: str) -> Counters:
        """The counters on a page in Prometheus' format, added up over their labels.

        A line is a name, perhaps labels, a value, and perhaps a time or an exemplar, which has a value of its own.

        Raises:
            ServerError: one is not a count.
        """
        by_position = self.page.get("accepted", "").replace("_total", "_per_pos_total")
        names = "|".join(map(re.escape, filter(None, (*self.page.values(), by_position))))
        sums, places = defaultdict[str, int](int), defaultdict[int, int](int)
        for name, labels, value in re.findall(rf"^({names}){_LABELS}[ \t]+(\S+)", text, re.MULTILINE):
            try:
                whole: Any = int(float(value)) if float(value).is_integer() else value
            except ValueError:
                whole = value
            sums[name] += (count := _count(name, whole))
            if name == by_position and (place := _POSITION.search(labels)):
                places[int(place[1])] += count
        found = {ours: sums[name] for ours, name in self.page.items() if name in sums and sums[name] < self.exact_below}
        by_place = tuple(places[number] for number in range(max(places, default=-1) + 1))
        # If all positions together are not all accepted drafts, they count something else.
        return Counters(**found, positions=by_place if by_place and sum(by_place) == found.get("accepted") else None)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ServerError(f"expected a count for {name}, found {escape(value, 40)}")
    return value


def total(counts: Iterable[int | None]) -> int | None:
    """Their sum; None where one of them is not known."""
    listed = list(counts)
    return None if None in listed else sum(filter(None, listed))


def at(value: Any, *keys: str) -> Any:
    """What ``keys`` lead to in nested JSON objects; None where they lead nowhere."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


# Usage in every event says how many tokens came with the first text.
_USAGE_ALWAYS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_TIMINGS = {"tokens": "predicted_n", "drafted": "draft_n", "accepted": "draft_n_accepted"}
_SPEC_DECODE = {"rounds": "drafts_total", "drafted": "draft_tokens_total", "accepted": "accepted_tokens_total"}

KINDS = (
    Kind(
        "llama-server",
        owner="llamacpp",
        header="llama.cpp",
        version=("/props", "build_info"),
        # A prompt found in the cache is computed in other batches than one that is not, and rounds differently.
        request={**Kind().request, "cache_prompt": False},
        answer=("timings",),
        counts=_TIMINGS,
        page={"tokens": "llamacpp:tokens_predicted_total"}
        | {ours: f"llamacpp:spec_decode_num_{theirs}" for ours, theirs in _SPEC_DECODE.items()},
        exact_below=10**6,  # it writes six digits
    ),
    Kind("mlx-vlm", header="mlx_vlm", answer=("timings",), counts={**_TIMINGS, "rounds": "draft_rounds"}),
    Kind(
        "SGLang",
        owner="sglang",
        version=("/server_info", "version"),
        request={**_USAGE_ALWAYS, "return_spec_tokens_details": True},
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
        request=_USAGE_ALWAYS,
        ids={"return_token_ids": True},
        answer=("metrics", "speculative_decoding"),
        counts={"rounds": "num_spec_steps", "drafted": "num_draft_tokens", "accepted": "num_accepted_draft_tokens"},
        page={"requests": "vllm:request_success_total", "tokens": "vllm:generation_tokens_total"}
        | {ours: f"vllm:spec_decode_num_{theirs}" for ours, theirs in _SPEC_DECODE.items()},
    ),
)
"""Every kind whose counters are known; any other server is of no kind here, and reports text and tokens at most."""
