"""An OpenAI-compatible server on loopback whose answers our own loop made: sound, or with a fault planted in it.

The answers are made before it listens, all prompts together, so that what is measured of it costs next to nothing. It
counts as vLLM does, on a page, with accepted drafts by position; or as llama-server does, in its answers.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtp_extract.speculate.result import Generation


@dataclass(frozen=True)
class Played:
    """An answer, and what is counted of it."""

    text: str
    tokens: int
    rounds: int
    drafted: int
    by_step: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return sum(self.by_step)


def played(result: Generation, drafts: int) -> Played:
    """What the loop made, counted as a server does: rounds in which nothing is drafted are none."""
    rounds = [made for made in result.rounds if made.drafted]
    by_step = tuple(sum(made.accepted > step for made in rounds) for step in range(drafts))
    drafted = sum(made.drafted for made in rounds)
    return Played(result.text or "", len(result.tokens), len(rounds), drafted, by_step)


@dataclass
class CountingServer:
    answers: Mapping[str, Played]  # by prompt
    kind: str = "vLLM"
    moved: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def page(self) -> str:
        names = {
            "request_success_total": "requests",
            "generation_tokens_total": "tokens",
            "spec_decode_num_drafts_total": "rounds",
            "spec_decode_num_draft_tokens_total": "drafted",
            "spec_decode_num_accepted_tokens_total": "accepted",
        }
        lines = [f'vllm:{metric}{{engine="0"}} {float(self.moved[name])}' for metric, name in names.items()]
        steps = sorted(int(name) for name in self.moved if name.isdecimal())
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{per_position}{{engine="0",position="{at}"}} {float(self.moved[str(at)])}' for at in steps]
        return "\n".join(lines) + "\n"

    def events(self, asked: Mapping[str, Any]) -> Iterator[Any]:
        chat = "messages" in asked
        answer = self.answers[asked["messages"][0]["content"] if chat else asked["prompt"]]
        piece = {"delta": {"content": answer.text}} if chat else {"text": answer.text}
        yield {"choices": [{"index": 0, "finish_reason": "length", **piece}]}
        counts = {"tokens": answer.tokens, "rounds": answer.rounds, "drafted": answer.drafted}
        self.moved.update(
            {"requests": 1, **counts, "accepted": answer.accepted, **{str(i): n for i, n in enumerate(answer.by_step)}}
        )
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": answer.tokens}}
        if self.kind == "llama-server":
            drafts = {"draft_n": answer.drafted, "draft_n_accepted": answer.accepted}
            last["timings"] = {"predicted_n": answer.tokens, "predicted_ms": 1.0, **drafts}
        yield last
        yield "[DONE]"


@contextmanager
def counting_server(answers: Mapping[str, Played], kind: str = "vLLM") -> Iterator[CountingServer]:
    """A running one: a ``vLLM`` or a ``llama-server``."""
    state = CountingServer(answers, kind)
    # vLLM has its counters from the start.
    state.moved.update({str(step): 0 for answer in answers.values() for step in range(len(answer.by_step))})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            return

        def send(self, body: bytes, content: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/metrics" and state.kind == "vLLM":
                self.send(state.page().encode(), "text/plain")
            elif self.path == "/v1/models":
                owner = {"vLLM": "vllm", "llama-server": "llamacpp"}[state.kind]
                self.send(json.dumps({"data": [{"id": "pair", "owned_by": owner}]}).encode())
            else:
                self.send(b"{}")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made = (event if isinstance(event, str) else json.dumps(event) for event in state.events(asked))
            self.send("".join(f"data: {event}\n\n" for event in made).encode(), "text/event-stream")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
