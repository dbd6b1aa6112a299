"""A whole tuning, from names to a directory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from mtp_extract.errors import MtpExtractError
from mtp_extract.validate.extras import require

if TYPE_CHECKING:
    from mtp_extract.speculate import Text
    from mtp_extract.tune.loop import Progress, Recipe, Trained
    from mtp_extract.tune.measure import Change, Measured
    from mtp_extract.tune.text import Item

__all__ = ["Comparison", "Plan", "Tuned", "default_directory", "run_tuning"]

_READ = 1 << 24
_LEAST_HELD_OUT = 4
_MOST_WATCHED = 32
"""Texts that are measured again and again, on the way."""

_KEPT_STATES = 1 << 31
"""Bytes of the base's states that are kept rather than computed in every step."""


@dataclass(frozen=True)
class Plan:
    """What to tune, on what, and how.

    Attributes:
        directory: the checkpoint.
        base: directory or Hub id of the base model.
        out: where the tuned checkpoint goes.
        work: where text, state and log are kept: a run that was stopped goes on from there.
        mode: a name in :data:`~mtp_extract.tune.modes.MODES`.
        prompts: file of prompts; None for the shipped ones.
        text: file of texts by people, to train on instead of the base's own.
        new_tokens: most tokens of each continuation.
        temperature: of serving: the base writes, and drafts are judged, at it.
        objective: a name in :data:`~mtp_extract.tune.loss.OBJECTIVES`; None chooses by the temperature.
        steps, draft_steps, batch, anchors, learning_rate, seed: as :class:`~mtp_extract.tune.loop.Recipe` has them.
        device: see :func:`~mtp_extract.validate.acceptance.base_model.load_base`.
        chat_template: apply it where there is one.
        force: write also what is not better.
        overwrite: replace ``out`` if it is a checkpoint of ours.
    """

    directory: Path
    base: str
    out: Path
    work: Path
    mode: str = "norms"
    prompts: Path | None = None
    text: Path | None = None
    new_tokens: int = 256
    temperature: float = 0.0
    objective: str | None = None
    steps: int = 300
    draft_steps: int = 3
    batch: int = 16
    anchors: int = 24
    learning_rate: float | None = None
    seed: int = 0
    device: str = "auto"
    chat_template: bool = True
    force: bool = False
    overwrite: bool = False

    def recipe(self) -> Recipe:
        """How to train."""
        from mtp_extract.tune.loop import Recipe

        return Recipe(
            steps=self.steps,
            draft_steps=self.draft_steps,
            batch=self.batch,
            anchors=self.anchors,
            objective=self.objective or ("tv" if self.temperature else "ce"),
            temperature=self.temperature,
            learning_rate=self.learning_rate,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Comparison:
    """Before and after, on texts that nothing was trained on or chosen by.

    Attributes:
        own: whether its workload is one of those trained on, and not only looked at for harm.
    """

    before: Measured
    after: Measured
    change: Change
    own: bool

    def as_json(self) -> dict[str, Any]:
        """For the record."""

        def figures(measured: Measured) -> dict[str, Any]:
            interval = measured.interval
            return {
                "mean_accepted_length": round(measured.mean_accepted_length, 4),
                "interval": _bounds(interval),
                "conditional": [round(rate, 4) for rate in measured.conditional],
            }

        return {
            "texts": self.before.texts,
            "anchors": len(self.before.anchor),
            "trained_on_its_kind": self.own,
            "before": figures(self.before),
            "after": figures(self.after),
            "change": {"mean": round(self.change.mean, 4), "interval": _bounds(self.change.interval)},
        }


def _bounds(interval: Any) -> list[float] | None:
    return None if interval is None else [round(interval.low, 4), round(interval.high, 4)]


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        directory: what was written; None for nothing.
        refused: why it was not accepted; empty if it was.
        overall: over all held-out texts of the workloads that were trained on.
        workloads: by name; those of shipped prompts that were not trained on are there to see harm.
        trained: the training.
        texts: how many were trained on, watched and held out.
        numbers: how many were trained.
        shared: share of the held-out texts' 8-token sequences that training texts have too.
        record: what ``extraction.json`` says of the tuning.
        notes: things worth knowing that are not errors.
    """

    directory: Path | None
    refused: tuple[str, ...]
    overall: Comparison
    workloads: Mapping[str, Comparison]
    trained: Trained
    texts: Mapping[str, int]
    numbers: int
    shared: float
    record: Mapping[str, Any]
    notes: tuple[str, ...]


def default_directory(directory: Path) -> Path:
    """Where a result goes when the user does not say: ``NAME-tuned`` in the current directory."""
    return Path(f"{directory.resolve().name}-tuned")


def run_tuning(
    plan: Plan,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Tune, measure, and write what is better.

    Args:
        plan: what.
        say: told what is being done.
        tell: called after every step.
        stop: asked after every step: what is best so far is then measured, and written if it is better, marked as
            interrupted; a later run with the same plan goes on.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    require("torch", "safetensors", "transformers", "accelerate", "matplotlib")
    _check(plan)
    return _Tuning(plan, say, tell, stop).run()


def _check(plan: Plan) -> None:
    from mtp_extract.checkpoint.staging import check_target
    from mtp_extract.tune.loss import OBJECTIVES
    from mtp_extract.tune.modes import MODES

    if plan.mode not in MODES:
        raise ValueError(f"mode {plan.mode!r}: expected {' or '.join(MODES)}.")
    if plan.objective is not None and plan.objective not in OBJECTIVES:
        raise ValueError(f"objective {plan.objective!r}: expected {' or '.join(OBJECTIVES)}.")
    if plan.prompts is not None and plan.text is not None:
        raise MtpExtractError("expected prompts or texts, found both; leave one out", remedies=("prompts", "text"))
    if plan.text is not None and plan.temperature:
        raise MtpExtractError(
            "expected text of the base itself for sampled serving, found text by people, which has another "
            "distribution; give prompts",
            remedies=("prompts", "temperature=0"),
        )
    least = {"steps": 1, "draft_steps": 1, "batch": 1, "anchors": 1, "new_tokens": plan.draft_steps + 2, "seed": 0}
    for name, bound in least.items():
        if getattr(plan, name) < bound:
            raise MtpExtractError(
                f"expected {name} of at least {bound}, found {getattr(plan, name)}; raise it", remedies=(name,)
            )
    if not 0 <= plan.temperature < math.inf:
        raise MtpExtractError(
            f"expected a temperature of at least 0, found {plan.temperature}; 0 is greedy", remedies=("temperature",)
        )
    check_target(plan.out, plan.overwrite)


class _Tuning:
    """One run's parts."""

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None],
        tell: Callable[[Progress], None],
        stop: Callable[[], bool],
    ) -> None:
        from accelerate import Accelerator

        from mtp_extract.conversion import ReadDirectory
        from mtp_extract.speculate import SpeculativeGenerator
        from mtp_extract.validate.acceptance.base_model import load_base, memory_guard

        self.plan, self.recipe, self.tell, self.stop = plan, plan.recipe(), tell, stop
        self.accelerator = Accelerator(cpu=plan.device == "cpu")
        main = self.accelerator.is_main_process
        self.say = say if main else lambda line: None
        self.share = (self.accelerator.process_index, self.accelerator.num_processes)
        if plan.batch < self.share[1]:
            raise MtpExtractError(
                f"expected a batch of at least {self.share[1]}, one text a process, found {plan.batch}; raise it",
                remedies=("batch",),
            )
        self.origin = ReadDirectory.of(plan.directory)
        self.say(f"loading the base {plan.base}")
        several = self.share[1] > 1 and self.accelerator.device.type != "cpu"
        self.base = load_base(plan.base, str(self.accelerator.device) if several else plan.device)
        self.dtype = self.base.drafter_dtype
        with memory_guard("loading the drafter"):
            self.drafter = self._drafter_of(self.origin.checkpoint)
            self.generator = SpeculativeGenerator(self.base.model, self.drafter, self.base.tokenizer)

    def run(self) -> Tuned:
        from mtp_extract.tune.modes import MODES, Latents
        from mtp_extract.validate.acceptance.base_model import memory_guard

        with memory_guard("tuning"):
            latents = Latents(self.origin.checkpoint, MODES[self.plan.mode], self.accelerator.device)
            texts = self._texts()
            self.say(f"measuring the drafter as it is on {len(texts.held_out)} held-out texts")
            before = self._measure(self.drafter, texts.held_out)
            trained = self._train(latents, texts)
            tuned = latents.tuned(trained.values)
            self.say("measuring the tuned drafter on the held-out texts")
            after = self._measure(self._drafter_of(tuned), texts.held_out)
        return self._finish(latents, tuned, texts, trained, before, after)

    def _drafter_of(self, checkpoint: Any) -> Any:
        from mtp_extract.drafter import drafter_of
        from mtp_extract.tune.writing import as_written

        return drafter_of(as_written(self.origin, checkpoint), dtype=self.dtype, device=self.accelerator.device)

    def _texts(self) -> _Texts:
        from mtp_extract.tune.text import HELD_OUT, TRAINED, WATCHED, of_prompts, people_texts, read_items
        from mtp_extract.validate.prompts import shipped_prompts

        plan = self.plan
        shipped = of_prompts(shipped_prompts())
        given = plan.prompts or plan.text
        items = read_items(given) if given is not None else shipped
        sides = {side: [item for item in items if item.side == side] for side in (TRAINED, WATCHED, HELD_OUT)}
        held = {item.key for side in (WATCHED, HELD_OUT) for item in sides[side]}
        sides[TRAINED] = [item for item in sides[TRAINED] if item.key not in held]
        sides[WATCHED] = sides[WATCHED][:_MOST_WATCHED]
        learned = {item.key for item in sides[TRAINED]}
        # Of another name, as a user's own workload may be called "code" too.
        guards = [
            dataclasses.replace(item, workload=f"{item.workload} (shipped)")
            for item in shipped
            if given is not None and item.key not in learned | held
        ]
        few = [side for side, found in sides.items() if len({item.key for item in found}) < _LEAST_HELD_OUT]
        if few:
            raise MtpExtractError(
                f"expected enough prompts for at least {_LEAST_HELD_OUT} to be {' and '.join(few)}, found "
                f"{len(items)} prompts from {len({item.source for item in items})} sources, divided by a hash of "
                "where they come from; give more",
                remedies=("prompts",),
            )
        writing = self._writing()
        own = [] if plan.text is not None else [*sides[TRAINED], *sides[WATCHED], *sides[HELD_OUT]]
        every = [*own, *guards]
        if every:
            self.say(f"continuing {len(every)} prompts with the base")
            writing.prepare(every)
            self.accelerator.wait_for_everyone()
        made: dict[str, list[tuple[Item, Text]]] = {}
        for side, found in sides.items():
            if plan.text is None:
                made[side] = list(zip(found, writing.texts(found), strict=True))
            else:
                windows = people_texts(found, self.generator.codec, plan.new_tokens)
                made[side] = [(item, text) for item, parts in zip(found, windows, strict=True) for text in parts]
        made = {side: self._long_enough(side, pairs) for side, pairs in made.items()}
        guarded = list(zip(guards, writing.texts(guards), strict=True)) if guards else []
        guarded = [pair for pair in guarded if self._has_a_round(pair[1])]
        return _Texts(
            trained=tuple(text for _, text in made[TRAINED]),
            watched=tuple(text for _, text in made[WATCHED][:_MOST_WATCHED]),
            held_out=tuple(text for _, text in (*made[HELD_OUT], *guarded)),
            workloads=tuple(item.workload for item, _ in (*made[HELD_OUT], *guarded)),
            own=len(made[HELD_OUT]),
        )

    def _has_a_round(self, text: Text) -> bool:
        return len(text.anchors) >= self.plan.draft_steps

    def _long_enough(self, side: str, pairs: list[tuple[Item, Text]]) -> list[tuple[Item, Text]]:
        """Those with a place to draft from, and a target for every step."""
        found = [pair for pair in pairs if self._has_a_round(pair[1])]
        if len(found) < _LEAST_HELD_OUT:
            raise MtpExtractError(
                f"expected texts of more than {self.plan.draft_steps} tokens, found {len(found)} that are {side}: the "
                "base ends the others at once; give other prompts",
                remedies=("prompts",),
            )
        return found

    def _writing(self) -> Any:
        from mtp_extract.tune.text import Writing

        plan = self.plan
        return Writing(
            generator=self.generator,
            folder=plan.work / "text",
            fingerprint=self.base_fingerprint,
            new_tokens=plan.new_tokens,
            temperature=plan.temperature,
            seed=plan.seed,
            batch=max(plan.batch, 32),
            chat_template=plan.chat_template,
            share=self.share,
        )

    @cached_property
    def base_fingerprint(self) -> str:
        """XXH3-128 of the base's weights: those of another one make other text."""
        import torch

        digest = xxh3_128()
        for name, value in sorted(self.base.model.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            for at in range(0, len(numbers), _READ):
                digest.update(numbers[at : at + _READ].data)
        return digest.hexdigest()

    def _measure(self, drafter: Any, texts: Sequence[Text]) -> Measured:
        from accelerate.utils import gather_object

        from mtp_extract.tune.measure import joined, measure

        number, processes = self.share
        mine = range(number, len(texts), processes)
        part = measure(
            self.generator.base,
            drafter,
            [texts[index] for index in mine],
            self.plan.draft_steps,
            temperature=self.plan.temperature,
            batch=max(self.plan.batch, 32),
        )
        part = dataclasses.replace(part, text=part.text * processes + number)
        return joined(gather_object([part])) if processes > 1 else part

    def _train(self, latents: Any, texts: _Texts) -> Trained:
        from mtp_extract.tune.loop import train
        from mtp_extract.tune.rounds import States

        self.plan.work.mkdir(parents=True, exist_ok=True)
        kinds = list(self.drafter.needs.shared_kv)
        states = States(self.generator.base, kinds, texts.trained, _KEPT_STATES, self.recipe.logits_at_once)
        self.say(f"training {latents.numbers} numbers on {len(texts.trained)} texts")
        everything = [
            self.origin.sums,
            self.base_fingerprint,
            self.plan.mode,
            dataclasses.asdict(self.recipe),
            [text.tokens for text in (*texts.trained, *texts.watched)],
        ]
        return train(
            latents,
            self.drafter,
            self.generator.base,
            states,
            texts.trained,
            self.recipe,
            self.accelerator,
            lambda drafter: self._measure(drafter, texts.watched),
            self.plan.work,
            sha256(json.dumps(everything).encode()).hexdigest(),
            tell=self.tell,
            stop=self.stop,
        )

    def _finish(
        self, latents: Any, tuned: Any, texts: _Texts, trained: Trained, before: Measured, after: Measured
    ) -> Tuned:
        from mtp_extract.tune.figure import draw_progress
        from mtp_extract.tune.text import repeated_share
        from mtp_extract.tune.writing import write_tuned

        own = list(range(texts.own))
        overall = _compared(before, after, own, own=True)
        workloads = {
            name: _compared(before, after, rows, own=rows[0] < texts.own)
            for name in dict.fromkeys(texts.workloads)
            for rows in [[index for index, workload in enumerate(texts.workloads) if workload == name]]
        }
        refused = _verdict(overall, workloads)
        shared = repeated_share(texts.held_out[: texts.own], texts.trained)
        counts = {"trained": len(texts.trained), "watched": len(texts.watched), "held_out": len(texts.held_out)}
        record = {
            "mode": self.plan.mode,
            "base": self.plan.base,
            "base_xxh3": self.base_fingerprint,
            "recipe": dataclasses.asdict(self.recipe),
            "numbers": latents.numbers,
            "texts": counts,
            "shared_sequences": round(shared, 4),
            "steps_done": trained.done,
            "best_step": trained.step,
            "interrupted": trained.interrupted,
            "accepted": not refused,
            "refused": list(refused),
            "overall": overall.as_json(),
            "workloads": {name: comparison.as_json() for name, comparison in workloads.items()},
        }
        written = None
        if self.accelerator.is_main_process:
            draw_progress(trained.history, self.plan.work / "progress.png")
            if not refused or self.plan.force:
                written = write_tuned(
                    self.origin, tuned, self.plan.out, record, overwrite=self.plan.overwrite
                ).directory
        self.accelerator.wait_for_everyone()
        return Tuned(
            written,
            refused,
            overall,
            workloads,
            trained,
            counts,
            latents.numbers,
            shared,
            record,
            self.base.notes,
        )


@dataclass(frozen=True)
class _Texts:
    """Texts by what they are for; of ``held_out`` the first ``own`` are of the workloads that are trained on."""

    trained: tuple[Text, ...]
    watched: tuple[Text, ...]
    held_out: tuple[Text, ...]
    workloads: tuple[str, ...]
    own: int


def _compared(before: Measured, after: Measured, rows: Sequence[int], *, own: bool) -> Comparison:
    from mtp_extract.tune.measure import compare

    old, new = before.of(rows), after.of(rows)
    return Comparison(old, new, compare(old, new), own)


def _verdict(overall: Comparison, workloads: Mapping[str, Comparison]) -> tuple[str, ...]:
    """Why the tuned drafter is not to be kept; empty if it is."""
    reasons = []
    if not overall.change.better:
        reasons.append(f"it is not better on held-out text at 95 % ({_signed(overall.change)} in mean accepted length)")
    reasons += [
        f"it is worse on {name} at 95 % ({_signed(comparison.change)})"
        for name, comparison in workloads.items()
        if comparison.change.worse
    ]
    return tuple(reasons)


def _signed(change: Change) -> str:
    interval = change.interval
    return f"{change.mean:+.3f}" + (f", {interval.low:+.3f} to {interval.high:+.3f}" if interval else "")
