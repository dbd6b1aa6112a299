"""What servers count of their drafts, and where they say it: in an answer, on ``/metrics``, in a log.

Names were read in the sources of llama.cpp 0c1e57098 (``server_slot_stats::to_json``, ``to_metrics``), mlx-vlm 0.7.10
(``GenerationTimings``), SGLang 0.5.23 (``SpecTokensDetails``, ``metrics_collector.py``) and vLLM 0.33.0
(``SpeculativeDecodingMetrics``, ``SpecDecodingProm``, ``loggers.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mtp_extract.errors import MtpExtractError, ServerError, escape
from mtp_extract.io.files import read_regular
from mtp_extract.io.typed import Count, Record

_LARGEST = 1 << 53  # JSON and Prometheus write larger numbers inexactly
_MOST_A_ROUND = 1 << 10  # drafts, of the widest trees
_MOST_CUT = 64  # drafts that the last round accepts beyond the last token that was asked for
_LARGEST_LOG = 1 << 26  # bytes


class Counters(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """What a server counted; null for what it does not tell."""

    requests: Count | None = None  #: answered
    tokens: Count | None = None  #: generated
    rounds: Count | None = None  #: verifications of drafts by the base
    drafted: Count | None = None  #: drafts it judged
    accepted: Count | None = None  #: of these
    positions: tuple[Count, ...] | None = None  #: accepted drafts by position in a round, from the first

    def __sub__(self, before: Counters) -> Counters:
        found: dict[str, Any] = {}
        for name in self.__struct_fields__:
            after, old = getattr(self, name), getattr(before, name)
            if after is None or old is None:
                continue
            pairs = zip_longest(after, old, fillvalue=0) if name == "positions" else ()
            found[name] = tuple(a - b for a, b in pairs) if name == "positions" else after - old
        return Counters(**found)


@dataclass(frozen=True)
class Kind:
    """One kind of server: how it is recognised, what to ask for, and what it calls its counters."""

    name: str = "unknown"
    owner: str = ""  # ``owned_by`` of its models
    header: str = ""  # how its ``Server`` header begins
    version: tuple[str, str] | None = None  # page and key; without, the header says it
    request: Mapping[str, Any] = field(default_factory=lambda: {"stream_options": {"include_usage": True}})
    ids: Mapping[str, Any] = field(default_factory=dict)  # what to ask for, so that an answer has its token ids
    answer: tuple[str, ...] = ()  # keys that lead to the counters in an event of an answer
    counts: Mapping[str, str] = field(default_factory=dict)  # our names of these counters → the server's
    page: Mapping[str, str] = field(default_factory=dict)  # the same on ``/metrics``
    positions: str = ""  # accepted drafts by position, there
    exact_below: int = _LARGEST  # larger counts are rounded on its page, and not taken

    def of_answer(self, event: Any) -> Counters | None:
        """The counters in one event of an answer; None where it has none.

        Raises:
            ServerError: one is not a count.
        """
        sent = at(event, *self.answer) if self.answer else None
        if not isinstance(sent, dict) or not sent.keys() & set(self.counts.values()):
            return None
        found: dict[str, Any] = {ours: _count(name, sent.get(name)) for ours, name in self.counts.items()}
        drafts = [name for name in ("rounds", "drafted", "accepted") if name in found]
        if "timings" in self.answer and all(found[name] is None for name in drafts):
            found |= dict.fromkeys(drafts, 0)  # these servers leave out drafts where there were none
        return Counters(**found)

    def of_page(self, text: str) -> Counters:
        """The counters on a page in Prometheus' format, added up over their labels.

        A line is a name, perhaps labels, a value, and perhaps a time or an exemplar, which has a value of its own.

        Raises:
            ServerError: one is not a count.
        """
        names = "|".join(map(re.escape, filter(None, (*self.page.values(), self.positions))))
        sums, places = defaultdict[str, int](int), defaultdict[int, int](int)
        for name, labels, value in re.findall(rf"^({names}){_LABELS}[ \t]+(\S+)", text, re.MULTILINE):
            count = _count(name, _whole(value))
            assert count is not None
            sums[name] += count
            if name == self.positions and (place := _PLACE.search(labels)):
                places[int(place[1])] += count
        found: dict[str, Any] = {ours: sums[name] for ours, name in self.page.items() if name in sums}
        found = {ours: count for ours, count in found.items() if count < self.exact_below}
        by_place = tuple(places[number] for number in range(max(places, default=-1) + 1))
        # Those of all positions are all that were accepted, or tell of something else.
        return Counters(**found, positions=by_place if by_place and sum(by_place) == found.get("accepted") else None)


_LABELS = r'(\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\})?'
_PLACE = re.compile(r'position="([0-9]{1,3})"')


def _whole(text: str) -> Any:
    """The whole number that ``text`` says, or ``text``."""
    try:
        number = float(text)
        return int(number) if number.is_integer() else text
    except (ValueError, OverflowError):
        return text


def _count(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < _LARGEST):
        raise ServerError(f"expected a count for {name}, found {escape(value, 40)}")
    return value


def at(value: Any, *keys: str) -> Any:
    """What ``keys`` lead to in nested JSON objects; None where they lead nowhere."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


_USAGE = {"include_usage": True}
# Usage in every event says how many tokens came with the first.
_USAGE_ALWAYS = {"stream_options": {**_USAGE, "continuous_usage_stats": True}}
_TIMINGS = {"tokens": "predicted_n", "drafted": "draft_n", "accepted": "draft_n_accepted"}
_DRAFTS = {
    "rounds": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos_total"

KINDS = (
    Kind(
        "llama-server",
        owner="llamacpp",
        header="llama.cpp",
        version=("/props", "build_info"),
        # A prompt that is found in the cache is computed otherwise than one that is not, and rounded otherwise.
        request={"stream_options": _USAGE, "cache_prompt": False},
        answer=("timings",),
        counts=_TIMINGS,
        page={"tokens": "llamacpp:tokens_predicted_total", **{k: f"llamacpp:{name}" for k, name in _DRAFTS.items()}},
        positions=f"llamacpp:{_POSITIONS}",
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
        page={
            "requests": "vllm:request_success_total",
            "tokens": "vllm:generation_tokens_total",
            **{k: f"vllm:{name}" for k, name in _DRAFTS.items()},
        },
        positions=f"vllm:{_POSITIONS}",
    ),
)
"""Every kind whose counters are known; any other server tells text and tokens."""


def recognise(header: str, owners: Iterable[Any]) -> Kind:
    """The kind of a server, by its ``Server`` header and by ``owned_by`` of its models."""
    known = [owner for owner in owners if isinstance(owner, str) and owner]
    found = (kind for kind in KINDS if kind.owner in known or (kind.header and header.startswith(kind.header)))
    return next(found, Kind())


def impossible(counted: Counters, most_tokens: int, answers: int = 1) -> tuple[str, ...]:
    """What in ``counted`` cannot be of ``answers`` answers of at most ``most_tokens`` each; empty where all can.

    Every round writes at least one token; the last one's drafts may reach beyond the end.
    """

    def beyond() -> Iterator[str]:
        most, accepted = most_tokens * answers, counted.accepted
        for value, name, bound in (
            (counted.tokens, "tokens", most),
            (counted.rounds, "rounds", most + answers),
            (counted.drafted, "drafts", most * _MOST_A_ROUND),
            (accepted, "accepted drafts", most + _MOST_CUT * answers),
            (accepted, "accepted drafts", counted.drafted),
            (accepted, "accepted drafts", 0 if counted.rounds == 0 else None),
        ):
            if value is not None and bound is not None and not 0 <= value <= bound:
                yield f"{escape(value, 24)} {name} where at most {bound} can be"

    return tuple(beyond())


def rate_in(log: Path) -> float:
    """The share of drafts that LiteRT-LM says were accepted, the last time it says so in its log.

    Raises:
        MtpExtractError: it says none.
    """
    try:
        text = read_regular(log, _LARGEST_LOG)
    except OSError as error:
        raise MtpExtractError(
            f"{escape(log)}: expected a log that can be read, found: {error.strerror}. Check the path."
        ) from error
    found = re.findall(rb"MTP Drafter - Success rate: (0\.\d+|[01](?:\.0*)?)(?![\d.])", text)
    if not found:
        raise MtpExtractError(
            f'{escape(log)}: expected a line "MTP Drafter - Success rate: …" of LiteRT-LM, found none. Let it log at '
            "INFO, and close the engine before the log is read."
        )
    return float(found[-1])
