"""The texts that a diagnosis looks along, what a server told of each, and whether they are this base's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtp_extract.doctor.fields import TextFit
from mtp_extract.doctor.patterns import Counted
from mtp_extract.doctor.rates import rate
from mtp_extract.doctor.served import Told
from mtp_extract.errors import PairError
from mtp_extract.evaluate.batches import base_texts, groups
from mtp_extract.evaluate.measured import share_over_texts
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, chances_of_base
from mtp_extract.speculate.texts import repeats


@dataclass(frozen=True)
class Sample:
    prompt: int  # its number
    text: Text
    told: Told | None  # None without a server
    own: bool  # the reference's own tokens; else those of the server's text, written as tokens again


def samples(
    generator: SpeculativeGenerator,
    encoded: Sequence[tuple[int, ...]],
    told: Sequence[Told] | None,
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
    own: Sequence[tuple[tuple[int, ...], str | None]] = [((), None)] * len(encoded)  # tokens and text
    if told is None or not temperature:
        written = base_texts(generator.base, encoded, new_tokens=max_tokens, batch=batch, temperature=temperature)
        own = [(tokens, generator.codec.decode(tokens)) for tokens in written]
    found = []
    for index, (prompt, (written_tokens, text)) in enumerate(zip(encoded, own, strict=True)):
        answer, tokens, same = told[index] if told is not None else None, written_tokens, True
        if answer is not None and answer.ids is not None:
            tokens, same = _known(answer.ids, generator.base.vocab_size), answer.ids == written_tokens
        elif answer is not None and (answer.thoughts or answer.text != text):
            tokens, same = generator.codec.continued(answer.text), False
            # The token that ended the text may be missing.
            if answer.thoughts or (answer.tokens or len(tokens)) - len(tokens) not in (0, 1):
                continue
        found.append(Sample(index, Text((*prompt, *tokens), len(prompt)), answer, same))
    again = repeats([sample.text.tokens for sample in found])
    kept = [sample for index, sample in enumerate(found) if sample.text.anchors and index not in again]
    return [sample for sample in kept if sample.told is not None and sample.told.counts] or kept


def _known(tokens: tuple[int, ...], size: int) -> tuple[int, ...]:
    if (most := max(tokens, default=0)) >= size:
        raise PairError(
            f"expected the server to write tokens below {size}, found {most}: it has another base. Name that one.",
            remedies=("base",),
        )
    return tokens


def counted(chosen: Sequence[Sample], steps: int) -> Counted | None:
    """The counters, text by text; None where nothing was drafted, or no counters are told."""
    if not all(sample.told is not None and sample.told.counts for sample in chosen):
        return None
    rows: list[tuple[int, int, int]] = []
    by_step: list[tuple[int, ...]] | None = []
    for sample in chosen:
        told, length = sample.told, len(sample.text.anchors)
        assert told is not None
        rounds = told.rounds if told.rounds is not None else max(1, length - (told.accepted or 0))
        accepted = told.accepted if told.accepted is not None else max(0, length - rounds)
        rows.append((length, rounds, accepted))
        known = told.by_step if told.rounds is not None else None
        if known is None or sum(known[:steps]) != accepted:
            by_step = None
        if by_step is not None and known is not None:
            by_step.append((*known, *[0] * steps)[:steps])
    if not sum(rounds for _, rounds, _ in rows):
        return None
    tokens, rounds, accepted = np.array(rows, np.float64).T
    return Counted(tokens, rounds, accepted, None if by_step is None else np.array(by_step, np.float64))


def text_fit(
    generator: SpeculativeGenerator,
    chosen: Sequence[Sample],
    otherwise: Sequence[tuple[int, ...]] | None,
    *,
    temperature: float,
    batch: int,
) -> TextFit:
    """Whether the texts are what this base would write, after these prompts, at this temperature.

    Args:
        otherwise: all prompts, with the chat template where they are without one, or without; None for none.
    """
    texts = [sample.text for sample in chosen]
    text, likeliest, best = _of_base(generator.base, texts, temperature or 1.0, batch)
    greedy, other = not temperature, None
    if otherwise is not None and not all(sample.own for sample in chosen):
        prompts = [otherwise[sample.prompt] for sample in chosen]
        after = [Text((*p, *t.continuation), len(p)) for p, t in zip(prompts, texts, strict=True)]
        other = float(_of_base(generator.base, after, temperature or 1.0, batch)[1].mean())
    sizes = [
        sample.told.prompt_tokens == sample.text.prompt_length
        for sample in chosen
        if sample.told is not None and sample.told.prompt_tokens is not None
    ]
    return TextFit(
        texts=len(chosen),
        same=sum(sample.own for sample in chosen) if greedy else 0,
        likeliest=rate(float(likeliest.mean()), share_over_texts(text, likeliest)),
        expected=1.0 if greedy else float(best.mean()),
        at_one=float(best.mean()) if greedy or temperature == 1 else None,
        other_template=other,
        prompts_alike=sum(sizes) / len(sizes) if sizes else None,
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
