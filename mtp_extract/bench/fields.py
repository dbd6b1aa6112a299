"""What ``bench.json`` holds, field by field. A field is called as in the results, from which it is taken."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Share, Tool


class Bench(Record):
    version: Literal[1]  #: version of this file: 1
    tool: Tool  #: what wrote it
    verdict: str  #: the result in one sentence
    findings: list[str]  #: what a reader should not miss, one by one
    notes: list[str]  #: what was not told, and what disturbed the measurement
    servers: Servers  #: what was asked
    settings: Settings  #: what a second run needs
    total: Figures  #: over all prompts
    workloads: dict[str, Figures]  #: the same by workload
    groups: Groups  #: every request, in the order of asking


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
    concurrency: Positive  #: requests in a group
    repeat: Positive  #: how often each prompt was asked
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


class Side(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    tokens: Count | None  #: of all answers, as the server counts
    seconds: NotNegative  #: from the first text to the last event, over all answers
    #: tokens after those of the first text, over `seconds`; of answers with more than one
    tokens_per_s: NotNegative | None
    tokens_per_s_ci95: Bounds | None  #: its interval
    throughput: NotNegative | None  #: tokens over the time in which requests were under way
    first_token_ms: NotNegative | None  #: mean time from request to first text
    first_token_ms_ci95: Bounds | None  #: its interval
    inter_token_ms: NotNegative | None  #: 1000 / `tokens_per_s`
    server_tokens_per_s: NotNegative | None  #: tokens after the first over the server's own time of generation
    counted: Count  #: answers whose drafts were counted; what follows is of these
    drafted: Count | None  #: drafts judged
    accepted: Count | None  #: of these
    acceptance: Share | None  #: accepted / drafted
    acceptance_ci95: Bounds | None  #: its interval; over groups where the server tells only these apart
    rounds: Count | None  #: of drafting and judging
    #: 1 + accepted / rounds
    mean_accepted_length: Annotated[float, Meta(extra_json_schema={"minimum": 1})] | None
    mean_accepted_length_ci95: Bounds | None  #: its interval; as above


class Groups(Record):
    baseline: list[Group] | None  #: what was asked of it; null for none
    server: list[Group]  #: what was asked of it


class Group(Record):
    """Requests that were sent at one time."""

    workload: str  #: of all of them
    prompts: Annotated[list[Count], Meta(min_length=1)]  #: their numbers in the file, from 0
    turn: Count  #: 0 is the first time they were asked
    answers: Annotated[list[Answer], Meta(min_length=1)]  #: one each
    wall: NotNegative  #: seconds from the first request to the end of the last answer
    #: by how much the counters of `/metrics` moved; null for none, where others moved them, or where it cannot be
    page: Counters | None
    disturbed: bool  #: whether others did
    #: by how much they moved, in words, where that cannot be of what was asked; no figure has it
    impossible: list[str]


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
