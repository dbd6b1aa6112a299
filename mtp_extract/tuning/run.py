"""A whole tuning, from a plan to a directory: text, training, before and after, and what is better is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluate.extras import require
from mtp_extract.evaluate.progress import Show, silent
from mtp_extract.tuning.plan import EAGLE3, ORDERED, TuningPlan

if TYPE_CHECKING:
    from mtp_extract.checkpoint.checkpoint import Checkpoint
    from mtp_extract.tuning.corpus import Corpus
    from mtp_extract.tuning.latents import Latents
    from mtp_extract.tuning.pair import Pair
    from mtp_extract.tuning.verdict import Comparisons


@dataclass(frozen=True)
class Outcome:
    directory: Path | None  # what was written; None for nothing
    refused: tuple[str, ...]  # why it was not accepted; empty if it was
    comparisons: Comparisons  # before and after
    corpus: Corpus  # the texts
    record: Mapping[str, Any]  # what ``extraction.json`` says of it
    notes: tuple[str, ...]  # things worth knowing that are not errors


def run_tuning(
    plan: TuningPlan,
    say: Callable[[str], None] = lambda line: None,
    tell: Show = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train, or make a head; measure it before and after on held-out text; save what is better.

    Args:
        say: told what is being done.
        tell: called after every batch of text and every step.
        stop: asked after every step: what is best so far is then measured, and saved if it is better, marked as
            interrupted; a later run with the same plan resumes there.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
        OutputError: the result cannot be written, or reads back differently; nothing is left behind.
    """
    require("torch", "transformers", "accelerate")
    plan.check()
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.io.address import public_name
    from mtp_extract.tuning.corpus import divided, gather
    from mtp_extract.tuning.ordered import check_dense, make_head, refusals
    from mtp_extract.tuning.pair import Pair
    from mtp_extract.tuning.work import locked
    from mtp_extract.tuning.writing import write_made

    # Too few prompts are no reason to load a base.
    divided(plan)
    pair = Pair(plan, say)
    # What cannot be written is refused before anything is kept.
    if plan.mode == ORDERED:
        check_dense(plan, pair)
    elif plan.mode != EAGLE3:
        _latents(plan, pair)
    # The first of several processes locks the folder for all.
    with memory_guard("tuning"), locked(plan.kept_in) if pair.accelerator.is_main_process else nullcontext():
        corpus = gather(pair, tell)
        if plan.mode == ORDERED:
            made, about, comparisons = make_head(plan, pair, corpus, tell)
            refused = tuple(refusals(about["kinds"], comparisons))
        else:
            made, about, comparisons = _tuned(plan, pair, corpus, tell, stop)
            refused = comparisons.refused()
    about |= {"base": public_name(plan.base), "base_xxh3": pair.base_fingerprint, **corpus.as_json}
    about |= {"accepted": not refused, "refused": list(refused), **comparisons.as_json()}
    keep = plan.force or not refused
    if keep and pair.accelerator.is_main_process:
        key = "ordered_head" if plan.mode == ORDERED else "tuning"
        write_made(pair.origin, made, plan.target, key, about, overwrite=plan.overwrite, inputs=plan.inputs)
    pair.accelerator.wait_for_everyone()
    notes = (*pair.loaded.notes, *corpus.notes, *comparisons.notes())
    return Outcome(plan.target if keep else None, refused, comparisons, corpus, about, notes)


def _tuned(
    plan: TuningPlan, pair: Pair, corpus: Corpus, tell: Show, stop: Callable[[], bool]
) -> tuple[Checkpoint, dict[str, Any], Comparisons]:
    """The drafter with trained weights; how it was trained, for the record; and what that did."""
    from mtp_extract.tuning.train import measured, train
    from mtp_extract.tuning.verdict import Comparisons

    if plan.mode == EAGLE3:
        _take_new_head(plan, pair, corpus)
    latents = _latents(plan, pair)
    pair.say(f"measuring the drafter as it is on {len(corpus.held_out)} held-out texts")
    before = measured(pair, pair.drafter, corpus.held_out)
    pair.say(f"training {latents.numbers} numbers on {len(corpus.trained)} texts")
    trained = train(plan, pair, corpus, latents, tell, stop)
    tuned = latents.tuned(trained.results)
    pair.say("measuring the tuned drafter on the held-out texts")
    after = measured(pair, pair.drafter_of(tuned), corpus.held_out)
    about = {
        "mode": plan.mode,
        "recipe": plan.recipe,
        "numbers": latents.numbers,
        "steps_done": trained.done,
        "best_step": trained.step,
        "interrupted": trained.interrupted,
    }
    return tuned, about, Comparisons.of(corpus, before, after)


def _take_new_head(plan: TuningPlan, pair: Pair, corpus: Corpus) -> None:
    """Put an untrained head, written into the folder of the work, beside the base."""
    from mtp_extract.pipeline.conversion import ReadDirectory
    from mtp_extract.tuning.eagle3 import new_head, write_head

    directory = plan.kept_in / "untrained-eagle3-head"
    if pair.accelerator.is_main_process:
        name = None if Path(plan.base).is_dir() else plan.base
        write_head(new_head(pair.base, corpus.trained, plan.draft_vocab, name, pair.loaded.dtype, plan.seed), directory)
    pair.accelerator.wait_for_everyone()
    pair.take(ReadDirectory.of(directory))


def _latents(plan: TuningPlan, pair: Pair) -> Latents:
    """What is trained.

    Raises:
        MtpExtractError: the mode trains what the drafter's format does not hold.
    """
    from mtp_extract.tuning.latents import MODES, Latents
    from mtp_extract.tuning.writing import check_writable

    # What this norm of an EAGLE-3 head would learn, fc learns, whatever the sizes of states. And a round of one step
    # never reads the state that the step hands on.
    idle = ("input_norm", *(["post_projection"] if plan.draft_steps == 1 else []))
    try:
        latents = Latents(pair.origin.checkpoint, MODES[plan.mode], pair.accelerator.device, idle)
    except MtpExtractError as error:
        raise MtpExtractError(f"{escape(pair.origin.directory)}: {error}", remedies=error.remedies) from error
    advice = "Train norms or codes, or convert it to the transformers format first."
    check_writable(pair.origin, latents.changed(), f"what {plan.mode} makes", advice, ("mode=norms", "mode=qat"))
    return latents
