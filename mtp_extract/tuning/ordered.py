"""Makes an ordered head for a drafter: clusters of tokens, and centroids that select the clusters to score.

A token's vector is the mean of the states in which the dense head chooses it and of its row in that head, since many
tokens are chosen seldom or never. The vectors are cut in two again and again, which gives clusters of equal size. Each
centroid begins at its cluster's mean and is trained as a classifier of states. A head made from one kind of text loses
choices on other kinds: so the base also continues random tokens, and every kind is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.architecture.roles import CENTROIDS, HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import wrap_array
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluation.agreement import estimate_share
from mtp_extract.evaluation.base_texts import group_by_length
from mtp_extract.progress import Reporter
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, choose_side, filter_new_texts
from mtp_extract.tuning.loss import find_argmax_tokens
from mtp_extract.tuning.pair import Pair, round_like
from mtp_extract.tuning.rounds import Batch, Rounds, draw_batch, mark_counted_drafts
from mtp_extract.tuning.text import Writer
from mtp_extract.tuning.train import EVALUATIONS, compute_cosine_decay
from mtp_extract.tuning.verdict import Comparisons, describe_change, number_units

RANDOM_PROMPTS = 320
_LEAST_KEPT = 0.995  # share of the dense head's choices, on text of each kind
# The share on watched text: it may lose a quarter as much, since held-out text loses more.
_ENOUGH = 1 - (1 - _LEAST_KEPT) / 4
_MOST_LOST = 0.02  # teacher-forced tokens per round, against the dense head
_RANDOM_LENGTHS = (4, 16, 48)  # tokens of random prompts
_RANDOM_NEW_TOKENS = 96
_RANDOM_SHARE = 1 / 3  # of the training states, those from text after random tokens
_STATES_A_CENTROID = 200
_LEAST_STATES = 200_000  # however few centroids there are
_ROW_WEIGHT = 5.0  # the number of states that a token's row in the dense head counts for
_AXIS_FROM = 1 << 14  # vectors from which the axis of a cut is computed
_AXIS_STEPS = 12  # of the power method
_BATCH = 2048  # states
_SCORES_AT_ONCE = 1 << 23  # numbers in a chunk of centroid scores


class HeadSample(NamedTuple):
    """N states that a drafter's head reads."""

    states: Tensor  # [N, width], in the type the drafter computes in
    choices: Tensor  # int64 [N], the dense head's argmax, or its cluster
    text: Tensor  # int64 [N], index of the text


class LearnedHead(NamedTuple):
    """Clusters of tokens with their centroids."""

    ordering: Tensor  # int64 [V], the tokens, cluster by cluster
    centroids: Tensor  # F32 [C, width]
    best_step: int  # the training step that gave these centroids

    def rank_choices(self, sample: HeadSample) -> Tensor:
        """Return how many clusters score higher than the one with the dense head's choice, int64 [N]."""
        cluster = find_token_clusters(self.ordering, len(self.centroids))
        return rank_clusters(sample.states, self.centroids, cluster[sample.choices])


def make_head(pair: Pair, drafter: Network, corpus: Corpus, reporter: Reporter) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the pair's checkpoint with an ordered head for ``drafter``, which has a dense one, and its record.

    Raises:
        MtpExtractError: there is too little text of a kind.
    """
    dense_checkpoint = remove_ordered_head(pair.origin.checkpoint)
    vocabulary = dense_checkpoint.config.vocab_size
    count = choose_cluster_count(vocabulary)
    random_by_side = write_random_texts(pair, reporter)
    training, watched = _collect_kinds(pair, drafter, corpus, random_by_side, count)

    states = sum(len(sample.states) for sample in training)
    pair.say(f"making {count} clusters, and learning their centroids from {states} states")
    rows = torch.from_numpy(dense_checkpoint.tensors["lm_head"].array().copy())
    head = build_head(rows, training, watched, count, pair.plan.optimizer_steps, pair.plan.seed)
    # Measure the centroids as they are written, which may round them.
    written = round_like(pair.origin, add_ordered_head(dense_checkpoint, head.ordering, head.centroids, 1))
    head_as_written = head._replace(centroids=torch.from_numpy(written.tensors[CENTROIDS].array().copy()))
    top_k = choose_top_k([head_as_written.rank_choices(sample) for sample in watched], vocabulary, count)
    tokens_a_cluster = vocabulary // count
    about: dict[str, Any] = {
        "centroids": count,
        "top_k": top_k,
        "tokens_a_cluster": tokens_a_cluster,
        "best_step": head.best_step,
        "states": states,
        "rows_read": count + top_k * tokens_a_cluster,
        "rows_dense": vocabulary,
        "kinds": _measure_shares_kept(pair, drafter, head_as_written, top_k, corpus, random_by_side[HELD_OUT]),
    }
    return add_ordered_head(dense_checkpoint, head.ordering, head.centroids, top_k), about


def _measure_shares_kept(
    pair: Pair, drafter: Network, head: LearnedHead, top_k: int, corpus: Corpus, random_tokens: Sequence[Text]
) -> dict[str, Any]:
    """Return by kind of held-out text which share of the dense head's choices the first ``top_k`` clusters have."""
    texts = [text for _, text in corpus.held_out]
    units = number_units(corpus)
    kinds = {
        "as trained on": (texts[: corpus.own_count], units[: corpus.own_count]),
        "shipped prompts": (texts[corpus.own_count :], units[corpus.own_count :]),
        "random tokens": (random_tokens, torch.arange(len(random_tokens))),
    }
    shares = {}
    for name, (texts_of_kind, unit_of_text) in kinds.items():
        if texts_of_kind:
            sample = collect_states(pair, drafter, texts_of_kind, _count_wanted_states(len(head.centroids)))
            share = estimate_share(unit_of_text[sample.text], head.rank_choices(sample) < top_k)
            shares[name] = {"share": share.value, "interval": share.ci95}
    return shares


def _count_wanted_states(count: int) -> int:
    """Return how many states to train, choose or measure ``count`` centroids with."""
    return max(_LEAST_STATES, _STATES_A_CENTROID * count)


def _collect_kinds(
    pair: Pair, drafter: Network, corpus: Corpus, random_by_side: Mapping[str, Sequence[Text]], count: int
) -> tuple[list[HeadSample], list[HeadSample]]:
    """Return training states and states to choose by; both over the base's text and over text after random tokens."""
    most = _count_wanted_states(count)
    conventions = (LITERT, TRANSFORMERS)
    pair.say(f"reading the drafter's states over {len(corpus.trained) + len(random_by_side[TRAINED])} texts")
    training = [
        collect_states(pair, drafter, corpus.trained, int((1 - _RANDOM_SHARE) * most), conventions),
        collect_states(pair, drafter, random_by_side[TRAINED], int(_RANDOM_SHARE * most), conventions),
    ]
    watched = [collect_states(pair, drafter, texts, most) for texts in (corpus.watched, random_by_side[WATCHED])]
    return training, watched


def add_zero_head(checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` with an ordered head of zeros, to ask whether a format can store such a head."""
    before = remove_ordered_head(checkpoint)
    vocabulary = before.config.vocab_size
    centroids = torch.zeros(choose_cluster_count(vocabulary), before.config.hidden_size)
    return add_ordered_head(before, torch.arange(vocabulary), centroids, 1)


def choose_cluster_count(vocabulary: int) -> int:
    """Return the number of equal clusters: of about 128 tokens as in official drafters, 16 in a small vocabulary."""
    wanted = vocabulary // (128 if vocabulary >= 1 << 14 else 16)
    fits = (number for number in range(1, vocabulary + 1) if vocabulary % number == 0)
    return min(fits, key=lambda fit: abs(fit - wanted))


def remove_ordered_head(checkpoint: Checkpoint) -> Checkpoint:
    tensors = {role: tensor for role, tensor in checkpoint.tensors.items() if role not in HEAD_ROLES}
    return replace(checkpoint, config=replace(checkpoint.mtp, ordered_head=None), tensors=MappingProxyType(tensors))


def add_ordered_head(checkpoint: Checkpoint, ordering: Tensor, centroids: Tensor, top_k: int) -> Checkpoint:
    """Add an ordered head: ``ordering`` int64 [V] lists tokens cluster by cluster, ``centroids`` are F32 [C, width]."""
    head = {CENTROIDS: wrap_array(centroids.numpy()), ORDERING: wrap_array(ordering.numpy().astype(np.int64))}
    config = replace(checkpoint.mtp, ordered_head=OrderedHeadConfig(len(centroids), top_k))
    return replace(checkpoint, config=config, tensors=MappingProxyType({**checkpoint.tensors, **head}))


def find_token_clusters(ordering: Tensor, count: int) -> Tensor:
    """Return the cluster of every token, int64 [V]; ``ordering`` [V] lists the tokens of ``count`` clusters in turn."""
    return torch.argsort(ordering) // (len(ordering) // count)


def write_random_texts(pair: Pair, reporter: Reporter) -> dict[str, list[Text]]:
    """Return by side what the base writes after random tokens, none of them special."""
    plan = pair.plan
    prompts = _draw_random_prompts(pair.loaded.tokenizer, pair.base.vocab_size, plan.seed)
    writer = Writer(pair, plan.temperature, min(plan.new_tokens, _RANDOM_NEW_TOKENS))
    written = writer.write_texts(prompts, reporter, "random prompts")
    by_side: dict[str, list[Text]] = {}
    for side in (TRAINED, WATCHED, HELD_OUT):
        texts = [text for text in written if choose_side(str(list(text.prompt))) == side]
        # After random tokens a base soon writes the same loops, which must not be on two sides.
        by_side[side] = filter_new_texts(texts, plan.draft_steps, list(chain(*by_side.values())))
    return by_side


def _draw_random_prompts(tokenizer: Any, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Return prompts of random tokens that are not special; they begin with BOS if the tokenizer has it."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    ordinary = [token for token in range(min(vocab_size, len(tokenizer))) if token not in special]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length in islice(cycle(_RANDOM_LENGTHS), RANDOM_PROMPTS):
        drawn = torch.randint(len(ordinary), (length,), generator=generator).tolist()
        prompts.append((*start, *(ordinary[index] for index in drawn)))
    return prompts


@torch.no_grad()
def collect_states(
    pair: Pair, drafter: Network, texts: Sequence[Text], most: int, conventions: Sequence[Convention] = (LITERT,)
) -> HeadSample:
    """Return up to ``most`` states of ``drafter``'s rounds over ``texts`` that count, with its dense head's choices.

    Raises:
        MtpExtractError: no draft counts.
    """
    plan = pair.plan
    anchors = max(1, most // (max(1, len(texts)) * plan.draft_steps * len(conventions)))
    parts: list[HeadSample] = []
    for group in group_by_length([len(text.tokens) for text in texts], plan.batch):
        batch = draw_batch(pair, drafter, [texts[index] for index in group], anchors)
        parts += _collect_batch_states(pair, drafter, batch, torch.tensor(group), conventions)
    if not any(len(part.states) for part in parts):
        message = "expected text that the base would write, found none of which a draft counts. Give other text."
        raise MtpExtractError(message, remedies=("text", "prompts"))
    return HeadSample(*(torch.cat(column)[:most] for column in zip(*parts, strict=True)))


def _collect_batch_states(
    pair: Pair, drafter: Network, batch: Batch, texts: Tensor, conventions: Sequence[Convention]
) -> Iterator[HeadSample]:
    """Yield the states that count, one sample for each convention; ``texts`` int64 [B] are the texts' numbers."""
    plan = pair.plan
    head = drafter.lm_head
    counts = mark_counted_drafts(batch, plan.draft_steps, greedy=plan.temperature == 0)
    text = texts[None, :, None].expand(counts.shape)[counts.cpu()]
    for convention in conventions:
        states = Rounds(drafter, plan.draft_steps)(batch, pair.base.embed, convention)[counts]
        choices = find_argmax_tokens(head, states, len(head.weight))
        yield HeadSample(states.cpu(), choices.cpu(), text)


def build_head(
    head: Tensor, training: Sequence[HeadSample], watched: Sequence[HeadSample], count: int, steps: int, seed: int
) -> LearnedHead:
    """Build a head of ``count`` clusters.

    Args:
        head: the dense head, F32 [V, width]; overwritten.
        training: training states by kind of text; every batch has equal parts of them.
        watched: states by which the best centroids are chosen, by kind of text.
    """
    vectors = _compute_token_vectors(head, training)
    ordering = split_into_clusters(vectors, torch.arange(len(vectors)), count)
    means = vectors[ordering].view(count, -1, vectors.shape[1]).mean(dim=1)

    # Centroids are learned from the cluster of each choice.
    cluster = find_token_clusters(ordering, count)
    training = [sample._replace(choices=cluster[sample.choices]) for sample in training]
    watched = [sample._replace(choices=cluster[sample.choices]) for sample in watched]
    centroids, best_step = learn_centroids(training, watched, means, steps=steps, seed=seed)
    return LearnedHead(ordering, centroids, best_step)


def _compute_token_vectors(head: Tensor, training: Sequence[HeadSample]) -> Tensor:
    """Return for each token the mean of the states in which it is chosen and of its row of ``head``, F32 [V, width].

    Rows are scaled to the mean length of states, and count as :data:`_ROW_WEIGHT` of them; ``head`` is overwritten.
    """
    # (w·row + Σ states) / (w + number of states), with w = _ROW_WEIGHT
    state_length = float(training[0].states.float().norm(dim=1).mean())
    row_length = float(head.norm(dim=1).mean())
    head.mul_(_ROW_WEIGHT * state_length / (row_length or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for sample in training:
        pieces = zip(torch.split(sample.choices, 1 << 16), torch.split(sample.states, 1 << 16), strict=True)
        for choices, states in pieces:
            head.index_add_(0, choices, states.float())
        counts += torch.bincount(sample.choices, minlength=len(head))
    return head.div_(counts[:, None])


def split_into_clusters(vectors: Tensor, members: Tensor, count: int) -> Tensor:
    """Return ``members`` int64 [N] in order of their cluster; the ``count`` clusters have one size, so it divides N.

    Members are rows of ``vectors`` F32 [V, width]. They are cut in two along the axis of greatest variance, and each
    part again.
    """
    if count == 1:
        return members.sort().values
    points = vectors[members]
    least = torch.finfo(vectors.dtype).tiny

    # The power method finds the axis of greatest variance; where all vectors are equal, any axis will do.
    sample = points[:: -(-len(points) // _AXIS_FROM)]
    sample = sample - sample.mean(dim=0)
    axis = sample[sample.square().sum(dim=1).argmax()]
    for _ in range(_AXIS_STEPS):
        axis = sample.T @ (sample @ normalize(axis, dim=0, eps=least))

    members = members[torch.argsort(points @ normalize(axis, dim=0, eps=least), stable=True)]
    half = count // 2
    cut = len(members) // count * half
    lower = split_into_clusters(vectors, members[:cut], half)
    upper = split_into_clusters(vectors, members[cut:], count - half)
    return torch.cat((lower, upper))


def rank_clusters(states: Tensor, centroids: Tensor, cluster: Tensor) -> Tensor:
    """Return how many ``centroids`` [C, width] score higher on each state than that of ``cluster`` int64 [N]."""
    rows_at_once = max(1, _SCORES_AT_ONCE // len(centroids))
    parts = [cluster[:0]]
    for piece, right in zip(torch.split(states, rows_at_once), torch.split(cluster, rows_at_once), strict=True):
        scores = piece.to(centroids) @ centroids.T
        parts.append((scores > scores.gather(1, right[:, None])).sum(dim=1))
    return torch.cat(parts)


def count_clusters_needed(kinds: Sequence[Tensor]) -> int:
    """Return how many clusters keep enough of the choices on every kind; ``kinds`` are ranks of the right cluster."""
    return max(int(rank.sort().values[math.ceil(_ENOUGH * len(rank)) - 1]) + 1 for rank in kinds)


def choose_top_k(watched: Sequence[Tensor], vocabulary: int, count: int) -> int:
    """Return how many clusters to look into: the next power of two from :func:`count_clusters_needed`, or the most
    that still save rows. ``watched`` are ranks by kind of text, int64 [N] each.
    """
    # A head that reads more than half of the rows saves too little.
    most = max(1, (vocabulary // 2 - count) // (vocabulary // count))
    return min(most, 1 << (count_clusters_needed(watched) - 1).bit_length())


def learn_centroids(
    training: Sequence[HeadSample], watched: Sequence[HeadSample], means: Tensor, *, steps: int, seed: int
) -> tuple[Tensor, int]:
    """Train centroids F32 [C, width]; return those that need the fewest clusters on the worst kind, and their step.

    They begin at the ``means`` F32 [C, width] of their clusters, which are step 0, and minimize the cross-entropy over
    clusters: ``choices`` of the samples are clusters here. Among centroids that need equally many clusters, those win
    whose mean log2(rank + 1), summed over kinds, is lowest.
    """
    random = torch.Generator().manual_seed(seed)
    # States are divided by their root mean square, so that states and scores are of size 1.
    first_states = training[0].states
    size = float(torch.linalg.vector_norm(first_states, dtype=torch.float32)) / first_states.numel() ** 0.5 or 1.0
    rows = (means / (float(means.norm(dim=1).mean()) or 1.0)).requires_grad_()
    highest_rate = 1 / means.shape[1]
    optimizer = torch.optim.Adam([rows], lr=highest_rate, betas=(0.9, 0.99))

    def score_centroids(step: int) -> tuple[tuple[int, float], int, Tensor]:
        copied = rows.detach().clone()
        kinds = [rank_clusters(sample.states / size, copied, sample.choices) for sample in watched]
        mean_logs = [float((rank + 1).double().log2().mean()) for rank in kinds]
        return (count_clusters_needed(kinds), sum(mean_logs)), step, copied

    # The lowest score is the best; among equal ones the earliest.
    best = score_centroids(0)
    for step in range(1, steps + 1):
        states, cluster = _draw_states(training, random)
        optimizer.param_groups[0]["lr"] = highest_rate * compute_cosine_decay((step - 1) / steps)
        optimizer.zero_grad()
        scores = _mask_rivals(states / size @ rows.T, cluster)
        cross_entropy(scores, cluster).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            best = min(best, score_centroids(step), key=itemgetter(0))
    _, best_step, centroids = best
    return centroids / size, best_step


def _draw_states(training: Sequence[HeadSample], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch with equal parts of every kind: states F32 [n, width], and the cluster of each choice int64 [n]."""
    size = (_BATCH // len(training),)
    drawn = [(sample, torch.randint(len(sample.states), size, generator=random)) for sample in training]
    states = torch.cat([sample.states[index].float() for sample, index in drawn])
    return states, torch.cat([sample.choices[index] for sample, index in drawn])


def _mask_rivals(scores: Tensor, cluster: Tensor) -> Tensor:
    """Set the scores [n, C] of the best few clusters to -inf, except the right one.

    They will be searched anyway, so the right cluster need not score higher than they do.
    """
    right = cluster[:, None]
    searched = scores.detach().topk(1 << int(math.log2(scores.shape[1]) / 2), dim=1).indices
    return scores.scatter(1, searched, -torch.inf).scatter(1, right, scores.gather(1, right))


def list_head_refusals(shares: Mapping[str, Mapping[str, Any]], comparisons: Comparisons) -> Iterator[str]:
    """Yield the reasons against saving the head; ``shares`` are those of :func:`_measure_shares_kept`."""
    for name, kind in shares.items():
        if kind["share"] < _LEAST_KEPT:
            kept_of = f"{kind['share']:.2%} of the dense head's choices on held-out text ({name})"
            yield f"it keeps {kept_of}, of which {_LEAST_KEPT:.1%} are wanted"
    if comparisons.overall.may_lose(_MOST_LOST):
        change = describe_change(comparisons.overall.change)
        yield f"it may lose more than {_MOST_LOST} teacher-forced tokens per round ({change})"
    for name, workload in comparisons.workloads.items():
        if workload.change.interval is not None and workload.change.interval.high < -_MOST_LOST:
            yield f"it loses more than {_MOST_LOST} on {escape(name)} ({describe_change(workload.change)})"
