"""A whole making of an ordered head, from names to a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtp_extract.architecture.roles import HEAD_ROLES
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.extras import require
from mtp_extract.options import About, Overwrite, check_values
from mtp_extract.report.card import UNSAID, CardWords
from mtp_extract.tune.setting import Force, Setting
from mtp_extract.tune.status import Status

if TYPE_CHECKING:
    import torch

    from mtp_extract.tune.ordered import Kept, Used
    from mtp_extract.tune.outcome import Outcome
    from mtp_extract.tune.verdict import Comparisons

MOST_LOST = 0.02
"""Of mean accepted length, against the dense head."""

_STATES_A_CENTROID = 200
_LEAST_STATES = 100_000  # asked for where there are few centroids
_FEW_STATES = 50  # a centroid: with fewer there is little to learn from
_LARGE = 1 << 14  # a vocabulary whose clusters are of 128 tokens, as those of the official drafters are


@dataclass(frozen=True)
class HeadPlan:
    """What to make an ordered head for, from what, and how."""

    setting: Setting
    out: Path
    centroids: Annotated[
        int | None,
        About("Clusters of that head; by default 128 tokens each, in a small vocabulary 16.", least=2),
    ] = None
    top_k: Annotated[
        int | None,
        About("Clusters it looks into; by default the least that keep 99.5 % of the best tokens.", least=1),
    ] = None
    states: Annotated[
        int | None,
        About("Most states of the drafter that it is made from; by default 200 a cluster.", least=1),
    ] = None
    steps: int = 600  # of the optimizer
    force: Force = False
    overwrite: Overwrite = False
    card: CardWords = UNSAID

    def check(self) -> None:
        """What can be said before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, or ``out`` holds something else.
        """
        self.setting.check()
        check_values(self)
        self.setting.check_out(self.out, self.overwrite)

    def count(self, vocabulary: int) -> int:
        """The number of clusters.

        Raises:
            MtpExtractError: it does not divide ``vocabulary``, or more than all would be looked into.
        """
        from mtp_extract.tune.clusters import check_count, divisors

        wanted = vocabulary // (128 if vocabulary >= _LARGE else 16)
        count = self.centroids or min(divisors(vocabulary), key=lambda fit: abs(fit - wanted), default=1)
        check_count(vocabulary, count)
        if self.top_k is not None and self.top_k > count:
            raise MtpExtractError(
                f"expected to look into at most all {count} clusters, found {self.top_k}; lower it",
                remedies=("top_k",),
            )
        return count


def run_ordered_head(
    plan: HeadPlan,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[Status], None] = lambda status: None,
) -> Outcome:
    """Make an ordered head, measure it, and write it where it drafts as the dense one does.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
        UnsupportedError: the drafter's format has no room for such a head.
    """
    require("torch", "safetensors", "transformers", "accelerate")
    plan.check()
    import torch

    from mtp_extract.drafter.mtp import MtpDrafter
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.ordered import Kept, build_head, collect, dense, head_of, ordered, ranks_of
    from mtp_extract.tune.outcome import conclude
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.verdict import Comparisons
    from mtp_extract.tune.writing import as_written, check_writable, ordered_record

    pair = Pair(plan.setting, say)
    if pair.share[1] > 1:
        raise MtpExtractError(f"expected one process to make an ordered head, found {pair.share[1]}; start only one")
    before = dense(pair.origin.checkpoint)
    vocabulary = before.config.vocab_size
    count = plan.count(vocabulary)
    like = ordered(before, torch.arange(vocabulary), torch.zeros(count, before.config.hidden_size), 1)
    advice = "Convert the drafter to the transformers format first."
    check_writable(pair.origin, like, "an ordered head", advice, needed=HEAD_ROLES)
    with pair.working_alone(), memory_guard("making an ordered head"):
        drafter = pair.drafter_of(before)
        assert isinstance(drafter, MtpDrafter)
        corpus = Corpus.of(pair, tell)
        pair.say(f"reading the drafter's states over {len(corpus.trained)} texts")
        most = plan.states or max(_LEAST_STATES, _STATES_A_CENTROID * count)
        used = _enough(collect(pair, drafter, corpus.trained, most, every_convention=True))
        watched, held_out = (
            _enough(collect(pair, drafter, texts, most, every_convention=False))
            for texts in (corpus.watched, corpus.held_out[: corpus.own])
        )
        held_out = replace(held_out, text=torch.tensor(corpus.units)[held_out.text])
        pair.say(f"making {count} clusters, and learning their centroids from {len(used.states)} states")
        built = build_head(head_of(before), used, watched, count, plan.top_k, plan.steps, plan.setting.seed)
        head = partial(ordered, before, built.ordering, built.learned.centroids)
        # Centroids as they will be read.
        rows = head_of(as_written(pair.origin, head(1)), centroids=True)
        top_k = plan.top_k or _chosen(watched, ranks_of(watched, built.ordering, rows), count)
        kept = Kept.of(held_out, ranks_of(held_out, built.ordering, rows), top_k)
        after = head(top_k)
        pair.say(f"measuring the drafter with either head on {len(corpus.held_out)} held-out texts")
        measured = (corpus.measured(pair, one) for one in (drafter, pair.drafter_of(after)))
        comparisons = Comparisons.of(corpus, *measured)
    about = {
        "centroids": count,
        "top_k": top_k,
        "tokens_a_cluster": vocabulary // count,
        "rows_read": count + top_k * (vocabulary // count),
        "rows_dense": vocabulary,
        **pair.as_json,
        "temperature": plan.setting.temperature,
        "draft_steps": plan.setting.draft_steps,
        "seed": plan.setting.seed,
        **corpus.as_json,
        "states": len(used.states),
        "tokens_used": built.tokens,
        "steps": plan.steps,
        "steps_done": built.learned.done,
        "best_step": built.learned.step,
        "kept": kept.as_json(),
    }
    notes = []
    if len(used.states) < _FEW_STATES * count:
        notes.append(
            f"{len(used.states)} states are {len(used.states) / count:.0f} a centroid; more prompts, or longer texts, "
            "make a better head."
        )
    describe = partial(ordered_record, pair.origin)
    return conclude(plan, pair, corpus, comparisons, _refused(kept, comparisons), after, about, describe, notes)


def _enough(used: Used) -> Used:
    if not len(used.states):
        raise MtpExtractError(
            "expected text that the base would write, found none of which a draft counts; give other text",
            remedies=("text", "prompts"),
        )
    return used


def _chosen(watched: Used, rank: torch.Tensor, count: int) -> int:
    """The least power of two of clusters that loses at most half of the choices that may be lost, up to a limit.

    Half, since the held-out text, which decides, loses more than the one it is chosen on.
    """
    from mtp_extract.tune.ordered import LEAST_KEPT, Kept

    # With more than an eighth of the clusters, too few rows are saved.
    most = max(1, count // 8)
    powers = (1 << power for power in range(most.bit_length()))
    return next((top_k for top_k in powers if Kept.of(watched, rank, top_k).share >= (1 + LEAST_KEPT) / 2), most)


def _refused(kept: Kept, comparisons: Comparisons) -> tuple[str, ...]:
    """Why the head is not to be accepted; empty if it is."""
    from mtp_extract.tune.ordered import LEAST_KEPT
    from mtp_extract.tune.verdict import signed

    reasons = []
    if kept.share < LEAST_KEPT:
        reasons.append(
            f"it keeps {kept.share:.2%} of the dense head's choices on held-out text, of which {LEAST_KEPT:.1%} are "
            "wanted"
        )
    overall = comparisons.overall.change
    # Where no text loses a draft, an interval's lower end is only as far off as the texts are few.
    if overall.interval is None or (overall.interval.low < -MOST_LOST and comparisons.overall.loses):
        reasons.append(
            f"it may lose more than {MOST_LOST} of mean accepted length on held-out text ({signed(overall)})"
        )
    reasons += [
        f"it loses more than {MOST_LOST} on {name} ({signed(found.change)})"
        for name, found in comparisons.workloads.items()
        if found.change.interval is not None and found.change.interval.high < -MOST_LOST
    ]
    return tuple(reasons)
