"""An OpenAI-compatible server: vLLM, SGLang, llama-server, mlx-vlm's, and what speaks as they do.

Answers are streamed, and each piece is timed as it arrives. What a server sends is untrusted: bounded in size and
time, checked in type.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from mtp_extract.engines.answer import Answer, EndedError, Reading, json_object, listed
from mtp_extract.engines.connection import Connection
from mtp_extract.engines.kinds import Counters, at, recognise
from mtp_extract.errors import MtpExtractError, ServerError, escape
from mtp_extract.io.address import WebAddress

T = TypeVar("T")

_PAGE_TIMEOUT = 30.0  # seconds, for what takes no computing
_LARGEST_PAGE = 1 << 24  # bytes
_MOST_NAMED = 8
_SETTLING_TIME = 2.0  # seconds that counters may trail behind answers
_POLL_INTERVAL = 0.05  # seconds between looks at them
_CHAT = "/v1/chat/completions"

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
        version: as it says; None if it does not.

    Its connections are closed at the end of a ``with`` block.

    Raises:
        MtpExtractError: it cannot be reached, or is not what it should be.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 300.0) -> None:
        self._root, login = _parse(url)
        self.name = WebAddress(self._root).name
        self._timeout = timeout
        self._secrets = [secret for secret in (key, *login) if secret]
        headers = {"Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        elif any(login):
            pair = base64.b64encode(":".join(login).encode()).decode()
            headers["Authorization"] = f"Basic {pair}"
            self._secrets.append(pair)
        self._connection = Connection(self._root, headers)
        try:
            self.run(self._recognise(model))
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, or raises, in the loop where requests are made."""
        return self._connection.run(work)

    async def _recognise(self, model: str | None) -> None:
        header, models = await self.get("/v1/models")
        entries = [entry for entry in listed(at(models, "data")) if isinstance(at(entry, "id"), str)]
        if not entries:
            raise ServerError(
                f"{self.name}: expected an OpenAI-compatible server, found none that lists its models. Check its "
                "address."
            )
        self.kind = recognise(header, [entry.get("owned_by") for entry in entries])
        self.model = self._choose(model, entries)
        self.version = await self._version(header)

    def _choose(self, model: str | None, entries: Sequence[Mapping[str, Any]]) -> str:
        names = [str(entry["id"]) for entry in entries]
        # Some list what they could load, and say what they have loaded.
        loaded = [str(entry["id"]) for entry in entries if entry.get("loaded") is True] or names
        if model is None and len(loaded) == 1:
            return loaded[0]
        if model in names:
            return model
        wanted = "one model" if model is None else f"the model {escape(model)}"
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise ServerError(
            f"{self.name}: expected {wanted}, found {', '.join(map(escape, names[:_MOST_NAMED]))}{more}. Name one.",
            remedies=("model",),
        )

    async def _version(self, header: str) -> str | None:
        if not self.kind.version:
            return header.partition("/")[2] or None if self.kind.header else None
        page, *keys = self.kind.version
        try:
            found = at((await self.get(page))[1], *keys)
        except ServerError:
            return None  # a proxy may let /v1 alone through
        return found if isinstance(found, str) else None

    def counters(self) -> Counters | None:
        """What it counted since its start, everybody's requests together; None if it does not tell.

        Raises:
            ServerError: what it tells are no counters.
        """
        return self.run(self._named(self._counters())) if self.kind.page else None

    def moved(self, before: Counters, asked: Counters) -> Counters | None:
        """By how much its counters moved since ``before``, which may trail behind the answers; None if it tells none.

        They are waited for until they moved by ``asked``, or by more: then somebody else moved them too.

        Raises:
            ServerError: what it tells are no counters.
        """
        deadline = time.monotonic() + _SETTLING_TIME
        while (after := self.counters()) is not None:
            found = after - before
            if found.is_of(asked) or found.exceeds(asked) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_INTERVAL)
        return None

    async def _counters(self) -> Counters | None:
        async with self._connection.request("/metrics", self._page_timeout) as response:
            if response.status != 200:
                return None
            found = self.kind.of_page((await self._body(response)).decode("utf-8", "replace"))
        # Without these nobody can say whose the others are.
        return None if found.requests is None and found.tokens is None else found

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
        if not isinstance(prompt, str):
            path, body["messages"] = _CHAT, list(prompt)
        elif chat:
            path, body["messages"] = _CHAT, [{"role": "user", "content": prompt}]
        else:
            path, body["prompt"] = "/v1/completions", prompt
        return await self._named(self._stream(path, json.dumps(body | more).encode(), max_tokens))

    async def _stream(self, path: str, content: bytes, max_tokens: int) -> Answer:
        sent = time.perf_counter()
        async with self._connection.request(path, self._timeout, content) as response:
            if response.status == 404:
                remedies = ("chat_template", "model")
                raise ServerError(
                    f"expected {path} and the model {escape(self.model)}, found one missing (404)", remedies=remedies
                )
            if response.status != 200:
                raise await self._refused(response)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ServerError(f"expected a stream of events, found {escape(kind) or 'nothing'}")
            reading = Reading(self.kind, sent, max_tokens, self._timeout)
            try:
                async for piece in response.content.iter_any():
                    reading.take(time.perf_counter(), piece)
            except EndedError as error:
                raise ServerError(f"the answer ended in an error{self._quoted(error.page)}") from None
            return reading.answer()

    async def get(self, path: str) -> tuple[str, Mapping[str, Any]]:
        """The ``Server`` header and the JSON of a page; to be run by :meth:`run`.

        Raises:
            ServerError: there is no such page, or it is no JSON object.
        """
        return await self._named(self._page(path))

    async def _page(self, path: str) -> tuple[str, Mapping[str, Any]]:
        async with self._connection.request(path, self._page_timeout) as response:
            if response.status == 404:
                raise ServerError(
                    f"expected an OpenAI-compatible server, found no {path} (404). Give what stands before /v1 in its "
                    "address"
                )
            if response.status != 200:
                raise await self._refused(response)
            return response.headers.get("server", ""), json_object(await self._body(response))

    async def _body(self, response: Any) -> bytes:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > _LARGEST_PAGE:
                raise ServerError(f"expected a page of at most {_LARGEST_PAGE >> 20} MiB, found one that does not end")
        return bytes(body)

    async def _refused(self, response: Any) -> ServerError:
        status = response.status
        what, remedies = _REFUSED.get(status, ("does not answer as an OpenAI-compatible server does", ()))
        try:
            said = self._quoted(json_object(await self._body(response)))
        except ServerError:
            said = ""
        return ServerError(f"the server {what} ({status}){said}", remedies=remedies)

    def _quoted(self, page: Mapping[str, Any]) -> str:
        """What the server says of an error, without what it was told in confidence."""
        error = page.get("error", page)
        said = next((text for text in (error, at(error, "message"), page.get("detail")) if isinstance(text, str)), "")
        for secret in self._secrets:
            said = said.replace(secret, "…")
        return f": {escape(said.strip().rstrip('.'))}" if said.strip() else ""

    @property
    def _page_timeout(self) -> float:
        """Seconds for a page, which takes no computing."""
        return min(self._timeout, _PAGE_TIMEOUT)

    async def _named(self, work: Awaitable[T]) -> T:
        """What ``work`` returns; its errors name the server."""
        try:
            return await work
        except ServerError as error:
            text = str(error)
            if text.startswith(self.name):
                raise
            raise ServerError(f"{self.name}: {text.rstrip('.')}.", remedies=error.remedies) from None


def _parse(url: str) -> tuple[str, tuple[str, ...]]:
    """A URL without login, query and what the API adds to it; user and password."""
    login: tuple[str, ...] = ()
    try:
        parts = urlsplit(url)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port
        if parts.username is not None:
            login = unquote(parts.username), unquote(parts.password or "")
    except ValueError:
        host = None
    if not host or scheme not in ("http", "https") or not url.isprintable() or " " in url:
        shown = escape(url.partition("?")[0].rpartition("@")[2])
        raise MtpExtractError(f"{shown}: expected the URL of a server, such as http://localhost:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", "")), login
