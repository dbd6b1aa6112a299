"""A whole tuning, from a plan to a directory: text, training, before and after, and what is better is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import escape
from mtp_extract.evaluation.extras import require
from mtp_extract.evaluation.progress import Show, silent
from mtp_extract.tuning.plan import EAGLE3, ORDERED, TuningPlan

if TYPE_CHECKING:
    from mtp_extract.tuning.corpus import Corpus
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

    from mtp_extract.evaluation.base_model import memory_guard
    from mtp_extract.io.address import public_name
    from mtp_extract.tuning.corpus import divided, gather
    from mtp_extract.tuning.eagle3 import new_head
    from mtp_extract.tuning.ordered import dense, make_head, refusals, untrained
    from mtp_extract.tuning.pair import Pair, check_writable, write_made
    from mtp_extract.tuning.train import latents_of, measured, train
    from mtp_extract.tuning.verdict import Comparisons
    from mtp_extract.tuning.work import locked

    # Too few prompts are no reason to load a base.
    divided(plan)
    pair = Pair(plan, say)
    first, ordered = pair.accelerator.is_main_process, plan.mode == ORDERED
    # What cannot be written is refused before anything is kept.
    if ordered:
        check_writable(pair.origin, untrained(pair.origin.checkpoint), plan.mode)
    elif plan.mode != EAGLE3:
        latents_of(pair)
    # The first of several processes locks the folder for all.
    with memory_guard("tuning"), locked(plan.kept_in) if first else nullcontext():
        corpus = gather(pair, tell)
        if plan.mode == EAGLE3:
            new_head(pair, corpus.trained)
        held_out = [text for _, text in corpus.held_out]
        pair.say(f"measuring the drafter as it is on {len(held_out)} held-out texts")
        drafter = pair.drafter_of(dense(pair.origin.checkpoint)) if ordered else pair.drafter
        before = measured(pair, drafter, held_out)
        if ordered:
            made, about = make_head(pair, drafter, corpus, tell)
        else:
            latents = latents_of(pair)
            trained = train(pair, corpus, latents, tell, stop)
            made, about = latents.tuned(trained.results), {"mode": plan.mode, "numbers": latents.numbers}
            about |= {"steps_done": trained.done, "best_step": trained.step, "interrupted": trained.interrupted}
        pair.say("measuring what was made on the held-out texts")
        comparisons = Comparisons.of(corpus, before, measured(pair, pair.drafter_of(made), held_out))
    refused = tuple(refusals(about["kinds"], comparisons) if ordered else comparisons.refused())
    texts = {side: len(getattr(corpus, side)) for side in ("trained", "watched", "held_out")}
    about |= {"recipe": plan.recipe, "base": public_name(plan.base), "base_xxh3": pair.base_fingerprint}
    about |= {"texts": texts, "text_from": corpus.text_from, "accepted": not refused, "refused": list(refused)}
    about |= msgspec.to_builtins(comparisons)
    keep = plan.force or not refused
    if keep and first:
        write_made(pair.origin, made, plan, "ordered_head" if ordered else "tuning", about)
    pair.accelerator.wait_for_everyone()
    notes = [*pair.origin.checkpoint.notes, *pair.loaded.notes, *comparisons.undecided()]
    if wrote := corpus.text_from:
        of = f"{wrote['positions']} tokens of {wrote['texts']} texts that {escape(wrote['kind'])} wrote"
        notes.append(f"The base at hand would have written {wrote['agreement']:.1%} of {of}.")
    return Outcome(plan.target if keep else None, refused, comparisons, corpus, about, tuple(notes))
