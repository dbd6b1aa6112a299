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
from mtp_extract.checkpoint.weight import of_array
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluation.agreement import estimate_share
from mtp_extract.evaluation.base_texts import groups
from mtp_extract.progress import Reporter
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, filter_new_texts, split_of
from mtp_extract.tuning.loss import find_argmax_tokens
from mtp_extract.tuning.pair import Pair, round_like
from mtp_extract.tuning.rounds import Batch, Rounds, draw_batch, mark_counted_drafts
from mtp_extract.tuning.text import Writer
from mtp_extract.tuning.train import EVALUATIONS, compute_cosine_decay
from mtp_extract.tuning.verdict import Comparisons, describe_change, number_units

RANDOM_PROMPTS = 320
_LEAST_KEPT = 0.995  # of the dense head's choices, on text of each kind
# On watched text: a quarter of what may be lost, since other text, which decides, loses more.
_ENOUGH = 1 - (1 - _LEAST_KEPT) / 4
_MOST_LOST = 0.02  # teacher-forced tokens per round, against the dense head
_RANDOM_LENGTHS, _RANDOM_NEW_TOKENS = (4, 16, 48), 96  # lengths are those of prompts
_RANDOM_SHARE = 1 / 3  # of the states that are learned from, those over text after random tokens
_STATES_A_CENTROID, _LEAST_STATES = 200, 200_000  # asked for; the latter where there are few centroids
_ROW_WEIGHT = 5.0  # a token's own row counts as much as so many states
_AXIS_FROM, _AXIS_STEPS = 1 << 14, 12  # vectors that the axis of a cut is found from; steps of the power method
_BATCH, _SCORES_AT_ONCE = 2048, 1 << 23


class HeadSample(NamedTuple):
    """N states that a drafter's head reads."""

    states: Tensor  # [N, width], in the type the drafter computes in
    choices: Tensor  # int64 [N], the dense head's argmax; or the cluster in which that is
    text: Tensor  # int64 [N], index of the text


class LearnedHead(NamedTuple):
    """Clusters of tokens, and what tells in which to look."""

    ordering: Tensor  # int64 [V], the tokens cluster by cluster
    centroids: Tensor  # F32 [C, width]
    best_step: int  # of learning them

    def rank_choices(self, sample: HeadSample) -> Tensor:
        """int64 [N]: how many clusters come before the one that has the dense head's choice."""
        cluster = find_token_clusters(self.ordering, len(self.centroids))
        return rank_clusters(sample.states, self.centroids, cluster[sample.choices])


def make_head(pair: Pair, drafter: Network, corpus: Corpus, reporter: Reporter) -> tuple[Checkpoint, dict[str, Any]]:
    """The pair's checkpoint with an ordered head in place of ``drafter``'s dense one; how it was made, for the record.
    MtpExtractError where there is too little text of a kind.
    """
    dense_checkpoint = remove_ordered_head(pair.origin.checkpoint)
    vocabulary = dense_checkpoint.config.vocab_size
    count = choose_cluster_count(vocabulary)
    random_by_side = write_random_texts(pair, reporter)
    taught, watched = _collect_kinds(pair, drafter, corpus, random_by_side, count)

    states = sum(len(sample.states) for sample in taught)
    pair.say(f"making {count} clusters, and learning their centroids from {states} states")
    rows = torch.from_numpy(dense_checkpoint.tensors["lm_head"].array().copy())
    head = build_head(rows, taught, watched, count, pair.plan.optimizer_steps, pair.plan.seed)
    # What is measured is what is written: centroids may be rounded.
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
    """What share of the dense head's choices is in the first ``top_k`` clusters, by kind of held-out text."""
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
    """States that ``count`` centroids are learned from, or chosen and measured by."""
    return max(_LEAST_STATES, _STATES_A_CENTROID * count)


def _collect_kinds(
    pair: Pair, drafter: Network, corpus: Corpus, random_by_side: Mapping[str, Sequence[Text]], count: int
) -> tuple[list[HeadSample], list[HeadSample]]:
    """States to learn from and states to choose by, each over the base's text and over what follows random tokens."""
    most = _count_wanted_states(count)
    conventions = (LITERT, TRANSFORMERS)
    pair.say(f"reading the drafter's states over {len(corpus.trained) + len(random_by_side[TRAINED])} texts")
    taught = [
        collect_states(pair, drafter, corpus.trained, int((1 - _RANDOM_SHARE) * most), conventions),
        collect_states(pair, drafter, random_by_side[TRAINED], int(_RANDOM_SHARE * most), conventions),
    ]
    watched = [collect_states(pair, drafter, texts, most) for texts in (corpus.watched, random_by_side[WATCHED])]
    return taught, watched


def add_zero_head(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with an ordered head of zeros: what holds it can hold one that was made."""
    before = remove_ordered_head(checkpoint)
    vocabulary = before.config.vocab_size
    centroids = torch.zeros(choose_cluster_count(vocabulary), before.config.hidden_size)
    return add_ordered_head(before, torch.arange(vocabulary), centroids, 1)


def choose_cluster_count(vocabulary: int) -> int:
    """How many clusters of equal size: of about 128 tokens, as official drafters have them, or 16 of few tokens."""
    wanted = vocabulary // (128 if vocabulary >= 1 << 14 else 16)
    fits = (number for number in range(1, vocabulary + 1) if vocabulary % number == 0)
    return min(fits, key=lambda fit: abs(fit - wanted))


def remove_ordered_head(checkpoint: Checkpoint) -> Checkpoint:
    tensors = {role: tensor for role, tensor in checkpoint.tensors.items() if role not in HEAD_ROLES}
    return replace(checkpoint, config=replace(checkpoint.mtp, ordered_head=None), tensors=MappingProxyType(tensors))


def add_ordered_head(checkpoint: Checkpoint, ordering: Tensor, centroids: Tensor, top_k: int) -> Checkpoint:
    """``checkpoint`` with an ordered head: tokens cluster by cluster int64 [V], and centroids F32 [C, width]."""
    head = {CENTROIDS: of_array(centroids.numpy()), ORDERING: of_array(ordering.numpy().astype(np.int64))}
    config = replace(checkpoint.mtp, ordered_head=OrderedHeadConfig(len(centroids), top_k))
    return replace(checkpoint, config=config, tensors=MappingProxyType({**checkpoint.tensors, **head}))


def find_token_clusters(ordering: Tensor, count: int) -> Tensor:
    """int64 [V], the cluster of every token, of an ``ordering`` [V] that lists ``count`` clusters one by one."""
    return torch.argsort(ordering) // (len(ordering) // count)


def write_random_texts(pair: Pair, reporter: Reporter) -> dict[str, list[Text]]:
    """By side, what the base writes after random tokens, none of them special."""
    plan = pair.plan
    prompts = _draw_random_prompts(pair.loaded.tokenizer, pair.base.vocab_size, plan.seed)
    writer = Writer(pair, plan.temperature, min(plan.new_tokens, _RANDOM_NEW_TOKENS))
    written = writer.write_texts(prompts, reporter, "random prompts")
    by_side: dict[str, list[Text]] = {}
    for side in (TRAINED, WATCHED, HELD_OUT):
        texts = [text for text in written if split_of(str(list(text.prompt))) == side]
        # After random tokens a base soon writes the same loops: one that was learned shows nothing.
        by_side[side] = filter_new_texts(texts, plan.draft_steps, list(chain(*by_side.values())))
    return by_side


def _draw_random_prompts(tokenizer: Any, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of random tokens that are not special, after BOS where there is one."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    usual = [token for token in range(min(vocab_size, len(tokenizer))) if token not in special]
    opened = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length in islice(cycle(_RANDOM_LENGTHS), RANDOM_PROMPTS):
        drawn = torch.randint(len(usual), (length,), generator=generator).tolist()
        prompts.append((*opened, *(usual[index] for index in drawn)))
    return prompts


@torch.no_grad()
def collect_states(
    pair: Pair, drafter: Network, texts: Sequence[Text], most: int, conventions: Sequence[Convention] = (LITERT,)
) -> HeadSample:
    """``most`` states of ``drafter``'s rounds over ``texts`` that count, and what its dense head chooses there;
    MtpExtractError where none counts."""
    plan = pair.plan
    anchors = max(1, most // (max(1, len(texts)) * plan.draft_steps * len(conventions)))
    parts: list[HeadSample] = []
    for group in groups([len(text.tokens) for text in texts], plan.batch):
        batch = draw_batch(pair, drafter, [texts[index] for index in group], anchors)
        parts += _collect_batch_states(pair, drafter, batch, torch.tensor(group), conventions)
    if not any(len(part.states) for part in parts):
        message = "expected text that the base would write, found none of which a draft counts. Give other text."
        raise MtpExtractError(message, remedies=("text", "prompts"))
    return HeadSample(*(torch.cat(column)[:most] for column in zip(*parts, strict=True)))


def _collect_batch_states(
    pair: Pair, drafter: Network, batch: Batch, texts: Tensor, conventions: Sequence[Convention]
) -> Iterator[HeadSample]:
    """The states of a batch that count, by each of ``conventions``; ``texts`` int64 [B] are its texts' numbers."""
    plan = pair.plan
    head = drafter.lm_head
    counts = mark_counted_drafts(batch, plan.draft_steps, greedy=plan.temperature == 0)
    text = texts[None, :, None].expand(counts.shape)[counts.cpu()]
    for convention in conventions:
        states = Rounds(drafter, plan.draft_steps)(batch, pair.base.embed, convention)[counts]
        choices = find_argmax_tokens(head, states, len(head.weight))
        yield HeadSample(states.cpu(), choices.cpu(), text)


def build_head(
    head: Tensor, taught: Sequence[HeadSample], watched: Sequence[HeadSample], count: int, steps: int, seed: int
) -> LearnedHead:
    """A head of ``count`` clusters.

    Args:
        head: F32 [V, width], the dense head; overwritten.
        taught, watched: states to learn from, equal parts of every batch, and to choose by; by kind of text.
    """
    vectors = _compute_token_vectors(head, taught)
    ordering = split_into_clusters(vectors, torch.arange(len(vectors)), count)
    means = vectors[ordering].view(count, -1, vectors.shape[1]).mean(dim=1)

    # Centroids are learned from the cluster of each choice.
    cluster = find_token_clusters(ordering, count)
    taught = [sample._replace(choices=cluster[sample.choices]) for sample in taught]
    watched = [sample._replace(choices=cluster[sample.choices]) for sample in watched]
    centroids, best_step = learn_centroids(taught, watched, means, steps=steps, seed=seed)
    return LearnedHead(ordering, centroids, best_step)


def _compute_token_vectors(head: Tensor, taught: Sequence[HeadSample]) -> Tensor:
    """F32 [V, width]: of each token, the mean of the states in which it is chosen and of its row of ``head``.

    Rows are scaled to the mean length of states, and count as :data:`_ROW_WEIGHT` of them; ``head`` is overwritten.
    """
    state_length = float(taught[0].states.float().norm(dim=1).mean())
    row_length = float(head.norm(dim=1).mean())
    head.mul_(_ROW_WEIGHT * state_length / (row_length or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for sample in taught:
        pieces = zip(torch.split(sample.choices, 1 << 16), torch.split(sample.states, 1 << 16), strict=True)
        for choices, states in pieces:
            head.index_add_(0, choices, states.float())
        counts += torch.bincount(sample.choices, minlength=len(head))
    return head.div_(counts[:, None])


def split_into_clusters(vectors: Tensor, members: Tensor, count: int) -> Tensor:
    """int64 [N]: ``members`` [N], rows of ``vectors`` F32 [V, width], in ``count`` clusters of one size, one by one.

    They are cut in two along the axis of greatest spread, and again; ``count`` divides N.
    """
    if count == 1:
        return members.sort().values
    points = vectors[members]
    least = torch.finfo(vectors.dtype).tiny

    # The axis of greatest spread, by the power method; where all vectors are equal, any will do.
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
    """int64 [N]: how many of ``centroids`` [C, width] score higher on each state than that of ``cluster`` int64 [N]."""
    rows_at_once = max(1, _SCORES_AT_ONCE // len(centroids))
    parts = [cluster[:0]]
    for piece, right in zip(torch.split(states, rows_at_once), torch.split(cluster, rows_at_once), strict=True):
        scores = piece.to(centroids) @ centroids.T
        parts.append((scores > scores.gather(1, right[:, None])).sum(dim=1))
    return torch.cat(parts)


def count_clusters_needed(kinds: Sequence[Tensor]) -> int:
    """How many clusters keep enough of the choices on every kind of text, by the ranks of the right ones."""
    return max(int(rank.sort().values[math.ceil(_ENOUGH * len(rank)) - 1]) + 1 for rank in kinds)


def choose_top_k(watched: Sequence[Tensor], vocabulary: int, count: int) -> int:
    """Return how many clusters to look into: the next power of two from :func:`count_clusters_needed`.

    ``watched`` are ranks by kind of text, int64 [N] each.
    """
    # With more than half of the rows, too few are saved.
    most = max(1, (vocabulary // 2 - count) // (vocabulary // count))
    return min(most, 1 << (count_clusters_needed(watched) - 1).bit_length())


def learn_centroids(
    taught: Sequence[HeadSample], watched: Sequence[HeadSample], means: Tensor, *, steps: int, seed: int
) -> tuple[Tensor, int]:
    """Centroids F32 [C, width] that look into the fewest clusters on the worst kind; and the step that made them.

    They begin at the ``means`` F32 [C, width] of their clusters, which are step 0, and minimize cross-entropy over
    clusters: ``choices`` of the samples are clusters here. Of those that need as many clusters, those are best whose
    mean log2 of ranks, summed over kinds, is least.
    """
    random = torch.Generator().manual_seed(seed)
    # States of a root mean square of 1, and scores of about as much.
    some = taught[0].states
    size = float(torch.linalg.vector_norm(some, dtype=torch.float32)) / some.numel() ** 0.5 or 1.0
    rows = (means / (float(means.norm(dim=1).mean()) or 1.0)).requires_grad_()
    highest_rate = 1 / means.shape[1]
    optimizer = torch.optim.Adam([rows], lr=highest_rate, betas=(0.9, 0.99))

    def score_centroids(step: int) -> tuple[tuple[int, float], int, Tensor]:
        copied = rows.detach().clone()
        kinds = [rank_clusters(sample.states / size, copied, sample.choices) for sample in watched]
        mean_logs = [float((rank + 1).double().log2().mean()) for rank in kinds]
        return (count_clusters_needed(kinds), sum(mean_logs)), step, copied

    # Less is better; of those that are as good, the earlier.
    best = score_centroids(0)
    for step in range(1, steps + 1):
        states, cluster = _draw_states(taught, random)
        optimizer.param_groups[0]["lr"] = highest_rate * compute_cosine_decay((step - 1) / steps)
        optimizer.zero_grad()
        scores = _mask_rivals(states / size @ rows.T, cluster)
        cross_entropy(scores, cluster).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            best = min(best, score_centroids(step), key=itemgetter(0))
    _, best_step, centroids = best
    return centroids / size, best_step


def _draw_states(taught: Sequence[HeadSample], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch, equal parts of every kind: states F32 [n, width], and the cluster of each choice int64 [n]."""
    size = (_BATCH // len(taught),)
    drawn = [(sample, torch.randint(len(sample.states), size, generator=random)) for sample in taught]
    states = torch.cat([sample.states[index].float() for sample, index in drawn])
    return states, torch.cat([sample.choices[index] for sample, index in drawn])


def _mask_rivals(scores: Tensor, cluster: Tensor) -> Tensor:
    """``scores`` [n, C], -inf for the best few clusters: they are looked into anyhow, so no rivals of the right one."""
    right = cluster[:, None]
    looked_into = scores.detach().topk(1 << int(math.log2(scores.shape[1]) / 2), dim=1).indices
    return scores.scatter(1, looked_into, -torch.inf).scatter(1, right, scores.gather(1, right))


def list_head_refusals(shares: Mapping[str, Mapping[str, Any]], comparisons: Comparisons) -> Iterator[str]:
    """Why the head is not to be saved; ``shares`` says what it keeps of the dense head's choices, by kind of text."""
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
