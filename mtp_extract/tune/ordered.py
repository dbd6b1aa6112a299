"""An ordered head for a drafter: clusters of tokens, and centroids that tell in which cluster to look.

A token's vector is the mean state in which it is the dense head's choice, averaged with its own row of that head, since
many tokens are chosen seldom or never. Clusters of equal size are made of these vectors; their centroids are learned,
from states of text and from such as are made for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.architecture.roles import CENTROIDS, HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import Weight, of_array, of_indices
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS, Convention
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.measured import share_over_texts
from mtp_extract.speculate.intervals import Interval
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.centroids import Learned, Taught, learn_centroids, ranks
from mtp_extract.tune.clusters import balanced_clusters, cluster_of, means_of
from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.pair import Pair
from mtp_extract.tune.rounds import Rounds, collate, counting, random_anchors
from mtp_extract.tune.states import states_of

LEAST_KEPT = 0.995
"""Of the dense head's choices, on text of each kind."""
LEAST_REACHED = 0.95
"""Of the tokens that states can be made for: such states are farther from text than any text is."""
ENOUGH = 1 - (1 - LEAST_KEPT) / 4
"""On watched text: a quarter of what may be lost, since other text, which decides, loses more."""

_MADE_SHARE = 0.1  # of a batch, beside 1 for each part of text
_ROW_WEIGHT = 5.0  # a token's own row counts as much as so many states


@dataclass(frozen=True)
class Used:
    """States that a drafter's head reads. N states."""

    states: Tensor  # [N, width], in the type the drafter computes in
    choices: Tensor  # int64 [N], the dense head's argmax
    text: Tensor  # int64 [N], index of the text, or of what intervals count

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True)
class Kept:
    share: float  # of the dense head's choices that lie in a cluster looked into
    interval: Interval | None  # of it, 95 % over texts; None with too few

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {"share": round(self.share, 5), "interval": self.interval and self.interval.rounded(5)}

    @classmethod
    def of(cls, used: Used, rank: Tensor, top_k: int) -> Kept:
        """With ``top_k`` clusters looked into, where the cluster of each choice has ``rank`` int64 [N]."""
        hits = (rank < top_k).double()
        return cls(float(hits.mean()), share_over_texts(used.text, hits))


@dataclass(frozen=True)
class Reached:
    """What becomes of states that were made for tokens and from which nothing was learned."""

    tokens: int  # that such a state could be made for
    share: float  # of those tokens, found from one state at least
    kept: float  # of the states, those in which the token is found

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {"tokens": self.tokens, "share": round(self.share, 5), "kept": round(self.kept, 5)}

    @classmethod
    def of(cls, made: Used, rank: Tensor, top_k: int) -> Reached:
        """As :meth:`Kept.of`; 1 where no state could be made."""
        hits, tokens = rank < top_k, torch.unique(made.choices)
        if not len(tokens):
            return cls(0, 1.0, 1.0)
        return cls(len(tokens), len(torch.unique(made.choices[hits])) / len(tokens), float(hits.double().mean()))


@dataclass(frozen=True)
class Built:
    ordering: Tensor  # int64 [V], the tokens cluster by cluster
    learned: Learned  # the centroids


def dense(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` without the ordered head that it may have."""
    tensors = {role: tensor for role, tensor in checkpoint.tensors.items() if role not in HEAD_ROLES}
    return replace(checkpoint, config=replace(checkpoint.mtp, ordered_head=None), tensors=MappingProxyType(tensors))


def ordered(checkpoint: Checkpoint, ordering: Tensor, centroids: Tensor, top_k: int) -> Checkpoint:
    """``checkpoint`` with an ordered head; all else as it is."""
    head: Mapping[str, Weight] = {
        CENTROIDS: of_array(centroids.numpy()),
        ORDERING: of_indices(ordering.numpy().astype(np.int64)),
    }
    return replace(
        checkpoint,
        config=replace(checkpoint.mtp, ordered_head=OrderedHeadConfig(len(centroids), top_k)),
        tensors=MappingProxyType({**checkpoint.tensors, **head}),
    )


def head_of(checkpoint: Checkpoint, *, centroids: bool = False) -> Tensor:
    """F32, a copy of the dense head's rows, or of the ordered one's centroids."""
    return torch.from_numpy(checkpoint.tensors[CENTROIDS if centroids else "lm_head"].array())


def ranks_of(used: Used, ordering: Tensor, centroids: Tensor) -> Tensor:
    """int64 [N]: how many clusters score higher than the one with the dense head's choice."""
    return ranks(used.states, centroids, cluster_of(ordering, len(centroids))[used.choices])


def collect(pair: Pair, drafter: MtpDrafter, texts: Sequence[Text], most: int, *, every_convention: bool) -> Used:
    """The states of ``drafter``'s rounds over ``texts`` that count, and what its dense head chooses there.

    Args:
        drafter: with a dense head.
        texts: with an anchor at least.
        most: states; where there are more, random anchors are taken.
        every_convention: for both position conventions, and not only LiteRT's.
    """
    conventions = (LITERT, TRANSFORMERS) if every_convention else (LITERT,)
    steps = pair.setting.draft_steps
    anchors = max(1, most // (len(texts) * steps * len(conventions)))
    parts = [
        part
        for group in groups([len(text.tokens) for text in texts], pair.setting.batch)
        for part in _states(pair, drafter, texts, group, anchors, conventions)
    ]
    return Used(*(torch.cat([getattr(part, name) for part in parts])[:most] for name in ("states", "choices", "text")))


@torch.no_grad()
def _states(
    pair: Pair,
    drafter: MtpDrafter,
    texts: Sequence[Text],
    group: Sequence[int],
    anchors: int,
    conventions: Sequence[Convention],
) -> Iterator[Used]:
    chosen, steps = [texts[index] for index in group], pair.setting.draft_steps
    most = min(anchors, max(len(text.anchors) for text in chosen))
    generator = torch.Generator().manual_seed(pair.setting.seed)
    states_there = states_of(pair.base, drafter.needs, chosen, LOGITS_AT_ONCE)
    batch = collate(states_there, *random_anchors(chosen, most, generator), drafter.pre_projection.weight.device)
    counts = counting(batch, steps, greedy=pair.setting.temperature == 0)
    index = torch.tensor(group)[None, :, None].expand(counts.shape)[counts.cpu()]
    rows = max(1, LOGITS_AT_ONCE // drafter.config.vocab_size)
    for convention in conventions:
        states = Rounds(drafter, steps)(batch, pair.base.embed, convention)[counts]
        choices = [drafter.lm_head(part).argmax(-1) for part in states.split(rows)]
        yield Used(states.cpu(), torch.cat(choices).cpu(), index)


def vectors_of(parts: Sequence[Used], head: Tensor) -> Tensor:
    """F32 [V, width]: of each token, the mean of the states in which it is chosen and of its own row, of their length.

    Overwrites ``head``, F32 [V, width]. The first of ``parts`` says how long states are.
    """
    head.mul_(_ROW_WEIGHT * _length(parts[0].states) / (_length(head) or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for used in parts:
        for rows in torch.split(torch.arange(len(used.states)), 1 << 16):
            head.index_add_(0, used.choices[rows], used.states[rows].float())
        counts += torch.bincount(used.choices, minlength=len(head))
    return head.div_(counts[:, None])


def _length(rows: Tensor) -> float:
    return float(rows.float().norm(dim=1).mean())


def build_head(
    head: Tensor,
    text: Sequence[Used],
    made: Used,
    watched: Sequence[Used],
    count: int,
    top_k: int | None,
    steps: int,
    seed: int,
) -> Built:
    """``count`` clusters, and their centroids.

    Args:
        head: F32 [V, width], the dense head; overwritten.
        text: states over text of each kind.
        made: states made for tokens.
        watched: what it is judged by, on the way: states over text of each kind.
        top_k, steps, seed: as for :func:`~mtp_extract.tune.centroids.learn_centroids`.

    Raises:
        MtpExtractError: ``count`` does not divide the vocabulary, or a number is not finite.
    """
    vectors = vectors_of([*text, made], head)
    ordering = balanced_clusters(vectors, count)
    cluster = cluster_of(ordering, count)
    learned = learn_centroids(
        [
            *(Taught(used.states, cluster[used.choices]) for used in text),
            Taught(made.states, cluster[made.choices], _MADE_SHARE),
        ],
        means_of(vectors, ordering, count),
        [Taught(used.states, cluster[used.choices]) for used in watched],
        top_k=top_k,
        share=ENOUGH,
        steps=steps,
        seed=seed,
    )
    return Built(ordering, learned)
