"""How much memory a run takes, phase by phase, said before anything is loaded.

Of configs and of the headers of the base's weights alone. What the libraries take by themselves is not counted: it is
taken already when the estimate is made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import INDEX, MATRIX, shapes_of
from mtp_extract.drafter.protocol import Needs
from mtp_extract.evaluate.base_size import BaseSize, check_room
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.options import Bytes
from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.modes import Mode
from mtp_extract.tune.prompts import TRAINED, side_of
from mtp_extract.tune.setting import Setting
from mtp_extract.tune.states import token_bytes
from mtp_extract.tune.text import BRANCHES

_F32 = 4
_A_LOGIT = {"mixed": 20, "ce": 8, "kl": 20, "tv": 16}
"""Bytes that the loss takes for each logit of a piece; measured."""
_SCORED = 24  # bytes for each logit of a piece that is measured: two distributions, and their products
_DRAWN = 20  # bytes for each logit of a round of generation
_CHARACTERS = 3  # of a prompt, a token


@dataclass(frozen=True)
class Phase:
    name: str  # what is being done
    parts: Mapping[str, int]  # what takes how many bytes at one time

    @property
    def bytes(self) -> int:
        """Most at a time."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    phases: tuple[Phase, ...]

    @property
    def most(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def line(self) -> str:
        """For people."""
        largest = sorted(self.most.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{Bytes(size)} {name}" for name, size in largest)
        return f"it takes about {Bytes(self.most.bytes)} of memory, most while {self.most.name}: {parts}"

    def check(self, device: torch.device | None, processes: int = 1) -> None:
        """Refuse what has no room.

        Args:
            device: None for all GPUs together.
            processes: on this machine, that share one main memory where they run on CPUs.

        Raises:
            MtpExtractError: there is less.
        """
        several = processes if device is not None and device.type == "cpu" else 1
        what = f"{self.most.name} takes" if several == 1 else f"{self.most.name} in {several} processes takes"
        check_room(
            several * self.most.bytes, device, what, ("batch", "states_memory", "mode=norms", "new_tokens", "device")
        )


@dataclass(frozen=True)
class Demand:
    """What a run is asked to do, as far as its memory depends on it."""

    mode: Mode | None  # None where an ordered head is made
    objective: str = "mixed"
    draft_vocab: int = 0  # of a new head, tokens
    # of an ordered head, by the vocabulary: most states of the drafter that it is made from
    states: Callable[[int], int] | None = None


@dataclass(frozen=True)
class _Sizes:
    """Numbers of a drafter's weights."""

    all: int
    largest: int  # of the largest matrix
    trained: int
    results: int  # bytes that are kept of what is trained: codes, and floats of what has none

    @classmethod
    def of(cls, config: DrafterConfig | Eagle3Config, mode: Mode | None) -> _Sizes:
        counts = {role: math.prod(shape) for role, shape in shapes_of(config).items() if role.kind != INDEX}
        matrices = [count for role, count in counts.items() if role.kind == MATRIX]
        kept = mode is None or mode.matrices == "kept"
        trained = 0 if mode is None else sum(counts.values()) - (sum(matrices) if kept else 0)
        codes = sum(matrices) if mode is not None and mode.matrices == "grid" else 0
        return cls(sum(counts.values()), max(matrices), trained, codes + _F32 * (trained - codes))


def estimate(
    setting: Setting, demand: Demand, base: BaseSize, config: DrafterConfig | Eagle3Config, items: Sequence[Prompt]
) -> Estimate:
    """What the run will take; of the base only if its size is known.

    Args:
        config: of the drafter, or of the new head.
        items: prompts, or texts by people.
    """
    text, size = base.config, base.itemsize
    sizes, width = _Sizes.of(config, demand.mode), _F32 if size > 2 else 2  # bytes that the drafter computes in
    own = {"the base": base.weights or 0, "the drafter": sizes.all * width}
    prompt, longest, trained = _tokens(setting, items)
    latents = sizes.trained * _F32
    large = _F32 * sizes.largest if demand.mode is not None and demand.mode.matrices != "kept" else 0
    needs = needs_of(config)
    a_token = token_bytes(needs, size)
    batch = setting.batch
    stored = min(setting.states_memory, trained * a_token)
    piece = min(LOGITS_AT_ONCE, batch * longest * int(text.vocab_size))  # logits at one time
    kv = _kv_bytes(text, setting.draft_steps, prompt + setting.new_tokens) * size
    vocabulary = int(text.vocab_size)
    pass_over = _activations(text, size)
    measuring = pass_over * batch * longest + _SCORED * piece
    kept = {"what is trained": latents} if latents else {}
    # A matrix is floats before it is what the drafter computes in; what is trained is tried once.
    reading = max(_F32 * sizes.largest, sizes.results + large)
    rounds = batch * (setting.draft_steps + 1) * vocabulary
    phases = [
        Phase("loading", {**own, **kept, "conversions": reading}),
        Phase(
            "writing text",
            {
                **own,
                **kept,
                "K and V": batch * kv,
                "logits": _DRAWN * rounds,
                "a forward": pass_over * batch * prompt,
            },
        ),
    ]
    if demand.mode is not None:
        # Both moments and the gradient; the weights of a step as they are computed with.
        optimizer = {"gradient and moments": 3 * latents}
        step = sizes.trained * width
        rows = {"logits": _A_LOGIT[demand.objective] * piece + large, "a batch's states": batch * longest * 2 * a_token}
        step_takes = {"the base's states": stored, "a step's weights": step, **rows}
        phases.append(Phase("training", {**own, **kept, **optimizer, **step_takes}))
        kept |= {"the best": sizes.results, "the tuned drafter": sizes.all * width}
    else:
        head = _F32 * vocabulary * int(config.hidden_size)
        # Each from every anchor, step and convention.
        states = min(demand.states(vocabulary) if demand.states else 0, 2 * setting.draft_steps * trained)
        read = states * int(config.hidden_size)
        phases.append(
            Phase("making clusters", {**own, "the drafter's states": read * (width + _F32), "the head": 4 * head})
        )
        kept |= {"the new head": sizes.all * width + head}
    phases.append(Phase("measuring", {**own, **kept, "logits and a forward": measuring}))
    return Estimate(tuple(phases))


def needs_of(config: DrafterConfig | Eagle3Config) -> Needs:
    """What a drafter of this shape reads of its base; of no weights."""
    from mtp_extract.drafter.eagle3 import Eagle3Drafter
    from mtp_extract.drafter.mtp import MtpDrafter

    with torch.device("meta"):
        return Eagle3Drafter(config).needs if isinstance(config, Eagle3Config) else MtpDrafter(config).needs


def processes_here(processes: int) -> int:
    """How many of a run's ``processes`` are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def _tokens(setting: Setting, items: Sequence[Prompt]) -> tuple[int, int, int]:
    """Of the longest prompt, of the longest text, and of all that is trained on: about, as nothing is encoded yet."""
    contents = [item.content if isinstance(item.content, str) else item.key for item in items]
    lengths = [len(content) // _CHARACTERS + 8 for content in contents]
    longest = max(lengths, default=0)
    trained = [length for length, item in zip(lengths, items, strict=True) if side_of(item.source) == TRAINED]
    if setting.text is not None:
        return 0, min(longest, setting.new_tokens), sum(trained)
    # As it is served and otherwise, and for greedy serving from within the latter.
    times = 2 if setting.temperature else 2 + BRANCHES
    return longest, longest + setting.new_tokens, times * (sum(trained) + len(trained) * setting.new_tokens)


def _kv_bytes(text: Any, draft_steps: int, capacity: int) -> int:
    """Numbers of K and V that a sequence of ``capacity`` tokens keeps."""
    kinds = list(text.layer_types)
    own = len(kinds) - int(getattr(text, "num_kv_shared_layers", 0) or 0)
    total = 0
    for index in range(own):
        shape = text.per_layer_config[index]
        window = text.sliding_window if kinds[index] == "sliding_attention" else None
        slots = capacity if window is None else min(capacity, window + draft_steps + 1)
        total += 2 * int(shape.num_key_value_heads) * int(shape.head_dim) * slots
    return total


def _activations(text: Any, size: int) -> int:
    """Bytes that a forward takes for a token at a time: of the widest part of a layer, and of what all layers read."""
    hidden, layers = int(text.hidden_size), len(text.layer_types)
    feed_forward = int(text.intermediate_size) * (2 if getattr(text, "use_double_wide_mlp", False) else 1)
    queries = int(text.num_attention_heads) * max(int(shape.head_dim) for shape in text.per_layer_config)
    of_layers = layers * int(getattr(text, "hidden_size_per_layer_input", 0) or 0)
    return size * (4 * hidden + max(3 * feed_forward, 4 * queries) + 3 * of_layers) + 2 * _F32 * hidden
