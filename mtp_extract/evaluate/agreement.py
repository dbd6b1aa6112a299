"""Agreement with the base: what the drafter drafts after every token of the base's own greedy text.

Definitions (as in vLLM and llama.cpp), for a round that drafts K tokens after an anchor token:

- *conditional* acceptance at step i: accepted_i / accepted_(i-1);
- *teacher-forced tokens per round*: 1 + accepted / rounds, the token the base adds included; of rounds that have all K
  targets.

Every position of the text is an anchor, so positions of one text overlap. All intervals are therefore taken over texts,
which are independent, and not over positions; a text that repeats another is not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluate.batches import base_texts, groups
from mtp_extract.evaluate.intervals import Interval
from mtp_extract.evaluate.measured import of_agreement, share_over_texts
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.evaluate.texts import repeats
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Along, Text, ranks_of_text, read_texts, teacher_forced

_RUN = 8

Found = TypeVar("Found", Agreement, Along)


@dataclass(frozen=True)
class Continuations:
    """The base's greedy continuations. One entry a prompt, in order."""

    prompts: tuple[Prompt, ...]  # texts and workloads
    texts: tuple[Text, ...]  # prompt and continuation

    @property
    def usable(self) -> tuple[int, ...]:
        """Indices of texts with at least one position to draft from, each of those that repeat one another once."""
        return tuple(index for index, text in enumerate(self.texts) if text.anchors and index not in self.repeats)

    @cached_property
    def repeats(self) -> frozenset[int]:
        """Indices of texts that repeat one before them, and are not counted."""
        return repeats([text.tokens for text in self.texts])

    @property
    def repeated(self) -> float:
        """Share of eight-token runs of the continuations that stand earlier in the same one: how much is loops."""
        seen = total = 0
        for text in self.texts:
            new = text.continuation
            runs = [tuple(new[at : at + _RUN]) for at in range(len(new) - _RUN + 1)]
            seen, total = seen + len(runs) - len(set(runs)), total + len(runs)
        return seen / total if total else 0.0

    def of_workload(self, name: str) -> list[int]:
        return [index for index, prompt in enumerate(self.prompts) if prompt.workload == name]

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names, in order of first appearance."""
        return tuple(dict.fromkeys(prompt.workload for prompt in self.prompts))


class Step(Record):
    """One draft of a round, at every position that has a target there."""

    step: Positive  #: 1 is the first draft
    top1: Figure  #: the draft is the base's token
    top5: Figure  #: the base's token is among the drafter's five likeliest
    conditional: Figure  #: the draft is accepted, of the positions at which all before it were


class Workload(Record):
    """Drafts after the tokens of the base's own texts, of one workload or of all."""

    texts: Count  #: texts that repeat no other
    n: Count  #: positions from which was drafted
    teacher_forced: Figure  #: tokens per round, from every position that has a target at every step
    steps: list[Step]  #: by draft step


def continue_greedily(
    base: Base,
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    *,
    new_tokens: int,
    batch: int,
    done: Callable[[], None] = lambda: None,
) -> Continuations:
    """The base's own text after each prompt, whose token ids are ``encoded``. ``done`` is called after each batch."""
    written = base_texts(base, encoded, new_tokens=new_tokens, batch=batch, done=done)
    texts = (Text((*prompt, *new), len(prompt)) for prompt, new in zip(encoded, written, strict=True))
    return Continuations(tuple(prompts), tuple(texts))


@dataclass(frozen=True)
class Asked:
    """A drafter that is to draft after the tokens of the texts."""

    drafter: Drafter
    every: int = 1  # of each text only every so many positions, from the first on


def measure_agreements(
    base: Base,
    asked: Sequence[Asked],
    continuations: Continuations,
    steps: int,
    *,
    batch: int,
    done: Callable[[], None] = lambda: None,
) -> list[Agreement]:
    """Teacher forcing over all texts, a batch at a time, which the base reads once for all drafters.

    Args:
        done: called after each batch.

    Returns:
        One for each drafter; ``text`` indexes ``continuations``.

    Raises:
        PairError: no text is long enough to draft from.
    """

    def measure(texts: Sequence[Text]) -> list[Agreement]:
        full = read_texts(base, texts, [one.drafter.needs for one in asked])
        found = [teacher_forced(base, one.drafter, texts, steps, every=one.every, full=full) for one in asked]
        done()
        return found

    return _over_all(continuations, batch, measure)


def measure_ranks(base: Base, drafter: Drafter, continuations: Continuations, steps: int, *, batch: int) -> Along:
    """How likely the drafter thinks the base's own tokens, after every token of its text.

    Raises:
        PairError: no text is long enough to draft from.
    """
    return _over_all(continuations, batch, lambda texts: [ranks_of_text(base, drafter, texts, steps)])[0]


def _over_all(
    continuations: Continuations, batch: int, measure: Callable[[Sequence[Text]], list[Found]]
) -> list[Found]:
    usable = continuations.usable or tuple(range(len(continuations.texts)))
    parts: list[list[Found]] = []
    for group in groups([len(continuations.texts[index].tokens) for index in usable], batch):
        rows = torch.tensor([usable[position] for position in group])
        found = measure([continuations.texts[row] for row in rows.tolist()])
        parts.append([dataclasses.replace(part, text=rows[part.text]) for part in found])
    return [type(own[0]).joined(own) for own in zip(*parts, strict=True)]


def at_every(agreement: Agreement, continuations: Continuations, every: int) -> Agreement:
    """``agreement`` at the positions that :class:`Asked` of ``every`` drafts at."""
    first = torch.tensor([text.anchors.start for text in continuations.texts])[agreement.text]
    return agreement.where((agreement.anchor - first) % every == 0)


def figures(agreement: Agreement, texts: Sequence[int] | None = None) -> Workload:
    """What ``agreement`` comes to, over all texts or those of these indices."""
    part = agreement if texts is None else agreement.of(texts)
    rounds, count = of_agreement(part), len(set(part.text.tolist()))
    forced = figure(rounds.teacher_forced, len(rounds.anchor), rounds.interval)
    return Workload(count, len(part.anchor), forced, [_step(part, index) for index in range(part.steps)])


def figure(value: float, n: int, interval: Interval | None) -> Figure:
    """As a record has it."""
    return Figure(None if math.isnan(value) else value, n, list(interval) if interval else None)


def _step(part: Agreement, step: int) -> Step:
    counted = part.counted(step)
    found = {}
    for name in ("top1", "top5", "conditional"):
        hit, among = counted[name]
        interval = share_over_texts(part.text[among], hit[among])
        found[name] = figure(part.rate(name, step), int(among.sum()), interval)
    return Step(step + 1, **found)
