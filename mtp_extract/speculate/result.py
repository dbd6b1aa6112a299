"""What a generation returns: text, tokens, and the account of every round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_extract.speculate.arithmetic import Proportion


@dataclass(frozen=True)
class Round:
    """One round of one sequence: draft, verify, accept."""

    # drafts proposed and judged; of a tree, its steps. 0 when one token was left to generate, so that none was worth
    # drafting.
    drafted: int
    accepted: int  # drafts that stand and were emitted
    emitted: int  # tokens the round added: accepted plus one, unless a stop token ended the text among the drafts
    draft_ms: float  # wall time of all draft steps; in a batch, of the whole batch
    verify_ms: float  # wall time of the base's forward and the judgement; in a batch, of the whole batch
    ranks: tuple[int, ...] = ()  # of a tree, the rank of each accepted draft among those of its parent


@dataclass(frozen=True)
class Chunk:
    """One step of a stream."""

    text: str  # what to append; may be empty while a character is incomplete, or a stop string may have begun
    tokens: tuple[int, ...]  # the tokens of this round
    round: Round | None  # its account, or None for the first token, which comes from the prompt's own forward


@dataclass(frozen=True)
class Generation:
    """The result for one prompt."""

    prompt_tokens: tuple[int, ...]  # as fed to the base
    # who opened the prompt with a BOS token: ``template``, ``tokenizer`` or ``prompt`` (the caller's own text or ids);
    # None when it does not begin with one
    bos: str | None
    tokens: tuple[int, ...]  # generated, the stop token or those that spell a stop string included
    text: str | None  # ``tokens`` decoded without special tokens, up to the stop string; None without a tokenizer
    finish_reason: str  # ``stop`` at a stop token or stop string, ``length`` at ``max_new_tokens``
    # the account of each round. The first token comes from the prompt's forward and belongs to none.
    rounds: tuple[Round, ...]
    prefill_ms: float  # wall time of the prompt's forward

    @property
    def drafted(self) -> int:
        """Drafts proposed and judged."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts that stand."""
        return sum(r.accepted for r in self.rounds)

    @property
    def acceptance(self) -> float:
        """``accepted / drafted``; NaN when nothing was drafted. The success rate LiteRT-LM prints."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted / rounds with drafts; NaN without any."""
        rounds = sum(r.drafted > 0 for r in self.rounds)
        return 1 + self.accepted / rounds if rounds else math.nan

    @property
    def draft_ms(self) -> float:
        """Wall time of all drafting."""
        return sum(r.draft_ms for r in self.rounds)

    @property
    def verify_ms(self) -> float:
        """Wall time of all verification."""
        return sum(r.verify_ms for r in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, per second; NaN for one token. In a batch, of this sequence alone."""
        elapsed = self.draft_ms + self.verify_ms
        return 1e3 * (len(self.tokens) - 1) / elapsed if elapsed else math.nan

    @property
    def conditional(self) -> list[Proportion]:
        """Per step: accepted, of the rounds that accepted every step before it and drafted this one."""
        return conditional_by_step(self.rounds)

    @property
    def unconditional(self) -> list[Proportion]:
        """Per step: accepted, of the rounds that drafted it."""
        return unconditional_by_step(self.rounds)


def conditional_by_step(rounds: Sequence[Round]) -> list[Proportion]:
    """Conditional acceptance at step i, ``accepted_i / accepted_(i-1)``, of rounds that drafted step i."""
    return [
        Proportion(sum(r.accepted > step for r in reached), len(reached))
        for step in range(_longest(rounds))
        for reached in [[r for r in rounds if r.drafted > step and r.accepted >= step]]
    ]


def unconditional_by_step(rounds: Sequence[Round]) -> list[Proportion]:
    """Unconditional acceptance at step i, ``accepted_i / rounds``, over the rounds that drafted step i."""
    return [
        Proportion(sum(r.accepted > step for r in drafted), len(drafted))
        for step in range(_longest(rounds))
        for drafted in [[r for r in rounds if r.drafted > step]]
    ]


def _longest(rounds: Sequence[Round]) -> int:
    return max((r.drafted for r in rounds), default=0)
