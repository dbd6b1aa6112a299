"""A whole making of an ordered head, from names to a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtp_extract.architecture.roles import HEAD_ROLES
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.extras import require
from mtp_extract.options import About, Overwrite, check_values
from mtp_extract.tune.setting import Force, Setting
from mtp_extract.tune.status import Status

if TYPE_CHECKING:
    import torch

    from mtp_extract.tune.ordered import Kept, Reached, Used
    from mtp_extract.tune.outcome import Outcome
    from mtp_extract.tune.verdict import Comparisons

MOST_LOST = 0.02
"""Of teacher-forced tokens per round, against the dense head."""

_STATES_A_CENTROID = 200
_LEAST_STATES = 200_000  # asked for where there are few centroids
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
        About(
            "Clusters it looks into; by default as few as keep 99.875 % of the dense head's choices on watched text, "
            "up to half of its rows.",
            least=1,
        ),
    ] = None
    states: Annotated[
        int | None,
        About("Most states of the drafter that it is made from; by default 200 a cluster.", least=1),
    ] = None
    steps: int = 600  # of the optimizer
    force: Force = False
    overwrite: Overwrite = False

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

    def most_states(self, vocabulary: int) -> int:
        """Of the drafter, that the head is made from at most; errors as of :meth:`count`."""
        return self.states or max(_LEAST_STATES, _STATES_A_CENTROID * self.count(vocabulary))


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
    require("torch", "transformers", "accelerate")
    plan.check()
    import torch

    from mtp_extract.drafter.mtp import MtpDrafter
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.tune.corpus import Corpus, divided
    from mtp_extract.tune.kinds import OWN, Material
    from mtp_extract.tune.ordered import Kept, Reached, build_head, dense, head_of, ordered, ranks_of
    from mtp_extract.tune.outcome import conclude
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.verdict import Comparisons
    from mtp_extract.tune.writing import as_written, check_writable, ordered_record

    # Too few prompts are no reason to load a base.
    divided(plan.setting)
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
        most = plan.most_states(vocabulary)
        found = Material.of(pair, drafter, corpus, head_of(before), most, tell)
        pair.say(f"making {count} clusters, and learning their centroids from {found.states} states")
        built = build_head(
            head_of(before), found.used, found.made, found.watched, count, plan.top_k, plan.steps, plan.setting.seed
        )
        head = partial(ordered, before, built.ordering, built.learned.centroids)
        # Centroids as they will be read.
        rows = head_of(as_written(pair.origin, head(1)), centroids=True)

        def ranked(states: Used) -> tuple[Used, torch.Tensor]:
            return states, ranks_of(states, built.ordering, rows)

        top_k = plan.top_k or _chosen(
            [ranked(part) for part in found.watched], ranked(found.checked), vocabulary, count
        )
        kept = {name: Kept.of(*ranked(states), top_k) for name, states in found.held_out.items()}
        reached = Reached.of(*ranked(found.checked), top_k)
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
        **found.as_json,
        "steps": plan.steps,
        "steps_done": built.learned.done,
        "best_step": built.learned.step,
        "kept": kept[OWN].as_json(),
        "kinds": {name: found.as_json() for name, found in kept.items()},
        "reached": reached.as_json(),
    }
    notes = []
    if found.states < _FEW_STATES * count:
        notes.append(
            f"{found.states} states are {found.states / count:.0f} a centroid; more prompts, or longer texts, "
            "make a better head."
        )
    describe = partial(ordered_record, pair.origin)
    return conclude(
        plan, pair, corpus, comparisons, _refused(kept, reached, comparisons), after, about, describe, notes
    )


def _chosen(
    watched: Sequence[tuple[Used, torch.Tensor]], made: tuple[Used, torch.Tensor], vocabulary: int, count: int
) -> int:
    """The least number of clusters that lose little enough on every kind of text and reach enough tokens.

    Args:
        watched: states over text of each kind, and the ranks of their clusters.
        made: the same of states made for tokens.
    """
    from mtp_extract.tune.ordered import ENOUGH, LEAST_REACHED, Kept, Reached

    # With more than half of the rows, too few are saved.
    most = max(1, (vocabulary // 2 - count) // (vocabulary // count))
    numbers = {number for power in range(most.bit_length()) for number in (1 << power, 3 << power)}
    fits = sorted({most, *(number for number in numbers if number < most)})
    return next(
        (
            top_k
            for top_k in fits
            if all(Kept.of(*part, top_k).share >= ENOUGH for part in watched)
            and Reached.of(*made, top_k).share >= LEAST_REACHED
        ),
        fits[-1],
    )


def _refused(kept: Mapping[str, Kept], reached: Reached, comparisons: Comparisons) -> tuple[str, ...]:
    """Why the head is not to be accepted; empty if it is."""
    from mtp_extract.tune.ordered import LEAST_KEPT, LEAST_REACHED
    from mtp_extract.tune.verdict import signed

    reasons = [
        f"it keeps {found.share:.2%} of the dense head's choices on held-out text ({name}), of which "
        f"{LEAST_KEPT:.1%} are wanted"
        for name, found in kept.items()
        if found.share < LEAST_KEPT
    ]
    if reached.share < LEAST_REACHED:
        reasons.append(
            f"it reaches {reached.share:.1%} of the tokens that states were made for, of which {LEAST_REACHED:.0%} are "
            "wanted"
        )
    overall = comparisons.overall.change
    # Where no text loses a draft, an interval's lower end is only as far off as the texts are few.
    if overall.interval is None or (overall.interval.low < -MOST_LOST and comparisons.overall.loses):
        reasons.append(
            f"it may lose more than {MOST_LOST} of teacher-forced tokens per round on held-out text ({signed(overall)})"
        )
    reasons += [
        f"it loses more than {MOST_LOST} on {name} ({signed(found.change)})"
        for name, found in comparisons.workloads.items()
        if found.change.interval is not None and found.change.interval.high < -MOST_LOST
    ]
    return tuple(reasons)
