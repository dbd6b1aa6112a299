"""What a server did with prompts: texts and counters, one prompt at a time. All that is asked of the client is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_extract.serving.client import Prompt, Server
from mtp_extract.serving.counters import Counters

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
    kind: str  # as serving.counters calls it
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
            moved = (server.moved(before, 1, answer.tokens) if before is not None else None) or Counters()
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
