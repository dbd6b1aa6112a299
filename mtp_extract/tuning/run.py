"""Runs a tuning: collect text, train or make a head, compare on held-out text, and save an improvement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.errors import escape
from mtp_extract.evaluation.base_model import guard_memory
from mtp_extract.io.address import choose_public_name
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.tuning.corpus import Corpus, gather_texts, split_prompts
from mtp_extract.tuning.eagle3 import add_untrained_head
from mtp_extract.tuning.ordered import add_zero_head, list_head_refusals, make_head, remove_ordered_head
from mtp_extract.tuning.pair import Pair, check_writable, write_result
from mtp_extract.tuning.plan import EAGLE3, ORDERED, TuningPlan
from mtp_extract.tuning.rounds import measure_acceptance
from mtp_extract.tuning.train import build_latents, train
from mtp_extract.tuning.verdict import Comparisons
from mtp_extract.tuning.work import lock_folder


@dataclass(frozen=True)
class Outcome:
    directory: Path | None  # the result; None if it was not written
    refused: tuple[str, ...]  # reasons against saving it; empty if it was accepted
    comparisons: Comparisons  # before and after, on held-out text
    corpus: Corpus
    record: Mapping[str, Any]  # its entry in ``extraction.json``
    notes: tuple[str, ...]  # things worth knowing that are not errors


def run_tuning(plan: TuningPlan, reporter: Reporter = SILENT) -> Outcome:
    """Run ``plan``, as :func:`mtp_extract.api.tune` describes."""
    plan.check()
    # Fail on too few prompts before the base is loaded.
    split_prompts(plan)
    pair = Pair(plan, reporter)
    # Fail before any work if the drafter's format cannot hold the result.
    if plan.mode == ORDERED:
        check_writable(pair.origin, add_zero_head(pair.origin.checkpoint), ORDERED)
    elif plan.mode != EAGLE3:
        build_latents(pair)

    # The first of several processes locks the folder for all.
    is_first = pair.accelerator.is_main_process
    with guard_memory("tuning"), lock_folder(plan.kept_in) if is_first else nullcontext():
        corpus = gather_texts(pair, reporter)
        checkpoint, about, comparisons = _make_and_compare(pair, corpus, reporter)
    refused = tuple(
        list_head_refusals(about["kinds"], comparisons) if plan.mode == ORDERED else comparisons.list_refusals()
    )
    record = {
        **about,
        "recipe": plan.recipe,
        "base": choose_public_name(plan.base),
        "base_xxh3": pair.base_fingerprint,
        "texts": {split: len(getattr(corpus, split)) for split in ("trained", "watched", "held_out")},
        "text_from": corpus.text_from,
        "accepted": not refused,
        "refused": list(refused),
        **msgspec.to_builtins(comparisons),
    }
    directory = plan.target if plan.force or not refused else None
    if directory and is_first:
        write_result(pair.origin, checkpoint, plan, "ordered_head" if plan.mode == ORDERED else "tuning", record)
    pair.accelerator.wait_for_everyone()
    notes = (
        *pair.origin.checkpoint.notes,
        *pair.loaded.notes,
        *comparisons.describe_undecided(),
        *_describe_agreement(corpus),
    )
    return Outcome(directory, refused, comparisons, corpus, record, notes)


def _make_and_compare(pair: Pair, corpus: Corpus, reporter: Reporter) -> tuple[Checkpoint, dict[str, Any], Comparisons]:
    """Return the checkpoint that the plan's mode makes, its record, and its comparison with the one before."""
    mode = pair.plan.mode
    if mode == EAGLE3:
        add_untrained_head(pair, corpus.trained)
    # An ordered head is compared with the dense one.
    before = pair.load_rounded(remove_ordered_head(pair.origin.checkpoint)) if mode == ORDERED else pair.drafter
    held_out = [text for _, text in corpus.held_out]
    pair.say(f"measuring the drafter as it is on {len(held_out)} held-out texts")
    acceptance = measure_acceptance(pair, before, held_out)

    if mode == ORDERED:
        checkpoint, about = make_head(pair, before, corpus, reporter)
    else:
        latents = build_latents(pair)
        progress = train(pair, corpus, latents, reporter)
        checkpoint = latents.build_checkpoint(progress.results)
        about = {
            "mode": mode,
            "numbers": latents.parameter_count,
            "steps_done": progress.done,
            "best_step": progress.step,
            "interrupted": progress.interrupted,
        }
    pair.say("measuring what was made on the held-out texts")
    after = measure_acceptance(pair, pair.load_rounded(checkpoint), held_out)
    return checkpoint, about, Comparisons.of(corpus, acceptance, after)


def _describe_agreement(corpus: Corpus) -> Iterator[str]:
    if writer := corpus.text_from:
        texts = f"{writer['positions']} tokens of {writer['texts']} texts that {escape(writer['kind'])} wrote"
        yield f"The base at hand would have written {writer['agreement']:.1%} of {texts}."
