"""Measure what the client of `mtp-bench` costs, and how far the times it reports are the server's.

    python scripts/bench_client.py [--streams 1,16,64,128] [--rates 150,200] [--tokens 300] [--repeats 3]

A server of its own process on loopback sends events of vLLM's form at a given rate in each of so many streams, and
keeps the times at which it sent the first and the last of each. The client, and a plain one that reads the same events
with aiohttp and nothing else, are asked in turn. Cost is CPU time of the client's process, which a busy machine leaves
as it is; what times are held against is the server's clock, which is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mtp_extract.engines.answer import Answer
from mtp_extract.engines.load import load
from mtp_extract.engines.server import Server

MODEL = {"data": [{"id": "loopback", "owned_by": "vllm"}]}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n"


@dataclass(frozen=True)
class Run:
    """One client at one load. Times of a stream are relative to the server's."""

    microseconds: float  # CPU time of the client, a token
    error: float  # of the time between tokens, over all streams
    worst: float  # of one stream, the largest
    limited: str  # what the client says of itself


def event(number: int) -> bytes:
    """As vLLM sends it for each token, in a chunk of HTTP."""
    data = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1763827200,
        "model": "google/gemma-4-E4B-it",
        "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
        "usage": {"prompt_tokens": 25, "total_tokens": 25 + number, "completion_tokens": number},
    }
    return chunk(b"data: " + json.dumps(data).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve() -> None:
    """Answer until the process is ended; the port is printed first."""
    truth: dict[str, tuple[float, float]] = {}

    async def page(writer: asyncio.StreamWriter, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(_HEAD % (b"application/json", b"Content-Length: %d" % len(body)) + body)

    async def stream(writer: asyncio.StreamWriter, asked: Mapping[str, Any]) -> None:
        writer.write(_HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked"))
        begun, first, last = time.perf_counter() + asked["after"], 0.0, 0.0
        for number in range(asked["tokens"]):
            wait = begun + number / asked["rate"] - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            writer.write(event(number + 1))
            last = time.perf_counter()
            first = first or last
        truth[asked["name"]] = (first, last)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                sizes = [line[15:] for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(sizes[0])) if sizes else b""
                if head.startswith(b"post"):
                    await stream(writer, json.loads(json.loads(body)["prompt"]))
                else:
                    await page(writer, truth if b" /truth " in head else MODEL)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def prompts(streams: int, rate: float, tokens: int) -> list[str]:
    """What each stream is to send; spread evenly, as tokens of a batch are not all sent at one moment of two."""
    return [
        json.dumps({"name": str(at), "after": at * 0.618 % 1 / rate, "rate": rate, "tokens": tokens})
        for at in range(streams)
    ]


def ours(url: str, asked: Sequence[str], tokens: int) -> tuple[float, list[float], str]:
    """CPU seconds, seconds of each stream from its first text to its last, and what the client says of itself."""
    with Server(url) as server:

        def ask(at: int) -> Any:
            return server.answer(asked[at], max_tokens=tokens, chat=False)

        server.run(load(lambda at: server.answer(warming(asked), max_tokens=1, chat=False), 1, 1))
        begun = time.process_time()
        done = server.run(load(ask, len(asked), len(asked)))
        used = time.process_time() - begun
    answers: list[Answer] = [sent.answer for sent in done.sent]
    assert all(answer.tokens == tokens for answer in answers)
    client = done.client
    said = f"{'yes' if client.limited else 'no'} ({client.busy:.0%}, {client.lag_ms:.1f} ms)"
    return used, [sum(answer.gaps) for answer in answers], said


def plain(url: str, asked: Sequence[str], tokens: int) -> tuple[float, list[float], str]:
    """The same of the least that reads these events with aiohttp."""

    async def one(session: aiohttp.ClientSession, prompt: str) -> float:
        times: list[float] = []
        rest = b""
        async with session.post(url + "/v1/completions", json={"prompt": prompt}) as response:
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                        found = json.loads(line[5:])
                        times += [now] * bool(found["choices"][0]["delta"]["content"])
        return times[-1] - times[0]

    async def every() -> tuple[float, list[float]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await one(session, warming(asked))
            begun = time.process_time()
            found = await asyncio.gather(*(one(session, prompt) for prompt in asked))
            return time.process_time() - begun, list(found)

    used, found = asyncio.run(every())
    return used, found, "–"


def warming(asked: Sequence[str]) -> str:
    """One token, so that modules are imported and the server is known."""
    return json.dumps({**json.loads(asked[0]), "tokens": 1, "name": "warming"})


CLIENTS: dict[str, Callable[[str, Sequence[str], int], tuple[float, list[float], str]]] = {
    "mtp-bench": ours,
    "plain aiohttp": plain,
}


def measure(url: str, client: str, streams: int, rate: float, tokens: int) -> Run:
    asked = prompts(streams, rate, tokens)
    used, found, said = CLIENTS[client](url, asked, tokens)
    with Server(url) as server:
        _, truth = server.run(server.get("/truth"))
    true = [truth[str(at)][1] - truth[str(at)][0] for at in range(streams)]
    errors = [a / b - 1 for a, b in zip(found, true, strict=True)]
    return Run(1e6 * used / (streams * tokens), sum(found) / sum(true) - 1, max(map(abs, errors)), said)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=numbers, default=[1, 16, 64, 128])
    parser.add_argument("--rates", type=numbers, default=[150, 200], help="tokens a second in each stream")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    print("| streams × tokens/s | client | CPU µs a token | error of ms a token | worst stream | client is the limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            for rate in options.rates:
                for streams in options.streams:
                    runs: dict[str, list[Run]] = {client: [] for client in CLIENTS}
                    for _ in range(options.repeats):
                        for client, found in runs.items():
                            found.append(measure(url, client, streams, rate, options.tokens))
                    for client, found in runs.items():
                        cost = statistics.median(run.microseconds for run in found)
                        error = statistics.median(run.error for run in found)
                        worst = statistics.median(run.worst for run in found)
                        said = found[-1].limited
                        cells = (f"{streams} × {rate}", client, f"{cost:.1f}", f"{error:+.2%}", f"{worst:.2%}", said)
                        print("|", " | ".join(cells), "|", flush=True)
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
