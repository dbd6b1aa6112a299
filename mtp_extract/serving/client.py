"""A client of OpenAI-compatible servers: vLLM, SGLang, llama-server, mlx-vlm's, and others with the same protocol.

Answers are streamed, and every event is timed as it arrives. Replies are untrusted: their size, time and types are
limited, and counts are compared with the request. huggingface_hub's HTTP client is not used, as it may be offline or
have an application's settings for the Hub.
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

from mtp_extract.errors import MtpExtractError, ServerError, escape, list_few
from mtp_extract.io.http_library import import_http_library
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
_SETTLING_TIME = 2.0  # seconds that counters may lag behind answers
_POLL_INTERVAL = 0.05  # seconds
_BEYOND_LIMIT = 1  # tokens of an answer beyond the limit: some servers also count the one that ends it
_MARKS = 8  # tokens without text: those that begin and end an answer, or thoughts
_BY_BOTH = ("requests", "tokens", "drafted", "accepted")  # counters that answers and pages define alike


def build_request(
    prompt: str | Sequence[Mapping[str, Any]], max_tokens: int, chat: bool = True, **more: Any
) -> dict[str, Any]:
    """Return the request for at most ``max_tokens`` tokens after ``prompt``: text, or messages.

    Text is a user's message in a ``chat``, else it is continued. ``more`` has other fields, such as ``temperature``.
    """
    if isinstance(prompt, str) and not chat:
        return {"prompt": prompt, "max_tokens": max_tokens, **more}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {"messages": messages, "max_tokens": max_tokens, **more}


class Answer(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """An answer; null means that the server does not report it."""

    text: str  #: all that was written, reasoning included, in order
    tokens: Count | None  #: generated, as the server counts
    first_s: NotNegative | None  #: seconds from connecting, for this request, to the first text; null without text
    seconds: NotNegative  #: from the first text to the last event of the text; 0 where all of the text came at once
    counted: Counters | None = None  #: the server's counters of this answer
    prompt_tokens: Count | None = None  #: of the prompt, as the server counts
    prompt_ids: tuple[Count, ...] | None = None  #: of the prompt as the server read it, if requested
    token_ids: tuple[Count, ...] | None = None  #: of the answer, if requested
    reasoning: bool = False  #: whether some of the text came as thoughts, whose marks are not in it
    first_tokens: Count | None = None  #: tokens up to the first text, it included; null where the server does not say
    unstreamed: bool = False  #: whether tokens were counted whose text did not come: thoughts, by all signs
    streamed: bool = True  #: whether it came as a stream of events

    @property
    def timed_tokens(self) -> int | None:
        """Tokens after the first text, which took ``seconds``; None if unknown.

        The first text counts as one token, as in ``vllm bench serve``, unless the server reports how many it has.
        """
        if self.tokens is None or (self.unstreamed and self.first_tokens is None):
            return None
        return self.tokens - (1 if self.first_tokens is None else self.first_tokens)


class _Choice(msgspec.Struct):
    """A choice in an event, or its delta or message."""

    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # some servers send both names
    delta: _Choice | None = None
    message: _Choice | None = None  # in an answer that is not streamed
    finish_reason: str | None = None
    token_ids: tuple[Count, ...] | None = None
    prompt_token_ids: tuple[Count, ...] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: Count | None = None
    reasoning_tokens: Count | None = None  # SGLang
    completion_tokens_details: Any = None  # other servers than SGLang

    @property
    def thoughts(self) -> int:
        """Tokens of thoughts among the completion's; 0 if not reported."""
        count = self.reasoning_tokens or get_field(self.completion_tokens_details, "reasoning_tokens")
        return count if isinstance(count, int) else 0


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] | None = None  # one is requested
    usage: _Usage | None = None
    error: Any = None
    prompt_token_ids: tuple[Count, ...] | None = None
    timings: Any = None  # this and the next two have servers' counters
    metrics: Any = None
    sglext: Any = None


def read_answer(stream: Iterable[bytes], sent: float, max_tokens: int, clock: Clock = time.perf_counter) -> Answer:
    """Read the answer in ``stream`` to a request for ``max_tokens`` tokens that was ``sent`` at that time of ``clock``.

    Raises:
        ServerError: it is too large, contains an error, is incomplete, or has impossible counts.
    """
    return _build_answer(_read_events(stream, _LARGEST_PAGE + _LARGEST_TOKEN * max_tokens, clock), sent, max_tokens)


def _build_answer(events: Iterable[tuple[float, bytes]], sent: float, max_tokens: int) -> Answer:
    """Build the answer from ``events`` with their times of arrival in seconds."""
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
    arrived.check_counts(max_tokens)
    first_tokens, unstreamed = _count_before_text(arrived)
    return Answer(
        text="".join(texts),
        tokens=tokens,
        first_s=arrived.first_at - sent if texts else None,
        # Text that came at once shows when it was sent, not how long it took.
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
    texts: list[str] = field(default_factory=list)  # of the events that have text
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[Count, ...] | None = None
    first_at: float = 0.0  # seconds of the first text
    last_at: float = 0.0  # seconds of the last event of the text
    usage: _Usage = field(default_factory=_Usage)
    usage_at_first: _Usage = field(default_factory=_Usage)  # in the event of the first text
    counted: Counters | None = None
    reasoning: bool = False  # whether thoughts are among the texts
    finish_reason: str | None = None

    @property
    def tokens(self) -> int | None:
        """Generated tokens, as the server counts; None if not reported."""
        if self.usage.completion_tokens is None and self.counted:
            return self.counted.tokens
        return self.usage.completion_tokens

    def check_counts(self, max_tokens: int) -> None:
        """Raise ServerError if the counts are impossible for an answer of up to ``max_tokens`` tokens."""
        most = max_tokens + _BEYOND_LIMIT
        # A text is at least one token.
        least = 1 if self.texts else 0
        is_possible = self.tokens is None or least <= self.tokens <= most
        if not is_possible or (self.counted and not self.counted.are_possible(most)):
            counts = f"{self.tokens} tokens, {self.counted}"
            raise ServerError(f"expected counts of an answer of up to {max_tokens} tokens, found {counts}")

    def add(self, event: _Event, now: float) -> None:
        """Add an event that arrived at ``now``; raise ServerError if it is an error."""
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
        # vLLM sends them beside the choices of a chat, and inside the choice of a completion.
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
    """Return the tokens up to the first text, if reported, and whether some tokens' text was not streamed.

    Some servers count thoughts that they do not send. Those were generated before the first text, so they must not
    count in the speed of the text. They show as more tokens than bytes of text: only a few marks have no text.
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
    """Sum the counters of ``answers``; null where one of them lacks it."""
    counted = [replace(answer.counted or Counters(), requests=1, tokens=answer.tokens) for answer in answers]
    # Without the last field, positions, which no answer has.
    columns = zip(*(astuple(counters)[:-1] for counters in counted), strict=True)
    return Counters(*map(sum_counts, columns))  # type: ignore[arg-type]


class Server(AbstractContextManager["Server"]):
    """A connection to the server at ``url`` for a ``with`` block; its kind and model are requested at once.

    Args:
        url: with or without ``/v1`` at its end.
        model: its name on the server; None for the only one.
        key: sent as a bearer token.

    Raises:
        MtpExtractError: it cannot be reached, or is not such a server.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        root = _parse_root(url)
        http = import_http_library()
        self.name = escape(root)
        self._http = http
        self._key = key
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # A new connection for each request: under load, llama-server may close a kept one as a request arrives.
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
        """Return the server's kind, and ``model`` or the only one that it lists."""
        header, body = self._fetch_page("/v1/models")
        listed = _decode(body, dict[str, Any], "a list of models").get("data")
        listed = listed if isinstance(listed, list) else []
        names = [name for entry in listed if isinstance(name := get_field(entry, "id"), str) and name]
        # If no listed model has a name, trust the caller's.
        is_known = model in names or (listed and not names)
        if not is_known if model is not None else len(names) != 1:
            wanted = "one model" if model is None else f"the model {escape(model)}"
            raise ServerError(f"expected {wanted}, found {list_few(names) or 'none'}. Name one", remedies=("model",))
        signs = {header.partition("/")[0], *(str(get_field(entry, "owned_by")) for entry in listed)}
        return next((kind for kind in KINDS if kind.sign in signs), Kind()), model or names[0]

    def read_counters(self) -> Counters:
        """Read the server's counters since its start, over all its users; all None if it does not report them."""
        with suppress(ServerError):  # llama-server has no such page by default
            ((_, page),) = self._map(self._fetch_page, ["/metrics"], _PAGE_TIMEOUT)
            return parse_page_counters(page.decode("utf-8", "replace"))
        return Counters()

    def count_answers(self, before: Counters, answers: Sequence[Answer], most_tokens: int) -> tuple[Counters, bool]:
        """Count ``answers``, which have ``most_tokens`` at most; return also whether somebody else used the server.

        Counts that the answers lack are taken from the server's counters, if these moved from ``before`` by exactly
        what the answers report. The counters may lag behind, so this waits for them.
        """
        in_answers = sum_counters(answers)
        deadline = time.monotonic() + _SETTLING_TIME
        most_tokens += _BEYOND_LIMIT * len(answers)
        while True:
            moved = self.read_counters() - before
            # The counts that both have: on the page, in the answers.
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
        """Send requests of :func:`build_request`, ``at_a_time`` in parallel, and return the answers in order.

        Raises:
            MtpExtractError: a request failed; the first failure ends all.
        """
        return self._map(self._fetch_answer, questions, _ANSWER_TIMEOUT, at_a_time)

    def try_each(self, questions: Sequence[Mapping[str, Any]], at_a_time: int = 1) -> list[Answer | ServerError]:
        """The same as :meth:`ask`, but a failed request has its error in place of the answer.

        Raises:
            MtpExtractError: an answer takes too long, which ends all.
        """
        return self._map(self._try_fetch_answer, questions, _ANSWER_TIMEOUT, at_a_time)

    def _map(
        self, work: Callable[[_Input], _Reply], inputs: Sequence[_Input], seconds: float, at_a_time: int = 1
    ) -> list[_Reply]:
        """Apply ``work`` to ``inputs`` in parallel; the first error ends all, and so does a wait of ``seconds``."""
        try:
            # The threads are daemons: those that still wait delay neither this call nor the end of the process.
            with ThreadPool(max(1, min(at_a_time, len(inputs), 64))) as pool:
                results = pool.imap(work, inputs)
                return [results.next(seconds) for _ in inputs]
        except (ServerError, Late, self._http.HTTPError, UnicodeError) as error:
            raise self._describe_error(error, seconds) from None

    def _describe_error(self, error: Exception, seconds: float) -> ServerError:
        """Return ``error`` as a ServerError; the key is removed, as a reply may quote the request."""
        http = self._http
        remedies = tuple[str, ...]()
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
        # JSON in ASCII, as a lone surrogate in a prompt cannot be encoded in UTF-8.
        content = json.dumps({**fields, **self.kind.request, **question}).encode()
        max_tokens = question["max_tokens"]
        sent = time.perf_counter()

        def read(response: Any) -> Answer:
            if "json" in response.headers.get("content-type", ""):  # not streamed
                body = _read_body(response)
                return replace(_build_answer([(time.perf_counter(), body)], sent, max_tokens), streamed=False)
            # Read the raw bytes: the client's layers for counting and cutting cost 3 µs for each token.
            return read_answer(response.stream, sent, max_tokens)

        return self._send(path, read, content)

    def _fetch_page(self, path: str) -> tuple[str, bytes]:
        """Return the ``Server`` header and the body of a page."""
        return self._send(path, lambda response: (response.headers.get("server", ""), _read_body(response)))

    def _send(self, path: str, read: Callable[[Any], _Reply], content: bytes | None = None) -> _Reply:
        """Send a request, a POST if it has JSON ``content``, and return what ``read`` makes of the response.

        Raises:
            ServerError: the status is not 200; the text has the server's own message, if it sends one.
        """
        method = "POST" if content else "GET"
        headers = {"Content-Type": "application/json"} if content else {}
        with self._client.stream(method, path, content=content, headers=headers) as response:
            if (status := response.status_code) == 200:
                return read(response)
            page: dict[str, Any] = {}
            with suppress(ServerError):  # an HTML page
                page = _decode(_read_body(response), dict[str, Any], "a JSON object")
            reply = f"{status} {response.reason_phrase}".strip() + _find_error_message(page.get("error", page))
            reply += ". Give the address as it stands before /v1" if status == 404 else ""
            raise ServerError(f"expected {path}, found {reply}", remedies=("key",) if status in (401, 403) else ())


def _read_events(stream: Iterable[bytes], most_bytes: int, clock: Clock) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each event of ``stream``, with the time at which it was complete."""
    begun = bytearray()  # an incomplete line; only new pieces are searched for its end
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
    """Return the message in a server's error, with a colon before it; empty if it has none."""
    candidates = (error, get_field(error, "message"), get_field(error, "detail"))
    words = next((text.strip() for text in candidates if isinstance(text, str)), "")
    return f": {words.rstrip('.')}" if words else ""


def _parse_root(url: str) -> str:
    """Return ``url`` without query and ``/v1``; raise MtpExtractError if it is not a URL or contains a login."""
    http = import_http_library()
    try:
        parts = http.URL(url)
        usable = parts.scheme in ("http", "https") and parts.host and (parts.port or 1) < 1 << 16
    except (http.InvalidURL, ValueError):
        usable = False
    if not usable or parts.userinfo or not url.isprintable() or " " in url:
        name = escape(url.partition("?")[0].rpartition("@")[2])  # a login must not be shown
        raise MtpExtractError(f"{name}: expected the URL of a server, without a login, such as http://localhost:8000.")
    return str(parts.copy_with(path=parts.path.rstrip("/").removesuffix("/v1"), query=None, fragment=None)).rstrip("/")
