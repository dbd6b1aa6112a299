"""An answer that is streamed as OpenAI's protocol has it, each piece timed as it arrives.

It is untrusted: bounded in size, checked in type, and its counts are compared with what was asked for. Little is
computed for a piece: a server sends ten thousand tokens a second, and the time that they wait here would count as its
own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mtp_extract.errors import ServerError, escape
from mtp_extract.io.typed import Count, NotNegative, Positive, Record
from mtp_extract.serving.counters import Counters, Kind, at, impossible

_LARGEST_EVENT, _LARGEST_TOKEN = 1 << 22, 1 << 14  # bytes


class Answer(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """One answer. Null is what the server does not tell."""

    text: str  #: all that was written, reasoning included, in order
    tokens: Count | None  #: generated, as the server counts
    first_tokens: Positive  #: of these, those that came with the first text: 1 unless the server tells otherwise
    first_s: NotNegative | None  #: seconds from sending the request to the first text; null without text
    seconds: NotNegative  #: from the first text to the last event of the text; 0 where all of the text came at once
    whole_s: NotNegative  #: from sending the request to the end
    finish_reason: str | None = None  #: as the server says
    told: Counters | None = None  #: the server's counters of this answer
    impossible: tuple[str, ...] = ()  #: what was told and cannot be of this answer; it stands in none of the above
    prompt_tokens: Count | None = None  #: of the prompt, as the server counts
    token_ids: tuple[Count, ...] | None = None  #: of the answer, where they were asked for and told
    reasoning: bool = False  #: whether some of the text was told as thoughts, whose marks are not in it


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    # Where servers tell their counters.
    timings: Any = None
    metrics: Any = None
    sglext: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Reading:
    """An answer as it comes.

    Args:
        sent: when the request was; seconds of ``time.perf_counter``, as all times here.
        asked: tokens of the answer at most.
    """

    def __init__(self, kind: Kind, sent: float, asked: int) -> None:
        self._kind, self._sent, self._asked = kind, sent, asked
        self._rest, self._left = b"", _LARGEST_EVENT + _LARGEST_TOKEN * asked
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._first = self._last = self._end = sent
        self._tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._first_tokens = 1
        self._reasoning = self._done = False
        self._reason: str | None = None
        self._counters: Counters | None = None

    def take(self, now: float, piece: bytes) -> None:
        """What arrived at ``now``.

        Raises:
            ServerError: it is no part of an answer, too much for one, or the server says that there was an error.
        """
        self._end = now
        self._left -= len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LARGEST_EVENT or self._left < 0:
            raise ServerError("the answer is too large for one")
        for line in lines:
            if line.startswith(b"data:") and not self._done:
                data = line[5:].strip()
                self._done = data == b"[DONE]"
                if not self._done:
                    self._event(now, data)

    def _event(self, now: float, data: bytes) -> None:
        try:
            event = _decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            shown = escape(data[:60].decode("utf-8", "replace")) or "nothing"
            raise ServerError(f"expected an event of an answer as JSON, found {shown}") from None
        if event.error:
            raise ServerError(f"the answer ended in an error{words_of(event.error)}")
        if event.usage is not None:
            told, given = event.usage.completion_tokens, event.usage.prompt_tokens
            self._tokens = self._tokens if told is None else told
            self._prompt_tokens = self._prompt_tokens if given is None else given
        if self._kind.answer:
            counts = getattr(event, self._kind.answer[0])
            if counts is not None:
                self._counters = self._kind.of_answer({self._kind.answer[0]: counts}) or self._counters
        for choice in event.choices or ():
            self._choice(now, choice)

    def _choice(self, now: float, choice: _Choice) -> None:
        text, delta = choice.text or "", choice.delta
        if delta is not None:
            thought = delta.reasoning or delta.reasoning_content or ""  # some say it under both names
            self._reasoning |= bool(thought)
            text += thought + (delta.content or "")
        if text:
            if not self._pieces:
                self._first, self._first_tokens = now, self._tokens or 1
            self._pieces.append(text)
        self._last = now
        self._ids += choice.token_ids or ()
        self._reason = choice.finish_reason or self._reason

    def answer(self) -> Answer:
        """All of it.

        Raises:
            ServerError: it did not end.
        """
        if not self._done and self._reason is None:
            raise ServerError("the answer ended before its end")
        told, tokens, first = self._counters, self._tokens, self._first_tokens
        wrong = impossible(told, self._asked) if told is not None else ()
        told = None if wrong else told
        if tokens is None and told is not None:
            tokens = told.tokens
        # A text is at least one token, and no more than asked for.
        if tokens is not None and not (first if self._pieces else 0) <= tokens <= self._asked:
            found = f"{len(self._pieces)} pieces and at most {self._asked} tokens"
            wrong += (f"{escape(tokens, 24)} tokens of an answer of {found}",)
            tokens, first = None, 1
        return Answer(
            text="".join(self._pieces),
            tokens=tokens,
            first_tokens=first,
            first_s=self._first - self._sent if self._pieces else None,
            # All of the text at once says when it was sent, not how long it took.
            seconds=self._last - self._first if len(self._pieces) > 1 else 0.0,
            whole_s=self._end - self._sent,
            finish_reason=None if self._reason is None else escape(self._reason),
            told=told,
            impossible=wrong,
            prompt_tokens=self._prompt_tokens,
            token_ids=tuple(self._ids) if self._ids and len(self._ids) == tokens else None,
            reasoning=self._reasoning,
        )


def words_of(error: Any) -> str:
    """What a server says of an error, to be put behind one's own words; empty where it says nothing."""
    said = next((text for text in (error, at(error, "message"), at(error, "detail")) if isinstance(text, str)), "")
    return f": {said.strip().rstrip('.')}" if said.strip() else ""
