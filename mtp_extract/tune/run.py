"""A whole tuning, from names to a directory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluate.extras import require
from mtp_extract.report.card import UNSAID, CardWords
from mtp_extract.tune.setting import Setting

if TYPE_CHECKING:
    from mtp_extract.drafter.load import Network
    from mtp_extract.evaluate.measured import Measured
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.loop import Recipe, Trained
    from mtp_extract.tune.modes import Latents
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.progress import Progress, Written
    from mtp_extract.tune.verdict import Comparisons

_STEPS, _STEPS_OF_NEW = 200, 300


@dataclass(frozen=True)
class Plan:
    """What to tune, on what, and how.

    Attributes:
        setting: the drafter, its base, and the text.
        out: where the tuned checkpoint goes.
        mode: a name in :data:`~mtp_extract.tune.modes.MODES`; of a new head every weight is trained.
        objective: a name in :data:`~mtp_extract.tune.loss.OBJECTIVES`; None chooses by the temperature.
        steps: of the optimizer; None for 200, and for a new head 300.
        anchors, learning_rate: as :class:`~mtp_extract.tune.loop.Recipe` has them.
        draft_vocab: most tokens that a new head can propose.
        force: write also what is not better.
        overwrite: replace ``out`` if it is a checkpoint of ours.
        card: what to say on the card.
    """

    setting: Setting
    out: Path
    mode: str = "norms"
    objective: str | None = None
    steps: int | None = None
    anchors: int = 24
    learning_rate: float | None = None
    draft_vocab: int = 32000
    force: bool = False
    overwrite: bool = False
    card: CardWords = UNSAID

    def recipe(self) -> Recipe:
        """How to train."""
        from mtp_extract.tune.loop import Recipe

        return Recipe(
            steps=self.steps or (_STEPS_OF_NEW if self.setting.directory is None else _STEPS),
            draft_steps=self.setting.draft_steps,
            batch=self.setting.batch,
            anchors=self.anchors,
            objective=self.objective or ("tv" if self.setting.temperature else "ce"),
            temperature=self.setting.temperature,
            learning_rate=self.learning_rate,
            seed=self.setting.seed,
        )

    def check(self) -> None:
        """What can be said before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, or ``out`` holds something else.
            ValueError: no such mode or objective.
        """
        from mtp_extract.tune.loss import OBJECTIVES
        from mtp_extract.tune.modes import MODES

        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r}: expected {' or '.join(MODES)}.")
        if self.objective is not None and self.objective not in OBJECTIVES:
            raise ValueError(f"objective {self.objective!r}: expected {' or '.join(OBJECTIVES)}.")
        self.setting.check()
        for name in ("steps", "anchors", "draft_vocab"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise MtpExtractError(
                    f"expected {name} of at least 1, found {getattr(self, name)}; raise it", remedies=(name,)
                )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise MtpExtractError(
                f"expected a learning rate above 0, found {self.learning_rate}; leave it out for the mode's own",
                remedies=("learning_rate",),
            )
        self.setting.check_out(self.out, self.overwrite)


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        directory: what was written; None for nothing.
        refused: why it was not accepted; empty if it was.
        comparisons: before and after.
        trained: the training.
        corpus: the texts.
        numbers: how many were trained.
        record: what ``extraction.json`` says of the tuning.
        notes: things worth knowing that are not errors.
    """

    directory: Path | None
    refused: tuple[str, ...]
    comparisons: Comparisons
    trained: Trained
    corpus: Corpus
    numbers: int
    record: Mapping[str, Any]
    notes: tuple[str, ...]


def default_directory(directory: Path) -> Path:
    """Where a result goes when the user does not say: ``NAME-tuned`` in the current directory."""
    return Path(f"{directory.resolve().name}-tuned")


def run_tuning(
    plan: Plan,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[Progress | Written], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Tune, measure, and write what is better.

    Args:
        plan: what.
        say: told what is being done.
        tell: called after every batch of text and every step.
        stop: asked after every step: what is best so far is then measured, and written if it is better, marked as
            interrupted; a later run with the same plan goes on.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    require("torch", "safetensors", "transformers", "accelerate", "matplotlib")
    plan.check()
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.verdict import Comparisons

    pair = Pair(plan.setting, say)
    new = plan.setting.directory is None
    with memory_guard("tuning"), ExitStack() as stack:
        # What cannot be written is said before anything is kept.
        latents = None if new else _latents(plan, pair)
        stack.enter_context(pair.working_alone())
        corpus = Corpus.of(pair, tell)
        if latents is None:
            pair.take(_made(plan, pair, corpus))
            latents = _latents(plan, pair)
        pair.say(f"measuring the drafter as it is on {len(corpus.held_out)} held-out texts")
        before = _measured(pair, pair.drafter, corpus)
        trained = _train(plan, pair, corpus, latents, tell, stop)
        tuned = latents.tuned(trained.values)
        pair.say("measuring the tuned drafter on the held-out texts")
        after = _measured(pair, pair.drafter_of(tuned), corpus)
    otherwise = (before[1], after[1]) if before[1] and after[1] else None
    comparisons = Comparisons.of(corpus, before[0], after[0], otherwise)
    refused = comparisons.refused()
    record = {
        "mode": "float" if new else plan.mode,
        "base": pair.name,
        "base_xxh3": pair.base_fingerprint,
        "recipe": dataclasses.asdict(plan.recipe()),
        "numbers": latents.numbers,
        "texts": corpus.counts,
        "shared_sequences": round(corpus.shared, 4),
        "steps_done": trained.done,
        "best_step": trained.step,
        "interrupted": trained.interrupted,
        "accepted": not refused,
        "refused": list(refused),
        **comparisons.as_json(),
    }
    written = _write(plan, pair, tuned, trained, record, keep=plan.force or not refused)
    notes = (*pair.loaded.notes, *corpus.notes, *comparisons.notes())
    return Tuned(written, refused, comparisons, trained, corpus, latents.numbers, record, notes)


def _made(plan: Plan, pair: Pair, corpus: Corpus) -> Path:
    """A head that nothing was trained of, in the directory of the work."""
    from mtp_extract.tune.new_head import frequent_tokens, head_for, new_head, state_sizes, write_head

    place, base, setting = plan.setting.work / "untrained-eagle3-head", pair.base, plan.setting
    config = head_for(base, plan.draft_vocab, None if Path(setting.base).is_dir() else setting.base)
    if pair.accelerator.is_main_process:
        tokens = frequent_tokens(corpus.trained, config.draft_vocab_size, config.vocab_size, base.stop_token_ids)
        dtype = "bf16" if pair.loaded.dtype == "bfloat16" else "f32"
        sizes = state_sizes(base, config.base_layers, corpus.trained)
        write_head(new_head(base, config, tokens, sizes, dtype, setting.seed), place)
    pair.accelerator.wait_for_everyone()
    return place


def _latents(plan: Plan, pair: Pair) -> Latents:
    """What is trained; that its like can be written is known before the work begins."""
    from mtp_extract.tune.modes import MODES, NEW_HEAD, Latents
    from mtp_extract.tune.writing import check_writable

    # What this norm of an EAGLE-3 head would learn, fc learns, whatever the sizes of states. And one step alone has
    # no use for the state that it hands on.
    idle = ("input_norm", *(["post_projection"] if plan.setting.draft_steps == 1 else []))
    mode = MODES[plan.mode] if plan.setting.directory is not None else NEW_HEAD
    try:
        latents = Latents(pair.origin.checkpoint, mode, pair.accelerator.device, idle)
    except MtpExtractError as error:
        raise MtpExtractError(f"{escape(pair.origin.directory)}: {error}", remedies=error.remedies) from error
    check_writable(pair.origin, latents.tuned({key: value + 1 for key, value in latents.values.items()}), plan.mode)
    return latents


def _measured(pair: Pair, drafter: Network, corpus: Corpus) -> tuple[Measured, Measured | None]:
    """On the held-out texts, and on those of another serving."""
    other = pair.measured(drafter, corpus.otherwise, corpus.other_temperature) if corpus.otherwise else None
    return pair.measured(drafter, corpus.held_out), other


def _train(
    plan: Plan,
    pair: Pair,
    corpus: Corpus,
    latents: Latents,
    tell: Callable[[Progress], None],
    stop: Callable[[], bool],
) -> Trained:
    from mtp_extract.tune.loop import train

    recipe = plan.recipe()
    pair.say(f"training {latents.numbers} numbers on {len(corpus.trained)} texts")
    everything = [
        pair.origin.sums,
        pair.base_fingerprint,
        plan.mode,
        dataclasses.asdict(recipe),
        [text.tokens for text in (*corpus.trained, *corpus.watched)],
    ]
    return train(
        latents,
        pair.drafter,
        pair.base,
        pair.states(corpus.trained, recipe.logits_at_once),
        corpus.trained,
        recipe,
        pair.accelerator,
        lambda drafter: pair.measured(drafter, corpus.watched),
        plan.setting.work,
        sha256(json.dumps(everything).encode()).hexdigest(),
        tell=tell,
        stop=stop,
    )


def _write(
    plan: Plan, pair: Pair, tuned: Any, trained: Trained, record: Mapping[str, Any], *, keep: bool
) -> Path | None:
    from mtp_extract.report.figures import draw_progress
    from mtp_extract.tune.work import kept
    from mtp_extract.tune.writing import write_tuned

    if pair.accelerator.is_main_process:
        with kept(plan.setting.work):
            draw_progress(trained.history, plan.setting.work / "progress.png")
        if keep:
            write_tuned(
                pair.origin,
                tuned,
                plan.out,
                record,
                overwrite=plan.overwrite,
                inputs=plan.setting.inputs,
                card=plan.card,
            )
    pair.accelerator.wait_for_everyone()
    return plan.out if keep else None
