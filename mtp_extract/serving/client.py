"""A client of OpenAI-compatible servers: vLLM, SGLang, llama-server, mlx-vlm's, and others with the same protocol.

Answers are streamed, and every event is timed as it arrives. What a server sends is untrusted: it is bounded in size
and time, checked in type, and its counts are compared with what was asked for. huggingface_hub's own HTTP client is
not used: it may be offline, or hold what an application put there for the Hub.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import TimeoutError as Late
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple, replace

from mtp_extract.errors import MtpExtractError, ServerError, escape, few
from mtp_extract.io.http_library import http_library
from mtp_extract.io.typed import Count, NotNegative, Record
from mtp_extract.serving.counters import (
    KINDS,
    Counters,
    Kind,
    get_field,
    parse_page_counters,
    read_answer_counters,
    sum_counts,
)

_Input = TypeVar("_Input")
_Reply = TypeVar("_Reply")
Clock = Callable[[], float]

_PAGE_TIMEOUT, _ANSWER_TIMEOUT = 30.0, 300.0  # seconds
_LARGEST_PAGE, _LARGEST_TOKEN = 1 << 24, 1 << 14  # bytes
_SETTLING_TIME, _POLL_INTERVAL = 2.0, 0.05  # seconds that counters may trail behind answers, and between looks
_BEYOND_LIMIT = 1  # tokens that an answer may have beyond the limit: servers count the one that ends it, or do not
_MARKS = 8  # tokens without text: those that begin and end an answer, or thoughts
_BY_BOTH = ("requests", "tokens", "drafted", "accepted")  # counters that answers and pages agree on


def question(
    prompt: str | Sequence[Mapping[str, Any]], max_tokens: int, chat: bool = True, **more: Any
) -> dict[str, Any]:
    """The request for at most ``max_tokens`` tokens after ``prompt``: text, or messages with ``role`` and ``content``.

    Text is what a user says in a ``chat``, or else continued. ``more`` are further fields, such as ``temperature``.
    """
    if isinstance(prompt, str) and not chat:
        return {"prompt": prompt, "max_tokens": max_tokens, **more}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {"messages": messages, "max_tokens": max_tokens, **more}


class Answer(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """One answer. Null is what the server does not report."""

    text: str  #: all that was written, reasoning included, in order
    tokens: Count | None  #: generated, as the server counts
    first_s: NotNegative | None  #: seconds from connecting, for this request, to the first text; null without text
    seconds: NotNegative  #: from the first text to the last event of the text; 0 where all of the text came at once
    counted: Counters | None = None  #: the server's counters of this answer
    prompt_tokens: Count | None = None  #: of the prompt, as the server counts
    prompt_ids: tuple[Count, ...] | None = None  #: of the prompt as the server read it, where it was asked for them
    token_ids: tuple[Count, ...] | None = None  #: of the answer, where they were asked for
    reasoning: bool = False  #: whether some of the text came as thoughts, whose marks are not in it
    first_tokens: Count | None = None  #: tokens up to the first text, it included; null where the server does not say
    unstreamed: bool = False  #: whether tokens were counted whose text did not come: thoughts, by all signs
    streamed: bool = True  #: whether it came as a stream of events

    @property
    def timed_tokens(self) -> int | None:
        """Tokens that came after the first text, which are those of ``seconds``; None where nothing says how many.

        The first text counts as one token, as in ``vllm bench serve``, unless the server says how many came by then.
        """
        if self.tokens is None or (self.unstreamed and self.first_tokens is None):
            return None
        return self.tokens - (1 if self.first_tokens is None else self.first_tokens)


class _Choice(msgspec.Struct):
    """A choice in an event, or the delta in one."""

    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # some servers say it under both names
    delta: _Choice | None = None
    message: _Choice | None = None  # of an answer that is no stream
    finish_reason: str | None = None
    token_ids: tuple[Count, ...] | None = None
    prompt_token_ids: tuple[Count, ...] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: Count | None = None
    reasoning_tokens: Count | None = None  # SGLang
    completion_tokens_details: Any = None  # others say it in here

    @property
    def thoughts(self) -> int:
        """Tokens of thoughts among those of the completion; 0 where it does not say."""
        count = self.reasoning_tokens or get_field(self.completion_tokens_details, "reasoning_tokens")
        return count if isinstance(count, int) else 0


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] | None = None  # one is asked for
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: tuple[Count, ...] | None = None
    timings: Any = None  # these have servers' counters
    metrics: Any = None
    sglext: Any = None


def read_answer(stream: Iterable[bytes], sent: float, asked: int, clock: Clock = time.perf_counter) -> Answer:
    """The answer in ``stream`` to a request for at most ``asked`` tokens, ``sent`` at those seconds of ``clock``.

    Raises:
        ServerError: it is too large, ends in an error or before its end, or counts what such an answer cannot have.
    """
    return _build_answer(_read_events(stream, _LARGEST_PAGE + _LARGEST_TOKEN * asked, clock), sent, asked)


def _build_answer(events: Iterable[tuple[float, bytes]], sent: float, asked: int) -> Answer:
    """As :func:`read_answer`, of ``events`` with the seconds at which each was whole."""
    arrived = _PartialAnswer()
    is_done = False
    for now, data in events:
        if is_done := data == b"[DONE]":
            break
        arrived.add(_decode(data, _Event, "an event of an answer as JSON"), now)
    if not is_done and arrived.finish_reason is None:
        raise ServerError("expected a stream of events up to the answer's end, found one that ended before")

    texts = arrived.texts
    tokens = arrived.tokens
    arrived.check_counts(asked)
    first_tokens, unstreamed = _count_before_text(arrived)
    return Answer(
        text="".join(texts),
        tokens=tokens,
        first_s=arrived.first_at - sent if texts else None,
        # All of the text at once says when it was sent, not how long it took.
        seconds=arrived.last_at - arrived.first_at if len(texts) > 1 else 0.0,
        counted=arrived.counted,
        prompt_tokens=arrived.usage.prompt_tokens,
        prompt_ids=arrived.prompt_ids,
        token_ids=tuple(arrived.token_ids) if arrived.token_ids and len(arrived.token_ids) == tokens else None,
        reasoning=arrived.reasoning,
        first_tokens=first_tokens,
        unstreamed=unstreamed,
    )


@dataclass
class _PartialAnswer:
    """What has come of an answer."""

    texts: list[str] = field(default_factory=list)  # of each event that has some
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[Count, ...] | None = None
    first_at: float = 0.0  # seconds of the first text
    last_at: float = 0.0  # seconds of the last event of the text
    usage: _Usage = field(default_factory=_Usage)
    usage_at_first: _Usage = field(default_factory=_Usage)  # as the event of the first text has it
    counted: Counters | None = None
    reasoning: bool = False  # whether thoughts are among the texts
    finish_reason: str | None = None

    @property
    def tokens(self) -> int | None:
        """Generated, as the server counts; None where it does not say."""
        if self.usage.completion_tokens is None and self.counted:
            return self.counted.tokens
        return self.usage.completion_tokens

    def check_counts(self, asked: int) -> None:
        """Raise a ServerError where an answer of up to ``asked`` tokens cannot have the counts that came with it."""
        most = asked + _BEYOND_LIMIT
        # A text is at least one token.
        least = 1 if self.texts else 0
        is_possible = self.tokens is None or least <= self.tokens <= most
        if not is_possible or (self.counted and not self.counted.are_possible(most)):
            counts = f"{self.tokens} tokens, {self.counted}"
            raise ServerError(f"expected counts of an answer of up to {asked} tokens, found {counts}")

    def add(self, event: _Event, now: float) -> None:
        """Add what ``event`` has, which was whole at ``now``; ServerError where it is an error."""
        if event.error:
            raise ServerError(f"the answer ended in an error{_find_error_message(event.error)}")
        self.usage = event.usage or self.usage
        self.counted = read_answer_counters(event.timings, event.metrics, event.sglext) or self.counted
        choice = _Choice()
        if event.choices:
            choice = event.choices[0]
            self.last_at = now
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.token_ids += choice.token_ids or ()
        # vLLM says them beside the choices of a chat, and else in them.
        self.prompt_ids = event.prompt_token_ids or choice.prompt_token_ids or self.prompt_ids

        delta = choice.delta or choice.message or choice
        thought = delta.reasoning or delta.reasoning_content or ""
        self.reasoning = self.reasoning or bool(thought)
        text = (delta.text or "") + thought + (delta.content or "")
        if not text:
            return
        if not self.texts:
            self.first_at = now
            self.usage_at_first = event.usage or _Usage()
        self.texts.append(text)


def _count_before_text(arrived: _PartialAnswer) -> tuple[int | None, bool]:
    """Tokens up to the first text, where the server says; and whether there were some whose text was not streamed.

    Servers count thoughts that they keep to themselves. They took their time before the first text, so they do not
    belong over the time of the text. A token has at least a byte of text, but for a few marks.
    """
    tokens = arrived.tokens
    if not arrived.texts or tokens is None:
        return None, False
    so_far = arrived.usage_at_first.completion_tokens if len(arrived.texts) > 1 else None
    thoughts = 0 if arrived.reasoning else arrived.usage.thoughts
    if so_far is None and thoughts:
        so_far = thoughts + 1
    first, *following = (len(text.encode(errors="replace")) for text in arrived.texts)
    beyond_text = tokens > first + sum(following) + _MARKS or (so_far or 0) > first + _MARKS
    return so_far and min(so_far, tokens), thoughts > 0 or beyond_text


def sum_counters(answers: Sequence[Answer]) -> Counters:
    """What all of ``answers`` say together; null for what one of them does not."""
    counted = [replace(answer.counted or Counters(), requests=1, tokens=answer.tokens) for answer in answers]
    # Without positions, which no answer has.
    columns = zip(*(astuple(counters)[:-1] for counters in counted), strict=True)
    return Counters(*map(sum_counts, columns))  # type: ignore[arg-type]


class Server(AbstractContextManager["Server"]):
    """A server that answers at ``url`` until the end of a ``with`` block; what it is, and its model, is asked at once.

    Args:
        url: with or without ``/v1`` at its end.
        model: by its name there; None for the one it serves.
        key: sent as a bearer token.

    Raises:
        MtpExtractError: it cannot be reached, or is not what it should be.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        root = _parse_root(url)
        http = http_library()
        self.name = escape(root)
        self._http = http
        self._key = key
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # Each request has a connection of its own: under load llama-server closes one that is kept as a request comes.
        limits = http.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = http.Client(base_url=root, headers=headers, timeout=_ANSWER_TIMEOUT, limits=limits)
        try:
            ((self.kind, self.model),) = self._map(self._recognize, [model], _PAGE_TIMEOUT)
        except BaseException:
            self._client.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def _recognize(self, model: str | None) -> tuple[Kind, str]:
        """What it is; and ``model``, or the one that it serves."""
        header, body = self._fetch_page("/v1/models")
        listed = _decode(body, dict[str, Any], "a list of models").get("data")
        listed = listed if isinstance(listed, list) else []
        names = [name for entry in listed if isinstance(name := get_field(entry, "id"), str) and name]
        # Where none of those listed has a name, whoever names one knows more.
        is_known = model in names or (listed and not names)
        if not is_known if model is not None else len(names) != 1:
            wanted = "one model" if model is None else f"the model {escape(model)}"
            raise ServerError(f"expected {wanted}, found {few(names) or 'none'}. Name one", remedies=("model",))
        signs = {header.partition("/")[0], *(str(get_field(entry, "owned_by")) for entry in listed)}
        return next((kind for kind in KINDS if kind.sign in signs), Kind()), model or names[0]

    def counters(self) -> Counters:
        """What it counted since its start, everybody's requests together, if it reports that."""
        with suppress(ServerError):  # without this page, as llama-server is by default, or with another one
            ((_, page),) = self._map(self._fetch_page, ["/metrics"], _PAGE_TIMEOUT)
            return parse_page_counters(page.decode("utf-8", "replace"))
        return Counters()

    def counted(self, before: Counters, answers: Sequence[Answer], most_tokens: int) -> tuple[Counters, bool]:
        """What all of ``answers`` come to, with ``most_tokens`` at most; and whether somebody else used the server.

        What the answers do not say is taken from the server's counters, where these moved from ``before`` by exactly
        what the answers say; they may trail behind, so they are waited for.
        """
        in_answers = sum_counters(answers)
        deadline = time.monotonic() + _SETTLING_TIME
        most_tokens += _BEYOND_LIMIT * len(answers)
        while True:
            moved = self.counters() - before
            # What both count, as the page does and as the answers do.
            pairs = [(getattr(moved, name), getattr(in_answers, name)) for name in _BY_BOTH]
            pairs = [pair for pair in pairs if None not in pair]
            if not pairs:
                return in_answers, False
            merged = in_answers.fill_from(moved)
            if all(on_page == in_all for on_page, in_all in pairs) and merged.are_possible(most_tokens):
                return merged, False
            if time.monotonic() > deadline or any(on_page > in_all for on_page, in_all in pairs):
                return in_answers, True
            time.sleep(_POLL_INTERVAL)

    def ask(self, questions: Sequence[Mapping[str, Any]], at_a_time: int = 1) -> list[Answer]:
        """The answers to what :func:`question` makes, in order; ``at_a_time`` in flight while there are as many.

        Raises:
            MtpExtractError: there is no answer, or none that ends; the first such error ends all.
        """
        return self._map(self._fetch_answer, questions, _ANSWER_TIMEOUT, at_a_time)

    def try_each(self, questions: Sequence[Mapping[str, Any]], at_a_time: int = 1) -> list[Answer | ServerError]:
        """As :meth:`ask`, with the error of an answer that fails in its place.

        Raises:
            MtpExtractError: one takes so long that nobody waits for the others.
        """
        return self._map(self._try_fetch_answer, questions, _ANSWER_TIMEOUT, at_a_time)

    def _map(
        self, work: Callable[[_Input], _Reply], inputs: Sequence[_Input], seconds: float, at_a_time: int = 1
    ) -> list[_Reply]:
        """``work`` of each of ``inputs``; ends at an error, and where the next is not there in ``seconds``."""
        try:
            # Its threads are daemons: what they still wait for holds up neither this call nor the end of the process.
            with ThreadPool(max(1, min(at_a_time, len(inputs), 64))) as pool:
                results = pool.imap(work, inputs)
                return [results.next(seconds) for _ in inputs]
        except (ServerError, Late, self._http.HTTPError, UnicodeError) as error:
            raise self._describe_error(error, seconds) from None

    def _describe_error(self, error: Exception, seconds: float) -> ServerError:
        """What ``error`` means, without the key; what a connection that broke wrote may quote the request."""
        http, remedies = self._http, tuple[str, ...]()
        if isinstance(error, ServerError):
            words, remedies = str(error), error.remedies
        elif isinstance(error, (Late, http.TimeoutException)):
            words = f"expected an answer within {seconds:g} seconds"
        elif isinstance(error, (http.ConnectError, UnicodeError)):
            why = escape(error).rpartition("] ")[2]  # without its number
            words = f"the server cannot be reached: {why}. Check that it runs, and its address"
        else:
            words = "the connection was lost, or what came over it is not HTTP. Its log may say why"
        words = words.replace(self._key, "…") if self._key else words
        return ServerError(f"{self.name}: {escape(words, 400)}.", remedies=remedies)

    def _try_fetch_answer(self, question: Mapping[str, Any]) -> Answer | ServerError:
        try:
            return self._fetch_answer(question)
        except (ServerError, self._http.HTTPError) as error:
            return self._describe_error(error, _ANSWER_TIMEOUT)

    def _fetch_answer(self, question: Mapping[str, Any]) -> Answer:
        path = "/v1/completions" if "prompt" in question else "/v1/chat/completions"
        options = {"include_usage": True, **self.kind.stream_options}
        fields = {"model": self.model, "stream": True, "stream_options": options}
        # In ASCII: half a surrogate pair in a prompt is no UTF-8.
        content = json.dumps({**fields, **self.kind.request, **question}).encode()
        asked = question["max_tokens"]
        sent = time.perf_counter()

        def read(response: Any) -> Answer:
            if "json" in response.headers.get("content-type", ""):  # it streams nothing, and sends all in the end
                body = _read_body(response)
                return replace(_build_answer([(time.perf_counter(), body)], sent, asked), streamed=False)
            # Of the bytes as they come, without the layers that count and cut them: 3 µs a token.
            return read_answer(response.stream, sent, asked)

        return self._send(path, read, content)

    def _fetch_page(self, path: str) -> tuple[str, bytes]:
        """Who says that it answers, and the body of a page."""
        return self._send(path, lambda response: (response.headers.get("server", ""), _read_body(response)))

    def _send(self, path: str, read: Callable[[Any], _Reply], content: bytes | None = None) -> _Reply:
        """What ``read`` makes of the answer to a request: for a page, or with ``content``, which is JSON.

        A ServerError says that the server does not answer; in its own words, where it has some.
        """
        method = "POST" if content else "GET"
        headers = {"Content-Type": "application/json"} if content else {}
        with self._client.stream(method, path, content=content, headers=headers) as response:
            if (status := response.status_code) == 200:
                return read(response)
            page: dict[str, Any] = {}
            with suppress(ServerError):  # else it is a page for people
                page = _decode(_read_body(response), dict[str, Any], "a JSON object")
            reply = f"{status} {response.reason_phrase}".strip() + _find_error_message(page.get("error", page))
            reply += ". Give the address as it stands before /v1" if status == 404 else ""
            raise ServerError(f"expected {path}, found {reply}", remedies=("key",) if status in (401, 403) else ())


def _read_events(stream: Iterable[bytes], most_bytes: int, clock: Clock) -> Iterator[tuple[float, bytes]]:
    """The data of each event of ``stream``, with the seconds at which it was whole."""
    begun = bytearray()  # of a line whose end has not come; it is looked through once, however it comes
    for piece in _limit_size(stream, most_bytes):
        now = clock()
        begun += piece
        if b"\n" in piece:
            *lines, begun = begun.split(b"\n")
            yield from ((now, bytes(line[5:].strip())) for line in lines if line.startswith(b"data:"))


def _limit_size(stream: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    for piece in stream:
        most_bytes -= len(piece)
        if most_bytes < 0:
            raise ServerError("what it sends is too large for an answer")
        yield piece


def _read_body(response: Any) -> bytes:
    return b"".join(_limit_size(response.iter_raw(), _LARGEST_PAGE))


def _decode(data: bytes, kind: type[_Reply], what: str) -> _Reply:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):
        text = data.decode("utf-8", "replace") or "nothing"
        raise ServerError(f"expected {what}, found {text}") from None


def _find_error_message(error: Any) -> str:
    """What a server says of an error, to be put behind one's own words; empty where it says nothing."""
    candidates = (error, get_field(error, "message"), get_field(error, "detail"))
    words = next((text.strip() for text in candidates if isinstance(text, str)), "")
    return f": {words.rstrip('.')}" if words else ""


def _parse_root(url: str) -> str:
    """A URL without query and what the API adds to it; a MtpExtractError where it is none, or a login is in it."""
    http = http_library()
    try:
        parts = http.URL(url)
        usable = parts.scheme in ("http", "https") and parts.host and (parts.port or 1) < 1 << 16
    except (http.InvalidURL, ValueError):
        usable = False
    if not usable or parts.userinfo or not url.isprintable() or " " in url:
        name = escape(url.partition("?")[0].rpartition("@")[2])  # without a login, which is no one else's
        raise MtpExtractError(f"{name}: expected the URL of a server, without a login, such as http://localhost:8000.")
    return str(parts.copy_with(path=parts.path.rstrip("/").removesuffix("/v1"), query=None, fragment=None)).rstrip("/")
