"""A whole tuning, from a plan to a directory: text, training, before and after, and what is better is saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluate.extras import require
from mtp_extract.evaluate.progress import Show, silent
from mtp_extract.tune.plan import EAGLE3, ORDERED, TuningPlan

if TYPE_CHECKING:
    from mtp_extract.drafter.load import Network
    from mtp_extract.evaluate.measured import Measured
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.latents import Latents
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.train import Trained
    from mtp_extract.tune.verdict import Comparisons, Made


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
    from mtp_extract.tune.corpus import Corpus, divided
    from mtp_extract.tune.ordered import check_dense, make_head
    from mtp_extract.tune.pair import Pair

    # Too few prompts are no reason to load a base.
    divided(plan)
    pair = Pair(plan, say)
    # What cannot be written is refused before anything is kept.
    if plan.mode == ORDERED:
        check_dense(plan, pair)
    elif plan.mode != EAGLE3:
        _latents(plan, pair)
    with memory_guard("tuning"), pair.working_alone():
        corpus = Corpus.of(pair, tell)
        made = make_head(plan, pair, corpus, tell) if plan.mode == ORDERED else _tuned(plan, pair, corpus, tell, stop)
    return _conclude(plan, pair, corpus, made)


def _conclude(plan: TuningPlan, pair: Pair, corpus: Corpus, made: Made) -> Outcome:
    """Write what was made if it is not refused, or forced; by the first process, and all wait for it."""
    from mtp_extract.tune.writing import write_made

    accepted = {"accepted": not made.refused, "refused": list(made.refused)}
    record = {**made.about, **pair.as_json, **corpus.as_json, **accepted, **made.comparisons.as_json()}
    keep = plan.force or not made.refused
    if keep and pair.accelerator.is_main_process:
        write_made(
            pair.origin, made.checkpoint, plan.out, made.key, record, overwrite=plan.overwrite, inputs=plan.inputs
        )
    pair.accelerator.wait_for_everyone()
    notes = (*pair.loaded.notes, *corpus.notes, *made.comparisons.notes(), *made.notes)
    return Outcome(plan.out if keep else None, made.refused, made.comparisons, corpus, record, notes)


def _tuned(plan: TuningPlan, pair: Pair, corpus: Corpus, tell: Show, stop: Callable[[], bool]) -> Made:
    """The drafter with trained weights."""
    from mtp_extract.tune.verdict import Comparisons, Made

    if plan.mode == EAGLE3:
        pair.take(_untrained_head(plan, pair, corpus))
    latents = _latents(plan, pair)
    pair.say(f"measuring the drafter as it is on {len(corpus.held_out)} held-out texts")
    before = pair.measured(pair.drafter, corpus.held_out)
    trained = _train(plan, pair, corpus, latents, tell, stop)
    tuned = latents.tuned(trained.results)
    pair.say("measuring the tuned drafter on the held-out texts")
    after = pair.measured(pair.drafter_of(tuned), corpus.held_out)
    comparisons = Comparisons.of(corpus, before, after)
    about = {
        "mode": plan.mode,
        "recipe": plan.recipe,
        "numbers": latents.numbers,
        "steps_done": trained.done,
        "best_step": trained.step,
        "interrupted": trained.interrupted,
    }
    return Made(tuned, "tuning", about, comparisons, comparisons.refused())


def _untrained_head(plan: TuningPlan, pair: Pair, corpus: Corpus) -> Path:
    """An untrained head for the base, written into the folder of the work."""
    from mtp_extract.tune.eagle3 import frequent_tokens, head_for, new_head, state_sizes, write_head

    directory, base = plan.work / "untrained-eagle3-head", pair.base
    config = head_for(base.config, plan.draft_vocab, None if Path(plan.base).is_dir() else plan.base)
    if pair.accelerator.is_main_process:
        tokens = frequent_tokens(corpus.trained, config.draft_vocab_size, config.vocab_size, base.stop_token_ids)
        dtype = "bf16" if pair.loaded.dtype == "bfloat16" else "f32"
        sizes = state_sizes(base, config.base_layers, corpus.trained)
        write_head(new_head(base, config, tokens, sizes, dtype, plan.seed), directory)
    pair.accelerator.wait_for_everyone()
    return directory


def _latents(plan: TuningPlan, pair: Pair) -> Latents:
    """What is trained.

    Raises:
        MtpExtractError: the mode trains what the drafter's format does not hold.
    """
    from mtp_extract.tune.latents import MODES, Latents
    from mtp_extract.tune.writing import check_writable

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


def _train(
    plan: TuningPlan, pair: Pair, corpus: Corpus, latents: Latents, tell: Show, stop: Callable[[], bool]
) -> Trained:
    from mtp_extract.tune.train import States, train

    pair.say(f"training {latents.numbers} numbers on {len(corpus.trained)} texts")
    everything = [
        pair.origin.sums,
        pair.base_fingerprint,
        plan.mode,
        plan.recipe,
        [[text.prompt_length, *text.tokens] for text in (*corpus.trained, *corpus.watched)],
    ]

    def watch(drafter: Network) -> tuple[Measured, float]:
        measured = pair.measured(drafter, corpus.watched)
        return measured, corpus.balanced(measured)

    trained = train(
        plan,
        latents,
        pair.drafter,
        pair.base,
        States(pair.base, pair.drafter.needs, corpus.trained, plan.batch),
        corpus.kinds,
        pair.accelerator,
        watch,
        sha256(json.dumps(everything).encode()).hexdigest(),
        tell,
        stop,
    )
    # It keeps the optimizer, and with that two numbers for each that was trained.
    pair.accelerator.free_memory()
    return trained
