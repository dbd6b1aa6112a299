"""Teacher forcing: what the drafter drafts after every token of a text, all positions in one pass.

The base runs once over the text. An *anchor* n is a position whose token is taken as pending: the base has
seen positions up to n - 1, exactly as at the start of a round of generation. All anchors are queries of
one drafter call a step; a mask gives each the K and V up to its own n - 1, and position and mask stay the
same in all steps, as in a round.

Step 1 reads the true token at n and the base's state at n - 1. Step i reads the drafter's *own* token of
step i - 1 and its own projected state, never the text's. So the conditional and unconditional acceptance
here are those of real rounds: step i counts only where all steps before it drafted the text's tokens, and
there the own token and the true one are the same. ``top1`` and ``top5`` of a later step count all anchors,
also those whose draft had left the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_extract.drafter import DraftArguments, Drafter
from mtp_extract.errors import PairError
from mtp_extract.speculate.arithmetic import Proportion
from mtp_extract.speculate.base import Base
from mtp_extract.speculate.draft import LITERT, Convention, Transform, draft_step, round_arguments

__all__ = ["Agreement", "Text", "teacher_forced", "teacher_forced_by_stepping"]

_LOGITS_AT_ONCE = 1 << 28
_TOP = 5
_NO_TARGET = -1


@dataclass(frozen=True)
class Text:
    """Tokens: the first ``prompt_length`` are given, the rest is what the base wrote and drafts aim at."""

    tokens: tuple[int, ...]
    prompt_length: int

    @property
    def anchors(self) -> range:
        """Pending positions: first generated token to last but one; never 0, with nothing before it."""
        return range(max(1, self.prompt_length), len(self.tokens) - 1)


@dataclass(frozen=True)
class Agreement:
    """What was drafted and what the text says, for every anchor. N anchors, K steps.

    Attributes:
        text: int64 [N], index of the text.
        anchor: int64 [N], position of the pending token.
        drafts: int64 [N, K].
        targets: int64 [N, K], the text's tokens at anchor + 1 …; -1 past its end.
        top5: bool [N, K], the target is among the five most likely.
    """

    text: Tensor
    anchor: Tensor
    drafts: Tensor
    targets: Tensor
    top5: Tensor

    @property
    def steps(self) -> int:
        """K."""
        return self.drafts.shape[1]

    def of(self, texts: Sequence[int]) -> Agreement:
        """The part that belongs to these texts: for figures by workload."""
        kept = torch.isin(self.text, torch.tensor(list(texts), dtype=torch.long))
        return Agreement(*(getattr(self, field.name)[kept] for field in dataclasses.fields(self)))

    def top1_at(self, step: int) -> Proportion:
        """Anchors whose draft at ``step`` (from 0) is the target, of those with a target there."""
        return _proportion(self._hit[:, step], self._aimed[:, step])

    def top5_at(self, step: int) -> Proportion:
        """Anchors whose five most likely drafts at ``step`` hold the target, of those with a target there."""
        return _proportion(self.top5[:, step], self._aimed[:, step])

    def conditional_at(self, step: int) -> Proportion:
        """``accepted_i / accepted_(i-1)``: hits at ``step``, of the anchors that hit at every step before."""
        before = self._hit[:, :step].all(dim=1)
        return _proportion(self._hit[:, step], self._aimed[:, step] & before)

    def unconditional_at(self, step: int) -> Proportion:
        """``accepted_i / rounds``: anchors that hit at all steps up to this, of those with a target there."""
        return _proportion(self._hit[:, : step + 1].all(dim=1), self._aimed[:, step])

    @property
    def mean_accepted_length(self) -> float:
        """1 + mean accepted drafts of a round of K, by summing the unconditional acceptances.

        The mean over all anchors. A real run's rounds start where the last one ended, so its mean differs
        somewhat.
        """
        return 1 + sum(self.unconditional_at(step).value for step in range(self.steps))

    @property
    def _aimed(self) -> Tensor:
        return self.targets != _NO_TARGET

    @property
    def _hit(self) -> Tensor:
        return self.drafts == self.targets


def _proportion(hit: Tensor, among: Tensor) -> Proportion:
    return Proportion(int((hit & among).sum()), int(among.sum()))


@torch.inference_mode()
def teacher_forced(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    *,
    convention: Convention = LITERT,
    transform: Transform | None = None,
    logits_at_once: int = _LOGITS_AT_ONCE,
) -> Agreement:
    """Draft ``steps`` tokens after every anchor of every text.

    Args:
        base: sees each text once.
        drafter: must fit the base (:func:`~mtp_extract.speculate.base.check_pair`).
        texts: padded to the longest; group texts of similar length.
        steps: K, at least 1.
        convention: where drafting queries stand.
        transform: changes the arguments of every step, for controls.
        logits_at_once: most draft logits held at a time (numbers, not bytes). More anchors than fit are
            taken in turns.

    Returns:
        Anchors in order of text, then position; on the CPU.

    Raises:
        PairError: no text has an anchor.
    """
    lengths = [len(text.anchors) for text in texts]
    if not any(lengths):
        raise PairError("expected a text with at least two generated tokens, found none; generate longer continuations")
    tokens = torch.zeros(len(texts), max(len(text.tokens) for text in texts), dtype=torch.long)
    anchors = torch.ones(len(texts), max(lengths), dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        anchors[row, : lengths[row]] = torch.tensor(text.anchors)
    targets = _targets(texts, anchors, steps)  # [B, L, K]
    tokens, anchors = tokens.to(base.device), anchors.to(base.device)

    full = base.full_pass(tokens)
    slots = torch.arange(tokens.shape[1], device=base.device).expand_as(tokens)
    width = max(1, logits_at_once // (len(texts) * base.vocab_size))
    drafts, top5 = [], []
    for part, aim in zip(torch.split(anchors, width, dim=1), torch.split(targets, width, dim=1), strict=True):
        seen = (part - 1)[..., None].expand(-1, -1, base.width).to(full.hidden.device)
        arguments = round_arguments(
            base,
            drafter,
            convention,
            tokens.gather(1, part),
            part,
            full.hidden.gather(1, seen),
            full.shared_kv,
            dict.fromkeys(full.shared_kv, slots),
        )
        drafted, held = _draft(base, drafter, arguments, aim, steps, transform)
        drafts.append(drafted)
        top5.append(held)
    real = torch.arange(anchors.shape[1])[None] < torch.tensor(lengths)[:, None]
    index = torch.arange(len(texts))[:, None].expand_as(real)
    return Agreement(
        index[real],
        anchors.cpu()[real],
        torch.cat(drafts, dim=1)[real],
        targets[real],
        torch.cat(top5, dim=1)[real],
    )


@torch.inference_mode()
def teacher_forced_by_stepping(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    *,
    convention: Convention = LITERT,
    transform: Transform | None = None,
) -> Agreement:
    """The same, the slow way: one token of the base and ``steps`` of the drafter at a time, with a cache.

    It shares no mask and no batching with :func:`teacher_forced`, so it is what that is checked against
    and timed against.
    """
    parts = [
        part
        for index, text in enumerate(texts)
        for part in _stepping(base, drafter, index, text, steps, convention, transform)
    ]
    return Agreement(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Agreement)))


def _stepping(
    base: Base,
    drafter: Drafter,
    index: int,
    text: Text,
    steps: int,
    convention: Convention,
    transform: Transform | None,
) -> Iterator[Agreement]:
    if not text.anchors:
        return
    first = text.anchors[0]
    cache = base.new_cache(batch=1, capacity=len(text.tokens), queries=1)
    tokens = torch.tensor([text.tokens], device=base.device)
    hidden = base.forward(tokens[:, :first], [0], cache, [first])[:, -1:]
    for anchor in text.anchors:
        position = torch.tensor([[anchor]])
        aim = _targets([text], position, steps)
        pending = tokens[:, anchor : anchor + 1]
        arguments = round_arguments(
            base, drafter, convention, pending, position.to(base.device), hidden, *base.read_kv(cache)
        )
        drafts, top5 = _draft(base, drafter, arguments, aim, steps, transform)
        yield Agreement(torch.tensor([index]), position[0], drafts[0], aim[0], top5[0])
        hidden = base.forward(pending, [anchor], cache)


def _targets(texts: Sequence[Text], anchors: Tensor, steps: int) -> Tensor:
    """int64 [texts, anchors, steps]: the tokens after each anchor, -1 past the end."""
    longest = max(len(text.tokens) for text in texts)
    padded = torch.full((len(texts), longest + steps), _NO_TARGET, dtype=torch.long)
    for row, text in enumerate(texts):
        padded[row, : len(text.tokens)] = torch.tensor(text.tokens)
    return torch.stack([padded.gather(1, anchors + 1 + step) for step in range(steps)], dim=-1)


def _draft(
    base: Base,
    drafter: Drafter,
    arguments: DraftArguments,
    targets: Tensor,
    steps: int,
    transform: Transform | None,
) -> tuple[Tensor, Tensor]:
    """Drafts int64 and top-5 membership bool, each [batch, queries, steps], on the CPU."""
    drafts, top5 = [], []
    for step in range(steps):
        logits, arguments = draft_step(drafter, arguments, step, transform)
        token = logits.argmax(-1)
        best = logits.topk(min(_TOP, logits.shape[-1]), dim=-1).indices
        aim = targets[..., step, None].to(best.device)
        drafts.append(token.cpu())
        top5.append((best == aim).any(-1).cpu())
        if step + 1 < steps:
            embedding = base.embed(token.to(base.device)).to(arguments.hidden)
            arguments = dataclasses.replace(arguments, embedding=embedding)
    return torch.stack(drafts, dim=-1), torch.stack(top5, dim=-1)
