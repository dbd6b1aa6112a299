"""Teacher forcing: draft after every token of a text, all positions in one pass.

The base runs once over the text. An *anchor* n is a position whose token is taken as pending: the base has seen
positions up to n - 1, as at the start of a round of generation. Each step is one drafter call, with all anchors as its
queries.

Step 1 reads the text's token at n and the base's state at n - 1; step i reads the drafter's *own* token of step i - 1
and its own projected state. So acceptance is that of real rounds: step i counts only if all steps before it drafted the
text's tokens. ``top1`` and ``top5`` of a later step count all anchors, also those whose draft had left the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import rnn

from mtp_extract.drafter.protocol import BaseOutput, BaseRequirements, Drafter, RoundStart
from mtp_extract.errors import PairError
from mtp_extract.speculate.target import Base

_LOGITS_AT_ONCE = 1 << 28  # numbers, not bytes; anchors are drafted in parts that have at most as many
_NO_TARGET = -1
_NEVER = torch.iinfo(torch.int64).max  # the rank of a token that the drafter cannot draft
_Part = TypeVar("_Part", bound="PerAnchor")


@dataclass(frozen=True)
class Text:
    """Tokens of a prompt, ``prompt_length`` of them, then those that the base wrote: the targets of drafts."""

    tokens: tuple[int, ...]
    prompt_length: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_length]

    @property
    def continuation(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]

    @property
    def anchors(self) -> range:
        """Positions of pending tokens: the first generated token to the last but one, without position 0."""
        return range(max(1, self.prompt_length), len(self.tokens) - 1)


@dataclass(frozen=True)
class PerAnchor:
    """A measurement at the anchors of several texts: every field has one row per anchor."""

    text: Tensor  # int64 [N], index of the text
    anchor: Tensor  # int64 [N], position of the pending token

    def of(self: _Part, texts: Sequence[int]) -> _Part:
        """Return the anchors of ``texts``, given by index."""
        return self.where(torch.isin(self.text, torch.tensor(list(texts), dtype=torch.long)))

    def where(self: _Part, rows: Tensor) -> _Part:
        """Return ``rows``: a mask, bool [N], or indices in any order."""
        return type(self)(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    @classmethod
    def from_parts(cls: type[_Part], parts: Sequence[_Part]) -> _Part:
        """Concatenate the rows of ``parts``."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(cls)))


@dataclass(frozen=True)
class Agreement(PerAnchor):
    """Drafts of K steps after each of N anchors, and the text's own tokens there."""

    drafts: Tensor  # int64 [N, K]
    targets: Tensor  # int64 [N, K], the text's tokens at anchor + 1 …; -1 past its end
    ranks: Tensor
    """int64 [N, K]: how many tokens the drafter ranks before the target; of equal logits the lower id comes first. -1
    past the text's end; the largest int64 for a token whose logit is -inf, which is never drafted."""

    @property
    def steps(self) -> int:
        return self.drafts.shape[1]


@torch.inference_mode()
def read_texts(base: Base, texts: Sequence[Text], needs: Sequence[BaseRequirements]) -> BaseOutput:
    """Run the base once over ``texts`` and return all that drafters with these ``needs`` read; K and V in F32."""
    layers = tuple(sorted({layer for need in needs for layer in need.layers}))
    full = base.feed(_pad_rows([text.tokens for text in texts], 0).to(base.device), layers)
    kinds = dict.fromkeys(kind for need in needs for kind in need.shared_kv)
    kv = {kind: (full.shared_kv[kind][0].float(), full.shared_kv[kind][1].float()) for kind in kinds}
    return dataclasses.replace(full, shared_kv=kv)


@torch.inference_mode()
def draft_teacher_forced(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    *,
    along: bool = False,
    full: BaseOutput | None = None,
) -> Agreement:
    """Draft ``steps`` tokens after every anchor of every text.

    Args:
        drafter: must fit the base (:func:`~mtp_extract.speculate.target.check_pair`).
        texts: padded to the longest; group texts of similar length.
        steps: K, at least 1.
        along: every step reads the text's own token, as the branch of a tree that follows the text does.
        full: the result of :func:`read_texts` for these texts, if the caller has it.

    Returns:
        Anchors in order of text, then position, on the CPU.

    Raises:
        PairError: no text has an anchor.
    """
    if not any(text.anchors for text in texts):
        raise PairError("expected a text with at least two generated tokens, found none; generate longer continuations")
    full = full or read_texts(base, texts, [drafter.needs])
    # [texts, anchors], padded to the text with the most anchors; ``real`` masks the padding out.
    anchors = _pad_rows([text.anchors for text in texts], 1)
    real = _pad_rows([[True] * len(text.anchors) for text in texts], 0).bool()
    targets = gather_targets(texts, anchors, steps)
    drafts = torch.empty_like(targets)
    ranks = torch.empty_like(targets)
    at_once = max(1, _LOGITS_AT_ONCE // (len(texts) * base.vocab_size))
    for part in torch.split(torch.arange(anchors.shape[1]), at_once):
        start = RoundStart(full, anchors[:, part].to(full.tokens.device), base.embed)
        drafts[:, part], ranks[:, part] = _draft(drafter, start, targets[:, part], along=along)

    text = torch.arange(len(texts))[:, None].expand_as(real)
    return Agreement(text[real], anchors[real], drafts[real], targets[real], ranks[real])


def _draft(drafter: Drafter, start: RoundStart, targets: Tensor, *, along: bool) -> tuple[Tensor, Tensor]:
    """Return the drafts and the ranks of ``targets``, both int64 [texts, anchors, steps] on the CPU.

    Each step reads the draft of the step before or, with ``along``, that step's target.
    """
    drafts = torch.empty_like(targets)
    ranks = torch.empty_like(targets)
    state = drafter.start(start)
    token = start.fed.tokens.gather(1, start.positions)
    for step in range(targets.shape[-1]):
        logits, state = drafter.step(state, token)
        target = targets[..., step].to(logits.device)
        draft = logits.argmax(-1)
        drafts[..., step] = draft.cpu()
        ranks[..., step] = _compute_ranks(logits, target).cpu()
        token = target.clamp(min=0) if along else draft
    return drafts, ranks


def _compute_ranks(logits: Tensor, target: Tensor) -> Tensor:
    """Return :attr:`Agreement.ranks` of ``target`` [batch, anchors] in ``logits`` [batch, anchors, vocabulary]."""
    token = target.clamp(min=0)[..., None]
    index = torch.arange(logits.shape[-1], device=logits.device)
    logit = logits.gather(-1, token)
    # A NaN ranks before all others, as in argmax.
    ranks = (~(logits <= logit) | ((logits == logit) & (index < token))).sum(-1)
    return ranks.where(logit.squeeze(-1) != -torch.inf, _NEVER).where(target != _NO_TARGET, _NO_TARGET)


@torch.inference_mode()
def mark_base_choices(base: Base, texts: Sequence[Text]) -> Tensor:
    """Mark the following tokens that are the base's argmax: bool [texts, length - 1]; undefined past a text's end."""
    tokens = _pad_rows([text.tokens for text in texts], 0)
    states = base.feed(tokens.to(base.device)).hidden
    return torch.stack([base.logits(row[:-1]).argmax(-1).cpu() for row in states]) == tokens[:, 1:]


def _pad_rows(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Return int64 [rows, longest], filled with ``filler`` after the end of each row."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


def gather_targets(texts: Sequence[Text], anchors: Tensor, steps: int) -> Tensor:
    """Return the tokens after each anchor, int64 [texts, anchors, steps]; -1 past the end."""
    padded = functional.pad(_pad_rows([text.tokens for text in texts], _NO_TARGET), (0, steps), value=_NO_TARGET)
    return torch.stack([padded.gather(1, anchors + 1 + step) for step in range(steps)], dim=-1)
