"""An OpenAI-compatible server: vLLM, SGLang, llama-server, mlx-vlm's, and what speaks as they do.

Answers are streamed, and each piece is timed as it arrives. What a server sends is untrusted: bounded in size and
time, checked in type. The client of io/http.py is not used, as it may be offline, or hold what an application put
there for the Hub.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from mtp_extract.engines.kinds import Counters, at, impossible, recognise
from mtp_extract.errors import MtpExtractError, ServerError, escape
from mtp_extract.io.address import WebAddress, origin_of
from mtp_extract.io.http_library import FaultError, faults, hide_queries, http_library
from mtp_extract.io.watchdog import watched

_CONNECT_TIMEOUT = 10.0  # seconds
_PAGE_TIMEOUT = 30.0  # seconds, for what takes no computing
_KEEP_ALIVE = 4.0  # seconds a connection is kept; servers close theirs after 5
_LARGEST_PAGE, _LARGEST_EVENT, _LARGEST_TOKEN = 1 << 24, 1 << 22, 1 << 14  # bytes
_MOST_NAMED = 8

_REFUSED: Mapping[int, tuple[str, tuple[str, ...]]] = {
    401: ("wants a key, or does not accept this one", ("key",)),
    403: ("refuses access", ("key",)),
    429: ("limits the rate of requests. Send fewer at a time, or try later", ("concurrency",)),
    503: ("is not available: it may still be loading its model, or have too much to do. Try later", ()),
}
"""What a status says of a server, and the arguments that may help."""


@dataclass(frozen=True)
class Answer:
    """One answer. None is what the server does not tell."""

    text: str  # all that was written, reasoning included, in order
    tokens: int | None  # generated, as the server counts
    first_tokens: int  # of these, those that came with the first text: 1 unless the server tells otherwise
    first_s: float | None  # seconds from sending the request to the first text; None if there was none
    seconds: float
    """From the first text to the last event of the text, the one that says why it ended among them; 0 where all of the
    text came at once."""
    finish_reason: str | None
    told: Counters | None
    impossible: tuple[str, ...] = ()
    """What the server told that cannot be of this answer, and so stands in none of the above."""


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
        self._timeout, self._ended = timeout, False
        self._secrets = [secret for secret in (key, *login) if secret]
        headers = {"Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        elif any(login):
            pair = base64.b64encode(":".join(login).encode()).decode()
            headers["Authorization"] = f"Basic {pair}"
            self._secrets.append(pair)
        library = http_library()
        hide_queries()
        self._client = library.Client(
            headers=headers,
            timeout=_limits(timeout),
            limits=library.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE),
        )
        try:
            self._recognise(model)
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def _recognise(self, model: str | None) -> None:
        header, listed = self._get("/v1/models")
        entries = [entry for entry in _list(at(listed, "data")) if isinstance(at(entry, "id"), str)]
        if not entries:
            raise ServerError(f"{self.name}: expected an OpenAI-compatible server, found none that lists its models.")
        self.kind = recognise(header, [entry.get("owned_by") for entry in entries])
        self.model = self._choose(model, entries)
        self.version = self._version(header)

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

    def _version(self, header: str) -> str | None:
        if not self.kind.version:
            return header.partition("/")[2] or None if self.kind.header else None
        page, *keys = self.kind.version
        try:
            found = at(self._get(page)[1], *keys)
        except ServerError:
            return None  # a proxy may let /v1 alone through
        return found if isinstance(found, str) else None

    def counters(self) -> Counters | None:
        """What it counted since its start, everybody's requests together; None if it does not tell.

        Raises:
            ServerError: what it tells are no counters.
        """
        if not self.kind.page:
            return None
        with self._page("/metrics") as response:
            if response.status_code != 200:
                return None
            text = self._body(response).decode("utf-8", "replace")
            found = self.kind.of_page(text)
        # Without these nobody can say whose the others are.
        return None if found.requests is None and found.tokens is None else found

    def ask(
        self, prompt: str | Sequence[Mapping[str, Any]], *, max_tokens: int, chat: bool = True, **more: Any
    ) -> Answer:
        """Send one prompt and read the answer as it comes.

        Args:
            prompt: text, or the messages of a chat.
            max_tokens: most of the answer.
            chat: take text as what a user says in a chat; else it is continued.
            more: further fields of the request, such as ``temperature``.

        Raises:
            MtpExtractError: there is no answer, or none that ends.
        """
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens, **self.kind.request}
        if chat:
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            path, body["messages"] = "/v1/chat/completions", said
        else:
            path, body["prompt"] = "/v1/completions", prompt
        content = json.dumps(body | more).encode()
        headers = {"Content-Type": "application/json"}
        post = self._client.stream("POST", self._root + path, content=content, headers=headers)
        with self._request(self._timeout) as sent, post as response:
            if response.status_code == 404:
                remedies = ("chat_template", "model")
                raise ServerError(
                    f"expected {path} and the model {escape(self.model)}, found one missing (404)", remedies=remedies
                )
            if response.status_code != 200:
                raise self._refused(response)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ServerError(f"expected a stream of events, found {escape(kind) or 'nothing'}")
            return self._read(response, sent, max_tokens)

    def _read(self, response: Any, sent: float, asked: int) -> Answer:
        pieces: list[str] = []
        tokens: int | None = None
        first = last = 0.0
        first_tokens, reason, counters, done = 1, None, None, False
        for now, data in self._events(response, _LARGEST_EVENT + _LARGEST_TOKEN * asked):
            if data == b"[DONE]":
                done = True
                break
            event = _json(data)
            if event.get("error"):
                raise ServerError(f"the answer ended in an error{self._quoted(event)}")
            count = at(event, "usage", "completion_tokens")
            if isinstance(count, int) and not isinstance(count, bool):
                tokens = count
            counters = self.kind.of_answer(event) or counters
            for choice in _list(event.get("choices")):
                text = _text(choice)
                if text and not pieces:
                    first, first_tokens = now, tokens or 1
                if text:
                    pieces.append(text)
                last = now
                given = at(choice, "finish_reason")
                reason = escape(given) if isinstance(given, str) else reason
        if not done and reason is None:
            raise ServerError("the answer ended before its end")
        wrong = impossible(counters, asked, seconds=self._timeout) if counters is not None else ()
        if wrong:
            counters = None
        if tokens is None and counters is not None:
            tokens = counters.tokens
        # A text is at least one token, and no more than asked for.
        if tokens is not None and not (first_tokens if pieces else 0) <= tokens <= asked:
            wrong += (f"{escape(tokens, 24)} tokens of an answer of {len(pieces)} pieces and at most {asked} tokens",)
            tokens, first_tokens = None, 1
        return Answer(
            text="".join(pieces),
            tokens=tokens,
            first_tokens=first_tokens,
            first_s=first - sent if pieces else None,
            # All of the text at once says when it was sent, not how long it took.
            seconds=last - first if len(pieces) > 1 else 0.0,
            finish_reason=reason,
            told=counters,
            impossible=wrong,
        )

    def _events(self, response: Any, largest: int) -> Iterator[tuple[float, bytes]]:
        """The data of each event, with the time at which it was here."""
        rest, size = b"", 0
        for piece in response.iter_raw():
            now = time.perf_counter()
            size += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _LARGEST_EVENT or size > largest:
                raise ServerError("the answer is too large for one")
            for line in lines:
                if line.startswith(b"data:"):
                    yield now, line[5:].strip()

    def _get(self, path: str) -> tuple[str, Mapping[str, Any]]:
        """The ``Server`` header and the JSON of a page."""
        with self._page(path) as response:
            if response.status_code == 404:
                raise ServerError(f"expected an OpenAI-compatible server, found no {path} (404)")
            if response.status_code != 200:
                raise self._refused(response)
            return response.headers.get("server", ""), _json(self._body(response))

    def _body(self, response: Any) -> bytes:
        body = bytearray()
        for piece in response.iter_raw():
            body += piece
            if len(body) > _LARGEST_PAGE:
                raise ServerError(f"expected a page of at most {_LARGEST_PAGE >> 20} MiB, found one that does not end")
        return bytes(body)

    def _refused(self, response: Any) -> ServerError:
        status = int(response.status_code)
        what, remedies = _REFUSED.get(status, ("does not answer as an OpenAI-compatible server does", ()))
        try:
            said = self._quoted(_json(self._body(response)))
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

    @contextmanager
    def _page(self, path: str) -> Iterator[Any]:
        """The answer for a page, which takes no computing."""
        seconds = min(self._timeout, _PAGE_TIMEOUT)
        get = self._client.stream("GET", self._root + path, timeout=_limits(seconds))
        with self._request(seconds), get as response:
            yield response

    @contextmanager
    def _request(self, seconds: float) -> Iterator[float]:
        """One request, which yields the time at which it begins; its errors name the server.

        All of it has to be over within ``seconds``, head and body. Then every request of this server ends with it.
        """
        begun = time.perf_counter()
        try:
            with faults(self.name), watched(seconds, self._end):
                yield begun
        except FaultError as fault:
            if self._ended or time.perf_counter() - begun >= seconds:
                remedies = ("timeout",) * (seconds == self._timeout)
                raise ServerError(
                    f"{self.name}: expected an answer within {seconds:g} seconds.", remedies=remedies
                ) from None
            advice = "Check that it runs, and its address" if fault.kind else "Its log may say why, if it speaks HTTP"
            raise ServerError(f"{self.name}: {fault}. {advice}.", remedies=("timeout",) * bool(fault.kind)) from None
        except ServerError as error:
            text = str(error)
            if not text.startswith(self.name):
                raise ServerError(f"{self.name}: {text.rstrip('.')}.", remedies=error.remedies) from None
            raise

    def _end(self) -> None:
        self._ended = True
        self._client.close()


def _limits(seconds: float) -> Any:
    """Of connecting, and of each read: the whole is the watch's affair."""
    return http_library().Timeout(seconds, connect=min(seconds, _CONNECT_TIMEOUT))


def _parse(url: str) -> tuple[str, tuple[str, ...]]:
    """A URL without login, query and what the API adds to it; user and password."""
    login: tuple[str, ...] = ()
    try:
        scheme, host, _ = origin_of(url)
        parts = urlsplit(url)
        if parts.username is not None:
            login = unquote(parts.username), unquote(parts.password or "")
    except ValueError:
        host = None
    if not host or scheme not in ("http", "https") or not url.isprintable() or " " in url:
        shown = escape(url.partition("?")[0].rpartition("@")[2])
        raise MtpExtractError(f"{shown}: expected the URL of a server, such as http://localhost:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", "")), login


def _json(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise ServerError(f"expected a JSON object, found {escape(data[:60].decode('utf-8', 'replace')) or 'nothing'}")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(choice: Any) -> str:
    """What an event adds to the text: of a completion, or of a chat."""
    delta = at(choice, "delta")
    # Some say the same thought under both names.
    found = at(choice, "text"), at(delta, "reasoning") or at(delta, "reasoning_content"), at(delta, "content")
    return "".join(text for text in found if isinstance(text, str))
