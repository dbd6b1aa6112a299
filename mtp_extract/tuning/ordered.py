"""An ordered head for a drafter: clusters of tokens, and centroids that tell in which cluster to look.

A token's vector is the mean state in which it is the dense head's choice, averaged with its own row of that head, since
many tokens are chosen seldom or never. Clusters of vectors are leaves of a tree of cuts, of equal size. A centroid
begins at its cluster's mean and is learned as a classifier of states. A head made of one kind of text loses the choices
of another: so the base also continues random tokens, and what the head keeps is measured on every kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.architecture.roles import CENTROIDS, HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import of_array
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluation.agreement import groups, share_over_texts
from mtp_extract.evaluation.progress import Show
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, new_texts, side_of
from mtp_extract.tuning.loss import LOGITS_AT_ONCE
from mtp_extract.tuning.pair import Pair, as_written
from mtp_extract.tuning.text import Writer
from mtp_extract.tuning.train import EVALUATIONS, Batch, Rounds, cosine, counting, random_anchors, states_of
from mtp_extract.tuning.verdict import Comparisons, signed, units_of

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
_BATCH, _SCORES_AT_ONCE = 2048, 1 << 23


class Used(NamedTuple):
    """N states that a drafter's head reads."""

    states: Tensor  # [N, width], in the type the drafter computes in
    choices: Tensor  # int64 [N], the dense head's argmax; or the cluster in which that is
    text: Tensor  # int64 [N], index of the text


def make_head(pair: Pair, drafter: Network, corpus: Corpus, tell: Show) -> tuple[Checkpoint, dict[str, Any]]:
    """The pair's checkpoint with an ordered head in place of ``drafter``'s dense one; how it was made, for the record.

    Raises:
        MtpExtractError: there is too little text of a kind.
    """
    dense_checkpoint = dense(pair.origin.checkpoint)
    random_by_side = random_texts(pair, tell)
    vocabulary = dense_checkpoint.config.vocab_size
    count = clusters_of(vocabulary)
    tokens_a_cluster = vocabulary // count

    # States to learn from and to choose by: over the base's text, and over what it writes after random tokens.
    most_states = max(_LEAST_STATES, _STATES_A_CENTROID * count)
    pair.say(f"reading the drafter's states over {len(corpus.trained) + len(random_by_side[TRAINED])} texts")
    conventions = (LITERT, TRANSFORMERS)
    taught = [
        collect(pair, drafter, corpus.trained, int((1 - _RANDOM_SHARE) * most_states), conventions),
        collect(pair, drafter, random_by_side[TRAINED], int(_RANDOM_SHARE * most_states), conventions),
    ]
    watched = [
        collect(pair, drafter, corpus.watched, most_states),
        collect(pair, drafter, random_by_side[WATCHED], most_states),
    ]

    states = sum(len(sample.states) for sample in taught)
    pair.say(f"making {count} clusters, and learning their centroids from {states} states")
    rows = torch.from_numpy(dense_checkpoint.tensors["lm_head"].array().copy())
    steps = pair.plan.optimizer_steps
    ordering, centroids, best_step = build_head(rows, taught, watched, count, steps, pair.plan.seed)

    # Centroids as they will be read.
    written = as_written(pair.origin, ordered(dense_checkpoint, ordering, centroids, 1)).tensors[CENTROIDS]
    stored_centroids = torch.from_numpy(written.array().copy())
    cluster = cluster_of(ordering, count)
    watched_ranks = [ranks(sample.states, stored_centroids, cluster[sample.choices]) for sample in watched]
    top_k = least_top_k(watched_ranks, vocabulary, count)

    # What of the dense head's choices it keeps, on each kind of held-out text.
    kept_by_kind: dict[str, Any] = {}
    for name, texts, unit_of_text in _held_out_kinds(corpus, random_by_side[HELD_OUT]):
        if texts:
            sample = collect(pair, drafter, texts, most_states)
            hits = (ranks(sample.states, stored_centroids, cluster[sample.choices]) < top_k).double()
            share = share_over_texts(unit_of_text[sample.text], hits)
            kept_by_kind[name] = {"share": share.value, "interval": share.ci95}

    about: dict[str, Any] = {
        "centroids": count,
        "top_k": top_k,
        "tokens_a_cluster": tokens_a_cluster,
        "best_step": best_step,
        "states": states,
        "rows_read": count + top_k * tokens_a_cluster,
        "rows_dense": vocabulary,
        "kinds": kept_by_kind,
    }
    return ordered(dense_checkpoint, ordering, centroids, top_k), about


def _held_out_kinds(corpus: Corpus, random_tokens: Sequence[Text]) -> Iterator[tuple[str, Sequence[Text], Tensor]]:
    """By kind of held-out text: its name, its texts, and for each text the unit that an interval counts.

    Windows of one text by people are one unit.
    """
    texts = [text for _, text in corpus.held_out]
    units = units_of(corpus)
    yield "as trained on", texts[: corpus.own], units[: corpus.own]
    yield "shipped prompts", texts[corpus.own :], units[corpus.own :]
    yield "random tokens", random_tokens, torch.arange(len(random_tokens))


def untrained(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with an ordered head of zeros: what holds it can hold one that was made."""
    before = dense(checkpoint)
    count, width = clusters_of(before.config.vocab_size), before.config.hidden_size
    return ordered(before, torch.arange(before.config.vocab_size), torch.zeros(count, width), 1)


def clusters_of(vocabulary: int) -> int:
    """How many clusters of equal size: of about 128 tokens, as official drafters have them, or 16 of few tokens."""
    wanted = vocabulary // (128 if vocabulary >= 1 << 14 else 16)
    fits = (number for number in range(1, vocabulary + 1) if vocabulary % number == 0)
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
    return torch.argsort(ordering) // (len(ordering) // count)


def random_texts(pair: Pair, tell: Show) -> dict[str, list[Text]]:
    """By side, what the base writes after random tokens, none of them special."""
    plan, tokenizer = pair.plan, pair.loaded.tokenizer
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    usual = [token for token in range(min(pair.base.vocab_size, len(tokenizer))) if token not in special]
    opened = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator, prompts = torch.Generator().manual_seed(plan.seed), []
    for length in islice(cycle(_RANDOM_LENGTHS), RANDOM_PROMPTS):
        drawn = torch.randint(len(usual), (length,), generator=generator).tolist()
        prompts.append((*opened, *(usual[index] for index in drawn)))
    writer = Writer(pair, plan.temperature, min(plan.new_tokens, _RANDOM_NEW_TOKENS))
    written = writer.texts(prompts, tell, "random prompts")
    sides, learned = dict[str, list[Text]](), list[Text]()
    # After random tokens a base soon writes the same loops: one that was learned shows nothing.
    for side in (TRAINED, WATCHED, HELD_OUT):
        own = [text for text in written if side_of(str(list(text.prompt))) == side]
        learned += sides.setdefault(side, new_texts(own, plan.draft_steps, learned))
    return sides


@torch.no_grad()
def collect(
    pair: Pair, drafter: Network, texts: Sequence[Text], most: int, conventions: Sequence[Convention] = (LITERT,)
) -> Used:
    """``most`` states of ``drafter``'s rounds over ``texts`` that count, and what its dense head chooses there.

    Raises:
        MtpExtractError: no draft counts.
    """
    plan, needs, head, parts = pair.plan, drafter.needs, drafter.lm_head, list[Used]()
    anchors = max(1, most // (max(1, len(texts)) * plan.draft_steps * len(conventions)))
    for group in groups([len(text.tokens) for text in texts], plan.batch):
        chosen = [texts[index] for index in group]
        count, generator = max(len(text.anchors) for text in chosen), torch.Generator().manual_seed(plan.seed)
        drawn = random_anchors(chosen, min(anchors, count), generator)
        batch = Batch.of(states_of(pair.base, needs, chosen), needs, *drawn, head.weight.device)
        counts = counting(batch, plan.draft_steps, greedy=plan.temperature == 0)
        index = torch.tensor(group)[None, :, None].expand(counts.shape)[counts.cpu()]
        for convention in conventions:
            states = Rounds(drafter, plan.draft_steps)(batch, pair.base.embed, convention)[counts]
            rows = torch.split(states, max(1, LOGITS_AT_ONCE // len(head.weight)))
            parts.append(Used(states.cpu(), torch.cat([head(part).argmax(-1) for part in rows]).cpu(), index))
    if not sum(len(part.states) for part in parts):
        message = "expected text that the base would write, found none of which a draft counts. Give other text."
        raise MtpExtractError(message, remedies=("text", "prompts"))
    return Used(*(torch.cat(column)[:most] for column in zip(*parts, strict=True)))


def build_head(
    head: Tensor, taught: Sequence[Used], watched: Sequence[Used], count: int, steps: int, seed: int
) -> tuple[Tensor, Tensor, int]:
    """``count`` clusters, the tokens cluster by cluster int64 [V]; their centroids; and the step that made these.

    Args:
        head: F32 [V, width], the dense head; overwritten.
        taught, watched: states to learn from, equal parts of every batch, and to choose by; by kind of text.
    """
    # Of each token, the mean of the states in which it is chosen and of its own row, made as long as states are.
    length, own = (float(rows.float().norm(dim=1).mean()) for rows in (taught[0].states, head))
    head.mul_(_ROW_WEIGHT * length / (own or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for one in taught:
        for choices, states in zip(torch.split(one.choices, 1 << 16), torch.split(one.states, 1 << 16), strict=True):
            head.index_add_(0, choices, states.float())
        counts += torch.bincount(one.choices, minlength=len(head))
    vectors = head.div_(counts[:, None])
    ordering = balanced_clusters(vectors, torch.arange(len(vectors)), count)
    means, cluster = vectors[ordering].view(count, -1, vectors.shape[1]).mean(dim=1), cluster_of(ordering, count)
    taught, watched = ([one._replace(choices=cluster[one.choices]) for one in part] for part in (taught, watched))
    return ordering, *learn_centroids(taught, watched, means, steps=steps, seed=seed)


def balanced_clusters(vectors: Tensor, members: Tensor, count: int) -> Tensor:
    """int64 [N]: ``members`` [N], rows of ``vectors`` F32 [V, width], in ``count`` clusters of one size, one by one.

    They are cut in two along the axis of greatest spread, and again; ``count`` divides N.
    """
    if count == 1:
        return members.sort().values
    there, least = vectors[members], torch.finfo(vectors.dtype).tiny
    # The axis of greatest spread, by the power method; where all vectors are equal, any will do.
    some = there[:: -(-len(there) // _AXIS_FROM)]
    some = some - some.mean(dim=0)
    axis = some[some.square().sum(dim=1).argmax()]
    for _ in range(_AXIS_STEPS):
        axis = some.T @ (some @ normalize(axis, dim=0, eps=least))
    members = members[torch.argsort(there @ normalize(axis, dim=0, eps=least), stable=True)]
    half, cut = count // 2, len(members) // count * (count // 2)
    parts = ((members[:cut], half), (members[cut:], count - half))
    return torch.cat([balanced_clusters(vectors, part, clusters) for part, clusters in parts])


def ranks(states: Tensor, centroids: Tensor, cluster: Tensor) -> Tensor:
    """int64 [N]: how many of ``centroids`` [C, width] score higher on each state than that of ``cluster`` int64 [N]."""
    found, rows = [cluster[:0]], max(1, _SCORES_AT_ONCE // len(centroids))
    for part, wanted in zip(torch.split(states, rows), torch.split(cluster, rows), strict=True):
        scores = part.to(centroids) @ centroids.T
        found.append((scores > scores.gather(1, wanted[:, None])).sum(dim=1))
    return torch.cat(found)


def enough(kinds: Sequence[Tensor]) -> int:
    """How many clusters keep enough of the choices on every kind of text, by the ranks of the right ones."""
    return max(int(rank.sort().values[math.ceil(ENOUGH * len(rank)) - 1]) + 1 for rank in kinds)


def least_top_k(watched: Sequence[Tensor], vocabulary: int, count: int) -> int:
    """How many clusters are looked into, of ranks by kind of text: a power of two that keeps :func:`enough`, or as many
    as are worth it.
    """
    # With more than half of the rows, too few are saved.
    most = max(1, (vocabulary // 2 - count) // (vocabulary // count))
    return min(most, 1 << (enough(watched) - 1).bit_length())


def learn_centroids(
    taught: Sequence[Used], watched: Sequence[Used], means: Tensor, *, steps: int, seed: int
) -> tuple[Tensor, int]:
    """Centroids F32 [C, width] that look into the fewest clusters on the worst kind; and the step that made them.

    Cross-entropy over clusters, the choices here, is minimized from their ``means`` F32 [C, width] on, of step 0.
    """
    random, (count, width) = torch.Generator().manual_seed(seed), means.shape
    # States of a root mean square of 1, and scores of about as much.
    size = float(torch.linalg.vector_norm(some := taught[0].states, dtype=torch.float32)) / some.numel() ** 0.5 or 1.0
    best = means / (float(means.norm(dim=1).mean()) or 1.0)
    rows, highest = best.clone().requires_grad_(), 1 / width
    optimizer = torch.optim.Adam([rows], lr=highest, betas=(0.9, 0.99))

    def score() -> tuple[int, float]:
        # Of the worst kind, how many clusters lose little enough; then the mean log2 of ranks.
        found = [ranks(one.states / size, rows.detach(), one.choices) for one in watched]
        return enough(found), sum(float((rank + 1).double().log2().mean()) for rank in found)

    best_score, best_step = score(), 0
    for done in range(1, steps + 1):
        drawn = [(one, torch.randint(len(one.states), (_BATCH // len(taught),), generator=random)) for one in taught]
        states = torch.cat([one.states[chosen].float() for one, chosen in drawn])
        cluster = torch.cat([one.choices[chosen] for one, chosen in drawn])
        scores, own = states / size @ rows.T, cluster[:, None]
        # The best few clusters are looked into anyhow: they are no rivals of the right one.
        looked_into = scores.detach().topk(1 << int(math.log2(count) / 2), dim=1).indices
        rivals = scores.scatter(1, looked_into, -torch.inf).scatter(1, own, scores.gather(1, own))
        optimizer.param_groups[0]["lr"] = highest * cosine((done - 1) / steps)
        optimizer.zero_grad()
        cross_entropy(rivals, cluster).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        if (done % max(1, steps // EVALUATIONS) == 0 or done == steps) and (now := score()) < best_score:
            best, best_score, best_step = rows.detach().clone(), now, done
    return best / size, best_step


def refusals(kept: Mapping[str, Mapping[str, Any]], comparisons: Comparisons) -> Iterator[str]:
    """Why the head is not to be saved, of what it keeps of each kind of text."""
    for name, found in kept.items():
        if found["share"] < LEAST_KEPT:
            kept_of = f"{found['share']:.2%} of the dense head's choices on held-out text ({name})"
            yield f"it keeps {kept_of}, of which {LEAST_KEPT:.1%} are wanted"
    if (overall := comparisons.overall).may_lose(MOST_LOST):
        yield f"it may lose more than {MOST_LOST} teacher-forced tokens per round ({signed(overall.change)})"
    for name, one in comparisons.workloads.items():
        if one.change.interval is not None and one.change.interval.high < -MOST_LOST:
            yield f"it loses more than {MOST_LOST} on {escape(name)} ({signed(one.change)})"
