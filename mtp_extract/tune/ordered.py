"""An ordered head for a drafter: clusters of tokens, and centroids that tell in which cluster to look.

A token's vector is the mean state in which it is the dense head's choice, averaged with its own row of that head, since
many tokens are chosen seldom or never. A head made of one kind of text loses the choices of another: so the base also
continues random tokens of its whole vocabulary, and what the head keeps is measured on every kind there is.
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
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.intervals import Interval
from mtp_extract.evaluate.measured import share_over_texts
from mtp_extract.evaluate.progress import Show
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.clusters import (
    Learned,
    Taught,
    balanced_clusters,
    check_count,
    cluster_of,
    divisors,
    learn_centroids,
    ranks,
)
from mtp_extract.tune.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, new_texts, side_of, write, writer_of
from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.pair import Pair
from mtp_extract.tune.plan import TuningPlan
from mtp_extract.tune.train import Rounds, collate, counting, random_anchors, states_of
from mtp_extract.tune.verdict import Comparisons, Made, signed
from mtp_extract.tune.writing import as_written, check_writable

LEAST_KEPT = 0.995
"""Of the dense head's choices, on text of each kind."""
ENOUGH = 1 - (1 - LEAST_KEPT) / 4
"""On watched text: a quarter of what may be lost, since other text, which decides, loses more."""
MOST_LOST = 0.02
"""Teacher-forced tokens per round, against the dense head."""

OWN, SHIPPED, RANDOM = "as trained on", "shipped prompts", "random tokens"
"""Text like that which the head is made of; that of workloads it is not made of; that after random tokens."""

_ROW_WEIGHT = 5.0  # a token's own row counts as much as so many states
_STATES_A_CENTROID = 200
_LEAST_STATES = 200_000  # asked for where there are few centroids
_FEW_STATES = 50  # a centroid: with fewer there is little to learn from
_LARGE = 1 << 14  # a vocabulary whose clusters are of 128 tokens, as those of the official drafters are
_RANDOM_SHARE = 1 / 3  # of the states that are learned from, those over text after random tokens
_RANDOM_PROMPTS = 320
_RANDOM_LENGTHS = (4, 16, 48)  # tokens of a prompt
_RANDOM_NEW_TOKENS = 96


def make_head(plan: TuningPlan, pair: Pair, corpus: Corpus, tell: Show) -> Made:
    """Make an ordered head and measure it beside the dense one.

    Raises:
        MtpExtractError: there is too little text of a kind, or a number of clusters is wrong.
    """
    before = dense(pair.origin.checkpoint)
    drafter = pair.drafter_of(before)
    assert isinstance(drafter, MtpDrafter)
    vocabulary, count = before.config.vocab_size, clusters_of(plan, before.config.vocab_size)
    strange = random_texts(pair, tell)
    pair.say(f"reading the drafter's states over {len(corpus.trained) + len(strange[TRAINED])} texts")
    most = max(_LEAST_STATES, _STATES_A_CENTROID * count)
    used = [
        collect(pair, drafter, texts, int(part * most), every_convention=True)
        for texts, part in ((corpus.trained, 1 - _RANDOM_SHARE), (strange[TRAINED], _RANDOM_SHARE))
    ]
    watched = [collect(pair, drafter, texts, most) for texts in (corpus.watched, strange[WATCHED])]
    kinds = {OWN: corpus.held_out[: corpus.own], SHIPPED: corpus.held_out[corpus.own :], RANDOM: strange[HELD_OUT]}
    held_out = {name: collect(pair, drafter, texts, most) for name, texts in kinds.items() if texts}
    held_out[OWN] = replace(held_out[OWN], text=torch.tensor(corpus.units)[held_out[OWN].text])

    states = sum(map(len, used))
    pair.say(f"making {count} clusters, and learning their centroids from {states} states")
    ordering, learned = build_head(head_of(before), used, watched, count, plan)
    made = ordered(before, ordering, learned.centroids, 1)
    # Centroids as they will be read.
    rows = head_of(as_written(pair.origin, made), centroids=True)
    top_k = plan.top_k or _chosen([ranks_of(one, ordering, rows) for one in watched], vocabulary, count)
    kept = {name: Kept.of(one, ranks_of(one, ordering, rows), top_k) for name, one in held_out.items()}
    made = ordered(before, ordering, learned.centroids, top_k)

    pair.say(f"measuring the drafter with either head on {len(corpus.held_out)} held-out texts")
    measured = [pair.measured(one, corpus.held_out) for one in (drafter, pair.drafter_of(made))]
    comparisons = Comparisons.of(corpus, measured[0], measured[1])
    about = {
        "centroids": count,
        "top_k": top_k,
        "tokens_a_cluster": vocabulary // count,
        "rows_read": count + top_k * (vocabulary // count),
        "rows_dense": vocabulary,
        "temperature": plan.temperature,
        "draft_steps": plan.draft_steps,
        "seed": plan.seed,
        "states": states,
        "tokens_used": len(torch.unique(used[0].choices)),
        "tokens_seen": len(torch.unique(torch.cat([part.choices for part in used]))),
        "steps": plan.optimizer_steps,
        "steps_done": learned.done,
        "best_step": learned.step,
        "kinds": {name: one.as_json() for name, one in kept.items()},
    }
    few = f"{states} states are {states / count:.0f} a centroid; more prompts, or longer texts, make a better head."
    notes = (few,) if states < _FEW_STATES * count else ()
    return Made(made, "ordered_head", about, comparisons, tuple(_refused(kept, comparisons)), notes)


def check_dense(plan: TuningPlan, pair: Pair) -> None:
    """Check, before any work, that an ordered head can be made for the pair's drafter.

    Raises:
        MtpExtractError: several processes, or a number of clusters that does not divide the vocabulary.
        UnsupportedError: the drafter's format has no room for such a head.
    """
    if pair.share[1] > 1:
        raise MtpExtractError(f"expected one process to make an ordered head, found {pair.share[1]}; start only one")
    before = dense(pair.origin.checkpoint)
    vocabulary = before.config.vocab_size
    centroids = torch.zeros(clusters_of(plan, vocabulary), before.config.hidden_size)
    like = ordered(before, torch.arange(vocabulary), centroids, 1)
    advice = "Convert the drafter to the transformers format first."
    check_writable(pair.origin, like, "an ordered head", advice, needed=HEAD_ROLES)


def clusters_of(plan: TuningPlan, vocabulary: int) -> int:
    """The number of clusters.

    Raises:
        MtpExtractError: it does not divide ``vocabulary``, or more than all would be looked into.
    """
    wanted = vocabulary // (128 if vocabulary >= _LARGE else 16)
    count = plan.centroids or min(divisors(vocabulary), key=lambda fit: abs(fit - wanted), default=1)
    check_count(vocabulary, count)
    if plan.top_k is not None and plan.top_k > count:
        raise MtpExtractError(
            f"expected to look into at most all {count} clusters, found {plan.top_k}; lower it", remedies=("top_k",)
        )
    return count


def dense(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` without the ordered head that it may have."""
    tensors = {role: tensor for role, tensor in checkpoint.tensors.items() if role not in HEAD_ROLES}
    return replace(checkpoint, config=replace(checkpoint.mtp, ordered_head=None), tensors=MappingProxyType(tensors))


def ordered(checkpoint: Checkpoint, ordering: Tensor, centroids: Tensor, top_k: int) -> Checkpoint:
    """``checkpoint`` with an ordered head; all else as it is.

    Args:
        ordering: int64 [V], the tokens cluster by cluster.
        centroids: F32 [C, width].
    """
    head: Mapping[str, Weight] = {
        CENTROIDS: of_array(centroids.numpy()),
        ORDERING: of_indices(ordering.numpy().astype(np.int64)),
    }
    config = replace(checkpoint.mtp, ordered_head=OrderedHeadConfig(len(centroids), top_k))
    return replace(checkpoint, config=config, tensors=MappingProxyType({**checkpoint.tensors, **head}))


def head_of(checkpoint: Checkpoint, *, centroids: bool = False) -> Tensor:
    """F32, a copy: [V, width], the dense head; or [C, width], the centroids."""
    return torch.from_numpy(checkpoint.tensors[CENTROIDS if centroids else "lm_head"].array().copy())


# States, and what is kept


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


def ranks_of(used: Used, ordering: Tensor, centroids: Tensor) -> Tensor:
    """int64 [N]: how many clusters score higher than the one with the dense head's choice."""
    return ranks(used.states, centroids, cluster_of(ordering, len(centroids))[used.choices])


def random_texts(pair: Pair, tell: Show) -> Mapping[str, list[Text]]:
    """By side, what the base writes after random tokens, none of them special.

    Raises:
        MtpExtractError: the base's context is too short, or it ends such texts at once.
    """
    plan, tokenizer = pair.plan, pair.loaded.tokenizer
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    usual = [token for token in range(min(pair.base.vocab_size, len(tokenizer))) if token not in special]
    opened = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator = torch.Generator().manual_seed(plan.seed)
    items = []
    for number in range(_RANDOM_PROMPTS):
        length = _RANDOM_LENGTHS[number % len(_RANDOM_LENGTHS)]
        drawn = torch.randint(len(usual), (length,), generator=generator).tolist()
        items.append((*opened, *(usual[index] for index in drawn)))
    own = replace(plan, text_from=None, new_tokens=min(plan.new_tokens, _RANDOM_NEW_TOKENS), chat_template=False)
    writer = writer_of(pair, own)
    write(pair, writer, items, tell, "prompts of random tokens")
    written = [(side_of(str(list(item))), text) for item, text in zip(items, writer.texts(items), strict=True)]
    sides, learned = dict[str, list[Text]](), list[Text]()
    # After random tokens a base soon writes the same loops: one that was learned shows nothing.
    for side in (TRAINED, WATCHED, HELD_OUT):
        own_side = [one for one in written if one[0] == side]
        sides[side] = [text for _, text in new_texts(own_side, plan.draft_steps, learned)]
        learned += sides[side]
    if not all(sides.values()):
        raise MtpExtractError(
            f"expected the base to write more than {plan.draft_steps} tokens after random ones, found that it ends "
            "nearly all such texts at once, or repeats itself: on other text than yours a head cannot be checked; "
            "keep the dense one"
        )
    return sides


def collect(
    pair: Pair, drafter: MtpDrafter, texts: Sequence[Text], most: int, *, every_convention: bool = False
) -> Used:
    """The states of ``drafter``'s rounds over ``texts`` that count, and what its dense head chooses there.

    Args:
        drafter: with a dense head.
        texts: with an anchor at least.
        most: states; where there are more, random anchors are taken.
        every_convention: for both position conventions, and not only LiteRT's.

    Raises:
        MtpExtractError: no draft counts.
    """
    conventions = (LITERT, TRANSFORMERS) if every_convention else (LITERT,)
    anchors = max(1, most // (len(texts) * pair.plan.draft_steps * len(conventions)))
    parts = [
        part
        for group in groups([len(text.tokens) for text in texts], pair.plan.batch)
        for part in _states(pair, drafter, texts, group, anchors, conventions)
    ]
    found = Used(*(torch.cat([getattr(part, name) for part in parts])[:most] for name in ("states", "choices", "text")))
    if not len(found):
        raise MtpExtractError(
            "expected text that the base would write, found none of which a draft counts; give other text",
            remedies=("text", "prompts"),
        )
    return found


@torch.no_grad()
def _states(
    pair: Pair,
    drafter: MtpDrafter,
    texts: Sequence[Text],
    group: Sequence[int],
    anchors: int,
    conventions: Sequence[Convention],
) -> Iterator[Used]:
    chosen, steps = [texts[index] for index in group], pair.plan.draft_steps
    most = min(anchors, max(len(text.anchors) for text in chosen))
    drawn = random_anchors(chosen, most, torch.Generator().manual_seed(pair.plan.seed))
    batch = collate(states_of(pair.base, drafter.needs, chosen), *drawn, drafter.pre_projection.weight.device)
    counts = counting(batch, steps, greedy=pair.plan.temperature == 0)
    index = torch.tensor(group)[None, :, None].expand(counts.shape)[counts.cpu()]
    rows = max(1, LOGITS_AT_ONCE // drafter.config.vocab_size)
    for convention in conventions:
        states = Rounds(drafter, steps)(batch, pair.base.embed, convention)[counts]
        choices = [drafter.lm_head(part).argmax(-1) for part in states.split(rows)]
        yield Used(states.cpu(), torch.cat(choices).cpu(), index)


# The head


def build_head(
    head: Tensor, used: Sequence[Used], watched: Sequence[Used], count: int, plan: TuningPlan
) -> tuple[Tensor, Learned]:
    """``count`` clusters, the tokens cluster by cluster int64 [V], and their centroids.

    Args:
        head: F32 [V, width], the dense head; overwritten.
        used: states to learn from, by kind of text.
        watched: states to choose by, by kind of text.

    Raises:
        MtpExtractError: ``count`` does not divide the vocabulary, or a number is not finite.
    """
    vectors = vectors_of(used, head)
    ordering = balanced_clusters(vectors, count)
    cluster, means = cluster_of(ordering, count), vectors[ordering].view(count, -1, vectors.shape[1]).mean(dim=1)
    taught, seen = ([Taught(one.states, cluster[one.choices]) for one in part] for part in (used, watched))
    learned = learn_centroids(
        taught, means, seen, top_k=plan.top_k, share=ENOUGH, steps=plan.optimizer_steps, seed=plan.seed
    )
    return ordering, learned


def vectors_of(parts: Sequence[Used], head: Tensor) -> Tensor:
    """F32 [V, width]: of each token, the mean of the states in which it is chosen and of its own row, of their length.

    Overwrites ``head``, F32 [V, width]. The first of ``parts`` says how long states are.
    """
    head.mul_(_ROW_WEIGHT * _length(parts[0].states) / (_length(head) or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for used in parts:
        for rows in torch.split(torch.arange(len(used)), 1 << 16):
            head.index_add_(0, used.choices[rows], used.states[rows].float())
        counts += torch.bincount(used.choices, minlength=len(head))
    return head.div_(counts[:, None])


def _length(rows: Tensor) -> float:
    return float(rows.float().norm(dim=1).mean())


def _chosen(watched: Sequence[Tensor], vocabulary: int, count: int) -> int:
    """The least number of clusters that lose little enough on every kind of text.

    Args:
        watched: by kind of text, ranks of the clusters that are to be found.
    """
    # With more than half of the rows, too few are saved.
    most = max(1, (vocabulary // 2 - count) // (vocabulary // count))
    numbers = {number for power in range(most.bit_length()) for number in (1 << power, 3 << power)}
    fits = sorted({most, *(number for number in numbers if number < most)})
    enough = (top_k for top_k in fits if all(float((rank < top_k).double().mean()) >= ENOUGH for rank in watched))
    return next(enough, fits[-1])


def _refused(kept: Mapping[str, Kept], comparisons: Comparisons) -> Iterator[str]:
    """Why the head is not to be saved."""
    for name, found in kept.items():
        if found.share < LEAST_KEPT:
            yield (
                f"it keeps {found.share:.2%} of the dense head's choices on held-out text ({name}), of which "
                f"{LEAST_KEPT:.1%} are wanted"
            )
    overall = comparisons.overall.change
    # Where no text loses a draft, an interval's lower end is only as far off as the texts are few.
    if overall.interval is None or (overall.interval.low < -MOST_LOST and comparisons.overall.loses):
        yield f"it may lose more than {MOST_LOST} teacher-forced tokens per round ({signed(overall)})"
    for name, comparison in comparisons.workloads.items():
        interval = comparison.change.interval
        if interval is not None and interval.high < -MOST_LOST:
            yield f"it loses more than {MOST_LOST} on {name} ({signed(comparison.change)})"
