"""The texts that a diagnosis looks along, what a server counted of each, and whether they are this base's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs

from mtp_extract.doctor.counts import BATCH, Counts
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.result import TextFit
from mtp_extract.errors import PairError
from mtp_extract.evaluation.agreement import estimate_share
from mtp_extract.evaluation.base_texts import continue_prompts, groups
from mtp_extract.evaluation.intervals import find_repeats
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.serving.client import Answer, Server, question
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text, likeliest_of_base

TokenIds = tuple[int, ...]
_FEW_ROUNDS = 4  # half of one more or less says nothing of drafts in so few


@dataclass(frozen=True)
class Sample:
    """A text to look along."""

    text: Text
    answer: Answer | None = None  # None without a server
    read_alike: bool | None = None  # whether the server read the prompt as it is here; None where it does not say
    without_bos: bool = False  # whether it read the prompt but for the BOS token that it begins with here


def ask_all(server: Server, plan: DoctorPlan, prompts: Sequence[Prompt]) -> list[Answer]:
    """The greedy answers to all prompts with their counters, one at a time: so the page's between two are of one."""
    answers = []
    for prompt in prompts:
        before = server.counters()
        fields = {"temperature": 0.0, **server.kind.ids}
        (answer,) = server.ask([question(prompt.content, plan.max_tokens, plan.chat_template, **fields)])
        counted, _ = server.counted(before, [answer], plan.max_tokens)
        answers.append(structs.replace(answer, counted=counted))
    return answers


def rounds_of(answer: Answer) -> float | None:
    """As reported; or what tokens and accepted drafts leave, half of one less for a last one without drafts."""
    counted = answer.counted or Counters()
    if counted.rounds is not None or answer.tokens is None or counted.accepted is None:
        return counted.rounds
    rounds = answer.tokens - 1 - counted.accepted
    return rounds - 0.5 if rounds >= _FEW_ROUNDS else None


def read_samples(
    generator: SpeculativeGenerator, encoded: Sequence[TokenIds], answers: Sequence[Answer] | None, plan: DoctorPlan
) -> list[Sample]:
    """Texts to count along; those that are too short, repeat another, or say nothing of drafts, are left out.

    Rounds are of tokens, and most servers report text alone. Where one does, the reference writes after the same
    prompts: text that is its own has its tokens; other text is made tokens again, and left out where these are not as
    many as the server counts. Prompts are taken as the server read them, where it says so. Where no answer says
    anything of drafts, all are kept.

    Raises:
        PairError: the server writes tokens that the base does not have.
    """
    by_prompt: Sequence[Answer | None] = answers or [None] * len(encoded)
    _check_vocabulary(generator, answers or ())
    bos = getattr(generator.codec.tokenizer, "bos_token_id", None)
    prompts = [_as_read(prompt, answer, bos) for prompt, answer in zip(encoded, by_prompt, strict=True)]
    written = list[TokenIds]([()] * len(prompts))
    if not all(answer is not None and answer.token_ids is not None for answer in by_prompt):
        written = continue_prompts(generator.base, prompts, new_tokens=plan.max_tokens, batch=BATCH)

    parts = zip(encoded, prompts, by_prompt, written, strict=True)
    readable = [sample for part in parts if (sample := _read_sample(generator, *part)) is not None]
    again = find_repeats([sample.text.tokens for sample in readable])
    usable = [sample for index, sample in enumerate(readable) if sample.text.anchors and index not in again]
    return [sample for sample in usable if _says_accepted(sample.answer)] or usable


def _read_sample(
    generator: SpeculativeGenerator, here: TokenIds, prompt: TokenIds, answer: Answer | None, reference: TokenIds
) -> Sample | None:
    """A text of the server's, or of the reference without one; None where its tokens cannot be known.

    Args:
        here: the prompt as the base's tokenizer has it; ``prompt`` as the server read it.
        reference: what the reference wrote after it.
    """
    tokens = reference if answer is None else _tokens(generator, answer, reference)
    if tokens is None:
        return None
    is_alike = None
    if answer is not None and (answer.prompt_ids is not None or answer.prompt_tokens is not None):
        is_alike = prompt == here and answer.prompt_tokens in (None, len(here))
    return Sample(Text((*prompt, *tokens), len(prompt)), answer, is_alike, without_bos=prompt == here[1:])


def _check_vocabulary(generator: SpeculativeGenerator, answers: Sequence[Answer]) -> None:
    """Raise a PairError where a server has tokens that the base does not have."""
    ids = (token for answer in answers for token in (*(answer.token_ids or ()), *(answer.prompt_ids or ())))
    most = max(ids, default=0)
    size = generator.base.vocab_size
    if most >= size:
        raise PairError(
            f"expected a server with tokens below {size}, found {most}: it has another base. Name that one.",
            remedies=("base",),
        )


def _says_accepted(answer: Answer | None) -> bool:
    return answer is not None and answer.counted is not None and answer.counted.accepted is not None


def _as_read(prompt: TokenIds, answer: Answer | None, bos: int | None) -> TokenIds:
    """``prompt`` as the server read it: by its tokens; or, where it counts one less, without the BOS token."""
    if answer is not None and answer.prompt_ids is not None:
        return answer.prompt_ids
    shorter = answer is not None and answer.prompt_tokens == len(prompt) - 1 > 0 and prompt[0] == bos
    return prompt[1:] if shorter else prompt


def _tokens(generator: SpeculativeGenerator, answer: Answer, written: TokenIds) -> TokenIds | None:
    """The tokens of an answer; None where they cannot be known. ``written``: what the reference wrote."""
    if answer.token_ids is not None or answer.reasoning:
        return answer.token_ids
    if answer.text == generator.codec.decode(written):
        return written
    tokens = generator.codec.continued(answer.text)
    # The token that ended the text may be missing.
    return tokens if (answer.tokens or len(tokens)) - len(tokens) in (0, 1) else None


def served_counts(chosen: Sequence[Sample], steps: int, stops: Collection[int]) -> Counts | None:
    """The counters, text by text; None where nothing was drafted, or no counters are reported.

    vLLM counts drafts that the last round accepts beyond the end of the text. These are left out where rounds are
    reported: a text's first token is of no round, and a round adds one beside its drafts; but the last one adds none
    where a draft ended the text, in one of the tokens ``stops``. How deep the last round went is not reported: it is
    taken to be as deep as any.
    """
    if not all(_says_accepted(sample.answer) for sample in chosen):
        return None
    counted = [_within_text(sample.text, sample.answer, steps, stops) for sample in chosen if sample.answer]
    rounds = np.array([counts.rounds for counts in counted], np.float64)
    if not rounds.sum():
        return None
    by_step = [counts.positions for counts in counted if counts.positions is not None]
    return Counts(
        tokens=np.array([float(len(sample.text.anchors)) for sample in chosen]),
        rounds=rounds,
        accepted=np.array([counts.accepted for counts in counted], np.float64),
        by_step=np.array(by_step, np.float64) if len(by_step) == len(chosen) else None,
    )


def _within_text(text: Text, answer: Answer, steps: int, stops: Collection[int]) -> Counters:
    """The counters of an answer that has some, without drafts beyond the end of its ``text``; ``steps`` positions."""
    counted = answer.counted or Counters()
    length = len(text.anchors)
    accepted = counted.accepted or 0
    if counted.rounds is None:
        return Counters(rounds=max(1, length - accepted), accepted=accepted)

    beyond = max(0, accepted - _room(text, answer, counted.rounds, stops))
    accepted -= beyond
    if counted.positions is None:
        return Counters(rounds=counted.rounds, accepted=accepted)
    by_step = [*counted.positions, *[0] * steps][:steps]
    for step in [step for step, count in enumerate(by_step) if count][::-1][:beyond]:
        by_step[step] -= 1
    positions = tuple(by_step) if sum(by_step) == accepted else None
    return Counters(rounds=counted.rounds, accepted=accepted, positions=positions)


def _room(text: Text, answer: Answer, rounds: int, stops: Collection[int]) -> int:
    """Drafts that so many ``rounds`` can have accepted of ``text``."""
    length = len(text.anchors)
    added = max(length, (answer.tokens or 0) - 1)  # the token that ended the text may be missing in it
    return max(0, added - rounds + (added > length or text.tokens[-1] in stops))


def text_fit(generator: SpeculativeGenerator, chosen: Sequence[Sample]) -> TextFit:
    """Whether the texts are what this base would write after these prompts."""
    texts = [sample.text for sample in chosen]
    alike = [sample.read_alike for sample in chosen if sample.read_alike is not None]
    # Of every token after the prompts: the number of its text, and whether the base finds it likeliest.
    text_of, hits = list[torch.Tensor](), list[torch.Tensor]()
    for group in groups([len(text.tokens) for text in texts], BATCH):
        likeliest = likeliest_of_base(generator.base, [texts[row] for row in group])
        for row, hits_of_row in zip(group, likeliest.double(), strict=True):
            hits.append(hits_of_row[max(1, texts[row].prompt_length) - 1 : len(texts[row].tokens) - 1])
            text_of.append(torch.full((len(hits[-1]),), row))
    return TextFit(
        texts=len(chosen),
        likeliest=estimate_share(torch.cat(text_of), torch.cat(hits)),
        prompts_alike=sum(alike) / len(alike) if alike else None,
    )
