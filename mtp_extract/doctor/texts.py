"""The texts that a diagnosis looks along, what a server counted of each, and whether they are this base's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import structs

from mtp_extract.doctor.counts import Counts
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.result import TextFit
from mtp_extract.errors import PairError
from mtp_extract.evaluate.agreement import base_texts, figure, groups
from mtp_extract.evaluate.intervals import repeats
from mtp_extract.evaluate.measured import share_over_texts
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.serving.client import Answer, Question, Server
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text, chances_of_base

Tokens = tuple[int, ...]
_FEW_ROUNDS = 4  # half of one more or less says nothing of drafts in so few


@dataclass(frozen=True)
class Sample:
    """A text to look along."""

    text: Text
    answer: Answer | None  # None without a server
    own: bool  # whether these are the tokens that the reference writes
    read_alike: bool | None = None  # whether the server read the prompt as it is here; None where it does not say
    without_bos: bool = False  # whether it read the prompt but for the BOS token that it begins with here


def ask_all(server: Server, plan: DoctorPlan, prompts: Sequence[Prompt]) -> list[Answer]:
    """The answers to all prompts with their counters, one at a time: so the page's counters between two are of one.

    Raises:
        MtpExtractError: the server does not answer as it should.
    """
    found = []
    for prompt in prompts:
        before, more = server.counters(), {"temperature": plan.temperature, **server.kind.ids}
        (answer,) = server.ask([Question(prompt.content, plan.max_tokens, plan.chat_template, more)])
        page = server.moved(before, [answer], plan.max_tokens) or Counters()
        found.append(structs.replace(answer, counted=(answer.counted or Counters()).filled(page)))
    return found


def rounds_of(answer: Answer) -> float | None:
    """As reported; or what tokens and accepted drafts leave, half of one less for a last one without drafts."""
    counted = answer.counted or Counters()
    if counted.rounds is not None or answer.tokens is None or counted.accepted is None:
        return counted.rounds
    found = answer.tokens - 1 - counted.accepted
    return found - 0.5 if found >= _FEW_ROUNDS else None


def samples(
    generator: SpeculativeGenerator, encoded: Sequence[Tokens], answers: Sequence[Answer] | None, plan: DoctorPlan
) -> list[Sample]:
    """Texts to count along; those that are too short, repeat another, or say nothing of drafts, are left out.

    Rounds are of tokens, and most servers report text alone. Greedy text that is the reference's own has its tokens;
    other text is made tokens again, and left out where these are not as many as the server counts. Prompts are taken
    as the server read them, where it says so. Where no answer says anything of drafts, all are kept.

    Raises:
        PairError: the server writes tokens that the base does not have.
    """
    told: Sequence[Answer | None] = answers if answers is not None else [None] * len(encoded)
    most = max((t for a in answers or () for t in (*(a.token_ids or ()), *(a.prompt_ids or ()))), default=0)
    if most >= (size := generator.base.vocab_size):
        raise PairError(
            f"expected a server with tokens below {size}, found {most}: it has another base. Name that one.",
            remedies=("base",),
        )
    bos = getattr(generator.codec.tokenizer, "bos_token_id", None)
    prompts = [_as_read(*pair, bos) for pair in zip(encoded, told, strict=True)]
    written: Sequence[Tokens | None] = [None] * len(encoded)
    if answers is None or not plan.temperature:
        sizes: Any = {"new_tokens": plan.max_tokens, "batch": plan.batch}
        written = base_texts(generator.base, prompts, temperature=plan.temperature, **sizes)
    found = []
    for here, prompt, answer, own in zip(encoded, prompts, told, written, strict=True):
        tokens = own if answer is None else _tokens(generator, answer, own)
        if tokens is not None:
            says = answer is not None and (answer.prompt_ids is not None or answer.prompt_tokens is not None)
            alike = prompt == here and (answer is None or answer.prompt_tokens in (None, len(here))) if says else None
            found.append(
                Sample(Text((*prompt, *tokens), len(prompt)), answer, tokens == own, alike, prompt == here[1:])
            )
    again = repeats([sample.text.tokens for sample in found])
    kept = [sample for index, sample in enumerate(found) if sample.text.anchors and index not in again]
    return [sample for sample in kept if sample.answer is not None and _counts(sample.answer)] or kept


def _as_read(prompt: Tokens, answer: Answer | None, bos: int | None) -> Tokens:
    """``prompt`` as the server read it: by its tokens; or, where it counts one less, without the BOS token."""
    if answer is not None and answer.prompt_ids is not None:
        return answer.prompt_ids
    shorter = answer is not None and answer.prompt_tokens == len(prompt) - 1 > 0 and prompt[0] == bos
    return prompt[1:] if shorter else prompt


def _tokens(generator: SpeculativeGenerator, answer: Answer, own: Tokens | None) -> Tokens | None:
    """The tokens of an answer; None where they cannot be known. ``own``: what the reference wrote, if it was asked."""
    if answer.token_ids is not None or answer.reasoning:
        return answer.token_ids
    if own is not None and answer.text == generator.codec.decode(own):
        return own
    tokens = generator.codec.continued(answer.text)
    # The token that ended the text may be missing.
    return tokens if (answer.tokens or len(tokens)) - len(tokens) in (0, 1) else None


def _counts(answer: Answer) -> bool:
    """Whether drafts and rounds are reported, or follow."""
    counted = answer.counted or Counters()
    return counted.accepted is not None or (counted.rounds is not None and answer.tokens is not None)


def served_counts(chosen: Sequence[Sample], steps: int, stops: Collection[int]) -> Counts | None:
    """The counters, text by text; None where nothing was drafted, or no counters are reported.

    vLLM counts drafts that the last round accepts beyond the end of the text. These are left out where rounds are
    reported: a text's first token is of no round, and a round adds one beside its drafts; but the last one adds none
    where a draft ended the text. How deep the last round went is not reported: it is taken to be as deep as any.

    Args:
        stops: tokens that end a text.
    """
    table, by_step = np.zeros((len(chosen), 3)), list[list[int]]()
    for row, sample in zip(table, chosen, strict=True):
        answer = sample.answer
        if answer is None or not _counts(answer):
            return None
        counted, length = answer.counted or Counters(), len(sample.text.anchors)
        rounds = counted.rounds if counted.rounds is not None else max(1, length - (counted.accepted or 0))
        accepted = counted.accepted if counted.accepted is not None else max(0, length - rounds)
        positions = [*(counted.positions or ()), *[0] * steps][:steps]
        if counted.rounds is not None:
            added = max(length, (answer.tokens or 0) - 1)  # the token that ended the text may be missing in it
            room = max(0, added - rounds + (added > length or sample.text.tokens[-1] in stops))
            beyond = max(0, accepted - room)
            for step in [step for step, count in enumerate(positions) if count][::-1][:beyond]:
                positions[step] -= 1
            accepted -= beyond
            if counted.positions is not None and sum(positions) == accepted:
                by_step.append(positions)
        row[:] = length, rounds, accepted
    known = np.array(by_step, np.float64) if len(by_step) == len(chosen) else None
    return Counts(table[:, 0], table[:, 1], table[:, 2], known) if table[:, 1].sum() else None


def text_fit(generator: SpeculativeGenerator, chosen: Sequence[Sample], plan: DoctorPlan) -> TextFit:
    """Whether the texts are what this base would write, after these prompts, at this temperature."""
    rows = []
    for group in groups([len(sample.text.tokens) for sample in chosen], plan.batch):
        texts = [chosen[row].text for row in group]
        found = chances_of_base(generator.base, texts, plan.temperature or 1.0)
        for place, (row, text) in enumerate(zip(group, texts, strict=True)):
            part = slice(max(1, text.prompt_length) - 1, len(text.tokens) - 1)
            likeliest = found.likeliest[place, part].double()
            rows.append((torch.full((len(likeliest),), row), likeliest, found.best[place, part]))
    text_of, likeliest, best = (torch.cat(column) for column in zip(*rows, strict=True))
    alike = [sample.read_alike for sample in chosen if sample.read_alike is not None]
    return TextFit(
        texts=len(chosen),
        same=0 if plan.temperature else sum(sample.own for sample in chosen),
        likeliest=figure(float(likeliest.mean()), len(likeliest), share_over_texts(text_of, likeliest)),
        expected=float(best.mean()) if plan.temperature else 1.0,
        prompts_alike=sum(alike) / len(alike) if alike else None,
    )
