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
    from mtp_extract.evaluate.measured import Measured
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
    import msgspec

    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.io.address import public_name
    from mtp_extract.tuning.corpus import divided, gather
    from mtp_extract.tuning.ordered import check_dense, make_head, refusals
    from mtp_extract.tuning.pair import Pair
    from mtp_extract.tuning.served import in_words
    from mtp_extract.tuning.verdict import Comparisons
    from mtp_extract.tuning.writing import locked, write_made

    # Too few prompts are no reason to load a base.
    divided(plan)
    pair = Pair(plan, say)
    # What cannot be written is refused before anything is kept.
    if plan.mode == ORDERED:
        check_dense(pair)
    elif plan.mode != EAGLE3:
        _latents(plan, pair)
    first = pair.accelerator.is_main_process
    # The first of several processes locks the folder for all.
    with memory_guard("tuning"), locked(plan.kept_in) if first else nullcontext():
        corpus = gather(pair, tell)
        if plan.mode == ORDERED:
            made, about, both = make_head(pair, corpus, tell)
        else:
            made, about, both = _tuned(plan, pair, corpus, tell, stop)
        comparisons = Comparisons.of(corpus, *both)
        refused = tuple(refusals(about["kinds"], comparisons) if plan.mode == ORDERED else comparisons.refused())
    texts = {side: len(getattr(corpus, side)) for side in ("trained", "watched", "held_out")}
    about |= {"recipe": plan.recipe, "base": public_name(plan.base), "base_xxh3": pair.base_fingerprint}
    about |= {"texts": {**texts, "repeats": corpus.repeats}, "text_from": corpus.text_from}
    about |= {"accepted": not refused, "refused": list(refused), **msgspec.to_builtins(comparisons)}
    keep = plan.force or not refused
    if keep and first:
        key = "ordered_head" if plan.mode == ORDERED else "tuning"
        write_made(pair.origin, made, plan.target, key, about, overwrite=plan.overwrite, inputs=plan.inputs)
    pair.accelerator.wait_for_everyone()
    wrote = in_words(corpus.text_from) if corpus.text_from else None
    notes = (*pair.loaded.notes, wrote, comparisons.undecided())
    return Outcome(plan.target if keep else None, refused, comparisons, corpus, about, tuple(filter(None, notes)))


def _tuned(
    plan: TuningPlan, pair: Pair, corpus: Corpus, tell: Show, stop: Callable[[], bool]
) -> tuple[Checkpoint, dict[str, Any], tuple[Measured, Measured]]:
    """The drafter with trained weights; how it was trained, for the record; and it before and after."""
    from mtp_extract.pipeline.conversion import ReadDirectory
    from mtp_extract.tuning.eagle3 import new_head, write_head
    from mtp_extract.tuning.train import measured, train

    if plan.mode == EAGLE3:
        # An untrained head, in the folder of the work.
        directory = plan.kept_in / "untrained-eagle3-head"
        if pair.accelerator.is_main_process:
            name = None if Path(plan.base).is_dir() else plan.base
            head = new_head(pair.base, corpus.trained, plan.draft_vocab, name, pair.loaded.dtype, plan.seed)
            write_head(head, directory)
        pair.accelerator.wait_for_everyone()
        pair.take(ReadDirectory.of(directory))
    latents = _latents(plan, pair)
    held_out = [text for _, text in corpus.held_out]
    pair.say(f"measuring the drafter as it is on {len(held_out)} held-out texts")
    before = measured(pair, pair.drafter, held_out)
    pair.say(f"training {latents.numbers} numbers on {len(corpus.trained)} texts")
    trained = train(plan, pair, corpus, latents, tell, stop)
    tuned = latents.tuned(trained.results)
    pair.say("measuring the tuned drafter on the held-out texts")
    after = measured(pair, pair.drafter_of(tuned), held_out)
    about: dict[str, Any] = {"mode": plan.mode, "numbers": latents.numbers, "steps_done": trained.done}
    about |= {"best_step": trained.step, "interrupted": trained.interrupted}
    return tuned, about, (before, after)


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
    # Another number for each that is trained: what can hold it can hold what comes out.
    changed = latents.tuned({key: result + 1 for key, result in latents.results().items()})
    check_writable(pair.origin, changed, f"what {plan.mode} makes", advice, ("mode=norms", "mode=qat"))
    return latents
