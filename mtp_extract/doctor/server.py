"""What a server did with prompts: texts and counters, one prompt at a time. All that is asked of the client is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.serving.client import Question, Server
from mtp_extract.serving.counters import Counters

_FEW_ROUNDS = 4  # half of one more or less says nothing of drafts in so few


@dataclass(frozen=True)
class Reply:
    """What a server did with one prompt. None is what it does not tell."""

    text: str
    tokens: int | None
    counted: Counters  # of this prompt alone
    ids: tuple[int, ...] | None = None  # of its tokens
    thoughts: bool = False  # whether some of the text was told as thoughts, whose marks are not in it
    prompt_tokens: int | None = None  # of the prompt, as the server wrote it

    @property
    def counts(self) -> bool:
        """Whether drafts and rounds are told, or follow."""
        return self.counted.accepted is not None or (self.counted.rounds is not None and self.tokens is not None)

    @property
    def rounds(self) -> float | None:
        """As told; or what tokens and accepted drafts leave, half of one less for a last one without drafts."""
        told, accepted = self.counted.rounds, self.counted.accepted
        if told is not None or self.tokens is None or accepted is None:
            return told
        found = self.tokens - 1 - accepted
        return found - 0.5 if found >= _FEW_ROUNDS else None


@dataclass(frozen=True)
class Asked:
    """A server, and its replies to all prompts, in their order."""

    name: str
    kind: str  # as serving.counters calls it
    version: str | None
    replies: tuple[Reply, ...]


def ask_all(plan: DoctorPlan, url: str, prompts: Sequence[Prompt]) -> Asked:
    """Ask every prompt, one at a time, so that the server's counters between two are of one answer.

    Counters that moved by more than one request are somebody else's too, and not taken.

    Raises:
        MtpExtractError: the server does not answer as it should.
    """
    with Server(url, model=plan.model, key=plan.key, timeout=plan.timeout) as server:
        asked = [_ask(server, plan, prompt) for prompt in prompts]
        return Asked(server.name, server.kind.name, server.version, tuple(asked))


def _ask(server: Server, plan: DoctorPlan, prompt: Prompt) -> Reply:
    before = server.counters()
    more = {"temperature": plan.temperature, **server.kind.ids}
    (answer,) = server.ask([Question(prompt.content, plan.max_tokens, plan.chat_template, more)])
    moved = server.moved(before, [answer], plan.max_tokens) or Counters()
    told = answer.counted or moved
    rounds = told.rounds if told.rounds is not None else moved.rounds
    counted = Counters(rounds=rounds, drafted=told.drafted, accepted=told.accepted, positions=moved.positions)
    return Reply(answer.text, answer.tokens, counted, answer.token_ids, answer.reasoning, answer.prompt_tokens)
