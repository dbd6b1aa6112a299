"""The training loop: optimizer steps, evaluations that keep the best weights, and a state file to resume from.

An optimizer step draws some texts and some anchors in each, runs K draft steps from every anchor, and compares each
draft with the base's output at its target. All random numbers depend on the seed and the step alone, so a stopped run
resumes exactly where it was.

Where accelerate starts several processes, each takes a share of every step's texts, and of the watched texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.func import functional_call

from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention
from mtp_extract.errors import CheckpointError, MtpExtractError, escape
from mtp_extract.progress import Reporter
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import Corpus
from mtp_extract.tuning.latents import MODES, Latents
from mtp_extract.tuning.loss import LOGITS_AT_ONCE, TrainingRows, choose_objective, compute_gradient
from mtp_extract.tuning.pair import Pair, check_writable, list_idle_roles
from mtp_extract.tuning.rounds import (
    Batch,
    Rounds,
    States,
    draw_anchors,
    find_target_positions,
    mark_counted_drafts,
    measure_acceptance,
)
from mtp_extract.tuning.work import replace_file

EVALUATIONS = 10  # during a training
PATIENCE = 5  # evaluations without improvement after which training ends
ANCHORS = 24  # of each text in a step: with more, the rows of one text are nearly the same
_WARM_UP = 0.1  # share of the steps
_LEAST_RATE = 0.02  # share of the learning rate at the end


def compute_cosine_decay(share: float) -> float:
    """Return the factor on a learning rate after ``share`` of the steps: half a cosine from 1 to 0.02."""
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


def compute_learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor on the learning rate at ``step`` (from 0) of ``steps``: a linear ramp, then a cosine."""
    ramp = max(1, round(_WARM_UP * steps))
    return (step + 1) / ramp if step < ramp else compute_cosine_decay((step - ramp) / max(1, steps - ramp))


@dataclass
class TrainingProgress:
    """The progress of a training and its best weights, as the state file stores them."""

    done: int = 0  # steps
    step: int = 0  # that gave the best weights
    score: float = -math.inf  # of the best weights
    stale: int = 0  # evaluations since the best
    results: Mapping[str, Tensor] = field(default_factory=dict)  # the best weights, of :meth:`Latents.copy_results`
    history: list[Mapping[str, Any]] = field(default_factory=list)  # an entry for each step and each evaluation
    interrupted: bool = False


def build_latents(pair: Pair) -> Latents:
    """Return the latents of the pair's plan; raise MtpExtractError if the drafter's format cannot store the result."""
    plan = pair.plan
    latents = Latents(pair.origin.checkpoint, MODES[plan.mode], pair.accelerator.device, list_idle_roles(plan))
    # A probe: every trained weight gets another value, and the format must be able to store that.
    changed = latents.build_checkpoint({key: result + 1 for key, result in latents.copy_results().items()})
    check_writable(pair.origin, changed, plan.mode)
    return latents


def train(pair: Pair, corpus: Corpus, latents: Latents, reporter: Reporter) -> TrainingProgress:
    """Train ``latents`` as the pair's plan says; after every step, ``reporter`` may stop it.

    The progress that is returned has the weights that are best on the watched texts. A run with the same plan, drafter,
    base and texts resumes where an earlier one stopped.

    Raises:
        CheckpointError: the stored state cannot be read.
        OutputError: the state cannot be written.
        MtpExtractError: the loss is not finite.
    """
    plan = pair.plan
    accelerator = pair.accelerator
    steps = plan.optimizer_steps
    steps_between = max(1, steps // EVALUATIONS)
    pair.say(f"training {latents.parameter_count} numbers on {len(corpus.trained)} texts")
    run = _Training(pair, corpus, latents)
    progress = run.progress
    if not progress.history:
        run.evaluate()

    while progress.done < steps and progress.stale < PATIENCE:
        loss = run.step()
        if progress.done % steps_between == 0 or progress.done == steps:
            run.evaluate()
            run.save()
        reporter.report_progress(f"step {progress.done} of {steps}, loss {loss:.3f}", progress.done, steps)
        # If any process is to stop, all must leave the loop together.
        if progress.done < steps and any(gather_object([reporter.is_stopped()])):
            run.save()
            progress.interrupted = True
            break

    # Free the optimizer, which has two numbers for each trained one.
    accelerator.free_memory()
    return progress


class _Training:
    """A running training: latents, optimizer and progress, which are saved to resume from."""

    def __init__(self, pair: Pair, corpus: Corpus, latents: Latents) -> None:
        plan = pair.plan
        self.pair = pair
        self.corpus = corpus
        self.latents = latents
        self.states = States(pair.base, pair.drafter.needs, corpus.trained, plan.batch)
        optimizer = torch.optim.AdamW(
            latents.list_param_groups(plan.learning_rate), betas=(0.9, 0.95), weight_decay=0.0
        )
        self.learning_rates = [group["lr"] for group in optimizer.param_groups]
        # In several processes the module averages gradients.
        self.module, self.optimizer = pair.accelerator.prepare(latents, optimizer)

        depends_on: list[Any] = [pair.origin.sums, pair.base_fingerprint, plan.mode, plan.recipe]
        depends_on += [[text.prompt_length, *text.tokens] for text in (*corpus.trained, *corpus.watched)]
        self.fingerprint = sha256(json.dumps(depends_on).encode()).hexdigest()
        self.progress = _resume_progress(plan.kept_in / "state.pt", self.fingerprint, latents, self.optimizer)

    def step(self) -> float:
        """Make an optimizer step and return its loss; raise MtpExtractError if that is not finite."""
        pair = self.pair
        progress = self.progress
        factor = compute_learning_rate_factor(progress.done, pair.plan.optimizer_steps)
        for group, highest in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = highest * factor
        batch, convention, weight = _draw_step_batch(pair, self.states, self.corpus.kinds, progress.done)
        loss, agreement = _backpropagate(pair, self.module, batch, convention, weight)
        pair.accelerator.clip_grad_norm_(self.latents.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.done += 1
        if not math.isfinite(loss):
            message = f"expected a finite loss, found {loss} at step {progress.done}. Use a lower learning rate."
            raise MtpExtractError(message, remedies=("learning_rate",))
        progress.history.append({"step": progress.done, "loss": loss, "agreement": agreement})
        return loss

    def evaluate(self) -> None:
        """Measure the watched texts, and keep the weights if they are the best so far."""
        progress = self.progress
        drafter = self.pair.drafter
        weights = self.latents(drafter.lm_head.weight.dtype)
        tuned = drafter.with_tensors({path: weight.detach() for path, weight in weights.items()})
        watched = measure_acceptance(self.pair, tuned, self.corpus.watched)
        score = self.corpus.compute_score(watched)
        entry = {"step": progress.done, "teacher_forced": watched.teacher_forced, "balanced": score}
        progress.history.append(entry)
        progress.stale += 1
        if score > progress.score:
            progress.score = score
            progress.step = progress.done
            progress.stale = 0
            progress.results = self.latents.copy_results()

    def save(self) -> None:
        """Write the state file and the log, if this is the first process."""
        folder = self.pair.plan.kept_in
        state = {"fingerprint": self.fingerprint, "run": vars(self.progress), "latents": self.latents.state_dict()}
        if self.pair.accelerator.is_main_process:
            with replace_file(folder / "state.pt") as file:
                torch.save({**state, "optimizer": self.optimizer.state_dict()}, file)
            with replace_file(folder / "log.jsonl") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in self.progress.history).encode())


def _backpropagate(
    pair: Pair, latents: nn.Module, batch: Batch, convention: Convention, weight: float
) -> tuple[float, float]:
    """Compute the gradients of a step; return its mean loss and agreement over all processes.

    ``weight`` is that of each anchor.
    """
    drafter = pair.drafter
    rows, within = _build_training_rows(pair, batch, weight)
    weights = {"lm_head.weight": drafter.lm_head.weight, **latents(drafter.lm_head.weight.dtype)}
    head = weights["lm_head.weight"]

    # Run the rounds with the latents' weights, so that gradients reach the latents.
    rounds = Rounds(drafter, pair.plan.draft_steps)
    replaced = {f"drafter.{path}": tensor for path, tensor in weights.items()}
    states = functional_call(rounds, replaced, (batch, pair.base.embed, convention))[within]
    loss, agreement, gradients = compute_gradient(rows, states, head)
    # The head has no gradient where it is not trained.
    torch.autograd.backward((states, head)[: len(gradients)], gradients)

    of_process = torch.stack((loss, agreement.sum(), loss.new_tensor(len(agreement))))
    losses, agreements, counts = pair.accelerator.gather(of_process[None]).T
    return float(losses.mean()), float(agreements.sum()) / max(1, int(counts.sum()))


def _build_training_rows(pair: Pair, batch: Batch, weight: float) -> tuple[TrainingRows, Tensor]:
    """Return the training rows of a step's drafts, of ``weight`` each, and which drafts have a row, bool [K, B, A]."""
    plan = pair.plan
    drafter = pair.drafter
    positions = find_target_positions(batch, plan.draft_steps)
    ce_counts = mark_counted_drafts(batch, plan.draft_steps, greedy=plan.temperature == 0)
    # A head may have its own smaller vocabulary; a token that it cannot draft ends the round.
    choices = drafter.find_rows(batch.choices.flatten())
    ce_counts = ce_counts & (choices[positions] >= 0).int().cumprod(0).bool()
    cap = getattr(drafter.config, "final_logit_softcap", None)

    objective = choose_objective(plan.objective, plan.temperature)
    # Cross-entropy counts only where the text is the base's choice; the other losses count at every target.
    within = ce_counts if objective.keys() == {"ce"} else mark_counted_drafts(batch, plan.draft_steps, greedy=False)
    rows = TrainingRows(
        positions[within],
        choices,
        _bind_base_logits(pair, batch),
        weight,
        ce_counts[within],
        objective,
        cap,
        plan.temperature or 1.0,
    )
    return rows, within


def _bind_base_logits(pair: Pair, batch: Batch) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the base's logits for the head's tokens at positions in the flattened B · L."""
    base = pair.base
    hidden = batch.base_output.hidden.flatten(0, 1)
    tokens = pair.drafter.targets

    def compute_logits(positions: Tensor) -> Tensor:
        # A chunk sized for a head with few tokens has too many rows for the base's vocabulary.
        pieces = torch.split(positions, max(1, LOGITS_AT_ONCE // base.vocab_size))
        logits = [base.logits(hidden[piece].to(base.device)).to(hidden.device)[:, tokens] for piece in pieces]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    return compute_logits


def _draw_step_batch(
    pair: Pair, states: States, kinds: Sequence[Sequence[Text]], step: int
) -> tuple[Batch, Convention, float]:
    """Return this process's batch of step ``step``, the position convention, and the weight of an anchor.

    Gradients are averaged over processes; the weight makes that the mean over all anchors, however they are divided.
    """
    plan = pair.plan
    accelerator = pair.accelerator
    texts = _choose_step_texts(kinds, step, plan.batch, plan.seed)
    shard = range(accelerator.process_index, len(texts), accelerator.num_processes)
    drawn = [draw_anchors([texts[index]], ANCHORS, _seed_generator(plan.seed, 2, step, index)) for index in shard]
    anchors, real = map(torch.cat, zip(*drawn, strict=True))
    columns = states.look_up([texts[index] for index in shard])
    batch = Batch.of(columns, pair.drafter.needs, anchors, real, accelerator.device)
    is_second = bool(torch.randint(2, (), generator=_seed_generator(plan.seed, 3, step)))
    anchors_of_step = sum(min(ANCHORS, len(text.anchors)) for text in texts)
    return batch, TRANSFORMERS if is_second else LITERT, accelerator.num_processes / anchors_of_step


def _choose_step_texts(kinds: Sequence[Sequence[Text]], step: int, count: int, seed: int) -> list[Text]:
    """Return the ``count`` texts of step ``step``, from each kind in turn; every epoch shuffles a kind anew."""
    texts = []
    for number in range(step * count, (step + 1) * count):
        turn, kind = divmod(number, len(kinds))
        epoch, place = divmod(turn, len(kinds[kind]))
        order = torch.randperm(len(kinds[kind]), generator=_seed_generator(seed, 1, kind, epoch))
        texts.append(kinds[kind][int(order[place])])
    return texts


def _seed_generator(*parts: int) -> torch.Generator:
    seed = 0
    for part in parts:
        seed = (seed * 0x9E3779B97F4A7C15 + part + 1) % (1 << 63)
    return torch.Generator().manual_seed(seed)


def _resume_progress(path: Path, fingerprint: str, latents: Latents, optimizer: Any) -> TrainingProgress:
    """Load the state of an earlier run with this fingerprint; return a new progress if there is none."""
    if not path.exists():
        return TrainingProgress()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["fingerprint"] != fingerprint:
            return TrainingProgress()
        latents.load_state_dict(state["latents"])
        optimizer.load_state_dict(state["optimizer"])
        return TrainingProgress(**state["run"])
    # torch.load raises many classes of errors on a damaged file.
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{escape(path)}: expected a training's state, found damage. Remove the file.") from error
