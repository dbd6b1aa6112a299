"""A server of models on loopback: it answers as vLLM, SGLang, llama-server or mlx-vlm's do, or as none should.

Its pages of counters are those in ``tests/metrics/``: vLLM's and SGLang's were made by running the classes of their
releases that count, llama-server's was sent by one. What is asked here is added to them.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.loopback import Handler, Listener

KEY = "sk-SecretKeyThatMustNotLeak"
MODEL = "google/gemma-4-E4B-it"
PAGES = Path(__file__).resolve().parents[1] / "metrics"


@dataclass(frozen=True)
class Manner:
    """How a kind of server behaves."""

    listed: dict[str, Any]  # an entry of its list of models
    header: str = "uvicorn"
    version: tuple[str, dict[str, Any]] = ("", {})  # page and content
    page: str = ""  # file of its counters
    moves: tuple[tuple[str, str], ...] = ()  # the counters there → what moves them
    paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")  # where it answers


def _moves(prefix: str, **others: str) -> tuple[tuple[str, str], ...]:
    """Counters that vLLM and llama-server both call so, and ``others``."""
    drafts = (("drafts", "rounds"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted"))
    both = ((f"spec_decode_num_{name}_total", what) for name, what in drafts)
    return tuple((f"{prefix}:{name}", what) for name, what in (*((n, w) for w, n in others.items()), *both))


MANNERS = {
    "vLLM": Manner(
        {"owned_by": "vllm"},
        version=("/version", {"version": "0.33.0"}),
        page="vllm-0.33.0.txt",
        moves=_moves("vllm", requests="request_success_total", tokens="generation_tokens_total"),
    ),
    "SGLang": Manner(
        {"owned_by": "sglang"},
        version=("/server_info", {"version": "0.5.23", "api_key": "not to be shown"}),
        page="sglang-0.5.23.txt",
        moves=(
            ("sglang:num_requests_total", "requests"),
            ("sglang:generation_tokens_total", "tokens"),
            ("sglang:spec_verify_calls_total", "rounds"),
        ),
    ),
    "llama-server": Manner(
        {"owned_by": "llamacpp"},
        header="llama.cpp",
        version=("/props", {"build_info": "b1-0c1e570"}),
        page="llama-server-0c1e57098.txt",
        moves=_moves("llamacpp", tokens="tokens_predicted_total"),
    ),
    "mlx-vlm": Manner({"loaded": True}, header="mlx_vlm/0.7.10", paths=("/v1/chat/completions",)),
    "unknown": Manner({}),
}


def words_of(prompt: str, most: int) -> list[str]:
    """The answer to ``prompt``: a text of its own, in tokens."""
    return [f" {len(prompt)}.{number}" for number in range(min(most, 7 + len(prompt) % 4))]


def prompt_of(asked: dict[str, Any]) -> Any:
    """The text of a request; of a chat, what was said first."""
    return asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]


def account(tokens: int) -> dict[str, int]:
    """What drafting four at a time comes to, of which two are accepted where so many are left."""
    rounds = -(-(tokens - 1) // 3)
    drafts = {"rounds": rounds, "drafted": 4 * rounds, "accepted": tokens - 1 - rounds}
    return {"requests": 1, "tokens": tokens, **drafts}


@dataclass(frozen=True)
class Written:
    """What is written after one prompt."""

    pieces: Sequence[str]  # the text of each event
    sizes: Sequence[int]  # tokens in each
    counted: Mapping[str, int]  # as :func:`account` has it; ``accepted_0`` and so on by position, where known
    finish: str = "length"
    ids: Sequence[Sequence[int]] | None = None  # the tokens of each piece, where they are told
    prompt_tokens: int = 5
    prompt_ids: Sequence[int] | None = None  # where they are told
    thoughts: int = 0  # tokens before the first piece that are counted and not streamed


class ModelServer:
    """Start with :func:`model_server`."""

    def __init__(self, kind: str, *, drafts: bool = True) -> None:
        self.kind, self.manner, self.drafts = kind, MANNERS[kind], drafts
        self.key: str | None = None  # asked for, if any
        self.told = False  # whether vLLM tells counters in its answers, as it does when it is started so
        self.streams = True  # else it answers with one JSON object, as behind a proxy that knows no streams
        self.details: bool = False  # whether it says how many tokens were thoughts, as OpenAI does
        self.fails: dict[str, int] = {}  # prompt → the status that it is answered with
        self.lies: dict[str, int] = {}  # prompt → how many tokens its answer is said to have
        self.models = [{"id": MODEL, **self.manner.listed}]
        self.answer: Callable[[str, int], list[str]] = words_of
        self.write: Callable[[dict[str, Any]], Written] = self.plain
        self.overrides: dict[str, Callable[[Any], None]] = {}  # path → what answers instead, with the handler at hand
        self.asked: list[tuple[str, dict[str, Any]]] = []  # path and body of every request for text
        self.seen: list[tuple[str, str | None]] = []  # every path, with the authorization that was sent
        self.moved: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.listener = Listener(_Handler, state=self)
        self.url = self.listener.url

    def plain(self, asked: dict[str, Any]) -> Written:
        """Of what ``answer`` gives, a token in each event."""
        tokens = self.answer(prompt_of(asked), asked["max_tokens"])
        return Written(tokens, [1] * len(tokens), account(len(tokens)))

    def page(self) -> str:
        """The page of counters: as it was, and what was asked since."""
        text = (PAGES / self.manner.page).read_text(encoding="utf-8")
        by_position = [(rf'.*_per_pos_total\{{.*position="{n}"\}}', f"accepted_{n}") for n in range(4)]
        for name, what in (*self.manner.moves, *by_position):
            if self.drafts or what in ("requests", "tokens"):
                line = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
                assert line or what.startswith("accepted_")
                if line:
                    text = f"{text[: line.start(1)]}{float(line[1]) + self.moved[what]}{text[line.end(1) :]}"
            else:
                text = re.sub(rf"^.*{name}.*\n", "", text, flags=re.MULTILINE)
        return text


class _Handler(Handler):
    state: ModelServer

    def version_string(self) -> str:
        return self.state.manner.header

    def handle_any(self) -> None:
        state, given = self.state, self.headers.get("authorization")
        page, version = state.manner.version
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        state.seen.append((self.path, given))
        if self.path in state.overrides:
            state.overrides[self.path](self)
        elif state.key is not None and given != f"Bearer {state.key}":
            self.json({"error": {"message": f"expected another key than {given}"}}, 401)
        elif self.path == "/v1/models":
            self.json({"object": "list", "data": state.models})
        elif self.path == page:
            self.json(version)
        elif self.path == "/metrics" and state.manner.page:
            self.answer(200, state.page().encode(), Content_Type="text/plain; version=0.0.4")
        elif self.path in state.manner.paths:
            self.write_text(json.loads(self.body))
        else:
            self.json({"detail": "Not Found"}, 404)

    do_GET = do_POST = handle_any  # noqa: N815 - the names http.server calls

    def write_text(self, asked: dict[str, Any]) -> None:
        with self.state.lock:
            self.state.asked.append((self.path, asked))
        if status := self.state.fails.get(prompt_of(asked)):
            self.json({"error": {"message": "the engine is dead"}}, status)
            return
        if not self.state.streams:
            self.json(self.whole(asked))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.events(asked):
            self.piece(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        self.piece(b"")

    def piece(self, data: bytes) -> None:
        """One chunk; an empty one ends the answer."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def events(self, asked: dict[str, Any]) -> Iterator[Any]:
        state, chat = self.state, "messages" in asked
        prompt, written = prompt_of(asked), state.write(asked)
        options = asked.get("stream_options") or {}
        given, count = written.prompt_tokens, written.thoughts + sum(written.sizes)
        by_kind = {"reasoning_tokens": written.thoughts} if state.details else None

        def usage(so_far: int) -> dict[str, Any]:
            counts = {"prompt_tokens": given, "completion_tokens": so_far, "total_tokens": given + so_far}
            return {"usage": {**counts, "completion_tokens_details": by_kind}}

        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        sent = written.thoughts
        for number, (text, size) in enumerate(zip(written.pieces, written.sizes, strict=True)):
            sent += size
            event: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": None}]}
            event["choices"][0] |= {"delta": {"content": text}} if chat else {"text": text}
            if asked.get("return_token_ids") and written.ids is not None:
                event["choices"][0]["token_ids"] = list(written.ids[number])
                # vLLM tells them with the first text: of a chat beside the choices, else in them.
                (event if chat else event["choices"][0])["prompt_token_ids"] = None if number else written.prompt_ids
            if options.get("continuous_usage_stats"):
                event |= usage(sent)
            yield event
        yield {"choices": [{"index": 0, "finish_reason": written.finish, **({"delta": {}} if chat else {"text": ""})}]}
        none = dict.fromkeys(("rounds", "drafted", "accepted"), 0)
        counted = {**written.counted} if state.drafts else {**written.counted, **none}
        counted["tokens"] = counted.get("tokens", 0) + written.thoughts
        with state.lock:
            state.moved.update({name: number for name, number in counted.items() if number is not None})
        if state.kind == "SGLang" and asked.get("return_spec_tokens_details") and state.drafts:
            details = {
                "spec_verify_ct": counted["rounds"],
                "spec_num_proposed_drafts": counted["drafted"],
                "spec_num_correct_drafts": counted["accepted"],
                "spec_accept_rate": 0.5,
                "spec_correct_drafts_histogram": [],
            }
            yield {"choices": [], "sglext": {"spec_tokens_details": details}}
        if options.get("include_usage") and state.kind != "unknown":
            yield {"choices": [], **usage(state.lies.get(prompt, count)), **self.counters(counted)}
        yield "[DONE]"

    def whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer as one object: what its events come to."""
        events = [event for event in self.events(asked) if isinstance(event, dict)]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
        said = {"message": {"role": "assistant", "content": text}} if "messages" in asked else {"text": text}
        last = {key: value for event in events for key, value in event.items() if key != "choices"}
        return {"choices": [{"index": 0, "finish_reason": choices[-1]["finish_reason"], **said}], **last}

    def counters(self, counted: dict[str, int]) -> dict[str, Any]:
        state = self.state
        if state.kind == "vLLM" and state.told and state.drafts:
            found = {
                "num_spec_steps": counted["rounds"],
                "num_draft_tokens": counted["drafted"],
                "num_accepted_draft_tokens": counted["accepted"],
            }
            return {"metrics": {"tokens_per_second": 1.0, "speculative_decoding": found}}
        times = {"predicted_n": counted["tokens"], "predicted_ms": 2.0 * (counted["tokens"] - 1)}
        drafts = {"draft_n": counted["drafted"], "draft_n_accepted": counted["accepted"]}
        if state.kind == "llama-server":
            return {"timings": times | (drafts if state.drafts else {})}
        if state.kind == "mlx-vlm":
            rounds = {"draft_rounds": counted["rounds"], **drafts}
            return {"timings": times | (rounds if state.drafts else dict.fromkeys(rounds))}
        return {}


@contextmanager
def model_server(kind: str, *, drafts: bool = True) -> Iterator[ModelServer]:
    """A running one."""
    server = ModelServer(kind, drafts=drafts)
    with closing(server.listener):
        yield server
