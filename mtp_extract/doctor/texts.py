"""Collect the texts of a diagnosis, what a server counted for each, and whether the base would write them."""

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
from mtp_extract.evaluation.base_texts import continue_prompts, group_by_length
from mtp_extract.evaluation.intervals import find_repeats
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.serving.client import Answer, Server, build_request
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text, mark_base_choices

TokenIds = tuple[int, ...]
_FEW_ROUNDS = 4  # with fewer rounds, half a round more or less leaves the drafts per round unknown


@dataclass(frozen=True)
class Sample:
    """A text along which drafts are counted."""

    text: Text
    answer: Answer | None = None  # None without a server
    read_alike: bool | None = None  # whether the server read the same prompt tokens; None if it does not report them
    without_bos: bool = False  # whether it read the prompt without the BOS token that it begins with here


def ask_all(server: Server, plan: DoctorPlan, prompts: Sequence[Prompt]) -> list[Answer]:
    """Ask for greedy answers, one at a time, so that each change of the metrics page belongs to one answer."""
    answers = []
    for prompt in prompts:
        before = server.read_counters()
        fields = {"temperature": 0.0, **server.kind.ids}
        (answer,) = server.ask([build_request(prompt.content, plan.max_tokens, plan.chat_template, **fields)])
        counted, _ = server.count_answers(before, [answer], plan.max_tokens)
        answers.append(structs.replace(answer, counted=counted))
    return answers


def count_rounds(answer: Answer) -> float | None:
    """Return the rounds that the server reports, or tokens − 1.5 − accepted drafts; None if unknown or too few.

    Each round adds one token beside its drafts. The half is for the last round, which may have had no room for drafts.
    """
    counted = answer.counted or Counters()
    if counted.rounds is not None or answer.tokens is None or counted.accepted is None:
        return counted.rounds
    rounds = answer.tokens - 1 - counted.accepted
    return rounds - 0.5 if rounds >= _FEW_ROUNDS else None


def read_samples(
    generator: SpeculativeGenerator, encoded: Sequence[TokenIds], answers: Sequence[Answer] | None, plan: DoctorPlan
) -> list[Sample]:
    """Collect the texts along which drafts can be counted, without those that are too short or repeat another.

    Rounds are counted in tokens, and most servers report text alone. For such a server the reference answers the same
    prompts: if the text is the same, so are its tokens. Any other text is tokenized, and left out if that gives another
    number of tokens than the server counts. Prompts are the tokens that the server read, if it reports them. Answers
    without counts of drafts are left out, unless no answer has any.

    Raises:
        PairError: the server writes tokens that the base does not have.
    """
    by_prompt: Sequence[Answer | None] = answers or [None] * len(encoded)
    _check_vocabulary(generator, answers or ())
    bos = getattr(generator.codec.tokenizer, "bos_token_id", None)
    prompts = [_recover_prompt(prompt, answer, bos) for prompt, answer in zip(encoded, by_prompt, strict=True)]
    written = list[TokenIds]([()] * len(prompts))
    if not all(answer is not None and answer.token_ids is not None for answer in by_prompt):
        written = continue_prompts(generator.base, prompts, new_tokens=plan.max_tokens, batch=BATCH)

    parts = zip(encoded, prompts, by_prompt, written, strict=True)
    readable = [sample for part in parts if (sample := _read_sample(generator, *part)) is not None]
    again = find_repeats([sample.text.tokens for sample in readable])
    usable = [sample for index, sample in enumerate(readable) if sample.text.anchors and index not in again]
    return [sample for sample in usable if _reports_acceptance(sample.answer)] or usable


def _read_sample(
    generator: SpeculativeGenerator, here: TokenIds, prompt: TokenIds, answer: Answer | None, reference: TokenIds
) -> Sample | None:
    """Read the server's text, or the reference's without a server; None if its tokens cannot be known.

    Args:
        here: tokens of the prompt by the base's tokenizer; ``prompt`` those that the server read.
        reference: tokens that the reference wrote after the prompt.
    """
    tokens = reference if answer is None else _recover_tokens(generator, answer, reference)
    if tokens is None:
        return None
    is_alike = None
    if answer is not None and (answer.prompt_ids is not None or answer.prompt_tokens is not None):
        is_alike = prompt == here and answer.prompt_tokens in (None, len(here))
    return Sample(Text((*prompt, *tokens), len(prompt)), answer, is_alike, without_bos=prompt == here[1:])


def _check_vocabulary(generator: SpeculativeGenerator, answers: Sequence[Answer]) -> None:
    """Raise PairError if the server's answers have tokens that the base does not have."""
    ids = (token for answer in answers for token in (*(answer.token_ids or ()), *(answer.prompt_ids or ())))
    most = max(ids, default=0)
    size = generator.base.vocab_size
    if most >= size:
        raise PairError(
            f"expected a server with tokens below {size}, found {most}: it has another base. Name that one.",
            remedies=("base",),
        )


def _reports_acceptance(answer: Answer | None) -> bool:
    return answer is not None and answer.counted is not None and answer.counted.accepted is not None


def _recover_prompt(prompt: TokenIds, answer: Answer | None, bos: int | None) -> TokenIds:
    """Return the tokens of ``prompt`` that the server read; without the BOS token if it counts one token less."""
    if answer is not None and answer.prompt_ids is not None:
        return answer.prompt_ids
    shorter = answer is not None and answer.prompt_tokens == len(prompt) - 1 > 0 and prompt[0] == bos
    return prompt[1:] if shorter else prompt


def _recover_tokens(generator: SpeculativeGenerator, answer: Answer, written: TokenIds) -> TokenIds | None:
    """Return the tokens of an answer; None if they cannot be known. The reference wrote ``written``."""
    if answer.token_ids is not None or answer.reasoning:
        return answer.token_ids
    if answer.text == generator.codec.decode(written):
        return written
    tokens = generator.codec.encode_continuation(answer.text)
    # The token that ended the text may be missing.
    return tokens if (answer.tokens or len(tokens)) - len(tokens) in (0, 1) else None


def count_served(chosen: Sequence[Sample], steps: int, stops: Collection[int]) -> Counts | None:
    """Count what the server drafted in each text; None if it drafted nothing or an answer has no counters.

    vLLM also counts drafts that the last round accepts beyond the end of the text. They are left out if rounds are
    reported. A text's first token belongs to no round, and a round adds one token beside its accepted drafts; the last
    round adds none if a draft ended the text with one of the tokens ``stops``. How many drafts the last round accepted
    is not reported: it is assumed to be as deep as any.
    """
    if not all(_reports_acceptance(sample.answer) for sample in chosen):
        return None
    counted = [_drop_drafts_beyond_text(sample.text, sample.answer, steps, stops) for sample in chosen if sample.answer]
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


def _drop_drafts_beyond_text(text: Text, answer: Answer, steps: int, stops: Collection[int]) -> Counters:
    """Return the counters of ``answer`` without drafts beyond the end of its ``text``, at ``steps`` positions."""
    counted = answer.counted or Counters()
    length = len(text.anchors)
    accepted = counted.accepted or 0
    if counted.rounds is None:
        return Counters(rounds=max(1, length - accepted), accepted=accepted)

    beyond = max(0, accepted - _count_possible_drafts(text, answer, counted.rounds, stops))
    accepted -= beyond
    if counted.positions is None:
        return Counters(rounds=counted.rounds, accepted=accepted)
    by_step = [*counted.positions, *[0] * steps][:steps]
    for step in [step for step, count in enumerate(by_step) if count][::-1][:beyond]:
        by_step[step] -= 1
    positions = tuple(by_step) if sum(by_step) == accepted else None
    return Counters(rounds=counted.rounds, accepted=accepted, positions=positions)


def _count_possible_drafts(text: Text, answer: Answer, rounds: int, stops: Collection[int]) -> int:
    """Return how many drafts that many ``rounds`` can have accepted within ``text``."""
    length = len(text.anchors)
    added = max(length, (answer.tokens or 0) - 1)  # the token that ended the text may be missing in it
    return max(0, added - rounds + (added > length or text.tokens[-1] in stops))


def measure_text_fit(generator: SpeculativeGenerator, chosen: Sequence[Sample]) -> TextFit:
    """Measure whether the texts are what this base would write after these prompts."""
    texts = [sample.text for sample in chosen]
    alike = [sample.read_alike for sample in chosen if sample.read_alike is not None]
    # For every token after the prompts: the number of its text, and whether it is the base's argmax.
    text_of, hits = list[torch.Tensor](), list[torch.Tensor]()
    for group in group_by_length([len(text.tokens) for text in texts], BATCH):
        likeliest = mark_base_choices(generator.base, [texts[row] for row in group])
        for row, hits_of_row in zip(group, likeliest.double(), strict=True):
            hits.append(hits_of_row[max(1, texts[row].prompt_length) - 1 : len(texts[row].tokens) - 1])
            text_of.append(torch.full((len(hits[-1]),), row))
    return TextFit(
        texts=len(chosen),
        likeliest=estimate_share(torch.cat(text_of), torch.cat(hits)),
        prompts_alike=sum(alike) / len(alike) if alike else None,
    )
