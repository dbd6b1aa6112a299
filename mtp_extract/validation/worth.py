"""What drafts are worth: rounds walked along the base's own text, and the times and the text of a few real ones.

Served greedily, where a round ends depends on the drafts alone, and those are known after every token of the text. So
the rounds of any chain or tree are read off one pass; their times, and that the text stays, are seen by generating.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from mtp_extract.evaluate.agreement import Continuations, Done, figure, measure_ranks
from mtp_extract.evaluate.intervals import share_interval
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.speculate.adaptive import AdaptiveDrafts, RunningLength
from mtp_extract.speculate.loop import Generation, SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, OfTexts
from mtp_extract.speculate.trees import Tree

FASTER = 0.9  # of the time of one token: what chance alone does not make of the time of a round

Drafts = int | AdaptiveDrafts | Tree
"""A chain's number of drafts, or how it is adapted, or a tree."""


class Divergence(Record):
    """Where a text first differs from the base's own."""

    prompt: Count  #: its number, from 0
    token: Count  #: its place among the generated tokens, from 0
    #: logit of the base's token less that of the other, in one forward over the text. Near 0 the two tie, and the shape
    #: of a matrix product decides. null where one text only ends earlier.
    margin: float | None


class Worth(Record, kw_only=True):
    """A chain or a tree of drafts: what a round of it yields in the loop, and what it costs."""

    tree: str | None  #: `adaptive`, or a tree such as `4x2x1`; null for a chain of one length
    drafts: Positive  #: most that the base verifies a round
    depth: Positive  #: most steps of the drafter a round; of a chain, as many as drafts
    rounds: Count  #: of the greedy loop along all texts that repeat no other, those that drafted something
    drafted: Count  #: steps of the drafter in these rounds; in a chain each is one draft
    accepted: Count  #: drafts that stand
    tokens_per_round: Figure  #: of these rounds: 1 + accepted / rounds
    prompts: Count  #: whose text was written with these drafts
    same_text: Count  #: of them, texts that are what the base alone writes
    divergences: list[Divergence]  #: the others
    base_tokens_per_s: float | None  #: the base alone, one prompt at a time, after the first token
    tokens_per_s: float | None  #: with the drafter, likewise
    verify_ms: float | None  #: mean of a round, one prompt at a time
    draft_ms: float | None  #: likewise
    predicted_speedup: float | None  #: by the tokens per round and the times of a round and of the base's forward
    measured_speedup: float | None  #: in tokens a second, over the prompts that were timed


class GenerationResult(Record):
    """All chains, then all trees."""

    worth: dict[str, Worth]  #: by what was drafted: `3` a chain of three, `4x2x1` a tree of that shape
    best: str  #: the chain that is predicted to be worth most
    timed: Count  #: prompts behind the times
    base_ms: float | None  #: one forward of the base over one token

    @property
    def disturbed(self) -> bool:
        """Whether the times cannot be right: a round that drafts and verifies took less than one token of the base."""
        times = [(found.verify_ms, found.draft_ms) for found in self.worth.values()]
        return any(v is not None and d is not None and v + d < FASTER * (self.base_ms or 0) for v, d in times)


@dataclass(frozen=True)
class Drafting:
    """What is drafted a round, and how many of the drafts stand after every token of the texts."""

    name: str  # "3" for a chain of three; of a tree "4x2x1"; "adaptive"
    what: Drafts
    stands: Mapping[tuple[int, int], int]  # (text, pending position) → drafts that stand, where a round begins there

    @property
    def depth(self) -> int:
        """Most steps of the drafter a round."""
        if isinstance(self.what, int):
            return self.what
        return self.what.depth if isinstance(self.what, Tree) else self.what.most


def draftings(
    generator: SpeculativeGenerator,
    chains: Sequence[int],
    trees: Mapping[str, Tree | AdaptiveDrafts],
    continuations: Continuations,
    agreement: Agreement,
    *,
    batch: int,
) -> list[Drafting]:
    """Chains, then trees and what is adapted, with what ``agreement``, over these texts, says of them.

    Args:
        chains: each of at most as many drafts as ``agreement`` has steps; likewise what is adapted.
    """
    held = (agreement.drafts == agreement.targets).int().cumprod(1)

    def made(name: str, what: Drafts, at: OfTexts, counts: Sequence[int]) -> Drafting:
        places = zip(at.text.tolist(), at.anchor.tolist(), strict=True)
        return Drafting(name, what, dict(zip(places, counts, strict=True)))

    found = [made(str(k), k, agreement, held[:, :k].sum(1).tolist()) for k in chains]
    depth = max((tree.depth for tree in trees.values() if isinstance(tree, Tree)), default=0)
    ranks = measure_ranks(generator.base, generator.drafter, continuations, depth, batch=batch) if depth else None
    for name, what in trees.items():
        if isinstance(what, Tree) and ranks is not None:
            rows = ranks.values[:, : what.depth].tolist()
            found.append(made(name, what, ranks, [what.stands(row) for row in rows]))
        elif isinstance(what, AdaptiveDrafts):
            found.append(made(name, what, agreement, held[:, : what.most].sum(1).tolist()))
    return found


def walked(drafting: Drafting, written: Continuations, new_tokens: int) -> list[list[tuple[int, int]]]:
    """By text, the rounds of the greedy loop that draft anything, as (drafted, accepted).

    Each begins where the one before ended.
    """
    walks = []
    for index in written.usable:
        text, walk = written.texts[index], list[tuple[int, int]]()
        at, last = text.prompt_length, len(text.tokens) - 1
        adaptive = RunningLength(drafting.what) if isinstance(drafting.what, AdaptiveDrafts) else None
        # Of the tokens that are left one is the base's own, so fewer are drafted near the end.
        while at < last and (left := text.prompt_length + new_tokens - at - 2) > 0:
            drafted = min(adaptive.value if adaptive else drafting.depth, left)
            accepted = min(drafting.stands[index, at], drafted)
            walk.append((drafted, accepted))
            at += accepted + 1
            if adaptive:
                adaptive.observe(drafted, accepted, draft_ms=0.0, verify_ms=0.0)
        walks.append(walk)
    return walks


def measure_generation(
    generator: SpeculativeGenerator,
    continuations: Continuations,
    draftings: Sequence[Drafting],
    *,
    new_tokens: int,
    timed: int,
    done: Done = lambda: None,
) -> GenerationResult:
    """The rounds of each of ``draftings``, chains first; and a few texts generated with it, one by one.

    Args:
        continuations: what the base alone wrote; texts must equal these.
        new_tokens: as the continuations were made with.
        timed: how many prompts to generate, the workloads in turn, those that leave something to draft first.
        done: called after each of ``draftings``.
    """
    texts = continuations.texts
    queues = [sorted(rows, key=lambda i: not texts[i].anchors) for rows in continuations.workloads.values()]
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    chosen = turns[:timed]

    def generated(drafts: Drafts, rows: Sequence[int] = chosen) -> list[Generation]:
        return [generator.generate(texts[i].prompt, max_new_tokens=new_tokens, drafts=drafts) for i in rows]

    # Kernels are chosen and memory is taken in the first call.
    generated(max(draftings, key=lambda drafting: drafting.depth).what, chosen[:1])
    plain, worth = generated(0), dict[str, Worth]()
    base_ms, base_rate = _mean([r.verify_ms for result in plain for r in result.rounds]), _rate(plain)
    for drafting in draftings:
        what = drafting.what
        if isinstance(what, AdaptiveDrafts):
            # With the costs of the longest chain: its rounds may not depend on the clock.
            longest = worth[str(what.most)]
            ratio = (longest.draft_ms or 0.0) / longest.depth / longest.verify_ms if longest.verify_ms else 0.0
            what = replace(what, cost_ratio=ratio)
        made, walks = generated(what), walked(replace(drafting, what=what), continuations, new_tokens)
        # One text at a time is compared with one at a time: the sums may be ordered otherwise than in a batch.
        pairs = zip(chosen, plain, made, strict=True)
        parted = [_divergence(generator.base, *pair) for pair in pairs if pair[1].tokens != pair[2].tokens]
        rounds, accepted = sum(map(len, walks)), [sum(held for _, held in walk) for walk in walks]
        length = 1 + sum(accepted) / rounds if rounds else math.nan
        interval = share_interval([held / drafting.depth for held in accepted], list(map(len, walks)))
        drafted = [r for result in made for r in result.rounds if r.drafted]
        verify, draft = _mean([r.verify_ms for r in drafted]), _mean([r.draft_ms for r in drafted])
        worth[drafting.name] = Worth(
            tree=None if isinstance(what, int) else drafting.name,
            drafts=what.drafts if isinstance(what, Tree) else drafting.depth,
            depth=drafting.depth,
            rounds=rounds,
            drafted=sum(count for walk in walks for count, _ in walk),
            accepted=sum(accepted),
            tokens_per_round=figure(length, rounds, interval and interval.scaled(drafting.depth, 1.0)),
            prompts=len(made),
            same_text=len(made) - len(parted),
            divergences=parted,
            base_tokens_per_s=_known(base_rate),
            tokens_per_s=_known(_rate(made)),
            verify_ms=_known(verify),
            draft_ms=_known(draft),
            predicted_speedup=_known(length * base_ms / (verify + draft)),
            measured_speedup=_known(_rate(made) / base_rate),
        )
        done()
    chains = {name: (found.predicted_speedup or 0.0, -found.drafts) for name, found in worth.items() if not found.tree}
    return GenerationResult(worth, max(chains, key=lambda name: chains[name]), len(chosen), _known(base_ms))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _rate(results: Sequence[Generation]) -> float:
    """Tokens after the first, per second, over several texts."""
    milliseconds = sum(r.draft_ms + r.verify_ms for result in results for r in result.rounds)
    return 1e3 * sum(len(r.tokens) - 1 for r in results) / milliseconds if milliseconds else math.nan


@torch.inference_mode()
def _divergence(base: Base, prompt: int, alone: Generation, drafted: Generation) -> Divergence:
    """Where the text with drafts leaves that of the base ``alone``, and how near the two tokens were there."""
    own, found = alone.tokens, drafted.tokens
    at = next((i for i in range(min(len(own), len(found))) if own[i] != found[i]), None)
    if at is None:
        return Divergence(prompt, min(len(own), len(found)), None)
    before = torch.tensor([[*alone.prompt_tokens, *own[:at]]], device=base.device)
    logits = base.logits(base.full_pass(before).hidden[:, -1])[0]
    return Divergence(prompt, at, float(logits[own[at]] - logits[found[at]]))
