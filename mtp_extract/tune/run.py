"""A whole tuning, from names to a directory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluate.extras import require
from mtp_extract.options import About, Overwrite, check_values
from mtp_extract.tune.setting import Force, Setting
from mtp_extract.tune.status import Status

if TYPE_CHECKING:
    from mtp_extract.drafter.load import Network
    from mtp_extract.evaluate.measured import Measured
    from mtp_extract.tune.corpus import Corpus
    from mtp_extract.tune.loop import Trained
    from mtp_extract.tune.modes import Latents, Mode
    from mtp_extract.tune.outcome import Outcome
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.recipe import Recipe

_STEPS, _STEPS_OF_NEW = 500, 300


@dataclass(frozen=True)
class TuningPlan:
    setting: Setting
    out: Path
    mode: Annotated[
        str,
        About(
            "norms: norms and layer scalars, every code and scale stays. qat: also the codes, on the stored grid, "
            "every scale stays. float: every weight, as floats.",
            choices=("norms", "qat", "float"),
        ),
    ] = "norms"
    """A name in :data:`~mtp_extract.tune.modes.MODES`; of a new head every weight is trained."""
    objective: Annotated[
        str,
        About(
            "ce for greedy serving alone, tv or kl for sampled alone; mixed (ce and tv) for both.",
            choices=("mixed", "ce", "kl", "tv"),
        ),
    ] = "mixed"
    """A name in :data:`~mtp_extract.tune.loss.OBJECTIVES`."""
    steps: Annotated[
        int | None,
        About("Of the optimizer; by default 500, for a new head 300, for an ordered one 600.", least=1),
    ] = None
    anchors: Annotated[int, About("Places in each text to draft from.", least=1)] = 24
    learning_rate: Annotated[float | None, About("By default the mode's own, by the drafter's width.", least=0)] = None
    draft_vocab: Annotated[
        int,
        About("Of a new head: how many tokens it can propose, the base's most frequent ones.", least=1),
    ] = 32000
    force: Force = False
    overwrite: Overwrite = False

    def recipe(self) -> Recipe:
        from mtp_extract.tune.recipe import Recipe

        return Recipe(
            steps=self.steps or (_STEPS_OF_NEW if self.setting.directory is None else _STEPS),
            draft_steps=self.setting.draft_steps,
            batch=self.setting.batch,
            anchors=self.anchors,
            objective=self.objective,
            temperature=self.setting.temperature,
            learning_rate=self.learning_rate,
            seed=self.setting.seed,
        )

    @property
    def trained_mode(self) -> Mode:
        """What is trained."""
        from mtp_extract.tune.modes import MODES, NEW_HEAD

        return NEW_HEAD if self.setting.directory is None else MODES[self.mode]

    def check(self) -> None:
        """What can be said before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, or ``out`` holds something else.
            ValueError: no such mode or objective.
        """
        self.setting.check()
        check_values(self)
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise MtpExtractError(
                f"expected a learning rate above 0, found {self.learning_rate}; leave it out for the mode's own",
                remedies=("learning_rate",),
            )
        self.setting.check_out(self.out, self.overwrite)


def default_directory(directory: Path) -> Path:
    """Where a result goes when the user does not say: ``NAME-tuned`` in the current directory."""
    return Path(f"{directory.resolve().name}-tuned")


def run_tuning(
    plan: TuningPlan,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[Status], None] = lambda status: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Tune, measure, and write what is better.

    Args:
        tell: called after every batch of text and every step.
        stop: asked after every step: what is best so far is then measured, and written if it is better, marked as
            interrupted; a later run with the same plan resumes there.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    require("torch", "transformers", "accelerate")
    plan.check()
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.tune.corpus import Corpus, divided
    from mtp_extract.tune.outcome import conclude
    from mtp_extract.tune.pair import Pair
    from mtp_extract.tune.verdict import Comparisons
    from mtp_extract.tune.writing import tuned_record

    new = plan.setting.directory is None
    # Too few prompts are no reason to load a base.
    divided(plan.setting)
    pair = Pair(plan.setting, say)
    with memory_guard("tuning"), ExitStack() as stack:
        # What cannot be written is refused before anything is kept.
        latents = None if new else _latents(plan, pair)
        stack.enter_context(pair.working_alone())
        corpus = Corpus.of(pair, tell)
        if latents is None:
            pair.take(_untrained_head(plan, pair, corpus))
            latents = _latents(plan, pair)
        pair.say(f"measuring the drafter as it is on {len(corpus.held_out)} held-out texts")
        before = corpus.measured(pair, pair.drafter)
        trained = _train(plan, pair, corpus, latents, tell, stop)
        tuned = latents.tuned(trained.results)
        pair.say("measuring the tuned drafter on the held-out texts")
        comparisons = Comparisons.of(corpus, before, corpus.measured(pair, pair.drafter_of(tuned)))
    about = {
        "mode": "float" if new else plan.mode,
        **pair.as_json,
        "recipe": dataclasses.asdict(plan.recipe()),
        "numbers": latents.numbers,
        **corpus.as_json,
        "steps_done": trained.done,
        "best_step": trained.step,
        "interrupted": trained.interrupted,
    }
    describe = partial(tuned_record, pair.origin, tuned)
    return conclude(plan, pair, corpus, comparisons, comparisons.refused(), tuned, about, describe)


def _untrained_head(plan: TuningPlan, pair: Pair, corpus: Corpus) -> Path:
    """An untrained head for the base, written into the folder of the work."""
    from mtp_extract.tune.new_head import frequent_tokens, head_for, new_head, state_sizes, write_head

    directory, base, setting = plan.setting.work / "untrained-eagle3-head", pair.base, plan.setting
    config = head_for(base.config, plan.draft_vocab, None if Path(setting.base).is_dir() else setting.base)
    if pair.accelerator.is_main_process:
        tokens = frequent_tokens(corpus.trained, config.draft_vocab_size, config.vocab_size, base.stop_token_ids)
        dtype = "bf16" if pair.loaded.dtype == "bfloat16" else "f32"
        sizes = state_sizes(base, config.base_layers, corpus.trained)
        write_head(new_head(base, config, tokens, sizes, dtype, setting.seed), directory)
    pair.accelerator.wait_for_everyone()
    return directory


def _latents(plan: TuningPlan, pair: Pair) -> Latents:
    """What is trained; refused here where its like cannot be written."""
    from mtp_extract.tune.modes import Latents
    from mtp_extract.tune.writing import check_writable

    # What this norm of an EAGLE-3 head would learn, fc learns, whatever the sizes of states. And a round of one step
    # never reads the state that the step hands on.
    idle = ("input_norm", *(["post_projection"] if plan.setting.draft_steps == 1 else []))
    try:
        latents = Latents(pair.origin.checkpoint, plan.trained_mode, pair.accelerator.device, idle)
    except MtpExtractError as error:
        raise MtpExtractError(f"{escape(pair.origin.directory)}: {error}", remedies=error.remedies) from error
    changed = latents.results()
    for value in changed.values():
        value.add_(1)
    advice = "Train norms or codes, or convert it to the transformers format first."
    check_writable(pair.origin, latents.tuned(changed), f"what {plan.mode} makes", advice, ("mode=norms", "mode=qat"))
    return latents


def _train(
    plan: TuningPlan,
    pair: Pair,
    corpus: Corpus,
    latents: Latents,
    tell: Callable[[Status], None],
    stop: Callable[[], bool],
) -> Trained:
    from mtp_extract.tune.loop import train

    recipe, work = plan.recipe(), plan.setting.work
    states = pair.states(corpus.trained, recipe.logits_at_once)
    pair.say(f"training {latents.numbers} numbers on {len(corpus.trained)} texts")
    everything = [
        pair.origin.sums,
        pair.base_fingerprint,
        plan.mode,
        dataclasses.asdict(recipe),
        [[text.prompt_length, *text.tokens] for text in (*corpus.trained, *corpus.watched)],
    ]

    def watch(drafter: Network) -> tuple[Measured, float]:
        measured = pair.measured(drafter, corpus.watched)
        return measured, corpus.balanced(measured)

    trained = train(
        latents,
        pair.drafter,
        pair.base,
        states,
        corpus.kinds,
        recipe,
        pair.accelerator,
        watch,
        work,
        sha256(json.dumps(everything).encode()).hexdigest(),
        tell=tell,
        stop=stop,
    )
    # It keeps the optimizer, and with that two numbers for each that was trained.
    pair.accelerator.free_memory()
    if pair.accelerator.is_main_process and not trained.interrupted:
        states.forget()
    return trained
