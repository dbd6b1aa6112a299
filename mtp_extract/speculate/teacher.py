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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import rnn

from mtp_extract.drafter.protocol import BaseState, Drafter, Fed, Needs
from mtp_extract.errors import PairError
from mtp_extract.speculate.codec import count
from mtp_extract.speculate.target import Base

_LOGITS_AT_ONCE = 1 << 28
_TOP = 5
_NO_TARGET = -1
_NEVER = torch.iinfo(torch.int64).max

_Part = TypeVar("_Part", bound="OfTexts")


@dataclass(frozen=True)
class Text:
    """Tokens: the first ``prompt_length`` are given, the rest is what the base wrote and drafts aim at."""

    tokens: tuple[int, ...]
    prompt_length: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """What was given."""
        return self.tokens[: self.prompt_length]

    @property
    def continuation(self) -> tuple[int, ...]:
        """What the base wrote."""
        return self.tokens[self.prompt_length :]

    @property
    def anchors(self) -> range:
        """Pending positions: first generated token to last but one; never 0, with nothing before it."""
        return range(max(1, self.prompt_length), len(self.tokens) - 1)


@dataclass(frozen=True)
class OfTexts:
    """What was found at anchors of several texts, a row each in every field."""

    text: Tensor  # int64 [N], index of the text
    anchor: Tensor  # int64 [N], position of the pending token

    def of(self: _Part, texts: Sequence[int]) -> _Part:
        """The part that belongs to these texts."""
        return self.where(torch.isin(self.text, torch.tensor(list(texts), dtype=torch.long)))

    def where(self: _Part, rows: Tensor) -> _Part:
        """These rows: bool [N], or their numbers in another order."""
        return type(self)(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    @classmethod
    def joined(cls: type[_Part], parts: Sequence[_Part]) -> _Part:
        """Several as one."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(cls)))


@dataclass(frozen=True)
class Agreement(OfTexts):
    """What was drafted and what the text says, for every anchor. N anchors, K steps."""

    drafts: Tensor  # int64 [N, K]
    targets: Tensor  # int64 [N, K], the text's tokens at anchor + 1 …; -1 past its end
    top5: Tensor  # bool [N, K], the target is among the five most likely

    @property
    def steps(self) -> int:
        """K."""
        return self.drafts.shape[1]

    def counted(self, step: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Figure → the anchors that count for it at ``step`` (from 0), and those among which; bool [N] each.

        ``top1`` and ``top5`` are of all anchors with a target there; ``conditional`` of those among them that hit at
        every step before (``accepted_i / accepted_(i-1)``).
        """
        hit, aimed = self.drafts == self.targets, self.targets[:, step] != _NO_TARGET
        return {
            "top1": (hit[:, step], aimed),
            "top5": (self.top5[:, step], aimed),
            "conditional": (hit[:, step], aimed & hit[:, :step].all(dim=1)),
        }

    def rate(self, figure: str, step: int) -> float:
        """A figure of :meth:`counted`, as a share; NaN where nothing counts."""
        hit, among = self.counted(step)[figure]
        return float(hit[among].double().mean()) if among.any() else math.nan


@dataclass(frozen=True)
class Along(OfTexts):
    """Something of the text's own tokens, each drafted after those before it, for every anchor. N anchors, K steps."""

    values: Tensor  # [N, K]


@torch.inference_mode()
def read_texts(base: Base, texts: Sequence[Text], needs: Sequence[Needs]) -> Fed:
    """What the base knows of ``texts``, for drafters of these ``needs``: one pass for all of them, K and V in F32."""
    layers = tuple(sorted({layer for need in needs for layer in need.layers}))
    full = base.full_pass(_padded([text.tokens for text in texts], 0).to(base.device), layers)
    kinds = dict.fromkeys(kind for need in needs for kind in need.shared_kv)
    kv = {kind: (full.shared_kv[kind][0].float(), full.shared_kv[kind][1].float()) for kind in kinds}
    return dataclasses.replace(full, shared_kv=kv)


def teacher_forced(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    *,
    logits_at_once: int = _LOGITS_AT_ONCE,
    every: int = 1,
    full: Fed | None = None,
) -> Agreement:
    """Draft ``steps`` tokens after every anchor of every text.

    Args:
        drafter: must fit the base (:func:`~mtp_extract.speculate.target.check_pair`).
        texts: padded to the longest; group texts of similar length.
        steps: K, at least 1.
        logits_at_once: most draft logits held at a time (numbers, not bytes). More anchors than fit are
            drafted in parts.
        every: of each text only every so many anchors, from the first on.
        full: :func:`read_texts` of these texts, where it is at hand.

    Returns:
        Anchors in order of text, then position; on the CPU.

    Raises:
        PairError: no text has an anchor.
        MtpExtractError: ``steps`` is no number of at least 1.
    """
    full = full or read_texts(base, texts, [drafter.needs])
    text, anchor, aims, (drafts, top5) = _stepped(base, drafter, texts, steps, full, _agreed, logits_at_once, every)
    return Agreement(text, anchor, drafts, aims, top5)


def _agreed(logits: Tensor, aim: Tensor) -> tuple[Tensor, ...]:
    """The drafts, and whether the target is among the five most likely."""
    best = logits.topk(min(_TOP, logits.shape[-1]), dim=-1).indices
    return logits.argmax(-1), (best == aim[..., None]).any(-1)


def ranks_of_text(base: Base, drafter: Drafter, texts: Sequence[Text], steps: int) -> Along:
    """How many tokens the drafter would draft before the text's own, after every anchor of every text.

    Every step reads the text's own token, as a tree's branch does that goes where the text goes. Arguments and errors
    are those of :func:`teacher_forced`.

    Returns:
        int64 values; of tokens that tie the first comes first. -1 past the text's end, and more than any tree holds for
        a token that the drafter cannot draft.
    """
    full = read_texts(base, texts, [drafter.needs])
    text, anchor, _, (ranks,) = _stepped(base, drafter, texts, steps, full, _ranked, along=True)
    return Along(text, anchor, ranks)


def _ranked(logits: Tensor, aim: Tensor) -> tuple[Tensor, ...]:
    token, before = aim.clamp(min=0), torch.arange(logits.shape[-1], device=logits.device)
    own = logits.gather(-1, token[..., None])
    better = ((logits > own) | ((logits == own) & (before < token[..., None]))).sum(-1)
    return (torch.where(own.squeeze(-1) == -torch.inf, _NEVER, better).where(aim != _NO_TARGET, _NO_TARGET),)


class OwnChances(NamedTuple):
    """What the base makes of texts, at every position but the last."""

    likeliest: Tensor  # bool [texts, length - 1], whether the token that follows is the argmax
    best: Tensor  # F64 [texts, length - 1], the probability of the argmax


@torch.inference_mode()
def chances_of_base(base: Base, texts: Sequence[Text], temperature: float) -> OwnChances:
    """What ``base`` thinks likeliest along ``texts``, at ``temperature`` above 0; past a text's end anything."""
    tokens = _padded([text.tokens for text in texts], 0)
    rows = []
    for state, following in zip(base.full_pass(tokens.to(base.device)).hidden, tokens[:, 1:], strict=True):
        best, index = torch.softmax(base.logits(state[:-1]).cpu().double() / temperature, dim=-1).max(-1)
        rows.append((index == following, best))
    return OwnChances(*(torch.stack(column) for column in zip(*rows, strict=True)))


@torch.inference_mode()
def _stepped(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    full: Fed,
    look: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    logits_at_once: int = _LOGITS_AT_ONCE,
    every: int = 1,
    *,
    along: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """What ``look`` makes of the logits of every step of a round at every anchor.

    Args:
        look: draft logits [batch, anchors, vocabulary] and their targets int64 [batch, anchors] → columns
            [batch, anchors].
        along: each step reads the text's own token; else the drafter's likeliest.

    Returns:
        Index of the text and position of every anchor, int64 [N] each; :func:`targets` int64 [N, K]; and the columns,
        [N, K] each. On the CPU.
    """
    count("steps", steps, least=1)
    taken = [text.anchors[::every] for text in texts]
    lengths = torch.tensor(list(map(len, taken)))
    if not lengths.any():
        raise PairError("expected a text with at least two generated tokens, found none; generate longer continuations")
    width = max(1, logits_at_once // (len(texts) * base.vocab_size))
    anchors = _padded(taken, 1)
    aims, real = targets(texts, anchors, steps), torch.arange(anchors.shape[1])[None] < lengths[:, None]
    parts = []
    for some, aimed in zip(torch.split(anchors, width, 1), torch.split(aims, width, 1), strict=True):
        places = some.to(full.tokens.device)
        state, token = drafter.start(BaseState.after(full, places, base.embed)), full.tokens.gather(1, places)
        columns = []
        for aim in aimed.unbind(-1):
            logits, state = drafter.step(state, token)
            there = aim.to(logits.device)
            token = there.clamp(min=0) if along else logits.argmax(-1)
            columns.append([column.cpu() for column in look(logits, there)])
        parts.append([torch.stack(column, dim=-1) for column in zip(*columns, strict=True)])
    text = torch.arange(len(texts))[:, None].expand_as(real)
    found = [torch.cat(column, dim=1)[real] for column in zip(*parts, strict=True)]
    return text[real], anchors[real], aims[real], found


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """int64 [rows, longest], each with ``filler`` after its end."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


def targets(texts: Sequence[Text], anchors: Tensor, steps: int) -> Tensor:
    """int64 [texts, anchors, steps]: the tokens after each anchor, -1 past the end."""
    padded = functional.pad(_padded([text.tokens for text in texts], _NO_TARGET), (0, steps), value=_NO_TARGET)
    return torch.stack([padded.gather(1, anchors + 1 + step) for step in range(steps)], dim=-1)
