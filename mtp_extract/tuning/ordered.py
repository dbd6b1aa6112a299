"""An ordered head for a drafter: clusters of tokens, and centroids that tell in which cluster to look.

A token's vector is the mean state in which it is the dense head's choice, averaged with its own row of that head, since
many tokens are chosen seldom or never. Clusters of vectors are leaves of a tree of cuts, of equal size. A centroid
begins at its cluster's mean and is learned as a classifier of states; what counts is that the right cluster is among
those looked into, so it is trained against those beyond the best few alone.

A head made of one kind of text loses the choices of another: so the base also continues random tokens of its whole
vocabulary, and what the head keeps is measured on every kind there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.architecture.roles import CENTROIDS, HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import of_array
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.agreement import groups
from mtp_extract.evaluate.measured import Measured, share_over_texts
from mtp_extract.evaluate.progress import Show
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, new_texts, side_of
from mtp_extract.tuning.loss import LOGITS_AT_ONCE
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.text import Tokens, Writer
from mtp_extract.tuning.train import Rounds, collate, cosine, counting, measured, random_anchors, states_of
from mtp_extract.tuning.verdict import Comparisons, signed, units_of
from mtp_extract.tuning.writing import as_written, check_writable

LEAST_KEPT = 0.995
"""Of the dense head's choices, on text of each kind."""
ENOUGH = 1 - (1 - LEAST_KEPT) / 4
"""On watched text: a quarter of what may be lost, since other text, which decides, loses more."""
MOST_LOST = 0.02
"""Teacher-forced tokens per round, against the dense head."""
RANDOM_PROMPTS = 320

_RANDOM_LENGTHS, _RANDOM_NEW_TOKENS = (4, 16, 48), 96  # lengths are those of prompts
_RANDOM_SHARE = 1 / 3  # of the states that are learned from, those over text after random tokens
_STATES_A_CENTROID, _LEAST_STATES = 200, 200_000  # asked for; the latter where there are few centroids
_ROW_WEIGHT = 5.0  # a token's own row counts as much as so many states
_AXIS_FROM, _AXIS_STEPS = 1 << 14, 12  # vectors that the axis of a cut is found from; steps of the power method
_BATCH, _SCALED_ON, _SCORES_AT_ONCE = 2048, 4096, 1 << 23
_EVALUATIONS, _PATIENCE = 10, 3  # evaluations without a better one after which learning ends
_RATE = 1.0  # learning rate times width, for states of a root mean square of 1

Taught = tuple[Tensor, Tensor]
"""States [N, width], and int64 [N], the cluster where the best token of each lies."""


class Used(NamedTuple):
    """States that a drafter's head reads. N states."""

    states: Tensor  # [N, width], in the type the drafter computes in
    choices: Tensor  # int64 [N], the dense head's argmax
    text: Tensor  # int64 [N], index of the text


def make_head(pair: Pair, corpus: Corpus, tell: Show) -> tuple[Checkpoint, dict[str, Any], tuple[Measured, Measured]]:
    """The drafter with an ordered head; how that was made, for the record; and it with either head.

    Raises:
        MtpExtractError: there is too little text of a kind.
    """
    before, plan, held_out = dense(pair.origin.checkpoint), pair.plan, [text for _, text in corpus.held_out]
    drafter, vocabulary = pair.drafter_of(before), before.config.vocab_size
    assert isinstance(drafter, MtpDrafter)
    strange, count = random_texts(pair, tell), clusters_of(vocabulary)
    pair.say(f"reading the drafter's states over {len(corpus.trained) + len(strange[TRAINED])} texts")
    most = max(_LEAST_STATES, _STATES_A_CENTROID * count)
    shares = (corpus.trained, 1 - _RANDOM_SHARE), (strange[TRAINED], _RANDOM_SHARE)
    used = [collect(pair, drafter, texts, int(share * most), every_convention=True) for texts, share in shares]
    watched = [collect(pair, drafter, texts, most) for texts in (corpus.watched, strange[WATCHED])]
    kinds = {
        "as trained on": held_out[: corpus.own],
        "shipped prompts": held_out[corpus.own :],
        "random tokens": strange[HELD_OUT],
    }
    kept_of = {
        name: collect(pair, drafter, texts, most) for name, texts in kinds.items() if texts or name == "random tokens"
    }
    states = sum(len(one.states) for one in used)
    pair.say(f"making {count} clusters, and learning their centroids from {states} states")
    rows = torch.from_numpy(before.tensors["lm_head"].array().copy())
    ordering, centroids, best_step = build_head(rows, used, watched, count, plan.optimizer_steps, plan.seed)
    # Centroids as they will be read.
    written = as_written(pair.origin, ordered(before, ordering, centroids, 1)).tensors[CENTROIDS]
    rows, cluster = torch.from_numpy(written.array().copy()), cluster_of(ordering, count)

    def ranked(one: Used) -> Tensor:
        return ranks(one.states, rows, cluster[one.choices])

    top_k, kept = least_top_k(list(map(ranked, watched)), vocabulary, count), {}
    for name, one in kept_of.items():
        hits = (ranked(one) < top_k).double()
        # Windows of one text by people are one to an interval.
        index = units_of(corpus)[one.text] if name == "as trained on" else one.text
        kept[name] = {"share": float(hits.mean()), "interval": share_over_texts(index, hits)}
    made, size = ordered(before, ordering, centroids, top_k), vocabulary // count
    pair.say(f"measuring the drafter with either head on {len(held_out)} held-out texts")
    both = measured(pair, drafter, held_out), measured(pair, pair.drafter_of(made), held_out)
    about = {"centroids": count, "top_k": top_k, "tokens_a_cluster": size, "best_step": best_step, "states": states}
    return made, about | {"rows_read": count + top_k * size, "rows_dense": vocabulary, "kinds": kept}, both


def check_dense(pair: Pair) -> None:
    """Check, before any work, that an ordered head can be made for the pair's drafter.

    Raises:
        MtpExtractError: several processes, or a vocabulary that cannot be divided.
        UnsupportedError: the drafter's format has no room for such a head.
    """
    if (processes := pair.accelerator.num_processes) > 1:
        raise MtpExtractError(f"expected one process to make an ordered head, found {processes}; start only one")
    before = dense(pair.origin.checkpoint)
    vocabulary = before.config.vocab_size
    centroids = torch.zeros(clusters_of(vocabulary), before.config.hidden_size)
    like = ordered(before, torch.arange(vocabulary), centroids, 1)
    advice = "Convert the drafter to the transformers format first."
    check_writable(pair.origin, like, "an ordered head", advice, needed=HEAD_ROLES)


def clusters_of(vocabulary: int) -> int:
    """The number of clusters: of about 128 tokens, as the official drafters have them, or 16 in a small vocabulary.

    Raises:
        MtpExtractError: ``vocabulary`` is a prime, which clusters of equal size cannot divide.
    """
    wanted = vocabulary // (128 if vocabulary >= 1 << 14 else 16)
    fits = [number for number in range(2, vocabulary) if vocabulary % number == 0]
    if not fits:
        raise MtpExtractError(
            f"expected a vocabulary that equal clusters divide, found {vocabulary}, a prime; keep the dense head"
        )
    return min(fits, key=lambda fit: abs(fit - wanted))


def dense(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` without the ordered head that it may have."""
    tensors = {role: tensor for role, tensor in checkpoint.tensors.items() if role not in HEAD_ROLES}
    return replace(checkpoint, config=replace(checkpoint.mtp, ordered_head=None), tensors=MappingProxyType(tensors))


def ordered(checkpoint: Checkpoint, ordering: Tensor, centroids: Tensor, top_k: int) -> Checkpoint:
    """``checkpoint`` with an ordered head: tokens cluster by cluster int64 [V], and centroids F32 [C, width]."""
    head = {CENTROIDS: of_array(centroids.numpy()), ORDERING: of_array(ordering.numpy().astype(np.int64))}
    config = replace(checkpoint.mtp, ordered_head=OrderedHeadConfig(len(centroids), top_k))
    return replace(checkpoint, config=config, tensors=MappingProxyType({**checkpoint.tensors, **head}))


def cluster_of(ordering: Tensor, count: int) -> Tensor:
    """int64 [V], the cluster of every token, of an ``ordering`` [V] that lists ``count`` clusters one by one."""
    found = torch.empty_like(ordering)
    found[ordering] = torch.arange(count).repeat_interleave(len(ordering) // count)
    return found


def random_texts(pair: Pair, tell: Show) -> dict[str, list[Text]]:
    """By side, what the base writes after random tokens, none of them special."""
    plan, tokenizer = pair.plan, pair.loaded.tokenizer
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    usual = [token for token in range(min(pair.base.vocab_size, len(tokenizer))) if token not in special]
    opened = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator, items = torch.Generator().manual_seed(plan.seed), list[Tokens]()
    for number in range(RANDOM_PROMPTS):
        length = _RANDOM_LENGTHS[number % len(_RANDOM_LENGTHS)]
        drawn = torch.randint(len(usual), (length,), generator=generator).tolist()
        items.append((*opened, *(usual[index] for index in drawn)))
    writer = Writer(pair, replace(plan, new_tokens=min(plan.new_tokens, _RANDOM_NEW_TOKENS)))
    written = [
        (item, line.as_text) for item, line in zip(items, writer.lines(items, tell, "random prompts"), strict=True)
    ]
    sides, learned = dict[str, list[Text]](), list[Text]()
    # After random tokens a base soon writes the same loops: one that was learned shows nothing.
    for side in (TRAINED, WATCHED, HELD_OUT):
        own = [pair for pair in written if side_of(str(list(pair[0]))) == side]
        sides[side] = [text for _, text in new_texts(own, plan.draft_steps, learned)]
        learned += sides[side]
    return sides


@torch.no_grad()
def collect(
    pair: Pair, drafter: MtpDrafter, texts: Sequence[Text], most: int, *, every_convention: bool = False
) -> Used:
    """The states of ``drafter``'s rounds over ``texts`` that count, and what its dense head chooses there.

    Args:
        most: states; where there are more, random anchors are taken.
        every_convention: for both position conventions, and not only LiteRT's.

    Raises:
        MtpExtractError: no draft counts.
    """
    conventions = (LITERT, TRANSFORMERS) if every_convention else (LITERT,)
    plan, parts = pair.plan, list[Used]()
    anchors = max(1, most // (max(1, len(texts)) * plan.draft_steps * len(conventions)))
    rows = max(1, LOGITS_AT_ONCE // drafter.config.vocab_size)
    for group in groups([len(text.tokens) for text in texts], plan.batch):
        chosen = [texts[index] for index in group]
        count, generator = max(len(text.anchors) for text in chosen), torch.Generator().manual_seed(plan.seed)
        drawn = random_anchors(chosen, min(anchors, count), generator)
        batch = collate(states_of(pair.base, drafter.needs, chosen), *drawn, drafter.pre_projection.weight.device)
        counts = counting(batch, plan.draft_steps, greedy=plan.temperature == 0)
        index = torch.tensor(group)[None, :, None].expand(counts.shape)[counts.cpu()]
        for convention in conventions:
            states = Rounds(drafter, plan.draft_steps)(batch, pair.base.embed, convention)[counts]
            choices = torch.cat([drafter.lm_head(part).argmax(-1) for part in torch.split(states, rows)])
            parts.append(Used(states.cpu(), choices.cpu(), index))
    if not sum(len(part.states) for part in parts):
        raise MtpExtractError(
            "expected text that the base would write, or writes after random tokens, found none of which a draft "
            "counts; give other text, or keep the dense head",
            remedies=("text", "prompts"),
        )
    return Used(*(torch.cat(column)[:most] for column in zip(*parts, strict=True)))


def build_head(
    head: Tensor, used: Sequence[Used], watched: Sequence[Used], count: int, steps: int, seed: int
) -> tuple[Tensor, Tensor, int]:
    """``count`` clusters, the tokens cluster by cluster int64 [V]; their centroids; and the step that made these.

    Args:
        head: F32 [V, width], the dense head; overwritten.
        used: states to learn from, by kind of text, equal parts of every batch. The first says how long states are.
        watched: states to choose by, by kind of text.
        steps, seed: of the learning.

    Raises:
        MtpExtractError: a number is not finite.
    """
    # Of each token, the mean of the states in which it is chosen and of its own row, made as long as states are.
    length, own = (float(rows.float().norm(dim=1).mean()) for rows in (used[0].states, head))
    head.mul_(_ROW_WEIGHT * length / (own or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for one in used:
        for choices, states in zip(torch.split(one.choices, 1 << 16), torch.split(one.states, 1 << 16), strict=True):
            head.index_add_(0, choices, states.float())
        counts += torch.bincount(one.choices, minlength=len(head))
    vectors = head.div_(counts[:, None])
    ordering = balanced_clusters(vectors, count)
    means = vectors[ordering].view(count, -1, vectors.shape[1]).mean(dim=1)
    cluster = cluster_of(ordering, count)
    taught, seen = ([(one.states, cluster[one.choices]) for one in part] for part in (used, watched))
    return ordering, *learn_centroids(taught, means, seen, steps=steps, seed=seed)


def balanced_clusters(vectors: Tensor, count: int) -> Tensor:
    """``count`` clusters of neighbours, all of one size: cut in two along the axis of greatest spread, and again.

    Args:
        vectors: F32 [V, width]; ``count`` divides V.

    Returns:
        int64 [V], a permutation: the members of the first cluster in order, then those of the second, …

    Raises:
        MtpExtractError: a vector is not finite.
    """
    if not bool(torch.isfinite(vectors.sum(dim=1)).all()):
        raise MtpExtractError("expected finite weights and states to make clusters of, found others; check the drafter")
    ordering, size = torch.arange(len(vectors)), len(vectors) // count

    def cut(first: int, clusters: int) -> None:
        part = ordering[first * size : (first + clusters) * size]
        if clusters == 1:
            part.copy_(part.sort().values)
            return
        there = vectors[part]
        # The axis of greatest spread, by the power method; where all vectors are equal, any will do.
        some = there[:: -(-len(there) // _AXIS_FROM)]
        some = some - some.mean(dim=0)
        axis, least = some[some.square().sum(dim=1).argmax()], torch.finfo(some.dtype).tiny
        for _ in range(_AXIS_STEPS):
            axis = some.T @ (some @ (axis / axis.norm().clamp(min=least)))
        part.copy_(part[torch.argsort(there @ (axis / axis.norm().clamp(min=least)), stable=True)])
        cut(first, clusters // 2)
        cut(first + clusters // 2, clusters - clusters // 2)

    cut(0, count)
    return ordering


def ranks(states: Tensor, centroids: Tensor, cluster: Tensor) -> Tensor:
    """int64 [N]: how many of ``centroids`` [C, width] score higher on each state than that of ``cluster`` int64 [N]."""
    found, rows = [cluster[:0]], max(1, _SCORES_AT_ONCE // len(centroids))
    for part, wanted in zip(torch.split(states, rows), torch.split(cluster, rows), strict=True):
        scores = part.to(centroids) @ centroids.T
        found.append((scores > scores.gather(1, wanted[:, None])).sum(dim=1))
    return torch.cat(found)


def learn_centroids(
    taught: Sequence[Taught], means: Tensor, watched: Sequence[Taught], *, steps: int, seed: int
) -> tuple[Tensor, int]:
    """Minimize cross-entropy over clusters; returned is what has to look into the fewest of them, on the worst kind.

    The means F32 [C, width], from which it starts, are among what is compared. In every batch, clusters of few states
    count more than their number: by its square root.

    Returns:
        F32 [C, width], the centroids; and the step after which they were the best, 0 for the means themselves.
    """
    random = torch.Generator().manual_seed(seed)
    ((some, wanted),) = _batches(taught, len(means), 1, _SCALED_ON, random)
    size = float(some.square().mean().sqrt()) or 1.0
    means = means / size
    # The factor with which the means' scores are the best distribution over clusters.
    scores = some / size @ means.T
    factors = [2.0**power for power in range(-10, 3)]
    best = means * min(factors, key=lambda factor: float(cross_entropy(scores * factor, wanted)))
    rows, highest = best.clone().requires_grad_(), _RATE / means.shape[1]
    optimizer = torch.optim.Adam([rows], lr=highest, betas=(0.9, 0.99))

    def score() -> tuple[int, float]:
        # Of the worst kind, how many clusters lose little enough; then the mean log2 of ranks.
        found = [ranks(states / size, rows.detach(), cluster) for states, cluster in watched]
        worst = max(int(rank.sort().values[math.ceil(ENOUGH * len(rank)) - 1]) + 1 for rank in found)
        return worst, sum(float((rank + 1).double().log2().mean()) for rank in found)

    best_score, best_step, stale = score(), 0, 0
    for done, (states, cluster) in enumerate(_batches(taught, len(means), steps, _BATCH, random), 1):
        optimizer.param_groups[0]["lr"] = highest * cosine((done - 1) / steps)
        scores, own = states / size @ rows.T, cluster[:, None]
        # The best few clusters are looked into anyhow: they are no rivals of the right one.
        looked_into = scores.detach().topk(1 << int(math.log2(len(means)) / 2), dim=1).indices
        rivals = scores.scatter(1, looked_into, -torch.inf).scatter(1, own, scores.gather(1, own))
        optimizer.zero_grad()
        cross_entropy(rivals, cluster).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        if done % max(1, steps // _EVALUATIONS) == 0 or done == steps:
            now, stale = score(), stale + 1
            if now < best_score:
                best, best_score, best_step, stale = rows.detach().clone(), now, done, 0
            if stale >= _PATIENCE:
                break
    return best / size, best_step


def _batches(
    taught: Sequence[Taught], clusters: int, count: int, size: int, random: torch.Generator
) -> Iterator[Taught]:
    """``count`` batches of states F32 [about ``size``, width] and their clusters, drawn alike from each part."""
    drawn, rows = [], max(1, round(size / len(taught)))
    for _, cluster in taught:
        weights = torch.bincount(cluster, minlength=clusters).double().rsqrt()[cluster]
        drawn.append(torch.multinomial(weights, count * rows, replacement=True, generator=random).view(count, rows))
    for chosen in zip(*drawn, strict=True):
        pairs = list(zip(taught, chosen, strict=True))
        yield (
            torch.cat([states[rows].float() for (states, _), rows in pairs]),
            torch.cat([cluster[rows] for (_, cluster), rows in pairs]),
        )


def least_top_k(watched: Sequence[Tensor], vocabulary: int, count: int) -> int:
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


def refusals(kept: Mapping[str, Mapping[str, Any]], comparisons: Comparisons) -> Iterator[str]:
    """Why the head is not to be saved, of what it keeps of each kind of text."""
    for name, found in kept.items():
        if found["share"] < LEAST_KEPT:
            yield (
                f"it keeps {found['share']:.2%} of the dense head's choices on held-out text ({name}), of which "
                f"{LEAST_KEPT:.1%} are wanted"
            )
    overall = comparisons.overall
    if overall.may_lose(MOST_LOST):
        yield f"it may lose more than {MOST_LOST} teacher-forced tokens per round ({signed(overall.change)})"
    for name, comparison in comparisons.workloads.items():
        interval = comparison.change.interval
        if interval is not None and interval.high < -MOST_LOST:
            yield f"it loses more than {MOST_LOST} on {name} ({signed(comparison.change)})"
