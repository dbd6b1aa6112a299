"""Training on the base's text: what the base computes there, rounds of drafts, and the loop.

A step is: some texts, some anchors in each (positions to draft from), K of the drafter's own steps from every anchor,
and a loss against what the base says at the position that each step aims at. All that is random depends on the seed and
the number of the step alone, so a run that was stopped resumes exactly where it was.

Where accelerate starts several processes, each takes a share of every step's texts, and of those that are measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, MtpDrafter
from mtp_extract.drafter.protocol import BaseState, Fed, Needs
from mtp_extract.errors import CheckpointError, MtpExtractError, escape
from mtp_extract.evaluation.agreement import Measured, groups
from mtp_extract.evaluation.base_model import free_memory
from mtp_extract.evaluation.progress import Show
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import Corpus
from mtp_extract.tuning.latents import MODES, Latents
from mtp_extract.tuning.loss import LOGITS_AT_ONCE, Rows, gradient_of, objective_for
from mtp_extract.tuning.pair import Pair, check_writable, idle_roles
from mtp_extract.tuning.work import kept_at

EVALUATIONS = 10
"""How often the watched texts are measured on the way."""
PATIENCE = 5
"""Evaluations without a better one after which training ends."""
ANCHORS = 24
"""Positions of each text to draft from in a step: with more, rows of one text say much the same."""

_WARM_UP = 0.1  # of the steps
_LEAST_RATE = 0.02  # of the learning rate, at the end
_TOKENS_AT_ONCE = 256  # of short texts in one forward of the base: of fewer it takes hardly less time
_OF_FREE_MEMORY = 0.5  # for what the base computes over the texts

# What the base computes over texts

Columns = Mapping[str, Tensor]
"""What the base computes over a text, in main memory, a row a token: ``tokens``, ``hidden`` (after the final norm),
``choices`` (its argmax after each), ``layer 3`` (the state that enters it), ``K of`` and ``V of`` a layer type."""


@torch.no_grad()
def states_of(base: Base, needs: Needs, texts: Sequence[Text]) -> list[Columns]:
    """What ``base`` computes over each of ``texts``, in one forward, as far as ``needs`` asks for it."""
    tokens = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True).to(base.device)
    full = base.feed(tokens, needs.layers)
    rows = torch.split(full.hidden.flatten(0, 1), max(1, LOGITS_AT_ONCE // base.vocab_size))
    choices = torch.cat([base.logits(part).argmax(-1) for part in rows]).view(tokens.shape)
    columns = {"tokens": tokens, "hidden": full.hidden, "choices": choices}
    columns |= {f"layer {layer}": states for layer, states in full.layers.items()}
    for kind in needs.shared_kv:
        keys, values = full.shared_kv[kind]
        columns |= {f"K of {kind}": keys.transpose(1, 2), f"V of {kind}": values.transpose(1, 2)}
    # Copies: what is kept of one text does not hold the whole pass.
    return [
        {name: part[row, : len(text.tokens)].to("cpu", copy=True) for name, part in columns.items()}
        for row, text in enumerate(texts)
    ]


class States:
    """The base's states over texts, kept as long as half of the free memory lasts, else computed when asked for.

    Which texts share a forward depends on the texts alone, so the numbers are the same, to the bit, in every run. Texts
    of similar length do, as many as one forward takes and at most ``batch``; a long one is alone.
    """

    def __init__(self, base: Base, needs: Needs, texts: Sequence[Text], batch: int) -> None:
        self._base, self._needs = base, needs
        self._left = int(_OF_FREE_MEMORY * free_memory(torch.device("cpu")))
        self._kept: dict[tuple[Text, ...], list[Columns]] = {}
        groups: list[list[Text]] = []
        for text in sorted(dict.fromkeys(texts), key=lambda text: len(text.tokens)):
            size = len(groups[-1]) if groups else batch
            if size == batch or (size + 1) * len(text.tokens) > _TOKENS_AT_ONCE:
                groups.append([])
            groups[-1].append(text)
        self._group_of = {text: tuple(group) for group in groups for text in group}

    def of(self, texts: Sequence[Text]) -> list[Columns]:
        """Of each of ``texts``, all of which were given before."""
        found = dict[Text, Columns]()
        for group in dict.fromkeys(self._group_of[text] for text in texts):
            if (items := self._kept.get(group)) is None:
                items = states_of(self._base, self._needs, group)
                if (size := sum(part.nbytes for item in items for part in item.values())) <= self._left:
                    self._kept[group], self._left = items, self._left - size
            found |= zip(group, items, strict=True)
        return [found[text] for text in texts]


# Rounds


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at their ends. B texts, L tokens, A anchors each."""

    fed: Fed  # what the base knows of them
    lengths: Tensor  # int64 [B]
    choices: Tensor  # int64 [B, L], the base's argmax after each token
    anchors: Tensor  # int64 [B, A]
    real: Tensor  # bool [B, A]; False where a text has fewer anchors, and the anchor is a placeholder

    @classmethod
    def of(cls, items: Sequence[Columns], needs: Needs, anchors: Tensor, real: Tensor, device: torch.device) -> Batch:
        """The texts of ``items``, on ``device``."""
        padded = {name: pad_sequence([item[name] for item in items], batch_first=True).to(device) for name in items[0]}

        def heads(name: str) -> Tensor:  # [B, KV heads, L, head_dim]
            return padded[name].transpose(1, 2).contiguous()

        tokens = padded["tokens"]
        fed = Fed(
            tokens,
            torch.arange(tokens.shape[1], device=device).expand_as(tokens),
            padded["hidden"],
            {layer: padded[f"layer {layer}"] for layer in needs.layers},
            {kind: (heads(f"K of {kind}"), heads(f"V of {kind}")) for kind in needs.shared_kv},
        )
        lengths = torch.tensor([len(item["tokens"]) for item in items], device=device)
        return cls(fed, lengths, padded["choices"], anchors.to(device), real.to(device))


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
        known, drafter, found = BaseState(batch.fed, batch.anchors, embed), self.drafter, []
        state: Any = drafter.start(known, convention) if isinstance(drafter, MtpDrafter) else drafter.start(known)
        for token in batch.fed.tokens.flatten()[aims(batch, self.steps)]:
            hidden, state = drafter.advance(state, token)
            found.append(hidden)
        return torch.stack(found)


def aims(batch: Batch, steps: int) -> Tensor:
    """int64 [K, B, A]: the position, of B · L, after whose token each step's draft comes; in a text's end, its last."""
    (rows, length), device = batch.fed.tokens.shape, batch.anchors.device
    later = batch.anchors + torch.arange(steps, device=device)[:, None, None]
    return torch.arange(rows, device=device)[:, None] * length + later.clamp(max=length - 1)


def counting(batch: Batch, steps: int, *, greedy: bool) -> Tensor:
    """bool [K, B, A]: which steps count: those whose target lies within the text.

    In ``greedy`` serving, only while the text is what the base chooses: elsewhere (in text by people) the round has
    ended before.
    """
    later = batch.anchors + torch.arange(1, steps + 1, device=batch.anchors.device)[:, None, None]
    found = batch.real & (later < batch.lengths[:, None])
    if greedy:
        follows = torch.ones_like(batch.fed.tokens, dtype=torch.bool)
        follows[:, 1:] = batch.fed.tokens[:, 1:] == batch.choices[:, :-1]
        chosen = follows.flatten()[aims(batch, steps)]
        chosen[0] = True  # the pending token is the base's own
        found &= chosen.int().cumprod(dim=0).bool()
    return found


# Measuring


def measured(pair: Pair, drafter: Network, texts: Sequence[Text]) -> Measured:
    """How many drafts of ``drafter`` stand after every anchor of ``texts`` that has all targets, as they are served."""
    accelerator, parts = pair.accelerator, list[Measured]()
    own = range(accelerator.process_index, len(texts), accelerator.num_processes)
    for group in groups([len(texts[index].tokens) for index in own], pair.plan.batch):
        rows = [own[place] for place in group]
        part = _standing(pair, drafter, [texts[row] for row in rows])
        parts.append(replace(part, text=torch.tensor(rows)[part.text]))
    found = Measured.joined(gather_object(parts))
    # Anchors of a text, which is in one part, stay in order.
    return found.where(torch.argsort(found.text, stable=True))


@torch.no_grad()
def _standing(pair: Pair, drafter: Network, texts: Sequence[Text]) -> Measured:
    """The drafts that stand along ``texts``.

    Greedily those that are its tokens. A draft drawn from q is accepted with probability min(1, p / q), and what is
    accepted has the base's distribution p; so along a text x drawn from p the first i drafts are accepted with the mean
    of ∏ min(1, q(x) / p(x)), the last factor replaced by its mean over x, Σ min(p, q).
    """
    base = pair.base
    steps = pair.plan.draft_steps
    temperature = pair.plan.temperature

    # All anchors, in order.
    anchors, real = random_anchors(texts, max(len(text.anchors) for text in texts), torch.Generator())
    device = drafter.lm_head.weight.device
    batch = Batch.of(states_of(base, drafter.needs, texts), drafter.needs, anchors, real, device)
    states = Rounds(drafter, steps)(batch, base.embed, LITERT)
    positions = aims(batch, steps)
    complete = counting(batch, steps, greedy=False).all(dim=0)
    tokens = batch.fed.tokens.flatten()
    hidden = batch.fed.hidden.flatten(0, 1)

    # Of each draft that is looked at: min(1, q(x) / p(x)) of the text's token x, and its mean over all tokens.
    of_token = torch.ones(positions.shape, dtype=torch.double)
    mean = torch.ones(positions.shape, dtype=torch.double)
    rows_at_once = max(1, LOGITS_AT_ONCE // base.vocab_size)
    for drafts in torch.split(complete.expand(steps, -1, -1).nonzero(), rows_at_once):
        index = drafts.unbind(1)
        index_on_cpu = drafts.cpu().unbind(1)
        logits = drafter.logits(states[index]).float()
        next_token = tokens[positions[index] + 1]
        if temperature == 0:
            accepted = (logits.argmax(-1) == next_token).double().cpu()
            of_token[index_on_cpu] = accepted
            mean[index_on_cpu] = accepted
            continue
        q = torch.softmax(logits / temperature, dim=-1)
        base_logits = base.logits(hidden[positions[index]].to(base.device)).to(device)
        p = torch.softmax(base_logits / temperature, dim=-1)
        q_of_token = q.gather(1, next_token[:, None]).squeeze(1)
        p_of_token = p.gather(1, next_token[:, None]).squeeze(1)
        of_token[index_on_cpu] = (q_of_token / p_of_token).clamp(max=1).double().cpu()
        mean[index_on_cpu] = torch.minimum(p, q).sum(-1).double().cpu()

    along = of_token.cumprod(dim=0)
    stands = torch.cat((torch.ones_like(along[:1]), along[:-1])) * mean
    complete = complete.cpu()
    text = torch.arange(len(texts))[:, None].expand_as(real)
    return Measured.over(
        text[complete], anchors[complete], stands.permute(1, 2, 0)[complete], along.permute(1, 2, 0)[complete]
    )


# The loop


def cosine(share: float) -> float:
    """The factor on a learning rate after ``share`` of the way, along half a cosine: from 1 to 0.02."""
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


def rate(step: int, steps: int) -> float:
    """The factor on the learning rate of step ``step`` of ``steps``, from 0: a ramp, then a cosine."""
    ramp = max(1, round(_WARM_UP * steps))
    return (step + 1) / ramp if step < ramp else cosine((step - ramp) / max(1, steps - ramp))


@dataclass
class Progress:
    """Where a training is, and the best so far: what is kept in the folder of the work."""

    done: int = 0
    step: int = 0  # after which it was the best
    score: float = -math.inf  # the best one's
    stale: int = 0  # evaluations since the best
    results: Mapping[str, Tensor] = field(default_factory=dict)  # the best, as :meth:`Latents.results` has them
    history: list[Mapping[str, Any]] = field(default_factory=list)  # one entry a step, and one an evaluation
    interrupted: bool = False


def latents_of(pair: Pair) -> Latents:
    """What the pair's plan trains; raises MtpExtractError where the drafter's format does not hold that."""
    plan = pair.plan
    latents = Latents(pair.origin.checkpoint, MODES[plan.mode], pair.accelerator.device, idle_roles(plan))
    # Another number for each that is trained: what can hold it can hold what comes out.
    changed = latents.tuned({key: result + 1 for key, result in latents.results().items()})
    check_writable(pair.origin, changed, plan.mode)
    return latents


def train(pair: Pair, corpus: Corpus, latents: Latents, tell: Show, stop: Callable[[], bool]) -> Progress:
    """Train ``latents`` as the pair's plan says; ``tell`` is called, and ``stop`` asked, after every step.

    The best by the watched texts is kept, and a run with the same plan, drafter, base and texts resumes where one was
    stopped, or had ended.

    Raises:
        CheckpointError: the state that is there cannot be read.
        OutputError: the state cannot be written.
        MtpExtractError: the loss is not finite.
    """
    plan, drafter, accelerator = pair.plan, pair.drafter, pair.accelerator
    pair.say(f"training {latents.numbers} numbers on {len(corpus.trained)} texts")
    steps, every = plan.optimizer_steps, max(1, plan.optimizer_steps // EVALUATIONS)
    states = States(pair.base, drafter.needs, corpus.trained, plan.batch)
    optimizer = torch.optim.AdamW(latents.groups(plan.learning_rate), betas=(0.9, 0.95), weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    # In several processes it averages gradients.
    wrapped, optimizer = accelerator.prepare(latents, optimizer)
    depends_on: list[Any] = [pair.origin.sums, pair.base_fingerprint, plan.mode, plan.recipe]
    depends_on += [[text.prompt_length, *text.tokens] for text in (*corpus.trained, *corpus.watched)]
    fingerprint = sha256(json.dumps(depends_on).encode()).hexdigest()
    run = _resumed(plan.kept_in / "state.pt", fingerprint, latents, optimizer)

    def evaluate() -> None:
        weights = latents(drafter.lm_head.weight.dtype)
        tuned = drafter.with_tensors({path: weight.detach() for path, weight in weights.items()})
        found = measured(pair, tuned, corpus.watched)
        score = corpus.balanced(found)
        run.history.append({"step": run.done, "teacher_forced": found.teacher_forced, "balanced": score})
        run.stale += 1
        if score > run.score:
            run.score, run.step, run.stale, run.results = score, run.done, 0, latents.results()

    def save() -> None:
        state = {"fingerprint": fingerprint, "run": vars(run), "latents": latents.state_dict()}
        if accelerator.is_main_process:
            with kept_at(plan.kept_in / "state.pt") as file:
                torch.save({**state, "optimizer": optimizer.state_dict()}, file)
            with kept_at(plan.kept_in / "log.jsonl") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in run.history).encode())

    if not run.history:
        evaluate()
    while run.done < steps and run.stale < PATIENCE:
        for group, highest in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = highest * rate(run.done, steps)
        loss, agreement = _backward(pair, wrapped, *_batch(pair, states, corpus.kinds, run.done))
        accelerator.clip_grad_norm_(latents.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.done += 1
        if not math.isfinite(loss):
            why = f"expected a finite loss, found {loss} at step {run.done}. Use a lower learning rate."
            raise MtpExtractError(why, remedies=("learning_rate",))
        run.history.append({"step": run.done, "loss": loss, "agreement": agreement})
        if run.done % every == 0 or run.done == steps:
            evaluate()
            save()
        tell(f"step {run.done} of {steps}, loss {loss:.3f}", run.done, steps)
        # All processes must leave the loop together.
        if run.done < steps and bool(accelerator.gather(torch.tensor([stop()], device=accelerator.device)).any()):
            save()
            run.interrupted = True
            break
    # It keeps the optimizer, and with that two numbers for each that was trained.
    accelerator.free_memory()
    return run


def _backward(
    pair: Pair, latents: nn.Module, batch: Batch, convention: Convention, weight: float
) -> tuple[float, float]:
    """Make the gradients of a step, each anchor of this ``weight``; its mean loss, and how well its rows agree."""
    plan, base, drafter, hidden = pair.plan, pair.base, pair.drafter, batch.fed.hidden.flatten(0, 1)
    where, choices = aims(batch, plan.draft_steps), batch.choices.flatten()
    choosing, cap = counting(batch, plan.draft_steps, greedy=plan.temperature == 0), None
    tokens: Tensor | slice = slice(None)
    if isinstance(drafter, Eagle3Drafter):
        # Rows of its head are tokens of its own vocabulary, and a token that it cannot draft ends the round.
        choices, tokens = drafter.rows(choices), drafter.targets
        choosing = choosing & (choices[where] >= 0).int().cumprod(0).bool()
    else:
        cap = drafter.config.final_logit_softcap
    objective = objective_for(plan.objective, plan.temperature)
    within = choosing if objective.keys() == {"ce"} else counting(batch, plan.draft_steps, greedy=False)

    def base_logits(positions: Tensor) -> Tensor:
        # A head may have far fewer tokens than the base, and a piece of its logits more rows.
        parts = torch.split(positions, max(1, LOGITS_AT_ONCE // base.vocab_size))
        made = [base.logits(hidden[part].to(base.device)).to(hidden.device)[:, tokens] for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    rows = Rows(where[within], choices, base_logits, weight, choosing[within], objective, cap, plan.temperature or 1.0)
    weights = {"lm_head.weight": drafter.lm_head.weight, **latents(drafter.lm_head.weight.dtype)}
    head, replaced = weights["lm_head.weight"], {f"drafter.{path}": new for path, new in weights.items()}
    counted = functional_call(Rounds(drafter, plan.draft_steps), replaced, (batch, base.embed, convention))[within]
    loss, agreement, made = gradient_of(rows, counted, head)
    torch.autograd.backward((counted, head)[: len(made)], made)
    losses, right, count = pair.accelerator.gather(torch.stack((loss, agreement.sum(), within.sum()))[None]).T
    return float(losses.mean()), float(right.sum()) / max(1, int(count.sum()))


def _batch(pair: Pair, states: States, kinds: Sequence[Sequence[Text]], step: int) -> tuple[Batch, Convention, float]:
    """This process's part of step ``step``: texts; a position convention; an anchor's weight.

    Texts are of each kind in turn; those of a kind are shuffled anew in every epoch. Gradients are averaged over
    processes: the weight makes of that the mean over all anchors, however they are divided.
    """
    plan, accelerator = pair.plan, pair.accelerator
    chosen = list[Text]()
    for number in range(step * plan.batch, (step + 1) * plan.batch):
        turn, kind = divmod(number, len(kinds))
        epoch, place = divmod(turn, len(kinds[kind]))
        order = torch.randperm(len(kinds[kind]), generator=_random(plan.seed, 1, kind, epoch))
        chosen.append(kinds[kind][int(order[place])])
    here = range(accelerator.process_index, len(chosen), accelerator.num_processes)
    drawn = [random_anchors([chosen[place]], ANCHORS, _random(plan.seed, 2, step, place)) for place in here]
    anchors, real = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    convention = int(torch.randint(2, (), generator=_random(plan.seed, 3, step)))
    items = states.of([chosen[place] for place in here])
    batch = Batch.of(items, pair.drafter.needs, anchors, real, accelerator.device)
    total = sum(min(ANCHORS, len(text.anchors)) for text in chosen)
    return batch, (LITERT, TRANSFORMERS)[convention], accelerator.num_processes / total


def _random(*parts: int) -> torch.Generator:
    """Random numbers that depend on ``parts`` alone."""
    seed = 0
    for part in parts:
        seed = (seed * 0x9E3779B97F4A7C15 + part + 1) % (1 << 63)
    return torch.Generator().manual_seed(seed)


def _resumed(path: Path, fingerprint: str, latents: Latents, optimizer: Any) -> Progress:
    """Where an earlier run with this fingerprint stopped; else a beginning."""
    if not path.exists():
        return Progress()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["fingerprint"] != fingerprint:
            return Progress()
        latents.load_state_dict(state["latents"])
        optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["run"])
    # What a damaged file raises in there is of many classes.
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{escape(path)}: expected a training's state, found damage. Remove the file.") from error
