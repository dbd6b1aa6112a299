"""What a written checkpoint computes: the drafter of Gemma 4 in plain NumPy, from its config and its tensors alone.

Nothing here knows of a graph. All samples are computed side by side, so that each tensor is read once; matrices are
multiplied block by block, so that an LM head of 262 144 rows never exists whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import CheckpointError
from mtp_extract.graph.arrays import Array, Bools, gelu, row_blocks
from mtp_extract.graph.rope import frequencies
from mtp_extract.litertlm.storage import Floats

if TYPE_CHECKING:
    from mtp_extract.architecture.config import DrafterConfig, LayerConfig


Read = Callable[[str], Iterable[Floats]]
"""Role → its numbers in row-major order, in flat chunks of any size."""

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Written:
    """A config, and the tensors by role."""

    config: DrafterConfig
    read: Read

    def vector(self, role: str, size: int) -> Floats:
        """A norm's weight or a scalar.

        Raises:
            CheckpointError: it has another size.
        """
        found = np.concatenate([np.array(chunk, np.float32).reshape(-1) for chunk in self.read(role)])
        if found.size != size:
            raise CheckpointError(f"{role}: expected {size} numbers, found {found.size}.")
        return found

    def linear(self, role: str, x: Floats, size: int) -> Floats:
        """``x`` ``[…, in]`` times the matrix ``[size, in]``."""
        flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        made = np.empty((flat.shape[0], size), np.float32)
        at = 0
        for block in row_blocks(self.read(role), x.shape[-1]):
            if at + len(block) > size:
                raise CheckpointError(f"{role}: expected {size} rows of {x.shape[-1]}, found more.")
            np.matmul(flat, block.T, out=made[:, at : at + len(block)])
            at += len(block)
        if at != size:
            raise CheckpointError(f"{role}: expected {size} rows of {x.shape[-1]}, found {at}.")
        return made.reshape(*x.shape[:-1], size)

    def norm(self, role: str, x: Floats) -> Floats:
        """x / rms(x) · weight over the last axis."""
        mean = np.mean(np.square(x), -1, keepdims=True) + np.float32(self.config.rms_norm_eps)
        normed: Floats = x / np.sqrt(mean) * self.vector(role, x.shape[-1])
        return normed


@dataclass(frozen=True)
class Cache:
    """K or V of one layer type: ``numbers`` as ``[KV heads, slots, head_dim]``, integers with a scale or floats."""

    numbers: Array
    scale: float = 1.0
    zero_point: int = 0

    def slots(self, head: int, chosen: slice) -> Floats:
        """``[chosen slots, head_dim]`` of one head."""
        # In the order in which it lies in memory, be it transposed.
        part = self.numbers[head, chosen].astype(np.float32, order="K")
        if self.zero_point:
            part -= np.float32(self.zero_point)
        part *= np.float32(self.scale)
        return part


@dataclass(frozen=True)
class Step:
    """One draft step of several samples.

    Attributes:
        activations: ``[samples, queries, 2 · backbone width]``.
        positions: integers ``[samples, queries]``.
        caches: per layer, K and V; the same for all samples.
        seen: per layer, bool ``[samples, queries, slots]``: the slots a query may see.
        trace: filled, if given, with what every role computes, by role.
    """

    activations: Floats
    positions: npt.NDArray[np.int64]
    caches: Sequence[tuple[Cache, Cache]]
    seen: Sequence[Bools]
    trace: dict[str, Floats] | None = field(default=None, compare=False)

    def note(self, role: str, values: Floats) -> Floats:
        """Keep what ``role`` computes, if a trace is asked for."""
        if self.trace is not None:
            self.trace[role] = values
        return values


def forward(checkpoint: Written, step: Step) -> tuple[Floats, Floats]:
    """The normalized state ``[samples, queries, width]`` and its projection ``[samples, queries, backbone width]``."""
    config = checkpoint.config
    # What is not a number is for the caller to see.
    with np.errstate(all="ignore"):
        h = step.note("pre_projection", checkpoint.linear("pre_projection", step.activations, config.hidden_size))
        for index in range(len(config.layers)):
            h = _layer(checkpoint, step, index, h)
        h = step.note("final_norm", checkpoint.norm("final_norm", h))
        projected = checkpoint.linear("post_projection", h, config.backbone_hidden_size)
    return h, step.note("post_projection", projected)


def logits(checkpoint: Written, state: Floats, trace: Mapping[str, Floats] | None = None) -> Floats:
    """The logits of :func:`forward`'s state, soft-capped, ``[samples, queries, vocabulary]``."""
    made = checkpoint.linear("lm_head", state, checkpoint.config.vocab_size)
    if isinstance(trace, dict):
        trace["lm_head"] = made
    cap = checkpoint.config.final_logit_softcap
    if cap is None:
        return made
    capped: Floats = np.tanh(made / np.float32(cap))
    capped *= np.float32(cap)
    return capped


def _layer(checkpoint: Written, step: Step, index: int, h: Floats) -> Floats:
    config, name = checkpoint.config, f"layers.{index}"

    def norm(role: str, x: Floats) -> Floats:
        return step.note(f"{name}.{role}", checkpoint.norm(f"{name}.{role}", x))

    def linear(role: str, x: Floats, size: int) -> Floats:
        return step.note(f"{name}.{role}", checkpoint.linear(f"{name}.{role}", x, size))

    layer = config.layers[index]
    x = norm("pre_attention_norm", h)
    q = linear("q_proj", x, config.num_heads * layer.head_dim)
    q = norm("q_norm", q.reshape(*q.shape[:-1], config.num_heads, layer.head_dim))
    turning = frequencies(layer.rope, layer.head_dim).astype(np.float32)
    q = rotate(q, step.positions, turning) * np.float32(config.attention_scale)
    mixed = step.note(f"{name}.attention", _attend(q, layer, *step.caches[index], step.seen[index], step, name))
    h = h + norm("post_attention_norm", linear("o_proj", mixed, config.hidden_size))
    x = norm("pre_ffw_norm", h)
    gate, up = (linear(role, x, config.intermediate_size) for role in ("gate_proj", "up_proj"))
    gated = step.note(f"{name}.gelu", gelu(gate, tanh=config.hidden_activation == "gelu_pytorch_tanh") * up)
    h = h + norm("post_ffw_norm", linear("down_proj", gated, config.hidden_size))
    return step.note(f"{name}.layer_scalar", h * checkpoint.vector(f"{name}.layer_scalar", 1))


def rotate(x: Floats, positions: npt.NDArray[np.int64], inverse: Floats) -> Floats:
    """Rotary embedding of ``x`` ``[…, heads, head_dim]``: dimension i turns with dimension i + head_dim / 2."""
    # In float32, as every implementation has it: in float64 the angle at position 24 000 is another one.
    angle = (positions.astype(np.float32)[..., None] * inverse)[..., None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(q: Floats, layer: LayerConfig, key: Cache, value: Cache, seen: Bools, step: Step, name: str) -> Floats:
    """softmax(q · K) · V over the slots that are seen: ``[samples, queries, heads · head_dim]``.

    ``q`` is ``[samples, queries, heads, head_dim]``; a slot that no query sees is not looked at.
    """
    samples, queries, heads, width = q.shape
    grouped = q.reshape(samples * queries, layer.num_kv_heads, -1, width)
    visible = seen.reshape(samples * queries, -1)
    count = visible.shape[-1]
    spans = [slice(at, min(at + _BLOCK // width, count)) for at in range(0, count, _BLOCK // width)]
    spans = [span for span in spans if visible[:, span].any()]
    mixed = np.zeros_like(grouped)
    weights = np.zeros((*grouped.shape[:3], count), np.float32)
    for head in range(layer.num_kv_heads):
        rows = np.ascontiguousarray(grouped[:, head]).reshape(-1, width)
        scores = np.full((rows.shape[0], count), -np.inf, np.float32)
        for span in spans:
            scores[:, span] = rows @ key.slots(head, span).T
        scores = np.where(visible[:, None], scores.reshape(samples * queries, -1, count), np.float32(-np.inf))
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        weights[:, head] = raised / raised.sum(-1, keepdims=True)
        flat = weights[:, head].reshape(-1, count)
        for span in spans:
            mixed[:, head] += (flat[:, span] @ value.slots(head, span)).reshape(samples * queries, -1, width)
    step.note(f"{name}.weights", weights.reshape(samples, queries, heads, count))
    made: Floats = mixed.reshape(samples, queries, heads * width)
    return made
