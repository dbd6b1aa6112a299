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
from mtp_extract.checkpoint.weight import of_array, of_indices
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.measured import share_over_texts
from mtp_extract.evaluate.progress import Show
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.clusters import balanced_clusters, learn_centroids, ranks
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, new_texts, side_of
from mtp_extract.tuning.loss import LOGITS_AT_ONCE
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.text import Tokens, Writer
from mtp_extract.tuning.train import Rounds, collate, counting, measured, random_anchors, states_of
from mtp_extract.tuning.verdict import Comparisons, signed
from mtp_extract.tuning.writing import as_written, check_writable

LEAST_KEPT = 0.995
"""Of the dense head's choices, on text of each kind."""
ENOUGH = 1 - (1 - LEAST_KEPT) / 4
"""On watched text: a quarter of what may be lost, since other text, which decides, loses more."""
MOST_LOST = 0.02
"""Teacher-forced tokens per round, against the dense head."""

OWN, SHIPPED, RANDOM = "as trained on", "shipped prompts", "random tokens"
"""Text like that which the head is made of; that of workloads it is not made of; that after random tokens."""

_ROW_WEIGHT = 5.0  # a token's own row counts as much as so many states
_STATES_A_CENTROID, _LEAST_STATES = 200, 200_000  # asked for; the latter where there are few centroids
_RANDOM_SHARE = 1 / 3  # of the states that are learned from, those over text after random tokens
_RANDOM_PROMPTS, _RANDOM_LENGTHS, _RANDOM_NEW_TOKENS = 320, (4, 16, 48), 96  # lengths are those of prompts


def make_head(
    plan: TuningPlan, pair: Pair, corpus: Corpus, tell: Show
) -> tuple[Checkpoint, dict[str, Any], Comparisons]:
    """The drafter with an ordered head; how that was made, for the record; and what it changes.

    Raises:
        MtpExtractError: there is too little text of a kind.
    """
    before = dense(pair.origin.checkpoint)
    drafter, vocabulary = pair.drafter_of(before), before.config.vocab_size
    assert isinstance(drafter, MtpDrafter)
    strange, count = random_texts(pair, tell), clusters_of(vocabulary)
    pair.say(f"reading the drafter's states over {len(corpus.trained) + len(strange[TRAINED])} texts")
    most, shares = max(_LEAST_STATES, _STATES_A_CENTROID * count), (1 - _RANDOM_SHARE, _RANDOM_SHARE)
    used = [
        collect(pair, drafter, texts, int(share * most), every_convention=True)
        for texts, share in zip((corpus.trained, strange[TRAINED]), shares, strict=True)
    ]
    watched = [collect(pair, drafter, texts, most) for texts in (corpus.watched, strange[WATCHED])]
    kinds = {OWN: corpus.held_out[: corpus.own], SHIPPED: corpus.held_out[corpus.own :], RANDOM: strange[HELD_OUT]}
    held_out = {name: collect(pair, drafter, texts, most) for name, texts in kinds.items() if texts}
    held_out[OWN] = replace(held_out[OWN], text=torch.tensor(corpus.units)[held_out[OWN].text])

    states = sum(len(one.states) for one in used)
    pair.say(f"making {count} clusters, and learning their centroids from {states} states")
    dense_rows = torch.from_numpy(before.tensors["lm_head"].array().copy())
    ordering, centroids, best_step = build_head(dense_rows, used, watched, count, plan)
    # Centroids as they will be read.
    written = as_written(pair.origin, ordered(before, ordering, centroids, 1)).tensors[CENTROIDS]
    rows, cluster = torch.from_numpy(written.array().copy()), cluster_of(ordering, count)
    ranked = [ranks(one.states, rows, cluster[one.choices]) for one in watched]
    top_k = least_top_k(ranked, vocabulary, count)
    kept = {}
    for name, one in held_out.items():
        hits = (ranks(one.states, rows, cluster[one.choices]) < top_k).double()
        interval = share_over_texts(one.text, hits)
        kept[name] = {"share": round(float(hits.mean()), 5), "interval": interval and interval.rounded(5)}
    made = ordered(before, ordering, centroids, top_k)

    pair.say(f"measuring the drafter with either head on {len(corpus.held_out)} held-out texts")
    both = (measured(pair, one, corpus.held_out) for one in (drafter, pair.drafter_of(made)))
    comparisons = Comparisons.of(corpus, *both)
    about = {
        "centroids": count,
        "top_k": top_k,
        "tokens_a_cluster": vocabulary // count,
        "rows_read": count + top_k * (vocabulary // count),
        "rows_dense": vocabulary,
        "recipe": plan.recipe,
        "states": states,
        "tokens_used": len(torch.unique(used[0].choices)),
        "tokens_seen": len(torch.unique(torch.cat([part.choices for part in used]))),
        "best_step": best_step,
        "kinds": kept,
    }
    return made, about, comparisons


def check_dense(plan: TuningPlan, pair: Pair) -> None:
    """Check, before any work, that an ordered head can be made for the pair's drafter.

    Raises:
        MtpExtractError: several processes, or a vocabulary that cannot be divided.
        UnsupportedError: the drafter's format has no room for such a head.
    """
    if pair.share[1] > 1:
        raise MtpExtractError(f"expected one process to make an ordered head, found {pair.share[1]}; start only one")
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
    head = {CENTROIDS: of_array(centroids.numpy()), ORDERING: of_indices(ordering.numpy().astype(np.int64))}
    config = replace(checkpoint.mtp, ordered_head=OrderedHeadConfig(len(centroids), top_k))
    return replace(checkpoint, config=config, tensors=MappingProxyType({**checkpoint.tensors, **head}))


def cluster_of(ordering: Tensor, count: int) -> Tensor:
    """int64 [V], the cluster of every token, of an ``ordering`` [V] that lists ``count`` clusters one by one."""
    found = torch.empty_like(ordering)
    found[ordering] = torch.arange(count).repeat_interleave(len(ordering) // count)
    return found


def random_texts(pair: Pair, tell: Show) -> Mapping[str, list[Text]]:
    """By side, what the base writes after random tokens, none of them special.

    Raises:
        MtpExtractError: the base's context is too short, or it ends such texts at once.
    """
    plan, tokenizer = pair.plan, pair.loaded.tokenizer
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    usual = [token for token in range(min(pair.base.vocab_size, len(tokenizer))) if token not in special]
    opened = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator, items = torch.Generator().manual_seed(plan.seed), list[Tokens]()
    for number in range(_RANDOM_PROMPTS):
        length = _RANDOM_LENGTHS[number % len(_RANDOM_LENGTHS)]
        drawn = torch.randint(len(usual), (length,), generator=generator).tolist()
        items.append((*opened, *(usual[index] for index in drawn)))
    writer = Writer(pair, replace(plan, new_tokens=min(plan.new_tokens, _RANDOM_NEW_TOKENS)))
    lines = writer.lines(items, tell, "prompts of random tokens")
    sides, learned = dict[str, list[Text]](), list[Text]()
    # After random tokens a base soon writes the same loops: one that was learned shows nothing.
    for side in (TRAINED, WATCHED, HELD_OUT):
        own = [
            (item, line.as_text) for item, line in zip(items, lines, strict=True) if side_of(str(list(item))) == side
        ]
        sides[side] = [text for _, text in new_texts(own, plan.draft_steps, learned)]
        learned += sides[side]
    if not all(sides.values()):
        raise MtpExtractError(
            f"expected the base to write more than {plan.draft_steps} tokens after random ones, found that it ends "
            "nearly all such texts at once, or repeats itself: on other text than yours a head cannot be checked; "
            "keep the dense one"
        )
    return sides


@dataclass(frozen=True)
class Used:
    """States that a drafter's head reads. N states."""

    states: Tensor  # [N, width], in the type the drafter computes in
    choices: Tensor  # int64 [N], the dense head's argmax
    text: Tensor  # int64 [N], index of the text, or of what intervals count


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
    plan, parts, conventions = pair.plan, [], (LITERT, TRANSFORMERS) if every_convention else (LITERT,)
    anchors = max(1, most // (len(texts) * plan.draft_steps * len(conventions)))
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
            parts.append((states.cpu(), choices.cpu(), index))
    found = Used(*(torch.cat(column)[:most] for column in zip(*parts, strict=True)))
    if not len(found.states):
        raise MtpExtractError(
            "expected text that the base would write, found none of which a draft counts; give other text",
            remedies=("text", "prompts"),
        )
    return found


def build_head(
    head: Tensor, used: Sequence[Used], watched: Sequence[Used], count: int, plan: TuningPlan
) -> tuple[Tensor, Tensor, int]:
    """``count`` clusters, the tokens cluster by cluster int64 [V]; their centroids; and the step that made these.

    Args:
        head: F32 [V, width], the dense head; overwritten.
        used: states to learn from, by kind of text.
        watched: states to choose by, by kind of text.

    Raises:
        MtpExtractError: a number is not finite.
    """
    vectors = vectors_of(used, head)
    ordering = balanced_clusters(vectors, count)
    cluster, means = cluster_of(ordering, count), vectors[ordering].view(count, -1, vectors.shape[1]).mean(dim=1)
    taught, seen = ([(one.states, cluster[one.choices]) for one in part] for part in (used, watched))
    return ordering, *learn_centroids(taught, means, seen, share=ENOUGH, steps=plan.optimizer_steps, seed=plan.seed)


def vectors_of(parts: Sequence[Used], head: Tensor) -> Tensor:
    """F32 [V, width]: of each token, the mean of the states in which it is chosen and of its own row, of their length.

    Overwrites ``head``, F32 [V, width]. The first of ``parts`` says how long states are.
    """
    length, own = (float(rows.float().norm(dim=1).mean()) for rows in (parts[0].states, head))
    head.mul_(_ROW_WEIGHT * length / (own or 1.0))
    counts = torch.full((len(head),), _ROW_WEIGHT)
    for used in parts:
        for choices, states in zip(torch.split(used.choices, 1 << 16), torch.split(used.states, 1 << 16), strict=True):
            head.index_add_(0, choices, states.float())
        counts += torch.bincount(used.choices, minlength=len(head))
    return head.div_(counts[:, None])


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
