"""Training on the base's text: what the base computes there, rounds of drafts, and the loop.

A step is: some texts, some anchors in each (positions to draft from), K of the drafter's own steps from every anchor,
and a loss against what the base says at the position that each step aims at. All that is random depends on the seed and
the number of the step alone, so a run that was stopped resumes exactly where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS, Convention
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.protocol import KV, BaseState, Fed, Needs
from mtp_extract.errors import CheckpointError, MtpExtractError, escape
from mtp_extract.evaluate.base_model import free_memory
from mtp_extract.evaluate.measured import Measured
from mtp_extract.evaluate.progress import Show, silent
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.latents import Latents
from mtp_extract.tune.loss import LOGITS_AT_ONCE, Rows, chunked_loss, objective_for
from mtp_extract.tune.plan import TuningPlan
from mtp_extract.tune.work import save_whole, writing_to

EVALUATIONS = 10
"""How often the watched texts are measured on the way."""
PATIENCE = 5
"""Evaluations without a better one after which training ends."""

_WARM_UP = 0.1  # of the steps
_LEAST_RATE = 0.02  # of the learning rate, at the end
_BETAS = (0.9, 0.95)
_CLIP = 1.0
_CONVENTIONS = (LITERT, TRANSFORMERS)
_TOKENS_AT_ONCE = 256  # of short texts in one forward of the base: of fewer it takes hardly less time
_OF_FREE_MEMORY = 0.5  # for what the base computes over the texts

# What the base computes over texts


@dataclass(frozen=True)
class TextStates:
    """What the base computes over one text of L tokens, in main memory."""

    text: Text
    hidden: Tensor  # [L, width], after the final norm
    shared_kv: Mapping[str, KV]  # layer type → K and V, each [KV heads, L, head_dim]
    layers: Mapping[int, Tensor]  # layer → [L, width], the state that enters it
    choices: Tensor  # int64 [L], the base's argmax after each token

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        kv = [part for pair in self.shared_kv.values() for part in pair]
        return sum(part.nbytes for part in (self.hidden, self.choices, *self.layers.values(), *kv))


@torch.no_grad()
def states_of(base: Base, needs: Needs, texts: Sequence[Text]) -> list[TextStates]:
    """What ``base`` computes over ``texts`` in one forward, as far as ``needs`` asks for it."""
    tokens = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
    full = base.full_pass(tokens.to(base.device), needs.layers)
    rows = torch.split(full.hidden.flatten(0, 1), max(1, LOGITS_AT_ONCE // base.vocab_size))
    choices = torch.cat([base.logits(part).argmax(-1) for part in rows]).view(tokens.shape)
    found = []
    for row, text in enumerate(texts):
        length = len(text.tokens)

        def own(part: Tensor) -> Tensor:
            # A copy: what is kept of one text does not hold the whole pass.
            return part.to("cpu", copy=True)

        kv = {
            kind: (own(full.shared_kv[kind][0][row, :, :length]), own(full.shared_kv[kind][1][row, :, :length]))
            for kind in needs.shared_kv
        }
        layers = {layer: own(states[row, :length]) for layer, states in full.layers.items()}
        found.append(TextStates(text, own(full.hidden[row, :length]), kv, layers, own(choices[row, :length])))
    return found


class States:
    """The base's states over texts, kept as long as half of the free memory lasts, else computed when asked for.

    Which texts share a forward depends on the texts alone, so the numbers are the same, to the bit, in every run.

    Args:
        batch: most texts in one forward.
        memory: bytes; by default half of what is free.
    """

    def __init__(self, base: Base, needs: Needs, texts: Sequence[Text], batch: int, memory: int | None = None) -> None:
        self._base, self._needs = base, needs
        self._left = int(_OF_FREE_MEMORY * free_memory(torch.device("cpu"))) if memory is None else memory
        self._kept: dict[int, list[TextStates]] = {}
        self._groups = list(_together(list(dict.fromkeys(texts)), batch))
        self._group_of = {text: number for number, group in enumerate(self._groups) for text in group}

    def of(self, texts: Sequence[Text]) -> list[TextStates]:
        """Of each of ``texts``, all of which were given before."""
        numbers = dict.fromkeys(self._group_of[text] for text in texts)
        found = {item.text: item for number in numbers for item in self._group(number)}
        return [found[text] for text in texts]

    def _group(self, number: int) -> list[TextStates]:
        if number in self._kept:
            return self._kept[number]
        items = states_of(self._base, self._needs, self._groups[number])
        if (size := sum(item.bytes for item in items)) <= self._left:
            self._kept[number], self._left = items, self._left - size
        return items


def _together(texts: Sequence[Text], batch: int) -> Iterator[list[Text]]:
    """Texts of similar length, as many as one forward takes; a long one alone."""
    group: list[Text] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if group and (len(group) == batch or (len(group) + 1) * len(text.tokens) > _TOKENS_AT_ONCE):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


# Rounds


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at their ends. B texts, L tokens, A anchors each."""

    tokens: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]
    # the next four as in TextStates, over [B, L]
    hidden: Tensor
    shared_kv: Mapping[str, KV]
    layers: Mapping[int, Tensor]
    choices: Tensor
    anchors: Tensor  # int64 [B, A]
    real: Tensor  # bool [B, A]; False where a text has fewer anchors, and the anchor is a placeholder

    def within(self, positions: Tensor) -> Tensor:
        """``positions``, the last one for those behind the longest text."""
        return positions.clamp(max=self.tokens.shape[1] - 1)


def collate(items: Sequence[TextStates], anchors: Tensor, real: Tensor, device: torch.device) -> Batch:
    """``items`` side by side, on ``device``, with ``anchors`` and ``real`` [B, A]."""

    def padded(parts: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(parts), batch_first=True).to(device)

    def heads(kind: str, which: int) -> Tensor:  # [B, KV heads, L, head_dim]
        rows = padded([item.shared_kv[kind][which].transpose(0, 1) for item in items])
        return rows.transpose(1, 2).contiguous()

    return Batch(
        tokens=padded([torch.tensor(item.text.tokens) for item in items]),
        lengths=torch.tensor([len(item.text.tokens) for item in items], device=device),
        hidden=padded([item.hidden for item in items]),
        shared_kv={kind: (heads(kind, 0), heads(kind, 1)) for kind in items[0].shared_kv},
        layers={layer: padded([item.layers[layer] for item in items]) for layer in items[0].layers},
        choices=padded([item.choices for item in items]),
        anchors=anchors.to(device),
        real=real.to(device),
    )


def random_anchors(texts: Sequence[Text], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` anchors of each text, none twice, in order, and which of them are real; int64 and bool [B, count].

    A text with fewer has all of them, and placeholders after them.
    """
    anchors, real = torch.ones(len(texts), count, dtype=torch.long), torch.zeros(len(texts), count, dtype=torch.bool)
    for row, text in enumerate(texts):
        chosen = torch.randperm(len(text.anchors), generator=generator)[:count].sort().values
        anchors[row, : len(chosen)] = chosen + text.anchors.start
        real[row, : len(chosen)] = True
    return anchors, real


class Rounds(nn.Module):
    """K draft steps from every anchor of a batch; a module, so that ``functional_call`` can replace its weights.

    Every step reads the text's token, which is the drafter's own wherever the step counts: in greedy text a step counts
    only where all before it drafted the text's tokens, and in sampled text an accepted draft has the base's
    distribution, as the text does.
    """

    def __init__(self, drafter: Network, steps: int) -> None:
        super().__init__()
        self.drafter, self.steps = drafter, steps

    def forward(self, batch: Batch, embed: Callable[[Tensor], Tensor], convention: Convention) -> Tensor:
        """States after the final norm, [K, B, A, width]."""
        last_seen = (batch.anchors - 1)[..., None].expand(-1, -1, batch.hidden.shape[-1])
        slots = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        known = BaseState(
            batch.anchors,
            batch.hidden.gather(1, last_seen),
            embed,
            batch.shared_kv,
            dict.fromkeys(batch.shared_kv, slots),
            Fed(batch.tokens, slots, batch.hidden, batch.layers),
        )
        drafter, found = self.drafter, []
        state: Any = drafter.start(known, convention) if isinstance(drafter, MtpDrafter) else drafter.start(known)
        for step in range(self.steps):
            hidden, state = drafter.advance(state, batch.tokens.gather(1, batch.within(batch.anchors + step)))
            found.append(hidden)
        return torch.stack(found)


def aims(batch: Batch, steps: int) -> Tensor:
    """int64 [K, B, A]: the position, of B · L, after whose token each step's draft comes."""
    length = batch.tokens.shape[1]
    row = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None] * length
    return torch.stack([row + batch.within(batch.anchors + step) for step in range(steps)])


def counting(batch: Batch, steps: int, *, greedy: bool) -> Tensor:
    """bool [K, B, A]: which steps count: those whose target lies within the text.

    In ``greedy`` serving, only while the text is what the base chooses: elsewhere (in text by people) the round has
    ended before.
    """
    follows = torch.zeros_like(batch.tokens, dtype=torch.bool)
    follows[:, 1:] = (batch.tokens[:, 1:] == batch.choices[:, :-1]) if greedy else True
    reached, found = batch.real, []
    for step in range(steps):
        if step:
            reached = reached & follows.gather(1, batch.within(batch.anchors + step))
        found.append(reached & (batch.anchors + 1 + step < batch.lengths[:, None]))
    return torch.stack(found)


class StepLoss(nn.Module):
    """One step's loss, as the module that accelerate divides among processes."""

    def __init__(self, plan: TuningPlan, latents: Latents, drafter: Network, base: Base) -> None:
        super().__init__()
        self.latents, self.rounds = latents, Rounds(drafter, plan.draft_steps)
        # In a tuple, so that the base is no part of the module.
        self._base, self._plan = (base,), plan

    def forward(self, batch: Batch, convention: Convention, weight: float) -> tuple[Tensor, Tensor]:
        """``weight`` times the sum over anchors and steps; and [2], the sum of the rows' agreement, and the rows."""
        plan, drafter, base = self._plan, self.rounds.drafter, self._base[0]
        weights = self.latents.weights(drafter.lm_head.weight.dtype)
        replaced = {f"drafter.{path}": tensor for path, tensor in weights.items()}
        states = functional_call(self.rounds, replaced, (batch, base.embed, convention))
        where, choices = aims(batch, plan.draft_steps), batch.choices.flatten()
        choosing = counting(batch, plan.draft_steps, greedy=plan.temperature == 0)
        cap, tokens = None, None
        if isinstance(drafter, Eagle3Drafter):
            # Rows of its head are tokens of its own vocabulary, and a token that it cannot draft ends the round.
            choices, tokens = drafter.rows(choices), drafter.targets
            choosing = choosing & (choices[where] >= 0).int().cumprod(0).bool()
        else:
            cap = drafter.config.final_logit_softcap
        objective = objective_for(plan.objective, plan.temperature)
        within = choosing if objective.keys() == {"ce"} else counting(batch, plan.draft_steps, greedy=False)
        rows = Rows(
            where[within],
            choices,
            _base_logits(base, batch.hidden.flatten(0, 1), tokens),
            torch.full((int(within.sum()),), weight, device=states.device),
            choosing[within],
        )
        head = weights.get("lm_head.weight", drafter.lm_head.weight)
        loss, agreement = chunked_loss(
            states[within],
            head,
            rows,
            objective,
            cap=cap,
            temperature=plan.temperature or 1.0,
            logits_at_once=LOGITS_AT_ONCE,
        )
        return loss, torch.stack((agreement.sum(), within.sum()))


def _base_logits(base: Base, hidden: Tensor, tokens: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Positions int64 [n] → the base's logits F32 [n, V], of ``tokens`` alone where a head has no others."""

    @torch.no_grad()
    def logits(positions: Tensor) -> Tensor:
        # A head may have far fewer tokens than the base, and a piece of its logits more rows.
        parts = torch.split(positions, max(1, LOGITS_AT_ONCE // base.vocab_size))
        made = (base.logits(hidden[part].to(base.device)).to(hidden.device) for part in parts)
        found = [each if tokens is None else each[:, tokens] for each in made]
        return found[0] if len(found) == 1 else torch.cat(found)

    return logits


# The loop


def cosine(share: float) -> float:
    """The factor on a learning rate after ``share`` of the way, along half a cosine: from 1 to 0.02."""
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


def rate(step: int, steps: int) -> float:
    """The factor on the learning rate of step ``step`` of ``steps``, from 0: a ramp, then a cosine."""
    ramp = max(1, round(_WARM_UP * steps))
    return (step + 1) / ramp if step < ramp else cosine((step - ramp) / max(1, steps - ramp))


@dataclass(frozen=True)
class Trained:
    """Where a training is, and the best so far: what is kept in the folder of the work."""

    done: int = 0
    step: int = 0  # after which it was the best
    score: float = -math.inf  # the best one's
    stale: int = 0  # evaluations since the best
    results: Mapping[str, Tensor] = field(default_factory=dict)  # the best, as :meth:`Latents.results` has them
    history: tuple[Mapping[str, Any], ...] = ()  # one entry a step, and one an evaluation
    interrupted: bool = False

    def evaluated(self, latents: Latents, measured: Measured, score: float) -> Trained:
        """With an evaluation of the watched texts; the best is the one with the highest ``score``."""
        entry = {
            "step": self.done,
            "teacher_forced": measured.teacher_forced,
            "balanced": score,
            "conditional": measured.conditional,
            "tokens_per_round": measured.tokens_per_round,
        }
        noted = replace(self, history=(*self.history, entry), stale=self.stale + 1)
        if score <= self.score:
            return noted
        return replace(noted, score=score, step=self.done, stale=0, results=latents.results())


def train(
    plan: TuningPlan,
    latents: Latents,
    drafter: Network,
    base: Base,
    states: States,
    kinds: Sequence[Sequence[Text]],
    accelerator: Any,
    watch: Callable[[Network], tuple[Measured, float]],
    fingerprint: str,
    tell: Show = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train ``latents``; where that was finished before, they stay as they are.

    Args:
        drafter: in the type it computes in; what is not trained is taken from it.
        states: of the base over all texts of ``kinds``.
        kinds: of text, of which a batch has equal shares.
        watch: measures a drafter on the watched texts; and the number by which the best is chosen.
        fingerprint: of everything the result depends on; a kept state with another is ignored.
        tell, stop: called, and asked, after every step.

    Raises:
        CheckpointError: the state that is there cannot be read.
        OutputError: the state cannot be written.
    """
    steps = plan.optimizer_steps
    module = StepLoss(plan, latents, drafter, base)
    optimizer = torch.optim.AdamW(latents.groups(plan.learning_rate), betas=_BETAS, weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    prepared, optimizer = accelerator.prepare(module, optimizer)
    run = _resumed(plan.work, fingerprint, latents, optimizer)

    def evaluated() -> Trained:
        weights = latents.weights(drafter.lm_head.weight.dtype)
        return run.evaluated(latents, *watch(drafter.with_tensors({k: w.detach() for k, w in weights.items()})))

    def save() -> None:
        if accelerator.is_main_process:
            _save(plan.work, fingerprint, run, latents, optimizer)

    if not run.history:
        run = evaluated()
    while run.done < steps and run.stale < PATIENCE:
        for group, base_rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = base_rate * rate(run.done, steps)
        loss, agreement = prepared(*_batch(plan, states, kinds, run.done, accelerator))
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(latents.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        entry = _entry(accelerator, run.done + 1, loss, agreement)
        entry |= {"gradient": float(norm), "rate": rate(run.done, steps)}
        run = replace(run, done=run.done + 1, history=(*run.history, entry))
        if run.done % max(1, steps // EVALUATIONS) == 0 or run.done == steps:
            run = evaluated()
            save()
        tell(f"step {run.done} of {steps}, loss {entry['loss']:.3f}", run.done, steps)
        if run.done < steps and _any(accelerator, stop()):
            save()
            return replace(run, interrupted=True)
    return run


def _entry(accelerator: Any, step: int, loss: Tensor, agreement: Tensor) -> dict[str, Any]:
    """Of a step, over all processes."""
    parts = accelerator.gather(torch.cat((loss.detach()[None], agreement))[None])
    mean, (right, rows) = float(parts[:, 0].mean()), parts[:, 1:].sum(dim=0).tolist()
    if not math.isfinite(mean):
        raise MtpExtractError(
            f"expected a finite loss, found {mean} at step {step}; use a lower learning rate",
            remedies=("learning_rate",),
        )
    return {"step": step, "loss": mean, "agreement": right / max(1, rows)}


def _any(accelerator: Any, flag: bool) -> bool:
    """Whether any process says so: all must leave the loop together."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.gather(torch.tensor([flag], device=accelerator.device)).any())


def _batch(
    plan: TuningPlan, states: States, kinds: Sequence[Sequence[Text]], step: int, accelerator: Any
) -> tuple[Batch, Convention, float]:
    """This process's part of step ``step``: texts; a position convention; an anchor's weight.

    Gradients are averaged over processes: the weight makes of that the mean over all anchors, however they are divided.
    """
    chosen = [_drawn(kinds, plan.seed, step * plan.batch + place) for place in range(plan.batch)]
    here = range(accelerator.process_index, len(chosen), accelerator.num_processes)
    drawn = [random_anchors([chosen[place]], plan.anchors, _random(plan.seed, 2, step, place)) for place in here]
    anchors, real = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    convention = int(torch.randint(len(_CONVENTIONS), (), generator=_random(plan.seed, 3, step)))
    batch = collate(states.of([chosen[place] for place in here]), anchors, real, accelerator.device)
    total = sum(min(plan.anchors, len(text.anchors)) for text in chosen)
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


# The state between runs


def _save(folder: Path, fingerprint: str, run: Trained, latents: Latents, optimizer: Any) -> None:
    """Keep the state, which is there whole or not at all, and the log beside it."""
    save_whole(
        {
            "fingerprint": fingerprint,
            "run": vars(run),
            "latents": latents.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        folder / "state.pt",
    )
    with writing_to(folder):
        (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in run.history), encoding="utf-8")


def _resumed(folder: Path, fingerprint: str, latents: Latents, optimizer: Any) -> Trained:
    """Where an earlier run with this fingerprint stopped; else a beginning.

    Raises:
        CheckpointError: the state cannot be read.
    """
    path = folder / "state.pt"
    if not path.is_file():
        return Trained()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["fingerprint"] != fingerprint:
            return Trained()
        latents.load_state_dict(state["latents"])
        optimizer.load_state_dict(state["optimizer"])
        return Trained(**state["run"])
    # What a damaged file raises in there is of many classes.
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(
            f"{escape(path)}: expected the state of a training, found a file that cannot be read. Remove it to begin "
            "anew."
        ) from error
