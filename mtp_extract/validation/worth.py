"""What drafts are worth: rounds derived along the base's own text, and the times and texts of a few real generations.

In greedy serving the drafts decide where a round ends, and they are known after every token of the text. So the rounds
of any chain or tree follow from one pass; their times, and that the text does not change, are measured by generating.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from statistics import fmean

from mtp_extract.evaluation.agreement import build_figure, nan_to_none
from mtp_extract.evaluation.base_texts import Continuations
from mtp_extract.evaluation.intervals import bound_share, compute_interval
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.progress import SILENT, Reporter, report_each
from mtp_extract.speculate.drafts import AdaptiveDrafts, Drafts, DraftTree, RunningLength, build_deepest_tree
from mtp_extract.speculate.loop import Generation, Round, SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement

TextPlace = tuple[int, int]  # a text's number and the position of its pending token
_WARMUP_TOKENS = 8  # generated before times are taken


class Worth(Record, kw_only=True):
    """A chain or a tree of drafts: what its rounds yield in the loop, and what they cost."""

    tree: str | None  #: `adaptive`, or a tree such as `4x2x1`; null for a chain of one length
    drafts: Positive  #: most drafts that the base verifies in a round
    depth: Positive  #: most draft steps of a round; for a chain, the same as drafts
    rounds: Count  #: rounds of the greedy loop that drafted anything, along all texts that repeat no other
    drafted: Count  #: draft steps of these rounds; in a chain each is one draft
    accepted: Count  #: accepted drafts
    tokens_per_round: Figure  #: of these rounds: 1 + accepted / rounds
    same_text: Count  #: timed texts that are what the base alone writes
    tokens_per_s: float | None  #: one text at a time, after its first token
    verify_ms: float | None  #: mean time of a round's verification, one text at a time: forward and judgement
    draft_ms: float | None  #: mean time of all draft steps of a round
    predicted_speedup: float | None  #: tokens per round · forward_ms of the base / (verify_ms + draft_ms)
    measured_speedup: float | None  #: in tokens per second


@dataclass(frozen=True)
class Timed:
    """A few texts, generated one at a time."""

    texts: Mapping[int, Generation]  # by index of the prompt

    @classmethod
    def of(
        cls, generator: SpeculativeGenerator, prompts: Mapping[int, Sequence[int]], drafts: Drafts, new_tokens: int
    ) -> Timed:
        """Generate the texts after ``prompts``: token ids by index."""
        for prompt in [*prompts.values()][:1]:  # warm up: the first calls choose kernels and allocate memory
            generator.generate(prompt, max_new_tokens=min(new_tokens, _WARMUP_TOKENS), drafts=drafts)
        texts = {
            index: generator.generate(prompt, max_new_tokens=new_tokens, drafts=drafts)
            for index, prompt in prompts.items()
        }
        return cls(texts)

    @property
    def rounds(self) -> list[Round]:
        """Rounds of all texts."""
        return [r for generation in self.texts.values() for r in generation.rounds]

    @property
    def verify_ms(self) -> float:
        """Mean time of the base's forward in rounds with drafts or, for the base alone, over one token; NaN without."""
        times = [r.verify_ms for r in self.rounds if r.drafted] or [r.verify_ms for r in self.rounds]
        return fmean(times) if times else math.nan

    @property
    def draft_ms(self) -> float:
        """Mean time of the draft steps of a round with drafts; NaN without any."""
        times = [r.draft_ms for r in self.rounds if r.drafted]
        return fmean(times) if times else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, without the first token of each text; NaN without rounds."""
        milliseconds = sum(r.draft_ms + r.verify_ms for r in self.rounds)
        tokens = sum(len(generation.tokens) - 1 for generation in self.texts.values())
        return 1e3 * tokens / milliseconds if milliseconds else math.nan


def generate_with_base_alone(
    generator: SpeculativeGenerator, written: Continuations, *, new_tokens: int, timed: int
) -> Timed:
    """Generate texts of ``timed`` prompts, taken from the workloads in turn, first those that have an anchor."""
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
    """Measure each of ``plans``: its rounds along all texts, and the times to generate the texts of ``alone``.

    Args:
        agreement: along these texts, each step after the drafter's own drafts; as many steps as the longest chain.
        along: the same, but each step after the text's tokens; as many as the deepest tree, None without trees.
        plans: drafts by name; the longest chain comes before adaptive drafts.
        alone: generations of the base alone, with the same ``new_tokens``; ``same_text`` counts texts equal to these.
        worth: the dictionary to fill, plan by plan, and return; by default a new one.
    """
    worth = {} if worth is None else worth
    prompts = {row: generation.prompt_tokens for row, generation in alone.texts.items()}
    for name in report_each(list(plans), reporter, "a few texts with drafts"):
        drafts = plans[name]
        if isinstance(drafts, AdaptiveDrafts):
            # A fixed cost, measured with the longest chain, so that rounds do not depend on the clock.
            longest = worth[str(drafts.most)]
            ratio = (longest.draft_ms or 0.0) / longest.depth / longest.verify_ms if longest.verify_ms else 0.0
            drafts = replace(drafts, cost_ratio=ratio)
        accepted = count_accepted_drafts(drafts, agreement, along)
        walks = walk_rounds(drafts, accepted, written, new_tokens)
        timed = Timed.of(generator, prompts, drafts, new_tokens)
        worth[name] = _summarize_worth(name, drafts, walks, timed, alone)
    return worth


def count_accepted_drafts(drafts: Drafts, agreement: Agreement, along: Agreement | None) -> dict[TextPlace, int]:
    """Count the accepted drafts of a round, by where it begins; for the arguments see :func:`measure_worth`."""
    depth = build_deepest_tree(drafts).depth
    if isinstance(drafts, DraftTree):
        assert along is not None
        agreement = along
        accepted = [drafts.count_accepted(ranks) for ranks in along.ranks[:, :depth].tolist()]
    else:
        accepted = (agreement.drafts == agreement.targets)[:, :depth].int().cumprod(1).sum(1).tolist()
    places = zip(agreement.text.tolist(), agreement.anchor.tolist(), strict=True)
    return dict(zip(places, accepted, strict=True))


def choose_best_chain(worth: Mapping[str, Worth]) -> str:
    """Return the chain with the highest predicted speedup; the shortest of those that tie."""
    chains = {name: (row.predicted_speedup or 0.0, -row.drafts) for name, row in worth.items() if not row.tree}
    return max(chains, key=lambda name: chains[name])


def walk_rounds(
    drafts: Drafts, accepted_at: Mapping[TextPlace, int], written: Continuations, new_tokens: int
) -> list[list[tuple[int, int]]]:
    """Return the rounds of the greedy loop that draft anything, by text, as (drafted, accepted).

    Each begins where the round before ended; ``accepted_at`` has the accepted drafts of a round that begins there.
    """
    walks = []
    depth = build_deepest_tree(drafts).depth
    for index in written.usable:
        text = written.texts[index]
        walk: list[tuple[int, int]] = []
        position = text.prompt_length
        last = len(text.tokens) - 1
        adaptive = RunningLength(drafts) if isinstance(drafts, AdaptiveDrafts) else None
        # One of the tokens that are left is the base's own, so fewer are drafted near the end.
        while position < last and (tokens_left := text.prompt_length + new_tokens - position - 2) > 0:
            drafted = min(adaptive.value if adaptive else depth, tokens_left)
            accepted = min(accepted_at[index, position], drafted)
            walk.append((drafted, accepted))
            position += accepted + 1
            if adaptive:
                adaptive.observe(drafted, accepted, draft_ms=0.0, verify_ms=0.0)
        walks.append(walk)
    return walks


def _summarize_worth(
    name: str, drafts: Drafts, walks: Sequence[Sequence[tuple[int, int]]], timed: Timed, alone: Timed
) -> Worth:
    """Combine the rounds by text with the times of texts with drafts (``timed``) and of the base ``alone``."""
    tree = build_deepest_tree(drafts)
    rounds = list(chain.from_iterable(walks))
    by_text = [sum(accepted for _, accepted in walk) for walk in walks]
    # Accepted drafts over the depth are a share, of which there is an interval.
    interval = compute_interval(bound_share, [accepted / tree.depth for accepted in by_text], list(map(len, walks)))
    tokens_per_round = 1 + sum(by_text) / len(rounds)
    # speedup = (tokens per round / time of a round) / (1 token / time of a forward of the base alone)
    predicted = tokens_per_round * alone.verify_ms / (timed.verify_ms + timed.draft_ms)
    return Worth(
        tree=None if isinstance(drafts, int) else name,
        drafts=tree.drafts,
        depth=tree.depth,
        rounds=len(rounds),
        drafted=sum(drafted for drafted, _ in rounds),
        accepted=sum(by_text),
        tokens_per_round=build_figure(tokens_per_round, len(rounds), interval and interval.rescale(tree.depth, 1.0)),
        same_text=sum(generation.tokens == alone.texts[row].tokens for row, generation in timed.texts.items()),
        tokens_per_s=nan_to_none(timed.tokens_per_s),
        verify_ms=nan_to_none(timed.verify_ms),
        draft_ms=nan_to_none(timed.draft_ms),
        predicted_speedup=nan_to_none(predicted),
        measured_speedup=nan_to_none(timed.tokens_per_s / alone.tokens_per_s),
    )
