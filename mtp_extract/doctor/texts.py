"""The texts that a diagnosis looks along, what a server counted of each, and whether they are this base's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtp_extract.doctor.counts import Counts
from mtp_extract.doctor.result import TextFit
from mtp_extract.doctor.server import Reply
from mtp_extract.errors import PairError
from mtp_extract.evaluate.agreement import figure
from mtp_extract.evaluate.batches import base_texts, groups
from mtp_extract.evaluate.measured import share_over_texts
from mtp_extract.evaluate.texts import repeats
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, chances_of_base


@dataclass(frozen=True)
class Sample:
    prompt: int  # its number
    text: Text
    reply: Reply | None  # None without a server
    own: bool  # the reference's own tokens; else those of the server's text, written as tokens again


def samples(
    generator: SpeculativeGenerator,
    encoded: Sequence[tuple[int, ...]],
    replies: Sequence[Reply] | None,
    *,
    max_tokens: int,
    temperature: float,
    batch: int,
) -> list[Sample]:
    """Texts to count along; those that are too short, repeat another, or say nothing of drafts, are left out.

    Rounds are of tokens, and most servers tell text alone. Greedy text that is the reference's own has its tokens;
    other text is made tokens again, and left out where these are not as many as the server counts. Where no text says
    anything of drafts, all are kept.

    Raises:
        PairError: the server writes tokens that the base does not have.
    """
    written: Sequence[tuple[int, ...] | None] = [None] * len(encoded)
    if replies is None or not temperature:
        written = base_texts(generator.base, encoded, new_tokens=max_tokens, batch=batch, temperature=temperature)
    found = []
    for index, (prompt, own) in enumerate(zip(encoded, written, strict=True)):
        reply = replies[index] if replies is not None else None
        tokens = own if reply is None else _tokens(generator, reply, own)
        if tokens is not None:
            found.append(Sample(index, Text((*prompt, *tokens), len(prompt)), reply, tokens == own))
    again = repeats([sample.text.tokens for sample in found])
    kept = [sample for index, sample in enumerate(found) if sample.text.anchors and index not in again]
    return [sample for sample in kept if sample.reply is not None and sample.reply.counts] or kept


def _tokens(generator: SpeculativeGenerator, reply: Reply, own: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The tokens of a reply; None where they cannot be known. ``own``: what the reference wrote, if it was asked."""
    codec, size = generator.codec, generator.base.vocab_size
    if reply.ids is not None:
        if (most := max(reply.ids, default=0)) >= size:
            raise PairError(
                f"expected the server to write tokens below {size}, found {most}: it has another base. Name that one.",
                remedies=("base",),
            )
        return reply.ids
    if own is not None and not reply.thoughts and reply.text == codec.decode(own):
        return own
    tokens = codec.continued(reply.text)
    # The token that ended the text may be missing.
    return tokens if not reply.thoughts and (reply.tokens or len(tokens)) - len(tokens) in (0, 1) else None


def served_counts(chosen: Sequence[Sample], steps: int, stops: Collection[int]) -> Counts | None:
    """The counters, text by text; None where nothing was drafted, or no counters are told.

    Args:
        stops: tokens that end a text.
    """
    replies = [sample.reply for sample in chosen if sample.reply is not None and sample.reply.counts]
    if len(replies) < len(chosen):
        return None
    table, by_step = np.zeros((len(chosen), 3)), []
    for row, sample, reply in zip(table, chosen, replies, strict=True):
        told, length = reply.counted, len(sample.text.anchors)
        rounds = told.rounds if told.rounds is not None else max(1, length - (told.accepted or 0))
        accepted = told.accepted if told.accepted is not None else max(0, length - rounds)
        beyond = int(max(0, accepted - _room(sample.text, reply, stops))) if told.rounds is not None else 0
        row[:] = length, rounds, accepted - beyond
        positions = _without_last((*(told.positions or ()), *[0] * steps)[:steps], beyond)
        if told.rounds is not None and told.positions is not None and sum(positions) == accepted - beyond:
            by_step.append(positions)
    told_by_step = np.array(by_step, np.float64) if len(by_step) == len(chosen) else None
    found = Counts(table[:, 0], table[:, 1], table[:, 2], told_by_step)
    return found if found.rounds.sum() else None


def _room(text: Text, reply: Reply, stops: Collection[int]) -> float:
    """Most drafts that can stand in a text of so many rounds.

    Its first token is of no round, and a round adds one beside its drafts; but the last one adds none where a draft
    ended the text. A token that ended it may be missing in what was told.
    """
    assert reply.counted.rounds is not None
    length = len(text.anchors)
    added = max(length, (reply.tokens or 0) - 1)
    return max(0, added - reply.counted.rounds + (added > length or text.tokens[-1] in stops))


def _without_last(positions: Sequence[int], beyond: int) -> list[int]:
    """Accepted drafts at each step, without the ``beyond`` deepest of a last round that goes on after its text.

    vLLM counts these. How deep that round went is not told: it is taken to be as deep as any.
    """
    left = list(positions)
    deepest = [step for step, count in enumerate(left) if count][::-1]
    for step in deepest[:beyond]:
        left[step] -= 1
    return left


def text_fit(generator: SpeculativeGenerator, chosen: Sequence[Sample], *, temperature: float, batch: int) -> TextFit:
    """Whether the texts are what this base would write, after these prompts, at this temperature."""
    texts, greedy = [sample.text for sample in chosen], not temperature
    text, likeliest, best = _of_base(generator.base, texts, temperature or 1.0, batch)
    given = [(s.reply.prompt_tokens, s.text.prompt_length) for s in chosen if s.reply is not None]
    alike = [there == here for there, here in given if there is not None]
    return TextFit(
        texts=len(chosen),
        same=sum(sample.own for sample in chosen) if greedy else 0,
        likeliest=figure(float(likeliest.mean()), len(likeliest), share_over_texts(text, likeliest)),
        expected=1.0 if greedy else float(best.mean()),
        at_one=float(best.mean()) if greedy or temperature == 1 else None,
        prompts_alike=sum(alike) / len(alike) if alike else None,
    )


def _of_base(base: Base, texts: Sequence[Text], temperature: float, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token of the continuations: index of its text, whether it is the argmax, that one's probability."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for group in groups([len(text.tokens) for text in texts], batch):
        found = chances_of_base(base, [texts[row] for row in group], temperature)
        for place, row in enumerate(group):
            part = slice(max(1, texts[row].prompt_length) - 1, len(texts[row].tokens) - 1)
            likeliest = found.likeliest[place, part].double()
            rows.append((torch.full((len(likeliest),), row), likeliest, found.best[place, part]))
    text, likeliest, best = (torch.cat(column) for column in zip(*rows, strict=True))
    return text, likeliest, best
