"""What drafts are worth: rounds walked along the base's own text, and the times and the text of a few real ones.

Served greedily, where a round ends depends on the drafts alone, and those are known after every token of the text. So
the rounds of any chain or tree are read off one pass; their times, and that the text stays, are seen by generating.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from statistics import fmean

from mtp_extract.evaluation.agreement import figure, nan_to_none
from mtp_extract.evaluation.base_texts import Continuations
from mtp_extract.evaluation.intervals import over_texts, share_bounds
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.progress import SILENT, Reporter, report_each
from mtp_extract.speculate.drafts import AdaptiveDrafts, Drafts, DraftTree, RunningLength, build_deepest_tree
from mtp_extract.speculate.loop import Generation, Round, SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement

TextPlace = tuple[int, int]  # a text's number and the position of its pending token
_WARMUP_TOKENS = 8  # new tokens, before times are taken


class Worth(Record, kw_only=True):
    """A chain or a tree of drafts: what a round of it yields in the loop, and what it costs."""

    tree: str | None  #: `adaptive`, or a tree such as `4x2x1`; null for a chain of one length
    drafts: Positive  #: most that the base verifies a round
    depth: Positive  #: most steps of the drafter a round; of a chain, as many as drafts
    rounds: Count  #: of the greedy loop along all texts that repeat no other, those that drafted something
    drafted: Count  #: steps of the drafter in these rounds; in a chain each is one draft
    accepted: Count  #: drafts that stand
    tokens_per_round: Figure  #: of these rounds: 1 + accepted / rounds
    same_text: Count  #: of the texts that were timed, those that are what the base alone writes
    tokens_per_s: float | None  #: one text at a time, after its first token
    verify_ms: float | None  #: mean of a round, one text at a time
    draft_ms: float | None  #: likewise
    predicted_speedup: float | None  #: by the tokens per round and the times of a round and of the base's forward
    measured_speedup: float | None  #: in tokens a second


@dataclass(frozen=True)
class Timed:
    """A few texts, generated one at a time."""

    texts: Mapping[int, Generation]  # by the prompt's number

    @classmethod
    def of(
        cls, generator: SpeculativeGenerator, prompts: Mapping[int, Sequence[int]], drafts: Drafts, new_tokens: int
    ) -> Timed:
        """The texts after ``prompts``, which are token ids by number."""
        for prompt in [*prompts.values()][:1]:  # the first calls choose kernels and take memory
            generator.generate(prompt, max_new_tokens=min(new_tokens, _WARMUP_TOKENS), drafts=drafts)
        return cls(
            {r: generator.generate(encoded, max_new_tokens=new_tokens, drafts=drafts) for r, encoded in prompts.items()}
        )

    @property
    def rounds(self) -> list[Round]:
        """Of all texts."""
        return [r for generation in self.texts.values() for r in generation.rounds]

    @property
    def verify_ms(self) -> float:
        """The mean of a round, of those with drafts if there are any; of the base alone, of a forward over one token.

        NaN without any.
        """
        times = [r.verify_ms for r in self.rounds if r.drafted] or [r.verify_ms for r in self.rounds]
        return fmean(times) if times else math.nan

    @property
    def draft_ms(self) -> float:
        """The mean of a round with drafts; NaN without any."""
        times = [r.draft_ms for r in self.rounds if r.drafted]
        return fmean(times) if times else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first of each text, per second; NaN without any."""
        milliseconds = sum(r.draft_ms + r.verify_ms for r in self.rounds)
        tokens = sum(len(generation.tokens) - 1 for generation in self.texts.values())
        return 1e3 * tokens / milliseconds if milliseconds else math.nan


def generate_with_base_alone(
    generator: SpeculativeGenerator, written: Continuations, *, new_tokens: int, timed: int
) -> Timed:
    """The texts of ``timed`` prompts, the workloads in turn, those that can be drafted first."""
    queues = [sorted(rows, key=lambda row: not written.texts[row].anchors) for rows in written.workloads.values()]
    chosen = [row for turn in zip_longest(*queues) for row in turn if row is not None][:timed]
    return Timed.of(generator, {row: written.texts[row].prompt for row in chosen}, 0, new_tokens)


def measure_worth(
    generator: SpeculativeGenerator,
    written: Continuations,
    agreement: Agreement,
    along: Agreement | None,
    plans: Mapping[str, Drafts],
    alone: Timed,
    new_tokens: int,
    reporter: Reporter = SILENT,
    worth: dict[str, Worth] | None = None,
) -> dict[str, Worth]:
    """The rounds of each of ``plans`` along all texts; and what it takes to generate those of ``alone``.

    Args:
        agreement: over these texts, with as many steps as the longest chain.
        along: with drafts along the texts, as many steps as the deepest tree; None where no tree is planned.
        plans: by name; the longest chain before what is adapted.
        alone: of the base alone, with as many ``new_tokens``; texts must equal these.
        worth: what is returned, filled plan by plan; by default a new one.
    """
    worth = {} if worth is None else worth
    prompts = {row: generation.prompt_tokens for row, generation in alone.texts.items()}
    for name in report_each(list(plans), reporter, "a few texts with drafts"):
        what = plans[name]
        if isinstance(what, AdaptiveDrafts):
            # With the costs of the longest chain: its rounds may not depend on the clock.
            longest = worth[str(what.most)]
            ratio = (longest.draft_ms or 0.0) / longest.depth / longest.verify_ms if longest.verify_ms else 0.0
            what = replace(what, cost_ratio=ratio)
        walks = walk_rounds(what, count_accepted_drafts(what, agreement, along), written, new_tokens)
        worth[name] = _summarize_worth(name, what, walks, Timed.of(generator, prompts, what, new_tokens), alone)
    return worth


def count_accepted_drafts(what: Drafts, agreement: Agreement, along: Agreement | None) -> dict[TextPlace, int]:
    """How many drafts of a round stand, by the place where it begins; arguments as of :func:`measure_worth`."""
    depth = build_deepest_tree(what).depth
    if isinstance(what, DraftTree):
        assert along is not None
        agreement = along
        stands = [what.count_accepted(ranks) for ranks in along.ranks[:, :depth].tolist()]
    else:
        stands = (agreement.drafts == agreement.targets)[:, :depth].int().cumprod(1).sum(1).tolist()
    places = zip(agreement.text.tolist(), agreement.anchor.tolist(), strict=True)
    return dict(zip(places, stands, strict=True))


def choose_best_chain(worth: Mapping[str, Worth]) -> str:
    """Of the chains, the one that is predicted to be worth most; of those that tie, the shortest."""
    chains = {name: (row.predicted_speedup or 0.0, -row.drafts) for name, row in worth.items() if not row.tree}
    return max(chains, key=lambda name: chains[name])


def walk_rounds(
    what: Drafts, stands: Mapping[TextPlace, int], written: Continuations, new_tokens: int
) -> list[list[tuple[int, int]]]:
    """By text, the rounds of the greedy loop that draft anything, as (drafted, accepted).

    Each begins where the one before ended; ``stands`` says how many drafts stand where one begins.
    """
    walks = []
    deepest = build_deepest_tree(what).depth
    for index in written.usable:
        text = written.texts[index]
        walk: list[tuple[int, int]] = []
        at = text.prompt_length
        last = len(text.tokens) - 1
        adaptive = RunningLength(what) if isinstance(what, AdaptiveDrafts) else None
        # Of the tokens that are left one is the base's own, so fewer are drafted near the end.
        while at < last and (tokens_left := text.prompt_length + new_tokens - at - 2) > 0:
            drafted = min(adaptive.value if adaptive else deepest, tokens_left)
            accepted = min(stands[index, at], drafted)
            walk.append((drafted, accepted))
            at += accepted + 1
            if adaptive:
                adaptive.observe(drafted, accepted, draft_ms=0.0, verify_ms=0.0)
        walks.append(walk)
    return walks


def _summarize_worth(
    name: str, what: Drafts, walks: Sequence[Sequence[tuple[int, int]]], timed: Timed, alone: Timed
) -> Worth:
    """Of rounds along all texts, by text; and of the few texts ``timed`` with drafts and by the base ``alone``."""
    tree = build_deepest_tree(what)
    rounds = list(chain.from_iterable(walks))
    by_text = [sum(accepted for _, accepted in walk) for walk in walks]
    # Over the depth it is a share, which the interval wants.
    interval = over_texts(share_bounds, [accepted / tree.depth for accepted in by_text], list(map(len, walks)))
    tokens_per_round = 1 + sum(by_text) / len(rounds)
    # The base alone writes a token a forward.
    sooner = tokens_per_round * alone.verify_ms / (timed.verify_ms + timed.draft_ms)
    return Worth(
        tree=None if isinstance(what, int) else name,
        drafts=tree.drafts,
        depth=tree.depth,
        rounds=len(rounds),
        drafted=sum(drafted for drafted, _ in rounds),
        accepted=sum(by_text),
        tokens_per_round=figure(tokens_per_round, len(rounds), interval and interval.scaled(tree.depth, 1.0)),
        same_text=sum(generation.tokens == alone.texts[row].tokens for row, generation in timed.texts.items()),
        tokens_per_s=nan_to_none(timed.tokens_per_s),
        verify_ms=nan_to_none(timed.verify_ms),
        draft_ms=nan_to_none(timed.draft_ms),
        predicted_speedup=nan_to_none(sooner),
        measured_speedup=nan_to_none(timed.tokens_per_s / alone.tokens_per_s),
    )
