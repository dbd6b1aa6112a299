"""A whole making of an ordered head, from names to a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.extras import require
from mtp_extract.options import About
from mtp_extract.report.card import UNSAID, CardWords
from mtp_extract.tune.setting import Force, Overwrite, Setting

if TYPE_CHECKING:
    import torch

    from mtp_extract.architecture.config import OrderedHeadConfig
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.ordered import Kept, Used
    from mtp_extract.tune.progress import Written
    from mtp_extract.tune.verdict import Comparisons

MOST_LOST = 0.02
"""Of mean accepted length, against the dense head."""

_STATES_A_CENTROID = 200
_LEAST_STATES = 100_000
"""Asked for where there are few centroids."""
_FEW_STATES = 50
"""A centroid: with fewer there is little to learn from."""
_LARGE = 1 << 14
"""A vocabulary whose clusters are of 128 tokens, as those of the official drafters are."""


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
    steps: int = 600
    """Of the optimizer."""
    force: Force = False
    overwrite: Overwrite = False
    card: CardWords = UNSAID

    def check(self) -> None:
        """What can be said before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, or ``out`` holds something else.
        """
        self.setting.check()
        for name in ("centroids", "top_k", "states", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MtpExtractError(f"expected {name} of at least 1, found {value}; raise it", remedies=(name,))
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


@dataclass(frozen=True)
class Ordered:
    """What came of it.

    Attributes:
        directory: what was written; None for nothing.
        refused: why it was not accepted; empty if it was.
        comparisons: the dense head before, the ordered one after.
        head: its shape.
        kept: of the dense head's choices, on held-out text.
        corpus: the texts.
        record: what ``extraction.json`` says of it.
        notes: things worth knowing that are not errors.
    """

    directory: Path | None
    refused: tuple[str, ...]
    comparisons: Comparisons
    head: OrderedHeadConfig
    kept: Kept
    corpus: Corpus
    record: Mapping[str, Any]
    notes: tuple[str, ...]


def run_ordered_head(
    plan: HeadPlan,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[Written], None] = lambda written: None,
) -> Ordered:
    """Make an ordered head, measure it, and write it where it drafts as the dense one does.

    Args:
        plan: what.
        say: told what is being done.
        tell: called after every batch of text that was written.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
        UnsupportedError: the drafter's format has no room for such a head.
    """
    require("torch", "safetensors", "transformers", "accelerate")
    plan.check()
    import torch

    from mtp_extract.architecture.config import OrderedHeadConfig
    from mtp_extract.drafter.mtp import MtpDrafter
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.ordered import Kept, build_head, collect, dense, head_of, ordered, ranks_of
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.verdict import Comparisons
    from mtp_extract.tune.writing import as_written, check_head_writable, write_ordered

    pair = Pair(plan.setting, say)
    if pair.share[1] > 1:
        raise MtpExtractError(f"expected one process to make an ordered head, found {pair.share[1]}; start only one")
    before = dense(pair.origin.checkpoint)
    count = plan.count(before.config.vocab_size)
    like = ordered(before, torch.arange(before.config.vocab_size), torch.zeros(count, before.config.hidden_size), 1)
    check_head_writable(pair.origin, like)
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
        pair.say(f"making {count} clusters, and learning their centroids from {len(used.states)} states")
        built = build_head(head_of(before), used, watched, count, plan.top_k, plan.steps, plan.setting.seed)
        # Centroids as they will be read.
        rows = head_of(
            as_written(pair.origin, ordered(before, built.ordering, built.learned.centroids, 1)), centroids=True
        )
        top_k = plan.top_k or _chosen(watched, ranks_of(watched, built.ordering, rows), count)
        judged = replace(held_out, text=torch.tensor(corpus.units)[held_out.text])
        kept = Kept.of(judged, ranks_of(judged, built.ordering, rows), top_k)
        after = ordered(before, built.ordering, built.learned.centroids, top_k)
        pair.say(f"measuring the drafter with either head on {len(corpus.held_out)} held-out texts")
        heads = (drafter, pair.drafter_of(after))
        first, second = (pair.measured(one, corpus.held_out) for one in heads)
        others = [pair.measured(one, corpus.otherwise, corpus.other_temperature) for one in heads if corpus.otherwise]
        comparisons = Comparisons.of(corpus, first, second, (others[0], others[1]) if others else None)
    refused = _refused(kept, comparisons)
    record = {
        "centroids": count,
        "top_k": top_k,
        "tokens_a_cluster": before.config.vocab_size // count,
        "rows_read": count + top_k * (before.config.vocab_size // count),
        "rows_dense": before.config.vocab_size,
        "base": pair.name,
        "base_xxh3": pair.base_fingerprint,
        "temperature": plan.setting.temperature,
        "draft_steps": plan.setting.draft_steps,
        "seed": plan.setting.seed,
        "texts": corpus.counts,
        "shared_sequences": round(corpus.shared, 4),
        "states": len(used.states),
        "tokens_used": built.tokens,
        "steps": plan.steps,
        "steps_done": built.learned.done,
        "best_step": built.learned.step,
        "kept": kept.as_json(),
        "accepted": not refused,
        "refused": list(refused),
        **comparisons.as_json(),
    }
    notes = [*pair.loaded.notes, *corpus.notes, *comparisons.notes()]
    if len(used.states) < _FEW_STATES * count:
        notes.append(
            f"{len(used.states)} states are {len(used.states) / count:.0f} a centroid; more prompts, or longer texts, "
            "make a better head."
        )
    written = None
    if plan.force or not refused:
        result = write_ordered(
            pair.origin,
            after,
            plan.out,
            record,
            overwrite=plan.overwrite,
            inputs=plan.setting.inputs,
            card=plan.card,
        )
        written = result.directory
    head = OrderedHeadConfig(count, top_k)
    return Ordered(written, refused, comparisons, head, kept, corpus, record, tuple(notes))


def _enough(used: Used) -> Used:
    if not len(used.states):
        raise MtpExtractError(
            "expected text that the base would write, found none of which a draft counts; give other text",
            remedies=("text", "prompts"),
        )
    return used


def _chosen(watched: Used, rank: torch.Tensor, count: int) -> int:
    """The least power of two that loses at most half of what may be lost, up to where there is little to be gained.

    Half, since other text loses more than the one it is chosen on; that decides.
    """
    from mtp_extract.tune.ordered import LEAST_KEPT, Kept, most_looked_into

    most = most_looked_into(count)
    powers = (1 << power for power in range(most.bit_length()))
    return next((top_k for top_k in powers if Kept.of(watched, rank, top_k).share >= (1 + LEAST_KEPT) / 2), most)


def _refused(kept: Kept, comparisons: Comparisons) -> tuple[str, ...]:
    """Why the head is not to be kept; empty if it is."""
    from mtp_extract.tune.ordered import LEAST_KEPT
    from mtp_extract.tune.verdict import signed

    reasons = []
    if kept.share < LEAST_KEPT:
        reasons.append(
            f"it keeps {kept.share:.2%} of the dense head's choices on held-out text, of which {LEAST_KEPT:.1%} are "
            "wanted"
        )
    overall = comparisons.overall.change
    # Of texts of which none loses a draft an interval says what one that was not seen might lose: the worst.
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
