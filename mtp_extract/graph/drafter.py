"""Which constant plays which role: the drafter's own expression, taken apart from its outputs to its input.

::

    logits     ← soft cap ← lm_head         ┐
    projected  ← post_projection            ┴ final_norm ← stream
    stream     ← [layer_scalar ·] (h + post_ffw_norm(down(gelu(gate(x)) · up(x)))),  x = pre_ffw_norm(h)
    h          ← stream + post_attention_norm(o(attention(q(pre_attention_norm(stream)))))
    stream of the first layer ← pre_projection ← activations

Equal functions are one expression, so "reads the same" is ``is``. What is not where it must be is an error that names
the role; what is left over is an error that names the constant and its reader. Names play no part in this.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mtp_extract.errors import NoDrafterError, RoleError, UnsupportedError, escape
from mtp_extract.graph.blocks import Blocks
from mtp_extract.graph.call import activation_scale, computing
from mtp_extract.graph.expressions import Expr, Term
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.graph.forms import Attention, heads_and_width, leaves_of
from mtp_extract.graph.kinds import require_kind
from mtp_extract.graph.masks import Masks
from mtp_extract.graph.positions import caches_of, is_mask
from mtp_extract.graph.reading import Reading
from mtp_extract.graph.roles import FoundRole, OtherConstant, in_order, set_aside
from mtp_extract.graph.rotation import Rotation, rotation_of
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor

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
    masks: tuple[str, ...]  # the mask inputs that decide what it sees
    inverse_frequencies: np.ndarray
    frequency_rounding: np.ndarray
    attention: Attention = field(repr=False, compare=False)
    rotation: Rotation = field(repr=False, compare=False)
    query_factor: float  # what a query is times the result of its norm


@dataclass(frozen=True)
class Walk:
    """All that the graph says."""

    roles: tuple[FoundRole, ...]
    layers: tuple[Layer, ...]
    aside: tuple[OtherConstant, ...]
    soft_cap: float | None
    rms_norm_eps: float
    hidden_activation: str
    caches: Mapping[str, Tensor]
    rounded: tuple[Value, ...]  # as in Reading
    reading: Reading = field(repr=False, compare=False)


def walk(graph: FlatGraph) -> Walk:
    """Find every role in ``graph``.

    Raises:
        NoDrafterError: the signature has not the inputs and outputs of a drafter.
        RoleError: a role is missing, or a constant is left over.
        UnsupportedError: the graph computes something a checkpoint cannot express.
    """
    return DrafterWalk(graph).walk()


class DrafterWalk(Blocks):
    """A drafter's graph, being walked: where that ends in a refusal, ``reading`` and ``roles`` hold all before it."""

    def __init__(self, graph: FlatGraph, *, whole: bool = True) -> None:
        super().__init__(Reading(graph, whole=whole))
        self.attentions: list[Attention] = []
        self.soft_cap: float | None = None
        self.has_head = False

    def _check_signature(self) -> None:
        graph = self.graph
        require_kind(graph)
        for kind, name, names in (
            ("output", LOGITS, graph.outputs),
            ("output", PROJECTED, graph.outputs),
            ("input", ACTIVATIONS, graph.inputs),
        ):
            if name not in names:
                listed = ", ".join(map(escape, names)) or "none"
                raise NoDrafterError(f"The signature has no {kind} {name!r} (it has: {listed}): this is not a drafter.")
            tensor = names[name].tensor
            if tensor.type not in FLOAT_TYPES and activation_scale(tensor) is None:
                raise UnsupportedError(f"The {kind} {tensor.label} should hold floats, or codes with a scale.")

    @computing("The graph")
    def walk(self) -> Walk:
        """As :func:`walk`."""
        self._check_signature()
        graph = self.graph
        reading = self.reading.read_all((LOGITS, PROJECTED))
        soft_cap, head = self.lm_head(*self.output(LOGITS))
        if self._walk_stream() is not head:
            raise RoleError("final_norm: lm_head and post_projection do not read the same normalized state.")
        roles = in_order(self.roles)
        masks = Masks(graph, reading.inside.positions)
        return Walk(
            roles,
            tuple(
                self._facts(f"layers.{i}", attention, masks) for i, attention in enumerate(reversed(self.attentions))
            ),
            set_aside(graph, roles),
            soft_cap,
            self.one_epsilon(),
            self.one_activation(),
            MappingProxyType({name: value.tensors[-1] for name, value in caches_of(graph.inputs).items()}),
            tuple(reading.rounded),
            reading,
        )

    @computing("The graph")
    def walk_outside(self) -> None:
        """Take the roles outside of attentions, where these cannot be read (``whole`` is False): the head by itself.

        Raises:
            RoleError, UnsupportedError: the stream cannot be followed from the projected state to the activations.
        """
        self._check_signature()
        self.reading.read_all((LOGITS, PROJECTED))
        self._walk_stream()
        with suppress(RoleError):
            self.soft_cap, _ = self.lm_head(*self.output(LOGITS))
            self.has_head = True

    def _walk_stream(self) -> Expr:
        """Take all roles but the head's; what the post projection reads."""
        head = self.linear("post_projection", *self.output(PROJECTED))
        stream, factor = self.norm("final_norm", head)
        for index in reversed(range(self.count_layers(stream, sums=2))):
            self.layer_scalar(f"layers.{index}", stream, factor)
            _, stream, factor = self.attention(f"layers.{index}", stream, self._query)
        self.require_input("pre_projection", self.linear("pre_projection", stream, factor), ACTIVATIONS)
        return head

    def _nearest_norm(self, name: str, mixed: Expr) -> Expr:
        """The one norm before an attention that was not read."""
        terms = {key: form for key, form in self.reading.forms.items() if isinstance(form, Term)}
        origins = {key: self.expressions.origin(term.expr, term.ids)[0] for key, term in terms.items()}
        norms = {key: expr for key, expr in origins.items() if self.match(expr) is not None}
        before = {norms[id(value)] for value in ancestors(mixed.parts[0], frozenset(norms)) if id(value) in norms}
        if len(before) != 1:
            raise RoleError(f"{name}.q_norm: expected one norm of a query before its scores, found {len(before)}.")
        return before.pop()

    def _query(self, name: str, mixed: Expr) -> Expr:
        """The normed query of the attention that ``mixed`` is of, which is noted."""
        attention = self.reading.inside.attentions.get(mixed)
        if attention is None and mixed.kind == "unread":
            return self._nearest_norm(name, mixed)
        if attention is None:
            raise RoleError(f"{name}.o_proj: expected it to read one attention, its heads in order.")
        self.attentions.append(attention)
        return attention.scores.rotated.query

    def _facts(self, name: str, attention: Attention, masks: Masks) -> Layer:
        scores = attention.scores
        graph = self.graph
        positions = self.reading.inside.positions
        query, norm = scores.rotated.query, self.match(scores.rotated.query)
        kv_heads, width = heads_and_width(graph.inputs[scores.key].tensor.shape, scores.axes)
        if norm is None or width != norm.width or query.size % width:
            raise RoleError(f"{name}: its query and its caches do not fit together.")
        heads = query.size // width
        rotation = rotation_of(name, scores, heads, kv_heads, positions)
        frequencies, rounding = rotation.measured()
        inputs = {v.input_name for leaf in leaves_of(scores.tree) for v in ancestors(leaf) if v.input_name}
        return Layer(
            scores.key,
            attention.value,
            kv_heads,
            width,
            heads,
            masks.window(attention),
            tuple(sorted(filter(is_mask, inputs))),
            frequencies,
            rounding,
            attention,
            rotation,
            self.scale_of(query),
        )
