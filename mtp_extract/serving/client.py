"""A client of OpenAI-compatible servers: vLLM, SGLang, llama-server, mlx-vlm's, and others with the same protocol.

Answers are streamed, and every event is timed as it arrives. What a server sends is untrusted: a request has one
deadline for head and body, an answer is bounded in size, checked in type, and its counts are compared with what was
asked for. Every request in flight has a thread, which nobody waits for once another has failed or time is up.
huggingface_hub's own HTTP client is not used: it may be offline, or hold what an application put there for the Hub.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from mtp_extract.errors import MtpExtractError, ServerError, escape, few
from mtp_extract.io.http_library import http_library
from mtp_extract.io.typed import Count, NotNegative, Positive, Record
from mtp_extract.serving.counters import KINDS, Counters, Kind, at

T = TypeVar("T")

_CONNECT_TIMEOUT, _PAGE_TIMEOUT = 10.0, 30.0  # seconds
_MOST_IN_FLIGHT = 64
_KEEP_ALIVE = 4.0  # seconds a connection is kept; servers close theirs after 5
_LARGEST_PAGE, _LARGEST_EVENT, _LARGEST_TOKEN = 1 << 24, 1 << 22, 1 << 14  # bytes
_LONGEST = 400  # characters of an error
_SETTLING_TIME, _POLL_INTERVAL = 2.0, 0.05  # seconds that counters may trail behind answers, and between looks
_REACH = "Check that it runs, and its address"
_REFUSED: Mapping[int, tuple[str, tuple[str, ...]]] = {
    401: ("wants a key, or does not accept this one", ("key",)),
    403: ("refuses access", ("key",)),
    404: ("has no {path}, or not this model. Give what stands before /v1 in its address", ("model",)),
    429: ("limits the rate of requests. Send fewer at a time, or try later", ("concurrency",)),
    503: ("is not available: it may still be loading its model, or have too much to do. Try later", ()),
}
"""What a status says of a server, and the arguments that may help."""

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or messages: dicts with ``role`` and ``content``."""


@dataclass(frozen=True)
class Question:
    """One prompt to be answered in at most ``max_tokens`` tokens."""

    prompt: Prompt
    max_tokens: int
    chat: bool = True  # take text as what a user says in a chat; else it is continued
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields of the request, such as ``temperature``


class Answer(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """One answer. Null is what the server does not report."""

    text: str  #: all that was written, reasoning included, in order
    tokens: Count | None  #: generated, as the server counts
    first_tokens: Positive  #: of these, those that came with the first text: 1 unless the server says otherwise
    first_s: NotNegative | None  #: seconds from sending the request to the first text; null without text
    seconds: NotNegative  #: from the first text to the last event of the text; 0 where all of the text came at once
    finish_reason: str | None = None  #: as the server says
    counted: Counters | None = None  #: the server's counters of this answer
    prompt_tokens: Count | None = None  #: of the prompt, as the server counts
    prompt_ids: tuple[Count, ...] | None = None  #: of the prompt as the server read it, where it was asked for them
    token_ids: tuple[Count, ...] | None = None  #: of the answer, where they were asked for
    reasoning: bool = False  #: whether some of the text came as thoughts, whose marks are not in it


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: list[Count] | None = None
    # Where servers report their counters.
    timings: Any = None
    metrics: Any = None
    sglext: Any = None


_decode, _NOTHING = msgspec.json.Decoder(_Event).decode, _Delta()


def _events(
    stream: Iterable[bytes], most_bytes: int, clock: Callable[[], float]
) -> Iterator[tuple[float, _Event | None]]:
    """The events of ``stream``, each with the seconds at which it was whole, and None for the last, which says so."""
    rest, done = b"", False
    for piece in stream:
        now = clock()
        most_bytes -= len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LARGEST_EVENT or most_bytes < 0:
            raise ServerError("the answer is too large for one")
        for line in lines:
            if done or not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            try:
                event = None if (done := data == b"[DONE]") else _decode(data)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                raise ServerError(f"expected an event of an answer as JSON, found {_shown(data)}") from None
            yield now, event


def read_answer(
    stream: Iterable[bytes],
    kind: Kind,
    sent: float,
    asked: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """The answer in the bytes of ``stream``, to a request of at most ``asked`` tokens that was ``sent`` at those
    seconds of ``clock``.

    Little is computed for an event: what others wait here counts as the server's time.

    Raises:
        ServerError: it is too large, ends in an error or before its end, or counts what such an answer cannot have.
    """
    pieces, ids, prompt_ids, times = list[str](), list[int](), list[int](), list[float]()
    usage, first_tokens = _Usage(), 1
    reason, counted, done, reasoning = None, None, False, False
    for now, event in _events(stream, _LARGEST_EVENT + _LARGEST_TOKEN * asked, clock):
        if event is None:
            done = True
            continue
        if event.error:
            raise ServerError(f"the answer ended in an error{_words_of(event.error)}")
        if event.usage is not None:
            usage = event.usage
        if kind.answer and (told := getattr(event, kind.answer[0])) is not None:
            counted = kind.of_answer({kind.answer[0]: told}) or counted
        for choice in event.choices or ():
            delta = choice.delta or _NOTHING
            thought = delta.reasoning or delta.reasoning_content or ""  # some say it under both names
            if text := (choice.text or "") + thought + (delta.content or ""):
                if not pieces:
                    times, first_tokens = [now, now], usage.completion_tokens or 1
                pieces.append(text)
            times[1:] = [now] if times else []
            ids += choice.token_ids or ()
            prompt_ids += choice.prompt_token_ids or ()
            reason, reasoning = choice.finish_reason or reason, reasoning or bool(thought)
        prompt_ids += event.prompt_token_ids or ()
    if not done and reason is None:
        raise ServerError("the answer ended before its end")
    tokens = usage.completion_tokens
    tokens = counted.tokens if tokens is None and counted is not None else tokens
    # A text is at least one token, and no more than asked for.
    least = first_tokens if pieces else 0
    if (tokens is not None and not least <= tokens <= asked) or (counted is not None and not counted.possible(asked)):
        found = escape(msgspec.json.encode(Counters(tokens=tokens) if counted is None else counted).decode())
        raise ServerError(f"expected counts of an answer of {least} to {asked} tokens, found {tokens} tokens, {found}")
    return Answer(
        text="".join(pieces),
        tokens=tokens,
        first_tokens=first_tokens,
        first_s=times[0] - sent if times else None,
        # All of the text at once says when it was sent, not how long it took.
        seconds=times[1] - times[0] if len(pieces) > 1 else 0.0,
        finish_reason=None if reason is None else escape(reason),
        counted=counted,
        prompt_tokens=usage.prompt_tokens,
        prompt_ids=tuple(prompt_ids) or None,
        token_ids=tuple(ids) if ids and len(ids) == tokens else None,
        reasoning=reasoning,
    )


class Server:
    """A server that answers at ``url``; what it is and which model it serves is asked at once.

    Args:
        url: with or without ``/v1`` at its end.
        model: by its name there; None for the one it serves.
        key: sent as a bearer token.
        timeout: seconds that an answer may take.

    Attributes:
        name: the URL, safe to show.
        kind: what it was recognised as.
        version: as it says; None if it does not.
        model: as it calls the one that is asked.
        computed: seconds in which the client computed, in all; so far as it waits, the time is the server's.

    Its connections are closed at the end of a ``with`` block.

    Raises:
        MtpExtractError: it cannot be reached, or is not what it should be.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 300.0) -> None:
        root = _root(url)
        self.name, self.computed, self._closed = escape(root), 0.0, False
        self._timeout, self._key, self._http = timeout, key, http_library()
        self._client = self._http.Client(
            base_url=root,
            headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
            timeout=self._http.Timeout(timeout, connect=_CONNECT_TIMEOUT),
            limits=self._http.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE
            ),
        )
        try:
            self._each([partial(self._recognise, model)], 1, _PAGE_TIMEOUT)
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._client.close()

    def _close_late(self, response: Any) -> None:
        """Close the connection of an answer that came after the client, which knows of it no more, was closed."""
        if self._closed:
            response.extensions["network_stream"].close()

    def _recognise(self, model: str | None) -> None:
        headers, body = self._get("/v1/models")
        listed = at(_json_object(body), "data")
        entries = [e for e in listed if isinstance(at(e, "id"), str)] if isinstance(listed, list) else []
        names = [str(entry["id"]) for entry in entries]
        # Some list what they could load, and say what they have loaded.
        loaded = [str(entry["id"]) for entry in entries if entry.get("loaded") is True] or names
        if not names:
            raise ServerError("expected a server that lists its models at /v1/models, found none. Check its address")
        if model not in names if model is not None else len(loaded) > 1:
            wanted = "one model" if model is None else f"the model {escape(model)}"
            raise ServerError(f"expected {wanted}, found {few(names)}. Name one", remedies=("model",))
        self.model, header = model or loaded[0], headers.get("server", "")
        owners = [entry["owned_by"] for entry in entries if entry.get("owned_by")]
        known = (kind for kind in KINDS if kind.owner in owners or (kind.header and header.startswith(kind.header)))
        self.kind = next(known, Kind())
        self.version: str | None = (header.partition("/")[2] or None) if self.kind.header else None
        if self.kind.version:
            place, key = self.kind.version
            try:
                found = at(_json_object((self._get(place))[1]), key)
            except ServerError:
                found = None  # a proxy may let /v1 alone through
            self.version = found if isinstance(found, str) else None

    def counters(self) -> Counters | None:
        """What it counted since its start, everybody's requests together; None if it reports none.

        Raises:
            ServerError: what it reports are no counters.
        """

        def read() -> Counters | None:
            try:
                _, body = self._get("/metrics")
            except ServerError:
                return None  # without this page, as llama-server is by default
            found = self.kind.of_page(body.decode("utf-8", "replace"))
            # Without these nobody can say whose the others are.
            return None if found.requests is None and found.tokens is None else found

        return self._each([read], 1, _PAGE_TIMEOUT)[0] if self.kind.page else None

    def moved(self, before: Counters | None, answers: Sequence[Answer], most_tokens: int) -> Counters | None:
        """By how much its counters moved since ``before`` for these ``answers`` of at most ``most_tokens`` each.

        They may trail behind the answers, so they are waited for. None if it reports none, or if they moved by other
        than these answers: somebody else uses the server, too.

        Raises:
            ServerError: what it reports are no counters.
        """
        listed = [answer.tokens for answer in answers]
        tokens = None if None in listed else sum(filter(None, listed))
        deadline = time.monotonic() + _SETTLING_TIME
        while before is not None and (after := self.counters()) is not None:
            found = after - before
            moved, wanted = (found.tokens, tokens) if found.requests is None else (found.requests, len(answers))
            if moved is not None and moved == wanted:
                counted = [answer.counted or Counters() for answer in answers]
                for name in ("drafted", "accepted"):
                    own: list[Any] = [getattr(one, name) for one in counted]
                    if None not in own and getattr(found, name) not in (None, sum(own)):
                        return None
                return found if found.possible(most_tokens, len(answers)) else None
            if (moved or 0) > (wanted or 0) or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_INTERVAL)
        return None

    def ask(self, questions: Sequence[Question], at_a_time: int = 1) -> list[Answer]:
        """The answers to ``questions``, in order; always ``at_a_time`` in flight while there are as many.

        Raises:
            MtpExtractError: there is no answer, or none that ends; the first such error ends all.
        """
        calls = [partial(self._answer, question) for question in questions]
        return self._each(calls, at_a_time, self._timeout, ("timeout",))

    def _each(
        self, calls: Sequence[Callable[[], T]], at_a_time: int, seconds: float, remedies: tuple[str, ...] = ()
    ) -> list[T]:
        """What ``calls`` return, in order; the first that fails ends all, as does that none ends for ``seconds``."""
        numbers, stop, found = iter(range(len(calls))), Event(), dict[int, T]()
        ended: SimpleQueue[tuple[int, Any, float]] = SimpleQueue()

        def work() -> None:
            for number in numbers:
                if stop.is_set():
                    return
                begun = time.thread_time()
                try:
                    result: Any = calls[number]()
                except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
                    result = error
                    stop.set()
                ended.put((number, result, time.thread_time() - begun))

        for _ in range(min(at_a_time, len(calls), _MOST_IN_FLIGHT)):
            Thread(target=work, daemon=True).start()
        try:
            while len(found) < len(calls):
                number, result, computed = ended.get(timeout=seconds)
                self.computed += computed
                if isinstance(result, Exception):
                    raise result
                found[number] = result
        except (ServerError, Empty, UnicodeError, self._http.HTTPError, self._http.InvalidURL) as error:
            said, remedies = self._words_for(error, seconds, remedies)
            said = said.replace(self._key, "…") if self._key else said
            raise ServerError(f"{self.name}: {escape(said.rstrip('.'), _LONGEST)}.", remedies=remedies) from None
        finally:
            stop.set()
        return [found[number] for number in range(len(calls))]

    def _words_for(self, error: Exception, seconds: float, remedies: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """What went wrong, and the arguments that may help."""
        if isinstance(error, ServerError):
            return str(error), error.remedies
        if isinstance(error, (Empty, self._http.ReadTimeout)):
            return f"expected an answer within {seconds:g} seconds", remedies
        if isinstance(error, self._http.ConnectTimeout):
            return f"the server does not answer in time. {_REACH}", ("timeout",)
        if isinstance(error, self._http.ConnectError):
            return f"the server cannot be reached: {re.sub(r'^.Errno -?[0-9]+. ', '', escape(error))}. {_REACH}", ()
        if isinstance(error, (self._http.InvalidURL, self._http.UnsupportedProtocol, UnicodeError)):
            return "this is not an address that can be requested", ()
        # What it wrote is never repeated: it may quote the request, and with it a key.
        return "the connection was lost, or what came over it is not HTTP. Its log may say why", ()

    def _answer(self, question: Question) -> Answer:
        prompt, most = question.prompt, question.max_tokens
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": most, **self.kind.request}
        path = "/v1/chat/completions"
        if isinstance(prompt, str) and not question.chat:
            path, body["prompt"] = "/v1/completions", prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        # In ASCII: half a surrogate pair in a prompt is no UTF-8.
        content, head = json.dumps(body | dict(question.more)).encode(), {"Content-Type": "application/json"}
        sent = time.perf_counter()
        with self._opened("POST", path, content=content, headers=head) as response:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ServerError(f"expected a stream of events, found {escape(kind) or 'nothing'}")
            # Of the bytes as they come, without the layers that count and cut them: 3 µs a token.
            return read_answer(self._in_time(response.stream, sent), self.kind, sent, most)

    def _in_time(self, stream: Iterable[bytes], sent: float) -> Iterator[bytes]:
        for piece in stream:
            if time.perf_counter() - sent > self._timeout:
                raise Empty
            yield piece

    def _get(self, path: str) -> tuple[Mapping[str, str], bytes]:
        """Head and body of a page."""
        with self._opened("GET", path) as response:
            return response.headers, _body(response)

    @contextmanager
    def _opened(self, method: str, path: str, **more: Any) -> Iterator[Any]:
        """The answer to a request, whose body is still to be read.

        Raises:
            ServerError: the server says that it does not answer; in its own words, where it has some.
        """
        with ExitStack() as at_last, self._client.stream(method, path, **more) as response:
            at_last.callback(self._close_late, response)
            if response.status_code != 200:
                try:
                    page = _json_object(_body(response))
                except ServerError:
                    page = {}  # a page for people
                known = "does not answer as an OpenAI-compatible server does", ()
                what, remedies = _REFUSED.get(response.status_code, known)
                said = f"{what.format(path=path)} ({response.status_code}){_words_of(page.get('error', page))}"
                raise ServerError(f"the server {said}", remedies=remedies)
            yield response


def _body(response: Any) -> bytes:
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > _LARGEST_PAGE:
            raise ServerError(f"expected a page of at most {_LARGEST_PAGE >> 20} MiB, found one that does not end")
    return bytes(body)


def _json_object(data: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ServerError(f"expected a JSON object, found {_shown(data)}") from None


def _shown(data: bytes) -> str:
    return escape(data[:60].decode("utf-8", "replace")) or "nothing"


def _words_of(error: Any) -> str:
    """What a server says of an error, to be put behind one's own words; empty where it says nothing."""
    said = next((text for text in (error, at(error, "message"), at(error, "detail")) if isinstance(text, str)), "")
    return f": {said.strip().rstrip('.')}" if said.strip() else ""


def _root(url: str) -> str:
    """A URL without query and what the API adds to it.

    Raises:
        MtpExtractError: it is none, or has a login in it, which would be shown and kept with the name of the server.
    """
    shown = escape(url.partition("?")[0].rpartition("@")[2])
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:
        host = None
    if not host or not url.isprintable() or " " in url:
        raise MtpExtractError(f"{shown}: expected the URL of a server, such as http://localhost:8000.")
    if parts.username is not None:
        raise MtpExtractError(f"{shown}: expected a URL without a login, found one. Give a key.", remedies=("key",))
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
