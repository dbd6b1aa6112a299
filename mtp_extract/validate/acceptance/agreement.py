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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mtp_extract.drafter import Drafter
from mtp_extract.speculate import (
    Agreement,
    Base,
    Interval,
    Options,
    Proportion,
    SpeculativeGenerator,
    Text,
    Transform,
    teacher_forced,
)
from mtp_extract.validate.prompts import Prompt

__all__ = [
    "Continuations",
    "StepFigures",
    "WorkloadFigures",
    "continue_greedily",
    "figures",
    "groups",
    "mean_over_texts",
    "measure_agreement",
]

_Z95 = 1.959963984540054


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
    generator: SpeculativeGenerator,
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    *,
    new_tokens: int,
    batch: int,
) -> Continuations:
    """The base's own text after each prompt, without drafts."""
    texts: dict[int, Text] = {}
    for group in groups([len(ids) for ids in encoded], batch):
        results = generator.generate_batch(
            [encoded[index] for index in group], Options(max_new_tokens=new_tokens, drafts=0)
        )
        for index, result in zip(group, results, strict=True):
            texts[index] = Text((*result.prompt_tokens, *result.tokens), len(result.prompt_tokens))
    return Continuations(tuple(prompts), tuple(texts[index] for index in range(len(encoded))))


def measure_agreement(
    base: Base,
    drafter: Drafter,
    continuations: Continuations,
    steps: int,
    *,
    batch: int,
    transform: Transform | None = None,
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
        part = teacher_forced(base, drafter, [continuations.texts[row] for row in rows], steps, transform=transform)
        parts.append(dataclasses.replace(part, text=torch.tensor(rows)[part.text]))
    return Agreement(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Agreement)))


def groups(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Indices in groups of similar length. Never a last group of one: some controls need two texts."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    made = [order[at : at + batch] for at in range(0, len(order), batch)]
    if len(made) > 1 and len(made[-1]) == 1:
        alone = made.pop()
        made[-1] += alone
    yield from made


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
    """95 % interval of the mean of ``values`` when texts, not positions, are the independent draws.

    None with fewer than two texts. The mean is a ratio of sums over texts; its variance is that of the texts'
    residuals.
    """
    rows, index = torch.unique(text, return_inverse=True)
    if len(rows) < 2:
        return None
    sums = torch.zeros(len(rows), dtype=torch.double).index_add_(0, index, values.double())
    sizes = torch.zeros(len(rows), dtype=torch.double).index_add_(0, index, torch.ones_like(values).double())
    mean = float(sums.sum() / sizes.sum())
    residual = sums - mean * sizes
    variance = float(residual.square().sum()) * len(rows) / (len(rows) - 1) / float(sizes.sum()) ** 2
    half = _Z95 * math.sqrt(variance)
    return Interval(mean - half, mean + half)
