"""What ``bench.json`` holds, field by field. A field is called as in the results, from which it is taken."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Share, Tool


class Bench(Record):
    version: Literal[2]  #: version of this file: 2
    tool: Tool  #: what wrote it
    verdict: str  #: the result in one sentence
    findings: list[str]  #: what a reader should not miss, one by one
    notes: list[str]  #: what was not told, and what disturbed the measurement
    servers: Servers  #: what was asked
    settings: Settings  #: what a second run needs
    total: Figures  #: over all prompts
    workloads: dict[str, Figures]  #: the same by workload
    windows: Windows  #: every request, in the order of asking


class Servers(Record):
    baseline: Server | None  #: the same without a drafter; null for none
    server: Server  #: the one that is measured


class Server(Record):
    name: Annotated[str, Meta(pattern="^https?://[^@?#]*$")] = field(name="url")  #: without login and query
    kind: Literal["vLLM", "SGLang", "llama-server", "mlx-vlm", "unknown"]  #: what it was recognised as
    version: str | None  #: as it says
    model: str  #: as it calls it


class Settings(Record, forbid_unknown_fields=True):
    prompts: dict[str, Positive]  #: by workload: how many
    max_tokens: Positive  #: most tokens of an answer
    temperature: NotNegative  #: 0 is greedy
    concurrency: Positive  #: requests in flight at most; without a rate the next is sent as soon as one has ended
    rate: NotNegative | None  #: requests a second, arriving at random as in a Poisson process; null for none
    repeat: Positive  #: how often each prompt was asked
    until: NotNegative | None  #: share of the main figure to which its interval was to be narrowed; null for none
    goodput: dict[str, NotNegative] | None  #: most milliseconds of what a good answer takes; null for none
    warm_up: Count  #: requests to each server before the measurement
    chat_template: bool  #: whether prompts were sent as chats, or to be continued


class Figures(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    texts: Positive  #: prompts
    server: Side  #: what it did
    baseline: Side | None  #: what it did; null for none
    #: time the baseline takes for the server's tokens, text by text, over the server's time
    speedup: NotNegative | None
    speedup_ci95: Bounds | None  #: its interval
    #: answers that are the baseline's, character for character; null unless greedy, with a baseline
    identical: Count | None
    compared: Count  #: of so many

    @property
    def width(self) -> float | None:
        """Of the main figure, the speedup or else tokens per second: half its interval, over it. None without one."""
        value, interval = self.speedup, self.speedup_ci95
        if self.baseline is None:
            value, interval = self.server.tokens_per_s, self.server.tokens_per_s_ci95
        return (interval[1] - interval[0]) / (2 * value) if value and interval else None


class Side(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    requests: Count  #: answered
    tokens: Count | None  #: of all answers, as the server counts
    seconds: NotNegative  #: from the first text to the last event, over all answers
    #: tokens after those of the first text, over `seconds`; of answers with more than one
    tokens_per_s: NotNegative | None
    tokens_per_s_ci95: Bounds | None  #: its interval
    #: requests a second while any were under way; null of a workload that was asked among others, as what follows
    request_throughput: NotNegative | None
    output_throughput: NotNegative | None  #: tokens over the same time
    request_goodput: NotNegative | None  #: requests a second that took no longer than wanted; null without a wish
    ttft_ms: Latency | None  #: time to first token: from request to first text
    tpot_ms: Latency | None  #: time per output token after the first text, of each answer
    itl_ms: Latency | None  #: inter-token latency: between two texts, each of one or several tokens
    e2el_ms: Latency | None  #: end-to-end latency: from request to the end of the answer
    server_tokens_per_s: NotNegative | None  #: tokens after the first over the server's own time of generation
    counted: Count  #: answers whose drafts were counted; what follows is of these
    drafted: Count | None  #: drafts judged
    accepted: Count | None  #: of these
    acceptance: Share | None  #: accepted / drafted
    acceptance_ci95: Bounds | None  #: its interval; over windows where the server tells only these apart
    rounds: Count | None  #: of drafting and judging
    #: 1 + accepted / rounds
    mean_accepted_length: Annotated[float, Meta(extra_json_schema={"minimum": 1})] | None
    mean_accepted_length_ci95: Bounds | None  #: its interval; as above
    #: by place in a round, from the first: share of the rounds in which the draft there was accepted
    acceptance_by_position: list[Share] | None


class Latency(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    mean: NotNegative  #: over answers; of `itl_ms`, over texts of all answers
    ci95: Bounds | None  #: its interval, over prompts
    median: NotNegative  #: of the same
    std: NotNegative  #: their standard deviation
    p99: NotNegative  #: 99 % are not above


class Windows(Record):
    baseline: list[Window] | None  #: what was asked of it; null for none
    server: list[Window]  #: what was asked of it


class Window(Record):
    """Requests that were sent in one go, the next whenever one had ended, or at its time."""

    begun_s: NotNegative  #: when, in seconds from the beginning of the measurement
    wall: NotNegative  #: seconds from the first request to the end of the last answer
    in_flight_mean: NotNegative  #: requests in flight, over this time
    in_flight_max: Count  #: the most at one time
    client: Client  #: what it cost the client
    asked: Annotated[list[Asked], Meta(min_length=1)]  #: one each
    #: by how much the counters of `/metrics` moved; null for none, where others moved them, or where it cannot be
    page: Counters | None
    disturbed: bool  #: whether others did
    #: by how much they moved, in words, where that cannot be of what was asked; no figure has it
    impossible: list[str]


class Client(Record):
    busy: NotNegative  #: share of the time in which its one thread computed
    lag_ms: float  #: how late it was on the mean at what it had to do
    limited: bool  #: whether it was so busy or late that times may be its own rather than the server's


class Asked(Record):
    workload: str  #: of the prompt
    prompt: Count  #: its number in the file, from 0
    turn: Count  #: 0 is the first time it was asked
    sent_s: NotNegative  #: seconds from the beginning of the window to the request
    ended_s: NotNegative  #: the same to the end of the answer
    answer: Answer  #: what came


class Answer(Record):
    tokens: Count | None  #: as the server counts; null where it does not, or counts what cannot be
    first_tokens: Positive  #: of these, those of the first text: 1 unless the server tells otherwise
    first_s: NotNegative | None  #: seconds from request to first text; null without text
    seconds: NotNegative  #: from first text to last event
    finish_reason: str | None  #: as the server says
    told: Counters | None  #: the server's counters of this answer; null where it has none, or where they cannot be
    #: what it told that cannot be of at most so many tokens as were asked for, in words; no figure has it
    impossible: list[str]


class Counters(Record):
    requests: Count | None  #: answered
    tokens: Count | None  #: generated
    rounds: Count | None  #: of drafting and judging
    drafted: Count | None  #: drafts judged
    accepted: Count | None  #: of these
    ms: NotNegative | None  #: the server's own time of generation
    positions: list[Count] | None  #: of the accepted drafts, those in each place of a round, from the first
