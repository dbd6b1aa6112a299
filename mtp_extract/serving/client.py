"""A client of OpenAI-compatible servers: vLLM, SGLang, llama-server, mlx-vlm's, and what speaks as they do.

Requests are made in an event loop of their own thread, so that callers need none, and may have one. What a server
sends is untrusted: a request has one deadline for head and body, and a bounded size. huggingface_hub's own HTTP client
is not used: it may be offline, or hold what an application put there for the Hub.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from mtp_extract.errors import MtpExtractError, ServerError, escape, few
from mtp_extract.io.address import WebAddress
from mtp_extract.io.http_library import http_library
from mtp_extract.serving.answer import Answer, Reading, words_of
from mtp_extract.serving.counters import Counters, at, recognise

T = TypeVar("T")

_CONNECT_TIMEOUT, _PAGE_TIMEOUT = 10.0, 30.0  # seconds
_KEEP_ALIVE = 4.0  # seconds a connection is kept; servers close theirs after 5
_LARGEST_PAGE = 1 << 24  # bytes
_LONGEST = 400  # characters of an error
_SETTLING_TIME, _POLL_INTERVAL = 2.0, 0.05  # seconds that counters may trail behind answers, and between looks
_CHAT = "/v1/chat/completions"
_REACH = "Check that it runs, and its address"

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or messages: dicts with ``role`` and ``content``."""

_REFUSED: Mapping[int, tuple[str, tuple[str, ...]]] = {
    401: ("wants a key, or does not accept this one", ("key",)),
    403: ("refuses access", ("key",)),
    429: ("limits the rate of requests. Send fewer at a time, or try later", ("concurrency",)),
    503: ("is not available: it may still be loading its model, or have too much to do. Try later", ()),
}
"""What a status says of a server, and the arguments that may help."""


class Server:
    """A server that answers at ``url``; what it is and which model it serves is asked at once.

    Args:
        url: with or without ``/v1`` at its end; a login in it is sent as such.
        model: by its name there; None for the one it serves.
        key: sent as a bearer token.
        timeout: seconds that an answer may take.

    Attributes:
        name: the URL, safe to show.
        kind: what it was recognised as.
        version: as it says; None if it does not.

    Its connections are closed at the end of a ``with`` block.

    Raises:
        MtpExtractError: it cannot be reached, or is not what it should be.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 300.0) -> None:
        root, login = _parse(url)
        self.name, self._timeout = WebAddress(root).name, timeout
        pair = base64.b64encode(":".join(login).encode()).decode() if login else ""
        self._secrets = [secret for secret in (key, pair, *login) if secret]
        headers = {"Accept-Encoding": "identity"}
        if key is not None or login:
            headers["Authorization"] = f"Bearer {key}" if key is not None else f"Basic {pair}"
        self._http = http = http_library()
        self._client = http.AsyncClient(
            base_url=root,
            headers=headers,
            timeout=http.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=http.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE),
        )
        self._loop = asyncio.new_event_loop()
        # A daemon: whoever is told to stop does not wait for answers.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.run(self._within(self._recognise(model), self._page_timeout))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, or raises, in the loop where requests are made."""
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    async def _recognise(self, model: str | None) -> None:
        header, page = await self._page("/v1/models")
        listed = at(page, "data")
        entries = [e for e in listed if isinstance(at(e, "id"), str)] if isinstance(listed, list) else []
        if not entries:
            raise ServerError(
                "expected an OpenAI-compatible server, found none that lists its models. Check its address"
            )
        names = [str(entry["id"]) for entry in entries]
        # Some list what they could load, and say what they have loaded.
        loaded = [str(entry["id"]) for entry in entries if entry.get("loaded") is True] or names
        self.model = loaded[0] if model is None else model
        if self.model not in names or (model is None and len(loaded) > 1):
            wanted = "one model" if model is None else f"the model {escape(model)}"
            raise ServerError(f"expected {wanted}, found {few(names)}. Name one", remedies=("model",))
        self.kind = recognise(header, [entry.get("owned_by") for entry in entries])
        self.version: str | None = (header.partition("/")[2] or None) if self.kind.header else None
        if self.kind.version:
            place, key = self.kind.version
            try:
                found = at((await self._page(place))[1], key)
            except ServerError:
                found = None  # a proxy may let /v1 alone through
            self.version = found if isinstance(found, str) else None

    def counters(self) -> Counters | None:
        """What it counted since its start, everybody's requests together; None if it does not tell.

        Raises:
            ServerError: what it tells are no counters.
        """
        return self.run(self._within(self._counters(), self._page_timeout)) if self.kind.page else None

    async def _counters(self) -> Counters | None:
        async with self._client.stream("GET", "/metrics") as response:
            if response.status_code != 200:
                return None
            found = self.kind.of_page((await _body(response)).decode("utf-8", "replace"))
        # Without these nobody can say whose the others are.
        return None if found.requests is None and found.tokens is None else found

    def moved(self, before: Counters, requests: int, tokens: int | None) -> Counters | None:
        """By how much its counters moved since ``before`` for so many requests, or tokens where it counts these alone.

        They may trail behind the answers, so they are waited for. None if it tells none, or if somebody else moved
        them too.

        Raises:
            ServerError: what it tells are no counters.
        """
        deadline = time.monotonic() + _SETTLING_TIME
        while (after := self.counters()) is not None:
            found = after - before
            moved, wanted = (found.tokens, tokens) if found.requests is None else (found.requests, requests)
            if moved is not None and moved == wanted:
                upwards = 0 <= (found.accepted or 0) <= (found.drafted or 0) and (found.rounds or 0) >= 0
                return found if upwards else None
            if (moved or 0) > (wanted or 0) or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_INTERVAL)
        return None

    def ask(self, prompt: Prompt, *, max_tokens: int, chat: bool = True, **more: Any) -> Answer:
        """What :meth:`answer` returns, for who asks one thing at a time."""
        return self.run(self.answer(prompt, max_tokens=max_tokens, chat=chat, **more))

    async def answer(self, prompt: Prompt, *, max_tokens: int, chat: bool = True, **more: Any) -> Answer:
        """Send one prompt and read the answer as it comes; to be run by :meth:`run`, among others.

        Args:
            prompt: text, or the messages of a chat.
            max_tokens: most of the answer.
            chat: take text as what a user says in a chat; else it is continued.
            more: further fields of the request, such as ``temperature``.

        Raises:
            MtpExtractError: there is no answer, or none that ends.
        """
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens, **self.kind.request}
        if isinstance(prompt, str) and not chat:
            path, body["prompt"] = "/v1/completions", prompt
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            path, body["messages"] = _CHAT, messages
        content = json.dumps(body | more).encode()
        return await self._within(self._stream(path, content, max_tokens), self._timeout, ("timeout",))

    async def _stream(self, path: str, content: bytes, max_tokens: int) -> Answer:
        reading = Reading(self.kind, time.perf_counter(), max_tokens)
        head = {"Content-Type": "application/json"}
        async with self._client.stream("POST", path, content=content, headers=head) as response:
            if response.status_code == 404:
                raise ServerError(
                    f"expected {path} and the model {escape(self.model)}, found one missing (404)",
                    remedies=("chat_template", "model"),
                )
            if response.status_code != 200:
                raise _refused(response.status_code, await _body(response))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ServerError(f"expected a stream of events, found {escape(kind) or 'nothing'}")
            # Of the bytes as they come, without the layers that count and cut them: 3 µs a token.
            async for piece in response.stream:
                reading.take(time.perf_counter(), piece)
            return reading.answer()

    @property
    def _page_timeout(self) -> float:
        """Seconds for a page, which takes no computing."""
        return min(self._timeout, _PAGE_TIMEOUT)

    async def _page(self, path: str) -> tuple[str, Mapping[str, Any]]:
        async with self._client.stream("GET", path) as response:
            if response.status_code == 404:
                raise ServerError(
                    f"expected an OpenAI-compatible server, found no {path} (404). Give what stands before /v1 in its "
                    "address"
                )
            body = await _body(response)
            if response.status_code != 200:
                raise _refused(response.status_code, body)
            return response.headers.get("server", ""), _json_object(body)

    async def _within(self, work: Awaitable[T], seconds: float, remedies: tuple[str, ...] = ()) -> T:
        """What ``work`` returns within ``seconds``; its errors name the server, and tell no secret."""
        try:
            return await asyncio.wait_for(work, seconds)
        except ServerError as error:
            said, remedies = str(error), error.remedies
        except asyncio.TimeoutError:
            said = f"expected an answer within {seconds:g} seconds"
        except self._http.ConnectTimeout:
            said, remedies = f"the server does not answer in time. {_REACH}", ("timeout",)
        except self._http.ConnectError as error:
            said, remedies = f"the server cannot be reached: {_reason(error)}. {_REACH}", ()
        except (self._http.InvalidURL, self._http.UnsupportedProtocol, UnicodeError):
            said, remedies = "this is not an address that can be requested", ()
        except self._http.HTTPError:
            # What it wrote is never repeated: it may quote the request, and with it a key.
            said, remedies = "the connection was lost, or what came over it is not HTTP. Its log may say why", ()
        for secret in self._secrets:
            said = said.replace(secret, "…")
        raise ServerError(f"{self.name}: {escape(said.rstrip('.'), _LONGEST)}.", remedies=remedies)


async def load(ask: Callable[[int], Awaitable[T]], count: int, at_a_time: int) -> list[T]:
    """What ``ask`` returns for 0 … ``count`` - 1, always ``at_a_time`` in flight while there are as many; in order.

    The first error ends it.
    """
    numbers, found = iter(range(count)), dict[int, T]()

    async def work() -> None:
        for number in numbers:
            found[number] = await ask(number)

    workers = [asyncio.create_task(work()) for _ in range(min(at_a_time, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[number] for number in range(count)]


async def _body(response: Any) -> bytes:
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > _LARGEST_PAGE:
            raise ServerError(f"expected a page of at most {_LARGEST_PAGE >> 20} MiB, found one that does not end")
    return bytes(body)


def _refused(status: int, body: bytes) -> ServerError:
    what, remedies = _REFUSED.get(status, ("does not answer as an OpenAI-compatible server does", ()))
    try:
        page = _json_object(body)
    except ServerError:
        page = {}  # a page for people
    return ServerError(f"the server {what} ({status}){words_of(page.get('error', page))}", remedies=remedies)


def _json_object(data: bytes) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"expected a JSON object, found {escape(data[:60].decode('utf-8', 'replace')) or 'nothing'}")
    return value


def _reason(error: BaseException) -> str:
    """Why a connection failed, as the system says it where it does."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno:
            return os.strerror(inner.errno) if inner.errno > 0 else escape(inner.strerror)
        inner = inner.__cause__ or inner.__context__
    return escape(error)


def _parse(url: str) -> tuple[str, tuple[str, ...]]:
    """A URL without login, query and what the API adds to it; user and password."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:
        host = None
    if not host or not url.isprintable() or " " in url:
        shown = escape(url.partition("?")[0].rpartition("@")[2])
        raise MtpExtractError(f"{shown}: expected the URL of a server, such as http://localhost:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    login = () if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", "")), login
