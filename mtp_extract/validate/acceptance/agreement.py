"""Agreement with the base: what the drafter drafts after every token of the base's own greedy text.

Definitions (as in vLLM and llama.cpp), for a round that drafts K tokens after an anchor token:

- *conditional* acceptance at step i: accepted_i / accepted_(i-1);
- *unconditional* acceptance at step i: accepted_i / rounds;
- *mean accepted length*: 1 + accepted / rounds, the token the base adds included.

Every position of the text is an anchor, so positions of one text overlap. Intervals of proportions are Wilson's,
which take positions as independent; that of the mean accepted length, and of the difference to a control, is
taken over texts, which are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_extract.drafter import Drafter
from mtp_extract.engines import Engine
from mtp_extract.speculate import (
    Agreement,
    Base,
    Encoded,
    Interval,
    Options,
    Proportion,
    Text,
    groups,
    ratio_interval,
    teacher_forced,
)
from mtp_extract.validate.prompts import Prompt

__all__ = [
    "Continuations",
    "StepFigures",
    "WorkloadFigures",
    "continue_greedily",
    "figures",
    "mean_over_texts",
    "measure_agreement",
]


@dataclass(frozen=True)
class Continuations:
    """The base's greedy continuations. One entry a prompt, in order.

    Attributes:
        prompts: texts and workloads.
        texts: prompt and continuation.
    """

    prompts: tuple[Prompt, ...]
    texts: tuple[Text, ...]

    @property
    def usable(self) -> tuple[int, ...]:
        """Indices of texts with at least one position to draft from."""
        return tuple(index for index, text in enumerate(self.texts) if text.anchors)

    def of_workload(self, name: str) -> list[int]:
        """Indices of the texts of one workload."""
        return [index for index, prompt in enumerate(self.prompts) if prompt.workload == name]

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names, in order of first appearance."""
        return tuple(dict.fromkeys(prompt.workload for prompt in self.prompts))


@dataclass(frozen=True)
class StepFigures:
    """One draft step."""

    top1: Proportion
    top5: Proportion
    conditional: Proportion
    unconditional: Proportion


@dataclass(frozen=True)
class WorkloadFigures:
    """All steps of a workload, or of all."""

    texts: int
    anchors: int
    steps: tuple[StepFigures, ...]
    mean_accepted_length: float
    mean_accepted_interval: Interval | None


def continue_greedily(
    engine: Engine, prompts: Sequence[Prompt], encoded: Sequence[Encoded], *, new_tokens: int
) -> Continuations:
    """The base's own text after each prompt, without drafts."""
    results = engine.generate(encoded, Options(max_new_tokens=new_tokens, drafts=0))
    texts = (Text((*result.prompt_tokens, *result.tokens), len(result.prompt_tokens)) for result in results)
    return Continuations(tuple(prompts), tuple(texts))


def measure_agreement(
    base: Base,
    drafter: Drafter,
    continuations: Continuations,
    steps: int,
    *,
    batch: int,
) -> Agreement:
    """Teacher forcing over all texts, a batch at a time; ``text`` indexes ``continuations``.

    Raises:
        PairError: no text is long enough to draft from.
    """
    usable = continuations.usable or tuple(range(len(continuations.texts)))
    lengths = [len(continuations.texts[index].tokens) for index in usable]
    parts = []
    for group in groups(lengths, batch):
        rows = [usable[position] for position in group]
        part = teacher_forced(base, drafter, [continuations.texts[row] for row in rows], steps)
        parts.append(dataclasses.replace(part, text=torch.tensor(rows)[part.text]))
    return Agreement(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Agreement)))


def figures(agreement: Agreement, texts: Sequence[int] | None = None) -> WorkloadFigures:
    """The figures of some texts, or of all."""
    part = agreement if texts is None else agreement.of(texts)
    steps = tuple(
        StepFigures(part.top1_at(i), part.top5_at(i), part.conditional_at(i), part.unconditional_at(i))
        for i in range(part.steps)
    )
    complete = (part.targets >= 0).all(dim=1)
    accepted = (part.drafts == part.targets).long().cumprod(dim=1).sum(dim=1)[complete]
    interval = mean_over_texts(part.text[complete], 1.0 + accepted.double())
    # Like the property, but nothing to say where nothing was drafted.
    mean = part.mean_accepted_length if len(part.anchor) else math.nan
    return WorkloadFigures(len(set(part.text.tolist())), len(part.anchor), steps, mean, interval)


def mean_over_texts(text: torch.Tensor, values: torch.Tensor) -> Interval | None:
    """95 % interval of the mean of ``values`` when texts, not positions, are independent draws; None of one text."""
    rows, index = torch.unique(text, return_inverse=True)
    sums, sizes = (
        torch.zeros(len(rows), dtype=torch.double).index_add_(0, index, column.double()).tolist()
        for column in (values, torch.ones_like(values))
    )
    return ratio_interval(sums, sizes)
