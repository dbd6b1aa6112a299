"""An answer that is streamed as OpenAI's protocol has it, each piece timed as it arrives.

It is untrusted: bounded in size, checked in type, and what it counts held against what was asked for. A piece is
parsed as it comes, with as little as that takes: a server sends ten thousand tokens a second, and the time that they
wait here would count as its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec import MsgspecError
from msgspec.json import Decoder

from mtp_extract.engines.kinds import Counters, Kind, at, impossible
from mtp_extract.errors import ServerError, escape

_LARGEST_EVENT, _LARGEST_TOKEN = 1 << 22, 1 << 14  # bytes
_decode = Decoder().decode


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
    gaps: tuple[float, ...] = ()  # seconds between each text and the one before it
    prompt_tokens: int | None = None  # of the prompt, as the server counts
    token_ids: tuple[int, ...] | None = None  # of the answer, where they were asked for and told
    reasoning: bool = False  # whether some of the text was told as thoughts, whose marks are not in it


class Reading:
    """An answer as it comes.

    Args:
        sent: when the request was; seconds of ``time.perf_counter``, as all times here.
        asked: tokens of the answer at most.
        timeout: seconds that it may take.
    """

    def __init__(self, kind: Kind, sent: float, asked: int, timeout: float) -> None:
        self._kind, self._sent, self._asked, self._timeout = kind, sent, asked, timeout
        self._rest, self._size, self._largest = b"", 0, _LARGEST_EVENT + _LARGEST_TOKEN * asked
        self._pieces: list[str] = []
        self._times: list[float] = []
        self._last = 0.0
        self._tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._first_tokens = 1
        self._ids: list[Any] = []
        self._reasoning = False
        self._reason: str | None = None
        self._counters: Counters | None = None
        self.done = False
        """Whether the server said that this is all."""

    def take(self, now: float, piece: bytes) -> None:
        """What arrived at ``now``.

        Raises:
            ServerError: it is no part of an answer, or too much for one.
        """
        self._size += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LARGEST_EVENT or self._size > self._largest:
            raise ServerError("the answer is too large for one")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                    return
                self._event(now, json_object(data))

    def _event(self, now: float, event: Mapping[str, Any]) -> None:
        if event.get("error"):
            raise EndedError(event)
        usage = event.get("usage")
        if usage is not None:
            self._tokens = _whole(at(usage, "completion_tokens"), self._tokens)
            self._prompt_tokens = _whole(at(usage, "prompt_tokens"), self._prompt_tokens)
        self._counters = self._kind.of_answer(event) or self._counters
        for choice in listed(event.get("choices")):
            text = self._text(choice)
            if text:
                if not self._pieces:
                    self._first_tokens = self._tokens or 1
                self._pieces.append(text)
                self._times.append(now)
            self._last = now
            if isinstance(choice, dict):
                self._ids += listed(choice.get("token_ids"))
                given = choice.get("finish_reason")
                self._reason = escape(given) if isinstance(given, str) else self._reason

    def _text(self, choice: Any) -> str:
        """What an event adds to the text: of a completion, or of a chat."""
        delta = at(choice, "delta")
        # Some say the same thought under both names.
        thought = at(delta, "reasoning") or at(delta, "reasoning_content")
        self._reasoning |= bool(thought)
        found = at(choice, "text"), thought, at(delta, "content")
        return "".join([text for text in found if isinstance(text, str)])

    def answer(self) -> Answer:
        """All of it.

        Raises:
            ServerError: it did not end.
        """
        if not self.done and self._reason is None:
            raise ServerError("the answer ended before its end")
        counters, tokens, asked = self._counters, self._tokens, self._asked
        first_tokens = self._first_tokens
        wrong = impossible(counters, asked, seconds=self._timeout) if counters is not None else ()
        if wrong:
            counters = None
        if tokens is None and counters is not None:
            tokens = counters.tokens
        # A text is at least one token, and no more than asked for.
        if tokens is not None and not (first_tokens if self._pieces else 0) <= tokens <= asked:
            pieces = len(self._pieces)
            wrong += (f"{escape(tokens, 24)} tokens of an answer of {pieces} pieces and at most {asked} tokens",)
            tokens, first_tokens = None, 1
        times = self._times
        ids = tuple(self._ids) if self._ids and len(self._ids) == tokens else None
        return Answer(
            text="".join(self._pieces),
            tokens=tokens,
            first_tokens=first_tokens,
            first_s=times[0] - self._sent if times else None,
            # All of the text at once says when it was sent, not how long it took.
            seconds=self._last - times[0] if len(times) > 1 else 0.0,
            finish_reason=self._reason,
            told=counters,
            impossible=wrong,
            gaps=tuple(b - a for a, b in pairwise(times)),
            prompt_tokens=self._prompt_tokens,
            token_ids=ids if ids and all(type(token) is int and token >= 0 for token in ids) else None,
            reasoning=self._reasoning,
        )


class EndedError(Exception):
    """The server ended the answer in an error, and ``page`` says which."""

    def __init__(self, page: Mapping[str, Any]) -> None:
        super().__init__()
        self.page = page


def json_object(data: bytes) -> Mapping[str, Any]:
    """The JSON object that a server sent.

    Raises:
        ServerError: it is none.
    """
    try:
        value = _decode(data)
    except (MsgspecError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"expected a JSON object, found {escape(data[:60].decode('utf-8', 'replace')) or 'nothing'}")
    return value


def listed(value: Any) -> list[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _whole(value: Any, other: int | None) -> int | None:
    return value if type(value) is int else other
