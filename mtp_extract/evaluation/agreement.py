"""The base's own text, and agreement with it: what a drafter drafts after every token.

Definitions (as in vLLM and llama.cpp), for a round that drafts K tokens after an anchor token:

- *conditional* acceptance at step i: accepted_i / accepted_(i-1);
- *teacher-forced tokens per round*: 1 + accepted / rounds, the token the base adds included; of rounds that have all K
  targets.

Every position of the text is an anchor, so positions of one text overlap. All intervals are therefore taken over texts,
which are independent, and not over positions; a text that repeats another is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import Drafter
from mtp_extract.errors import PairError
from mtp_extract.evaluation.intervals import Interval, repeats
from mtp_extract.evaluation.measured import of_agreement, share_over_texts
from mtp_extract.evaluation.progress import Say, Show, counted, silent
from mtp_extract.evaluation.prompts import Prompt, encode_prompts
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.speculate.codec import Codec, count
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Text, read_texts, teacher_forced

_TOP = 5


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
    def workloads(self) -> dict[str, list[int]]:
        """Indices of the texts of each, by name, in order of first appearance."""
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            found.setdefault(prompt.workload, []).append(index)
        return found


class Asked(NamedTuple):
    """What is to be drafted after every token."""

    drafter: Drafter
    steps: int
    along: bool = False  # whether drafts follow the text's own tokens: see :func:`teacher_forced`


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


def groups(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Indices in groups of similar length, so that little of a batch is padding.

    A last group of one joins the one before: some controls need two texts.

    Raises:
        MtpExtractError: ``batch`` is no number of at least 1.
    """
    count("batch", batch, least=1)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    made = [order[at : at + batch] for at in range(0, len(order), batch)]
    if batch > 1 and len(made) > 1 and len(made[-1]) == 1:
        alone = made.pop()
        made[-1] += alone
    return made


@torch.inference_mode()
def base_texts(
    base: Base,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch: int,
    temperature: float = 0.0,
    seed: int = 0,
    show: Show = silent,
) -> list[tuple[int, ...]]:
    """What the base writes after each prompt, by transformers' own generation: new token ids, a stop token included.

    Args:
        prompts: token ids.
        batch: prompts at a time.
        temperature: 0 is greedy.
        seed: of the random numbers, with the number of the batch.
    """
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    stops, device, found = frozenset(base.stop_token_ids), base.device, dict[int, tuple[int, ...]]()
    batches = groups(list(map(len, prompts)), batch)
    for number, group in enumerate(counted(batches, show, "the base's text")):
        longest = max(len(prompts[index]) for index in group)
        before = [longest - len(prompts[index]) for index in group]
        tokens = [[0] * pad + list(prompts[index]) for pad, index in zip(before, group, strict=True)]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + (number << 20))
            made = base.model.generate(
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in before], device=device),
                max_new_tokens=new_tokens,
                do_sample=temperature > 0,
                pad_token_id=0,
                **drawn,
            )
        for index, row in zip(group, made[:, longest:].tolist(), strict=True):
            # What comes after a stop token is padding.
            found[index] = tuple(row[: next((at + 1 for at, token in enumerate(row) if token in stops), len(row))])
    return [found[index] for index in range(len(prompts))]


def write_texts(
    base: Base,
    codec: Codec,
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    batch: int,
    chat_template: bool,
    say: Say = silent,
    show: Show = silent,
) -> Continuations:
    """What the base alone writes greedily after each of ``prompts``.

    Raises:
        PairError: the base's context has no room for a prompt and what follows it.
    """
    encoded = encode_prompts(prompts, codec, chat_template=chat_template)
    context = getattr(base.config, "max_position_embeddings", None)
    length, longest = max((len(tokens), index) for index, tokens in enumerate(encoded))
    if context is not None and length + new_tokens > context:
        raise PairError(
            f"prompt {longest + 1} ({prompts[longest].workload}): expected at most the base's {context} tokens, "
            f"found {length} and {new_tokens} new ones. Give shorter prompts.",
            remedies=("prompts", "new_tokens"),
        )
    say(f"continuing {len(prompts)} prompts with the base alone")
    written = base_texts(base, encoded, new_tokens=new_tokens, batch=batch, show=show)
    texts = (Text((*prompt, *new), len(prompt)) for prompt, new in zip(encoded, written, strict=True))
    return Continuations(tuple(prompts), tuple(texts))


def measure_agreements(
    base: Base, asked: Sequence[Asked], written: Continuations, *, batch: int, show: Show = silent
) -> list[Agreement]:
    """Teacher forcing over all texts, a batch at a time, which the base reads once for all that is ``asked``.

    Returns:
        One for each; ``text`` indexes ``written``.

    Raises:
        PairError: no text is long enough to draft from.
    """
    usable = written.usable or tuple(range(len(written.texts)))
    parts: list[list[Agreement]] = [[] for _ in asked]
    batches = groups([len(written.texts[index].tokens) for index in usable], batch)
    for group in counted(batches, show, "drafts after every token"):
        rows = torch.tensor([usable[position] for position in group])
        texts = [written.texts[row] for row in rows.tolist()]
        full = read_texts(base, texts, [one.drafter.needs for one in asked])
        for part, (drafter, steps, along) in zip(parts, asked, strict=True):
            found = teacher_forced(base, drafter, texts, steps, along=along, full=full)
            part.append(replace(found, text=rows[found.text]))
    return [Agreement.joined(part) for part in parts]


def figures(agreement: Agreement, texts: Sequence[int] | None = None) -> Workload:
    """What ``agreement`` comes to, over all texts or those of these indices."""
    part = agreement if texts is None else agreement.of(texts)
    hit, near, aimed = part.drafts == part.targets, part.ranks < _TOP, part.targets >= 0

    def share(hits: Tensor, among: Tensor) -> Figure:
        counted = hits[among]
        value = float(counted.double().mean()) if len(counted) else math.nan
        return figure(value, len(counted), share_over_texts(part.text[among], counted))

    steps = [
        Step(
            step + 1,
            top1=share(hit[:, step], aimed[:, step]),
            top5=share(near[:, step], aimed[:, step]),
            conditional=share(hit[:, step], aimed[:, step] & hit[:, :step].all(dim=1)),
        )
        for step in range(part.steps)
    ]
    rounds = of_agreement(part)
    forced = figure(rounds.teacher_forced, len(rounds.anchor), rounds.interval)
    return Workload(len(set(part.text.tolist())), len(part.anchor), forced, steps)


def figure(value: float, n: int, interval: Interval | None) -> Figure:
    """As a record has it."""
    return Figure(known(value), n, list(interval) if interval else None)


def known(value: float) -> float | None:
    """None for NaN."""
    return None if math.isnan(value) else value
