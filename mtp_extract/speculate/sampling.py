"""Choosing tokens: the warped distribution, drawing from it, and the rule that accepts or rejects drafts.

Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): a draft
x, *drawn from* the drafter's distribution q, is accepted with probability min(1, p(x) / q(x)); the first
rejected one is replaced by a draw from max(0, p - q), normalized. What comes out is then distributed as p,
whatever q is. Both conditions matter: a draft that is q's argmax but is judged as if it had been drawn
skews the result.

A tree's drafts are the drafter's likeliest, not drawn. There the base draws a token after every node, and the tree is
followed as long as it holds that token: the text is what the base would have drawn alone, from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.growing import Nodes
from mtp_extract.speculate.numbers import count

NOT_DRAWN = torch.iinfo(torch.int64).min
"""In place of a token, where weights are no numbers."""
_COLD = 1e-3  # below it, a logit over the temperature may leave the range of F32; above it, it does not


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; applied in this order to base and drafter alike."""

    temperature: float = 0.0  # logits are divided by it. 0 is greedy: the argmax, and nothing is random.
    top_k: int | None = None  # keep the k most likely tokens, and those tied with the k-th; None keeps all
    top_p: float | None = None  # keep the smallest set of most likely tokens whose mass reaches it; None keeps all

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and 0 <= self.temperature < float("inf")):
            raise MtpExtractError(
                f"expected a finite temperature of at least 0, found {escape(self.temperature)}; 0 is greedy"
            )
        if self.top_k is not None:
            count("top_k", self.top_k, least=1, advice="leave it out to keep every token")
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise MtpExtractError(
                f"expected top_p in (0, 1], found {escape(self.top_p)}; leave it out to keep every token"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution tokens are drawn from: F32 [..., vocabulary], from ``logits`` of the same shape.

        Temperature, then top-k, then top-p, as transformers' logits warpers do.
        """
        scores = logits.float()
        if self.temperature < _COLD:
            # So little leaves one token, or those that tie: only the division would not survive it.
            scores = (scores - scores.amax(-1, keepdim=True)) / max(self.temperature, torch.finfo(scores.dtype).tiny)
        else:
            scores = scores / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = scores.sort(dim=-1, descending=False)
            dropped = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            dropped[..., -1] = False
            scores = scores.masked_fill(dropped.scatter(-1, index, dropped), -torch.inf)
        return scores.softmax(-1)


@dataclass(frozen=True)
class Verdict:
    """What a verification decided, per sequence: int64 [batch] each."""

    accepted: Tensor  # how many of the drafts stand
    following: Tensor  # the token after them: the base's choice at the first rejection, or after the last draft


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens from ``weights`` [..., vocabulary] (any sum), one per number of ``uniform`` [...] in [0, 1).

    The inverse of the cumulative sum, in F64: first over blocks of about the root of the vocabulary, then within the
    block it falls in, so that little is summed so precisely. A token of weight zero is never drawn: the point lies in
    (0, total], and the first block, then token, whose cumulative sum reaches it has a share of its own. Where the sum
    is no number above 0 it is :data:`NOT_DRAWN`: to raise an error here would be to wait for the device.
    """
    width = 1 << (weights.shape[-1].bit_length() + 1) // 2
    padded = functional.pad(weights, (0, -weights.shape[-1] % width))
    blocks = padded.reshape(*padded.shape[:-1], -1, width)  # [..., blocks, width]
    cumulative = blocks.sum(-1).double().cumsum(-1)
    point = (1 - uniform.double())[..., None] * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, point).clamp(max=cumulative.shape[-1] - 1)  # [..., 1]
    ends = functional.pad(cumulative, (1, 0))
    before, after = ends.gather(-1, block), ends.gather(-1, block + 1)
    within = blocks.gather(-2, block[..., None].expand(*block.shape, width)).squeeze(-2).double().cumsum(-1)
    # The block's sum in F32 is not quite that of its numbers in F64.
    token = torch.searchsorted(within, (point - before) / (after - before) * within[..., -1:])
    drawn = (cumulative[..., -1] > 0) & cumulative[..., -1].isfinite()
    return torch.where(drawn, (block * width + token).squeeze(-1), NOT_DRAWN)


def verify_greedy(choices: Tensor, drafts: Tensor, limits: Tensor) -> Verdict:
    """The longest prefix of drafts that equals the base's own choices.

    Args:
        choices: int64 [batch, K + 1], the base's argmax after the pending token and after each draft.
        drafts: int64 [batch, K].
        limits: int64 [batch], how many drafts of each sequence count; those beyond it were never proposed.
    """
    agree = (drafts == choices[:, :-1]) & _proposed(drafts, limits)
    accepted = agree.cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(p: Tensor, q: Tensor, drafts: Tensor, limits: Tensor, uniform: Tensor) -> Verdict:
    """The probability-ratio rule.

    Args:
        p: [batch, K + 1, vocabulary], the base's distribution after the pending token and after each draft.
        q: [batch, K, vocabulary], the distributions the drafts were drawn from.
        drafts: int64 [batch, K].
        limits: int64 [batch], how many drafts of each sequence count. After the last one that counts, the
            next token is drawn from p itself, as after a full acceptance.
        uniform: [batch, K + 1] in [0, 1), independent of how the drafts were drawn: K to judge, one to draw.
    """
    batch, drafted = drafts.shape
    index = drafts[..., None]
    p_draft, q_draft = (x.gather(-1, index).squeeze(-1) for x in (p[:, :-1], q))
    stands = (uniform[:, :drafted] * q_draft < p_draft) & _proposed(drafts, limits)
    accepted = stands.cumprod(dim=1).sum(dim=1)
    row = torch.arange(batch, device=p.device)
    weights = p[row, accepted]
    if drafted:
        judged = (accepted < limits)[:, None]
        residual = (weights - q[row, accepted.clamp(max=drafted - 1)]).clamp(min=0)
        # p <= q everywhere means p = q, so the residual can only vanish by rounding; p is then its limit.
        usable = judged & (residual.sum(-1, keepdim=True) > 0)
        weights = torch.where(usable, residual, weights)
    return Verdict(accepted, draw(weights, uniform[:, -1]))


def verify_tree(choices: Tensor, nodes: Nodes, limits: Tensor, depth: int) -> tuple[Verdict, Tensor]:
    """The longest way down a tree that the base goes.

    Args:
        choices: int64 [batch, nodes], the base's own token after each node: its argmax, or drawn from its distribution.
        nodes: what was drafted; no two drafts of one parent are the same.
        limits: int64 [batch], the depth to which drafts of each sequence count.

    Returns:
        The verdict, and int64 [batch, depth + 1]: the node at each depth on the way; past its end, any.
    """
    batch, count = choices.shape
    said = choices.gather(1, nodes.parent.expand(batch, -1))
    stands = ((nodes.tokens == said) & (nodes.depth <= limits[:, None])) | (nodes.depth == 0)
    reached = (stands[:, None] | ~nodes.sees).all(-1)  # [B, N], all on the way to it stand
    accepted, last = torch.where(reached, nodes.depth, -1).max(dim=1)
    following = choices.gather(1, last[:, None]).squeeze(1)
    on_the_way = nodes.sees.expand(batch, -1, -1).gather(1, last[:, None, None].expand(-1, 1, count)).squeeze(1)
    # One column more takes the nodes that are not on the way.
    places = torch.where(on_the_way, nodes.depth, depth + 1)
    path = torch.arange(depth + 2, device=choices.device).repeat(batch, 1)
    path.scatter_(1, places, torch.arange(count, device=choices.device).expand(batch, -1))
    return Verdict(accepted, following), path[:, :-1]


def _proposed(drafts: Tensor, limits: Tensor) -> Tensor:
    return torch.arange(drafts.shape[1], device=drafts.device)[None] < limits[:, None]
