"""The training loop: a step depends on the seed and its number alone, so a run that was stopped resumes exactly.

``accelerate`` places it: one CPU, one GPU, or several with the texts of a batch divided among them. The weights that
are trained are few (78 M in a drafter of Gemma 4 E4B), so every process holds them all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS, Convention
from mtp_extract.errors import CheckpointError, MtpExtractError, escape
from mtp_extract.evaluate.measured import Measured
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.loss import Teacher, chunked_loss, objective_for
from mtp_extract.tune.modes import Latents
from mtp_extract.tune.recipe import Recipe
from mtp_extract.tune.rounds import Batch, Rounds, aims, collate, counting, random_anchors
from mtp_extract.tune.states import States
from mtp_extract.tune.status import Status
from mtp_extract.tune.work import save_whole, writing_to

_CONVENTIONS = (LITERT, TRANSFORMERS)
_BETAS = (0.9, 0.95)
_CLIP = 1.0
_BEST = re.compile(r"best-[0-9a-f]{16}-\d+\.pt")
_STATE = ("done", "best_step", "best_watched", "watched", "stale", "history")
"""Attributes of a run that are kept on disk; besides, until it is finished, latents and optimizer."""


@dataclass(frozen=True)
class Trained:
    """A training that ended, or was asked to stop (``interrupted``) after ``done`` steps."""

    results: Mapping[str, Tensor]  # the best by the watched texts, as :meth:`Latents.results` has them
    step: int  # after which they were the best
    done: int
    interrupted: bool
    history: tuple[Mapping[str, Any], ...]  # one entry a step, and one a measurement


class _Training(nn.Module):
    """One step's loss, as the module that accelerate divides among processes."""

    def __init__(self, latents: Latents, drafter: Network, base: Base, recipe: Recipe) -> None:
        super().__init__()
        self.latents, self.rounds = latents, Rounds(drafter, recipe.draft_steps)
        self._base, self._recipe = (base,), recipe

    def forward(self, batch: Batch, convention: Convention, weight: float) -> tuple[Tensor, Tensor]:
        """``weight`` times the sum over anchors and steps; and [2], the sum of the rows' agreement, and the rows."""
        recipe, drafter, base = self._recipe, self.rounds.drafter, self._base[0]
        steps, greedy = recipe.draft_steps, recipe.temperature == 0
        weights = self.latents.weights(drafter.lm_head.weight.dtype)
        replaced = {f"drafter.{path}": weight for path, weight in weights.items()}
        states = functional_call(self.rounds, replaced, (batch, base.embed, convention))
        where, choices, objective = (
            aims(batch, steps),
            batch.choices.flatten(),
            objective_for(recipe.objective, recipe.temperature),
        )
        choosing = counting(batch, steps, greedy=greedy)
        cap, tokens = None, None
        if isinstance(drafter, Eagle3Drafter):
            # Rows of its head are tokens of its own vocabulary, and a token that it cannot draft ends the round.
            choices, tokens = drafter.rows(choices), drafter.targets
            choosing = choosing & (choices[where] >= 0).int().cumprod(0).bool()
        else:
            cap = drafter.config.final_logit_softcap
        counts = counting(batch, steps, greedy=False) if objective.over_distributions else choosing
        device = states.device
        hidden = batch.hidden.flatten(0, 1)

        @torch.no_grad()
        def logits(positions: Tensor) -> Tensor:
            # A head may have far fewer tokens than the base, and a piece of its logits more rows.
            parts = torch.split(positions, max(1, recipe.logits_at_once // base.vocab_size))
            made = (base.logits(hidden[part].to(base.device)).to(device) for part in parts)
            found = [each if tokens is None else each[:, tokens] for each in made]
            return found[0] if len(found) == 1 else torch.cat(found)

        losses = chunked_loss(
            states[counts],
            weights.get("lm_head.weight", drafter.lm_head.weight),
            Teacher(choices, logits),
            where[counts],
            torch.full((int(counts.sum()),), weight, device=device),
            objective,
            choosing=choosing[counts],
            cap=cap,
            temperature=recipe.temperature or 1.0,
            logits_at_once=recipe.logits_at_once,
        )
        return losses.total, torch.stack((losses.agreement.sum(), counts.sum()))


def train(
    latents: Latents,
    drafter: Network,
    base: Base,
    states: States,
    kinds: Sequence[Sequence[Text]],
    recipe: Recipe,
    accelerator: Any,
    watch: Callable[[Network], tuple[Measured, float]],
    folder: Path,
    fingerprint: str,
    *,
    tell: Callable[[Status], None] = lambda status: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train ``latents``; where that was finished before, they stay as they are.

    Args:
        drafter: in the type it computes in; what is not trained is taken from it.
        states: of the base over all texts of ``kinds``.
        kinds: of text, of which a batch has equal shares.
        watch: measures a drafter on the watched texts; and the number by which the best is chosen.
        folder: where the state is kept, and the log.
        fingerprint: of everything the result depends on; a kept state with another is ignored.
        tell, stop: called, and asked, after every step.

    Raises:
        CheckpointError: the state that is there cannot be read.
    """
    module = _Training(latents, drafter, base, recipe)
    optimizer = torch.optim.AdamW(latents.groups(recipe.learning_rate), betas=_BETAS, weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    prepared, optimizer = accelerator.prepare(module, optimizer)
    run = _Run(latents, drafter, recipe, watch, folder, fingerprint, accelerator, optimizer)
    run.begin()
    interrupted = False
    while not run.finished:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.rate(run.done)
        loss, agreement = prepared(*_batch(states, kinds, recipe, run.done, accelerator))
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(latents.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        parts = accelerator.gather(torch.cat((loss.detach()[None], agreement))[None])
        mean, (right, rows) = float(parts[:, 0].mean()), parts[:, 1:].sum(dim=0).tolist()
        if not math.isfinite(mean):
            raise MtpExtractError(
                f"expected a finite loss, found {mean} at step {run.done + 1}; use a lower learning rate",
                remedies=("learning_rate",),
            )
        run.note(
            {
                "step": run.done + 1,
                "loss": mean,
                "agreement": right / max(1, rows),
                "gradient": float(norm),
                "rate": recipe.rate(run.done),
            }
        )
        run.done += 1
        if recipe.evaluates(run.done):
            run.evaluate()
            run.save()
        tell(Status("step", run.done, recipe.steps, mean, run.watched))
        if run.done < recipe.steps and _any(accelerator, stop()):
            run.save()
            interrupted = True
            break
    return Trained(run.best(), run.best_step, run.done, interrupted, tuple(run.history))


def _any(accelerator: Any, flag: bool) -> bool:
    """Whether any process says so: all must leave the loop together."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.gather(torch.tensor([flag], device=accelerator.device)).any())


def _batch(
    states: States, kinds: Sequence[Sequence[Text]], recipe: Recipe, step: int, accelerator: Any
) -> tuple[Batch, Convention, float]:
    """This process's part of step ``step``: texts; a convention; an anchor's weight.

    Gradients are averaged over processes: the weight makes of that the mean over all anchors, however they are divided.
    """
    chosen = [_drawn(kinds, recipe.seed, step * recipe.batch + place) for place in range(recipe.batch)]
    here = range(accelerator.process_index, len(chosen), accelerator.num_processes)
    drawn = [random_anchors([chosen[place]], recipe.anchors, _random(recipe.seed, 2, step, place)) for place in here]
    anchors, real = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    convention = int(torch.randint(len(_CONVENTIONS), (), generator=_random(recipe.seed, 3, step)))
    batch = collate(states.of([chosen[place] for place in here]), anchors, real, accelerator.device)
    total = sum(min(recipe.anchors, len(text.anchors)) for text in chosen)
    return batch, _CONVENTIONS[convention], accelerator.num_processes / total


def _drawn(kinds: Sequence[Sequence[Text]], seed: int, number: int) -> Text:
    """The text that is drawn as ``number``: of each kind in turn; those of a kind are shuffled anew in every epoch."""
    number, kind = divmod(number, len(kinds))
    epoch, place = divmod(number, len(kinds[kind]))
    order = torch.randperm(len(kinds[kind]), generator=_random(seed, 1, kind, epoch))
    return kinds[kind][int(order[place])]


def _random(*parts: int) -> torch.Generator:
    """Random numbers that depend on ``parts`` alone."""
    seed = 0
    for part in parts:
        seed = (seed * 0x9E3779B97F4A7C15 + part + 1) % (1 << 63)
    return torch.Generator().manual_seed(seed)


class _Run:
    """What changes while it runs, in memory and on disk."""

    def __init__(
        self,
        latents: Latents,
        drafter: Network,
        recipe: Recipe,
        watch: Callable[[Network], tuple[Measured, float]],
        folder: Path,
        fingerprint: str,
        accelerator: Any,
        optimizer: Any,
    ) -> None:
        self.latents, self.drafter, self.recipe, self.watch = latents, drafter, recipe, watch
        self.fingerprint, self.accelerator, self.optimizer = fingerprint, accelerator, optimizer
        self._folder, self._state, self._log = folder, folder / "state.pt", folder / "log.jsonl"
        self.done = self.best_step = self.stale = 0
        self.best_watched = self.watched = -math.inf
        self.history: list[Mapping[str, Any]] = []

    @property
    def finished(self) -> bool:
        return self.done >= self.recipe.steps or self.stale >= self.recipe.patience

    def begin(self) -> None:
        if self._state.is_file():
            self._load()
        if self.accelerator.is_main_process:
            with writing_to(self._folder):
                self._log.write_text("".join(map(_line, self.history)), encoding="utf-8")
        if not self.history:
            self.evaluate()

    def evaluate(self) -> None:
        weights = self.latents.weights(self.drafter.lm_head.weight.dtype)
        drafter = self.drafter.with_tensors({path: weight.detach() for path, weight in weights.items()})
        measured, balanced = self.watch(drafter)
        figures = {"conditional": measured.conditional, "tokens_a_round": measured.tokens_a_round}
        self.watched = measured.mean_accepted_length
        self.note({"step": self.done, "mean_accepted_length": self.watched, "balanced": balanced, **figures})
        self.stale += 1
        if balanced > self.best_watched:
            self.best_watched, self.best_step, self.stale = balanced, self.done, 0
            # On disk: in memory it would be as much again as what is trained.
            if self.accelerator.is_main_process:
                save_whole(self.latents.results(), self._best(self.done))

    def note(self, entry: Mapping[str, Any]) -> None:
        self.history.append(entry)
        if self.accelerator.is_main_process:
            with writing_to(self._folder), open(self._log, "a", encoding="utf-8") as file:
                file.write(_line(entry))

    def save(self) -> None:
        """Keep the state, which is there whole or not at all; of what is finished, what came out."""
        if not self.accelerator.is_main_process:
            return
        latents = {key: value.detach().cpu() for key, value in self.latents.values.items()}
        going_on = {} if self.finished else {"latents": latents, "optimizer": self.optimizer.state_dict()}
        kept = {name: getattr(self, name) for name in _STATE}
        save_whole({"fingerprint": self.fingerprint, **going_on, **kept}, self._state)
        # Not before: the state that was there needs the one that was the best then.
        with writing_to(self._folder):
            for path in self._folder.glob("best-*.pt"):
                # A folder that a user named may hold others of such a name.
                if _BEST.fullmatch(path.name) and path != self._best(self.best_step):
                    path.unlink()

    def best(self) -> Mapping[str, Tensor]:
        """The best results by the watched texts.

        Raises:
            CheckpointError: the file that holds them cannot be read.
        """
        self.accelerator.wait_for_everyone()
        with _reading(self._best(self.best_step)) as path:
            found: Mapping[str, Tensor] = torch.load(path, weights_only=True)
        return found

    def _best(self, step: int) -> Path:
        plan = sha256(self.fingerprint.encode()).hexdigest()[:16]
        return self._folder / f"best-{plan}-{step}.pt"

    def _load(self) -> None:
        with _reading(self._state) as path:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["fingerprint"] != self.fingerprint or not self._best(state["best_step"]).is_file():
                return
            for name in _STATE:
                setattr(self, name, state[name])
            if not self.finished:
                with torch.no_grad():
                    for key, value in self.latents.values.items():
                        value.copy_(state["latents"][key])
                self.optimizer.load_state_dict(state["optimizer"])


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    # What a damaged file raises in there is of many classes.
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(
            f"{escape(path)}: expected the state of a training, found a file that cannot be read. Remove it to begin "
            "anew."
        ) from error


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry) + "\n"
