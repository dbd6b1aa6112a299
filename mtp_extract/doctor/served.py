"""What a server did with prompts: texts and counters, one prompt at a time. All that is asked of the client is here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_extract.engines.kinds import Counters
from mtp_extract.engines.server import Prompt, Server
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.files import read_regular

_RATE = re.compile(rb"MTP Drafter - Success rate: ([0-9.]+)")
_LARGEST_LOG = 1 << 26
_FEW_ROUNDS = 4  # half of one more or less says nothing of drafts in so few


@dataclass(frozen=True)
class Told:
    """What a server did with one prompt. None is what it does not tell."""

    text: str
    tokens: int | None
    rounds: int | None
    drafted: int | None
    accepted: int | None
    by_step: tuple[int, ...] | None  # accepted at each step
    ids: tuple[int, ...] | None = None  # of its tokens
    thoughts: bool = False  # whether some of the text was told as thoughts, whose marks are not in it
    prompt_tokens: int | None = None  # of the prompt, as the server wrote it

    @property
    def counts(self) -> bool:
        """Whether drafts and rounds can be told."""
        return self.accepted is not None or (self.rounds is not None and self.tokens is not None)

    @property
    def made(self) -> float | None:
        """Rounds: as told; or what tokens and accepted drafts leave, half of one less for a last one without drafts."""
        if self.rounds is not None or self.tokens is None or self.accepted is None:
            return self.rounds
        found = self.tokens - 1 - self.accepted
        return found - 0.5 if found >= _FEW_ROUNDS else None


@dataclass(frozen=True)
class Asked:
    """A server, and what it told of every prompt, in their order."""

    name: str
    kind: str  # as engines.kinds calls it
    version: str | None
    answers: tuple[Told, ...]


def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    *,
    model: str | None,
    key: str | None,
    timeout: float,
    max_tokens: int,
    temperature: float,
    chat: bool,
) -> Asked:
    """Ask every prompt, one at a time, so that the server's counters between two are of one answer.

    Counters that moved by more than one request are somebody else's too, and not taken.

    Raises:
        MtpExtractError: the server does not answer as it should.
    """
    with Server(url, model=model, key=key, timeout=timeout) as server:
        answers = []
        for prompt in prompts:
            before = server.counters()
            answer = server.ask(prompt, max_tokens=max_tokens, chat=chat, temperature=temperature, **server.kind.ids)
            moved = _moved(server, before, answer.tokens) or Counters()
            told = answer.told or moved
            answers.append(
                Told(
                    text=answer.text,
                    tokens=answer.tokens,
                    rounds=told.rounds if told.rounds is not None else moved.rounds,
                    drafted=told.drafted,
                    accepted=told.accepted,
                    by_step=moved.positions,
                    ids=answer.token_ids,
                    thoughts=answer.reasoning,
                    prompt_tokens=answer.prompt_tokens,
                )
            )
        return Asked(server.name, server.kind.name, server.version, tuple(answers))


def _moved(server: Server, before: Counters | None, tokens: int | None) -> Counters | None:
    """By how much the page's counters moved for one answer; None if it has none, or if somebody else moved them."""
    asked = Counters(requests=1, tokens=tokens)
    moved = server.moved(before, asked) if before is not None else None
    return moved if moved is not None and moved.is_of(asked) else None


def rate_in(log: Path) -> float:
    """The share of drafts that LiteRT-LM says were accepted, the last time it says so.

    Raises:
        MtpExtractError: it says none.
    """
    try:
        found = _RATE.findall(read_regular(log, _LARGEST_LOG))
    except OSError as error:
        raise MtpExtractError(
            f"{escape(log)}: expected a log that can be read, found: {error.strerror}. Check the path."
        ) from error
    try:
        rate = float(found[-1])
    except (IndexError, ValueError):
        rate = -1.0
    if not 0 <= rate <= 1:
        raise MtpExtractError(
            f'{escape(log)}: expected a line "MTP Drafter - Success rate: …" of LiteRT-LM, found none. Let it log at '
            "INFO, and close the engine before the log is read."
        )
    return rate
