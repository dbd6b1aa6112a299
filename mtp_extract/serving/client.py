"""A client of OpenAI-compatible servers: vLLM, SGLang, llama-server, mlx-vlm's, and others with the same protocol.

Answers are streamed, and every event is timed as it arrives. What a server sends is untrusted: it is bounded in size
and time, checked in type, and its counts are compared with what was asked for. Every request in flight has a thread,
which takes less time for a token than a coroutine does, and which nobody waits for once another has failed or time is
up. huggingface_hub's own HTTP client is not used: it may be offline, or hold what an application put there for the Hub.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import TimeoutError as Late
from multiprocessing.pool import ThreadPool
from threading import Event
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from mtp_extract.errors import MtpExtractError, ServerError, escape, few
from mtp_extract.io.http_library import http_library
from mtp_extract.io.typed import Count, NotNegative, Positive, Record
from mtp_extract.serving.counters import KINDS, Counters, Kind, at, total

T = TypeVar("T")

_PAGE_TIMEOUT = 30.0  # seconds
_MOST_IN_FLIGHT = 64
_KEEP_ALIVE = 4.0  # seconds a connection is kept; servers close theirs after 5
_LARGEST_PAGE, _LARGEST_TOKEN = 1 << 24, 1 << 14  # bytes
_LONGEST = 400  # characters of an error
_SETTLING_TIME, _POLL_INTERVAL = 2.0, 0.05  # seconds that counters may trail behind answers, and between looks
_REMEDIES = {401: ("key",), 403: ("key",), 404: ("model",), 429: ("concurrency",)}  # arguments that may help, by status
_BY_BOTH = ("requests", "tokens", "drafted", "accepted")  # counters that answers and pages agree on

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


class _Choice(msgspec.Struct):
    """A choice in an event, or the delta in one."""

    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # some servers say it under both names
    delta: _Choice | None = None
    finish_reason: str | None = None
    token_ids: tuple[Count, ...] | None = None
    prompt_token_ids: tuple[Count, ...] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: Count | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] | None = None  # one is asked for
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: tuple[Count, ...] | None = None
    # Where servers report their counters.
    timings: Any = None
    metrics: Any = None
    sglext: Any = None


class _Model(msgspec.Struct):
    id: str
    owned_by: Any = None
    loaded: Any = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _events(
    stream: Iterable[bytes], most_bytes: int, clock: Callable[[], float]
) -> Iterator[tuple[float, _Event | None]]:
    """The events of ``stream``, each with the seconds at which it was whole; None where it says that these are all."""
    rest = b""
    for piece in _bounded(stream, most_bytes):
        now = clock()
        *lines, rest = (rest + piece).split(b"\n")
        for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            event = None if data == b"[DONE]" else _decoded(data, _Event, "an event of an answer as JSON")
            if event and event.error:
                raise ServerError(f"the answer ended in an error{_words_of(event.error)}")
            yield now, event


def read_answer(
    stream: Iterable[bytes], kind: Kind, sent: float, asked: int, clock: Callable[[], float] = time.perf_counter
) -> Answer:
    """The answer in the bytes of ``stream``, to a request of at most ``asked`` tokens that was ``sent`` at those
    seconds of ``clock``.

    Raises:
        ServerError: it is too large, ends in an error or before its end, or counts what such an answer cannot have.
    """
    texts, times, ids, ended, done, reasoning = list[str](), list[float](), list[int](), 0.0, False, False
    usage, least, reason, counted, prompt_ids = _Usage(), 0, None, None, None
    for now, event in _events(stream, _LARGEST_PAGE + _LARGEST_TOKEN * asked, clock):
        if done := done or event is None:
            continue  # to the end of the stream, so that its connection can be used again
        choice, ended = (event.choices[0], now) if event.choices else (_Choice(), ended)
        usage, reason = event.usage or usage, choice.finish_reason or reason
        counted = kind.of_answer(asdict(event)) or counted
        # vLLM says them beside the choices of a chat, and else in them.
        prompt_ids = event.prompt_token_ids or choice.prompt_token_ids or prompt_ids
        ids += choice.token_ids or ()
        said = choice.delta or choice
        thought = said.reasoning or said.reasoning_content or ""
        reasoning = reasoning or bool(thought)
        if text := (said.text or "") + thought + (said.content or ""):
            # A text is at least one token.
            least = least or (event.usage or _Usage()).completion_tokens or 1
            texts.append(text)
            times.append(now)
    if not done and reason is None:
        raise ServerError("the answer ended before its end")
    tokens = counted.tokens if usage.completion_tokens is None and counted else usage.completion_tokens
    if not least <= (least if tokens is None else tokens) <= asked or (counted and not counted.possible(asked)):
        found = f"{escape(tokens)} tokens, {escape(msgspec.json.encode(counted).decode())}"
        raise ServerError(f"expected counts of an answer of {least} to {asked} tokens, found {found}")
    return Answer(
        text="".join(texts),
        tokens=tokens,
        first_tokens=least or 1,
        first_s=times[0] - sent if times else None,
        # All of the text at once says when it was sent, not how long it took.
        seconds=ended - times[0] if times[1:] else 0.0,
        finish_reason=None if reason is None else escape(reason),
        counted=counted,
        prompt_tokens=usage.prompt_tokens,
        prompt_ids=prompt_ids,
        token_ids=tuple(ids) if ids and len(ids) == tokens else None,
        reasoning=reasoning,
    )


def counted_in(answers: Sequence[Answer]) -> Counters:
    """What all of ``answers`` say together; null for what one of them does not."""
    counted = [answer.counted or Counters() for answer in answers]
    return Counters(
        requests=len(answers),
        tokens=total(answer.tokens for answer in answers),
        rounds=total(one.rounds for one in counted),
        drafted=total(one.drafted for one in counted),
        accepted=total(one.accepted for one in counted),
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

    Its connections are closed at the end of a ``with`` block.

    Raises:
        MtpExtractError: it cannot be reached, or is not what it should be.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 300.0) -> None:
        root, http = _root(url), http_library()
        self.name, self._http, self._timeout, self._key = escape(root), http, timeout, key
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        limits = http.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE)
        self._client = http.Client(base_url=root, headers=headers, timeout=timeout, limits=limits)
        try:
            self._each([partial(self._recognise, model)], _PAGE_TIMEOUT)
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def _recognise(self, model: str | None) -> None:
        header, body = self._page("/v1/models")
        listed = _decoded(body, _Models, "a list of models").data
        names = [one.id for one in listed]
        # Some list what they could load, and say what they have loaded.
        loaded = [one.id for one in listed if one.loaded is True] or names
        if not names:
            raise ServerError("expected a server that lists its models at /v1/models, found none. Check its address")
        if model not in names if model is not None else len(loaded) > 1:
            wanted = "one model" if model is None else f"the model {escape(model)}"
            raise ServerError(f"expected {wanted}, found {few(names)}. Name one", remedies=("model",))
        self.model, owners = model or loaded[0], [one.owned_by for one in listed if one.owned_by]
        known = (kind for kind in KINDS if kind.owner in owners or (kind.header and header.startswith(kind.header)))
        self.kind = next(known, Kind())
        version: Any = header.partition("/")[2] if self.kind.header else None
        if self.kind.version:
            page, key = self.kind.version
            try:
                version = _decoded(self._page(page)[1], dict[str, Any], "a JSON object").get(key)
            except ServerError:
                version = None  # a proxy may let /v1 alone through
        self.version: str | None = version if version and isinstance(version, str) else None

    def counters(self) -> Counters | None:
        """What it counted since its start, everybody's requests together; None if it reports none.

        Raises:
            ServerError: what it reports are no counters.
        """

        def read() -> Counters:
            try:
                _, body = self._page("/metrics")
            except ServerError:
                return Counters()  # without this page, as llama-server is by default
            return self.kind.of_page(body.decode("utf-8", "replace"))

        found = self._each([read], _PAGE_TIMEOUT)[0] if self.kind.page else Counters()
        # Without these nobody can say whose the others are.
        return None if found.requests is None and found.tokens is None else found

    def counted(self, before: Counters | None, answers: Sequence[Answer], most_tokens: int) -> tuple[Counters, bool]:
        """What all of ``answers`` come to, and whether somebody else used the server meanwhile.

        What the answers do not say is taken from the server's counters, where these moved by what the answers say.
        They may trail behind, so they are waited for.

        Args:
            before: the counters before the first of these was asked.
            most_tokens: that all answers may have.

        Raises:
            ServerError: what it reports are no counters.
        """
        told, deadline = counted_in(answers), time.monotonic() + _SETTLING_TIME
        while before is not None and (after := self.counters()) is not None:
            moved = after - before
            pairs = [(getattr(moved, name), getattr(told, name)) for name in _BY_BOTH]
            known = [pair for pair in pairs if None not in pair]
            if known and all(by_page == by_answers for by_page, by_answers in known):
                found = told.filled(moved)
                return (found, False) if found.possible(most_tokens) else (told, True)
            if any(by_page > by_answers for by_page, by_answers in known) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_INTERVAL)
        return told, before is not None

    def ask(self, questions: Sequence[Question], at_a_time: int = 1) -> list[Answer]:
        """The answers to ``questions``, in order; always ``at_a_time`` in flight while there are as many.

        Raises:
            MtpExtractError: there is no answer, or none that ends; the first such error ends all.
        """
        calls = [partial(self._answer, question) for question in questions]
        return self._each(calls, self._timeout, at_a_time, ("timeout",))

    def _each(
        self, calls: Sequence[Callable[[], T]], seconds: float, at_a_time: int = 1, remedies: tuple[str, ...] = ()
    ) -> list[T]:
        """What ``calls`` return, in order; the first that fails ends all, as does that none ends for ``seconds``."""
        failed = Event()

        def work(number: int) -> tuple[int, Any]:
            try:
                return number, None if failed.is_set() else calls[number]()
            except Exception:
                failed.set()
                raise

        try:
            # Its threads are daemons: what they still wait for holds up neither this call nor the end of the process.
            with ThreadPool(max(1, min(at_a_time, len(calls), _MOST_IN_FLIGHT))) as pool:
                ended = pool.imap_unordered(work, range(len(calls)))
                found = dict(ended.next(seconds) for _ in calls)
            return [found[number] for number in range(len(calls))]
        except ServerError as error:
            said, remedies = str(error).rstrip("."), error.remedies
        except (Late, self._http.TimeoutException):
            said = f"expected an answer within {seconds:g} seconds"
        except (self._http.ConnectError, UnicodeError) as error:
            why, remedies = re.sub(r"^.Errno -?[0-9]+. ", "", escape(error)), ()
            said = f"the server cannot be reached: {why}. Check that it runs, and its address"
        except self._http.HTTPError:
            # What it wrote is never repeated: it may quote the request, and with it a key.
            said, remedies = "the connection was lost, or what came over it is not HTTP. Its log may say why", ()
        said = said.replace(self._key, "…") if self._key else said
        raise ServerError(f"{self.name}: {escape(said, _LONGEST)}.", remedies=remedies)

    def _answer(self, question: Question) -> Answer:
        prompt, most = question.prompt, question.max_tokens
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": most, **self.kind.request}
        path = "/v1/chat/completions"
        if isinstance(prompt, str) and not question.chat:
            path, body["prompt"] = "/v1/completions", prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        # In ASCII: half a surrogate pair in a prompt is no UTF-8.
        content, sent = json.dumps(body | dict(question.more)).encode(), time.perf_counter()

        def read(response: Any) -> Answer:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ServerError(f"expected a stream of events, found {escape(kind) or 'nothing'}")
            # Of the bytes as they come, without the layers that count and cut them: 3 µs a token.
            return read_answer(response.stream, self.kind, sent, most)

        return self._request(path, read, content)

    def _page(self, path: str) -> tuple[str, bytes]:
        """Who says that it answers, and the body of a page."""
        return self._request(path, lambda response: (response.headers.get("server", ""), _body(response)))

    def _request(self, path: str, read: Callable[[Any], T], content: bytes | None = None) -> T:
        """What ``read`` makes of the answer to a request: for a page, or with ``content``, which is JSON.

        Raises:
            ServerError: the server says that it does not answer; in its own words, where it has some.
        """
        method, headers = "POST" if content else "GET", {"Content-Type": "application/json"} if content else {}
        with self._client.stream(method, path, content=content, headers=headers) as response:
            if (status := response.status_code) == 200:
                return read(response)
            try:
                page = _decoded(_body(response), dict[str, Any], "a JSON object")
            except ServerError:
                page = {}  # a page for people
            said, found = _words_of(page.get("error", page)), f"{status} {response.reason_phrase}".strip()
            if status == 404:
                said += ". Give the address as it stands before /v1"
            raise ServerError(f"expected {path}, found {found}{said}", remedies=_REMEDIES.get(status, ()))


def _bounded(stream: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    for piece in stream:
        most_bytes -= len(piece)
        if most_bytes < 0:
            raise ServerError("what it sends is too large for an answer")
        yield piece


def _body(response: Any) -> bytes:
    return b"".join(_bounded(response.iter_raw(), _LARGEST_PAGE))


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):
        found = escape(data[:60].decode("utf-8", "replace")) or "nothing"
        raise ServerError(f"expected {what}, found {found}") from None


def _words_of(error: Any) -> str:
    """What a server says of an error, to be put behind one's own words; empty where it says nothing."""
    said = next((text for text in (error, at(error, "message"), at(error, "detail")) if isinstance(text, str)), "")
    return f": {said.strip().rstrip('.')}" if said.strip() else ""


def _root(url: str) -> str:
    """A URL without query and what the API adds to it.

    Raises:
        MtpExtractError: it is none, or has a login in it, which would be shown and kept with the name of the server.
    """
    http, shown = http_library(), escape(url.partition("?")[0].rpartition("@")[2])
    try:
        parts = http.URL(url)
        usable = parts.scheme in ("http", "https") and parts.host and (parts.port is None or 0 < parts.port < 1 << 16)
    except (http.InvalidURL, ValueError):
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise MtpExtractError(f"{shown}: expected the URL of a server, such as http://localhost:8000.")
    if parts.userinfo:
        raise MtpExtractError(f"{shown}: expected a URL without a login, found one. Give a key.", remedies=("key",))
    path = parts.path.rstrip("/").removesuffix("/v1")
    return str(parts.copy_with(path=path, query=None, fragment=None)).rstrip("/")
