"""Which constant of the graph plays which role: the walk from the two heads back to the input.

Everything is read backwards from the signature's outputs, because a value has one producer and many readers. The
residual stream is taken apart layer by layer::

    logits     ← soft cap ← lm_head         ┐
    projected  ← post_projection            ┴ final_norm ← stream
    stream     ← [layer_scalar ·] (h + post_ffw_norm(down(gelu(gate(x)) · up(x)))),  x = pre_ffw_norm(h)
    h          ← stream + post_attention_norm(o(attention(q(pre_attention_norm(stream)))))
    stream of the first layer ← pre_projection ← activations

What is not where it must be is an error that names the role; what is left over is an error that names the constant
and its reader. Names play no part in this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mtp_extract.errors import NoDrafterError, RoleError, UnsupportedError, escape
from mtp_extract.graph.attention import Attention, read_attention
from mtp_extract.graph.blocks import Blocks, count_layers, in_order
from mtp_extract.graph.flat import FlatGraph, Value
from mtp_extract.graph.ledger import FoundRole, SetAside
from mtp_extract.graph.patterns import strip
from mtp_extract.graph.probe import cache_slots, measure_windows
from mtp_extract.litertlm.tflite import Tensor, TensorType

ACTIVATIONS = "activations"
LOGITS = "logits"
PROJECTED = "projected_activations"


@dataclass(frozen=True)
class Layer:
    """What the graph says of one layer, beyond its weights. Cache names are those of the signature's inputs."""

    key: str
    value: str
    kv_heads: int
    head_dim: int
    heads: int
    window: int | None
    masks: tuple[str, ...]
    inverse_frequencies: np.ndarray
    frequency_rounding: np.ndarray
    query: Value = field(repr=False)  # normalized; the attention lies between it and ``mixed``
    mixed: Value = field(repr=False)  # what the o projection reads


@dataclass(frozen=True)
class Walk:
    """All that the graph says."""

    roles: tuple[FoundRole, ...]
    layers: tuple[Layer, ...]
    aside: tuple[SetAside, ...]
    soft_cap: float | None
    rms_norm_eps: float
    hidden_activation: str
    caches: MappingProxyType[str, Tensor]


def walk(graph: FlatGraph) -> Walk:
    """Find every role in ``graph``.

    Raises:
        NoDrafterError: the signature has not the inputs and outputs of a drafter.
        RoleError: a role is missing, or a constant is left over.
        UnsupportedError: the graph computes something a checkpoint cannot express.
    """
    return _Walker(graph).run()


class _Walker(Blocks):
    def run(self) -> Walk:
        graph = self.graph
        wanted = (("output", LOGITS, graph.outputs), ("output", PROJECTED, graph.outputs))
        for kind, name, names in (*wanted, ("input", ACTIVATIONS, graph.inputs)):
            if name not in names:
                found = ", ".join(map(escape, names)) or "none"
                raise NoDrafterError(f"The signature has no {kind} {name!r} (it has: {found}): this is not a drafter.")
        self.refuse_rotation()
        cap, head = self.lm_head(graph.outputs[LOGITS])
        post = self.linear("post_projection", graph.outputs[PROJECTED], "whose output is projected_activations")
        norm = self.norm("final_norm", head, "which feeds both heads")
        if strip(post) is not strip(head):
            raise RoleError(
                "final_norm: lm_head and post_projection do not read the same normalized state, as a drafter's do."
            )
        self.count = count = count_layers(graph)
        attentions: list[Attention] = []
        stream = norm.x
        for index in reversed(range(count)):
            name = f"layers.{index}"
            attention, stream, _ = self.layer(name, self.layer_scalar(name, stream), read_attention)
            attentions.append(attention)
        source = self.linear("pre_projection", stream, "which is fed by activations")
        self.require_input("pre_projection", source, ACTIVATIONS)
        attentions.reverse()
        self.account()
        windows = measure_windows(
            graph,
            [a.mixed for a in attentions],
            [a.query for a in attentions],
            [str(a.value.input_name) for a in attentions],
        )
        slots = cache_slots(graph)
        layers = [
            self._layer_facts(f"layers.{index}", attention, window, slots)
            for index, (attention, window) in enumerate(zip(attentions, windows, strict=True))
        ]
        eps = self.one_epsilon()
        if len(self.hidden_activations) > 1:
            raise UnsupportedError(f"The layers use different activations: {sorted(self.hidden_activations)}.")
        return Walk(
            tuple(in_order(self.roles)),
            tuple(layers),
            tuple(self.aside_list()),
            cap,
            eps,
            self.hidden_activations.pop() if self.hidden_activations else "gelu_pytorch_tanh",
            self._caches(),
        )

    def _layer_facts(self, name: str, attention: Attention, window: int | None, slots: int) -> Layer:
        head_dim = attention.q_norm.size
        width = next(r.shape[0] for r in self.roles if r.role == f"{name}.q_proj")
        key, value = attention.key.tensor, attention.value.tensor
        kv_heads = key.elements // max(head_dim * slots, 1)
        fits = sorted((1, kv_heads, slots, head_dim))
        if not head_dim or width % head_dim or sorted(key.shape) != fits or sorted(value.shape) != fits:
            raise RoleError(
                f"{name}: q projection of width {width}, q norm of {head_dim}, key cache {list(key.shape)} and value "
                f"cache {list(value.shape)} of {slots} slots do not fit together."
            )
        if not kv_heads or (width // head_dim) % kv_heads:
            raise RoleError(f"{name}: {width // head_dim} query heads do not share {kv_heads} KV heads.")
        assert attention.key.input_name is not None and attention.value.input_name is not None
        return Layer(
            attention.key.input_name,
            attention.value.input_name,
            kv_heads,
            head_dim,
            width // head_dim,
            window,
            attention.masks,
            attention.inverse_frequencies,
            attention.frequency_rounding,
            attention.query,
            self.operand(f"{name}.o_proj"),
        )

    def operand(self, role: str) -> Value:
        """What the matrix of ``role`` is multiplied with."""
        result = next(r.result for r in self.roles if r.role == role)
        assert result is not None and result.producer is not None
        return result.producer.operand(0)

    def _caches(self) -> MappingProxyType[str, Tensor]:
        return MappingProxyType(
            {
                name: value.tensors[-1]
                for name, value in sorted(self.graph.inputs.items())
                if len(value.tensor.shape) == 4
                and value.tensor.type not in (TensorType.BOOL, TensorType.INT32, TensorType.INT64)
            }
        )
