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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import rnn

from mtp_extract.drafter.protocol import BaseState, Drafter, DraftState, Fed, Needs
from mtp_extract.errors import PairError
from mtp_extract.speculate.arithmetic import Proportion
from mtp_extract.speculate.numbers import count
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
        every step before (``accepted_i / accepted_(i-1)``); ``unconditional`` counts hits at all steps up to this one
        (``accepted_i / rounds``).
        """
        hit, aimed = self.drafts == self.targets, self.targets[:, step] != _NO_TARGET
        before = hit[:, :step].all(dim=1)
        return {
            "top1": (hit[:, step], aimed),
            "top5": (self.top5[:, step], aimed),
            "conditional": (hit[:, step], aimed & before),
            "unconditional": (hit[:, step] & before, aimed),
        }

    def rate(self, figure: str, step: int) -> Proportion:
        """A figure of :meth:`counted`, as a share."""
        hit, among = self.counted(step)[figure]
        return Proportion(int((hit & among).sum()), int(among.sum()))


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


@torch.inference_mode()
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
            taken in turns.
        every: of each text only every so many anchors, from the first on.
        full: :func:`read_texts` of these texts, where it is at hand.

    Returns:
        Anchors in order of text, then position; on the CPU.

    Raises:
        PairError: no text has an anchor.
        MtpExtractError: ``steps`` or ``logits_at_once`` is no number of at least 1.
    """
    rounds = _Rounds(base, drafter, texts, steps, logits_at_once, full, every)
    drafts, top5 = rounds.over(lambda state, token, aims: draft(drafter, state, token, aims, steps))
    return Agreement(rounds.text, rounds.anchor, drafts, rounds.aims, top5)


@torch.inference_mode()
def ranks_of_text(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    *,
    logits_at_once: int = _LOGITS_AT_ONCE,
) -> Along:
    """How many tokens the drafter would draft before the text's own, after every anchor of every text.

    Every step reads the text's own token, as a tree's branch does that goes where the text goes. Arguments and errors
    are those of :func:`teacher_forced`.

    Returns:
        int64 values; of tokens that tie the first comes first. -1 past the text's end, and more than any tree holds for
        a token that the drafter cannot draft.
    """

    def rank(logits: Tensor, token: Tensor) -> Tensor:
        own, before = logits.gather(-1, token[..., None]), torch.arange(logits.shape[-1], device=logits.device)
        better = ((logits > own) | ((logits == own) & (before < token[..., None]))).sum(-1)
        return torch.where(own.squeeze(-1) == -torch.inf, _NEVER, better)

    rounds = _Rounds(base, drafter, texts, steps, logits_at_once)
    ranks = torch.where(rounds.aims == _NO_TARGET, _NO_TARGET, rounds.along(rank))
    return Along(rounds.text, rounds.anchor, ranks)


@torch.inference_mode()
def chances_of_text(
    base: Base,
    drafter: Drafter,
    texts: Sequence[Text],
    steps: int,
    *,
    temperature: float,
    logits_at_once: int = _LOGITS_AT_ONCE,
    full: Fed | None = None,
) -> Along:
    """How likely drafts that are drawn at ``temperature`` stand, where the base drew the text at it, too.

    Every step reads the text's own token, as where all drafts before it stand. Other arguments and errors are those of
    :func:`teacher_forced`; ``temperature`` is above 0.

    Returns:
        F64 values: min(1, q / p) of the text's token, p the base's probability and q the drafter's; 0 past its end.
    """

    def chance(logits: Tensor, token: Tensor) -> Tensor:
        return torch.softmax(logits.float() / temperature, dim=-1).gather(-1, token[..., None])[..., 0].double()

    rounds = _Rounds(base, drafter, texts, steps, logits_at_once, full)
    q, own = rounds.along(chance), chances_of_base(base, texts, temperature, full=full)
    # The token at position n + 1 + i is the one that the base gives at n + i.
    at = (rounds.anchor[:, None] + torch.arange(steps)).clamp(max=own.chance.shape[1] - 1)
    p = own.chance[rounds.text[:, None], at]
    stands = torch.where(rounds.aims == _NO_TARGET, 0.0, (q / p).clamp(max=1))
    return Along(rounds.text, rounds.anchor, torch.nan_to_num(stands))


@dataclass(frozen=True)
class OwnChances:
    """What the base makes of texts, at every position but the last: of the token that follows there."""

    chance: Tensor  # F64 [texts, length - 1], its probability
    likeliest: Tensor  # bool [texts, length - 1], whether it is the argmax
    best: Tensor  # F64 [texts, length - 1], the probability of the argmax


@torch.inference_mode()
def chances_of_base(base: Base, texts: Sequence[Text], temperature: float, *, full: Fed | None = None) -> OwnChances:
    """How likely the base thinks each token of ``texts``, at ``temperature`` above 0; past a text's end anything.

    Args:
        full: :func:`read_texts` of these texts, where it is at hand.
    """
    tokens = _padded([text.tokens for text in texts], 0)
    hidden = (full or base.full_pass(tokens.to(base.device))).hidden
    rows = []
    for state, following in zip(hidden, tokens[:, 1:], strict=True):
        p = torch.softmax(base.logits(state[:-1]).cpu().double() / temperature, dim=-1)
        best, index = p.max(-1)
        rows.append((p.gather(-1, following[:, None])[:, 0], index == following, best))
    return OwnChances(*(torch.stack(column) for column in zip(*rows, strict=True)))


class _Rounds:
    """The beginning of a round at every anchor of some texts; arguments as of :func:`teacher_forced`.

    Attributes:
        text: int64 [N], index of the text; in order of text, then position.
        anchor: int64 [N].
        aims: int64 [N, K], :func:`targets`.
    """

    def __init__(
        self,
        base: Base,
        drafter: Drafter,
        texts: Sequence[Text],
        steps: int,
        logits_at_once: int,
        full: Fed | None = None,
        every: int = 1,
    ) -> None:
        count("steps", steps, least=1)
        taken = [text.anchors[::every] for text in texts]
        lengths = torch.tensor(list(map(len, taken)))
        if not lengths.any():
            raise PairError(
                "expected a text with at least two generated tokens, found none; generate longer continuations"
            )
        self._drafter, self._embed = drafter, base.embed
        self._full = full or read_texts(base, texts, [drafter.needs])
        self._width = max(1, count("logits_at_once", logits_at_once, least=1) // (len(texts) * base.vocab_size))
        self._places = _padded(taken, 1)
        self._aims = targets(texts, self._places, steps)
        self._real = torch.arange(self._places.shape[1])[None] < lengths[:, None]
        self.text = torch.arange(len(texts))[:, None].expand_as(self._real)[self._real]
        self.anchor, self.aims = self._places[self._real], self._aims[self._real]

    def over(self, found: Callable[[DraftState, Tensor, Tensor], Sequence[Tensor]]) -> list[Tensor]:
        """What is ``found`` from the drafter's state, the pending tokens int64 [B, L] and their targets [B, L, K], as
        many anchors at a time as their logits allow: of each column [B, L, K] the real ones, [N, K].
        """
        tokens, parts = self._full.tokens, []
        for places, aims in zip(
            *(torch.split(part, self._width, 1) for part in (self._places, self._aims)), strict=True
        ):
            there = places.to(tokens.device)
            state = self._drafter.start(BaseState.after(self._full, there, self._embed))
            parts.append(found(state, tokens.gather(1, there), aims))
        return [torch.cat(column, dim=1)[self._real] for column in zip(*parts, strict=True)]

    def along(self, value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[N, K], a ``value`` of each step's logits [B, L, vocabulary] and the text's own token [B, L], which the next
        step reads; past the end of a text it is any.
        """

        def found(state: DraftState, token: Tensor, aims: Tensor) -> Sequence[Tensor]:
            values = []
            for aim in aims.clamp(min=0).unbind(-1):
                logits, state = self._drafter.step(state, token)
                token = aim.to(logits.device)
                values.append(value(logits, token).cpu())
            return [torch.stack(values, dim=-1)]

        return self.over(found)[0]


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """int64 [rows, longest], each with ``filler`` after its end."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


def targets(texts: Sequence[Text], anchors: Tensor, steps: int) -> Tensor:
    """int64 [texts, anchors, steps]: the tokens after each anchor, -1 past the end."""
    padded = functional.pad(_padded([text.tokens for text in texts], _NO_TARGET), (0, steps), value=_NO_TARGET)
    return torch.stack([padded.gather(1, anchors + 1 + step) for step in range(steps)], dim=-1)


def draft(drafter: Drafter, state: DraftState, token: Tensor, aims: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Drafts int64 and top-5 membership bool, each [batch, queries, steps], on the CPU.

    Args:
        state: of ``drafter``, at the start of a round.
        token: int64 [batch, queries], the pending tokens.
        aims: int64 [batch, queries, steps].
    """
    drafts, top5 = [], []
    for step in range(steps):
        logits, state = drafter.step(state, token)
        token = logits.argmax(-1)
        best = logits.topk(min(_TOP, logits.shape[-1]), dim=-1).indices
        drafts.append(token.cpu())
        top5.append((best == aims[..., step, None].to(best.device)).any(-1).cpu())
    return torch.stack(drafts, dim=-1), torch.stack(top5, dim=-1)
