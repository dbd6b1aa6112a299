"""Find which constant of a drafter's graph plays which role, from its two outputs to its input.

::

    logits     ← soft cap ← lm_head         ┐
    projected  ← post_projection            ┴ final_norm ← stream
    stream     ← [layer_scalar ·] (h + post_ffw_norm(down(gelu(gate(x)) · up(x)))),  x = pre_ffw_norm(h)
    h          ← stream + post_attention_norm(o(attention(q(pre_attention_norm(stream)))))
    stream of the first layer ← pre_projection ← activations

Equal functions are one object, so ``is`` tells whether two blocks read the same. A block that is not where it must be
is an error that names its role; a constant that is left over is an error that names the constant and its reader. Names
of tensors play no part in this.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mtp_extract.errors import MtpExtractError, NoDrafterError, RoleError, UnsupportedError, escape
from mtp_extract.graph.blocks import Blocks
from mtp_extract.graph.call import convert_errors, read_activation_scale
from mtp_extract.graph.evaluate import find_input_names
from mtp_extract.graph.expressions import Expr
from mtp_extract.graph.flat import FlatGraph, Value, walk_ancestors
from mtp_extract.graph.forms import Attention, ReadGraph, read_heads_and_width
from mtp_extract.graph.kinds import require_kind
from mtp_extract.graph.masks import Masks
from mtp_extract.graph.positions import find_caches, is_mask
from mtp_extract.graph.reading import read_graph
from mtp_extract.graph.roles import FoundRole, OtherConstant, list_other_constants, sort_roles
from mtp_extract.graph.rotation import Rotation, read_rotation
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor

ACTIVATIONS = "activations"
LOGITS = "logits"
PROJECTED = "projected_activations"


@dataclass(frozen=True)
class Layer:
    """The geometry of one layer, read from its attention."""

    key: str  # the input that holds K
    value: str  # the input that holds V
    kv_heads: int
    head_dim: int
    heads: int
    window: int | None  # how many slots it sees; None without a window
    masks: tuple[str, ...]  # the mask inputs that decide what it sees
    inverse_frequencies: np.ndarray  # ``[head_dim / 2]``, in radians per position
    frequency_rounding: np.ndarray  # by how much each may be off
    attention: Attention = field(repr=False, compare=False)
    rotation: Rotation = field(repr=False, compare=False)
    query_factor: float  # query = query_factor · norm(q)


@dataclass(frozen=True)
class DrafterStructure:
    """What the graph says of the drafter: roles of its constants, and geometry."""

    roles: tuple[FoundRole, ...]
    layers: tuple[Layer, ...]
    other_constants: tuple[OtherConstant, ...]
    soft_cap: float | None
    rms_norm_eps: float
    hidden_activation: str
    caches: Mapping[str, Tensor]
    rounded: tuple[Value, ...]  # as in ReadGraph
    reading: ReadGraph = field(repr=False, compare=False)


@convert_errors("The graph")
def read_drafter_graph(graph: FlatGraph, *, strict: bool = True) -> ReadGraph:
    """Read what a drafter's two outputs depend on, with :func:`~mtp_extract.graph.reading.read_graph`.

    A signature that is not a drafter's is not read at all: the result has the error as its ``refusal``.
    """
    try:
        _check_signature(graph)
    except MtpExtractError as refusal:
        return ReadGraph(graph, strict, refusal=refusal)
    return read_graph(graph, (LOGITS, PROJECTED), strict=strict)


def _check_signature(graph: FlatGraph) -> None:
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
        if tensor.type not in FLOAT_TYPES and read_activation_scale(tensor) is None:
            raise UnsupportedError(f"The {kind} {tensor.label} should hold floats, or codes with a scale.")


def read_drafter_structure(graph: FlatGraph) -> DrafterStructure:
    """Find the constant of every role in ``graph``, and the geometry of every layer.

    Raises:
        NoDrafterError: the signature lacks an input or output of a drafter.
        RoleError: a role is missing, or a constant is left over.
        UnsupportedError: the graph computes something a checkpoint cannot express.
    """
    return DrafterReader(read_drafter_graph(graph)).read_structure()


class DrafterReader(Blocks):
    """Finds the roles of a drafter's graph; after an error, ``roles`` has those that were found before it."""

    def __init__(self, reading: ReadGraph) -> None:
        super().__init__(reading)
        self.mixed_by_layer: dict[str, Expr] = {}  # name of a layer → the expression that its o_proj reads
        self.soft_cap: float | None = None
        self.has_head = False

    @convert_errors("The graph")
    def read_structure(self) -> DrafterStructure:
        """Do the work of :func:`read_drafter_structure`."""
        graph = self.graph
        reading = self.reading.require_all()
        soft_cap, head = self.take_lm_head(*self.read_output(LOGITS))
        if self._take_stream() is not head:
            self.matched = head
            raise RoleError("final_norm: lm_head and post_projection do not read the same normalized state.")

        roles = sort_roles(self.roles)
        masks = Masks(graph, reading.positions)
        names = (f"layers.{index}" for index in range(len(self.mixed_by_layer)))
        layers = tuple(self._read_layer(name, self.mixed_by_layer[name], masks) for name in names)
        self.matched = None

        caches = {name: value.tensors[-1] for name, value in find_caches(graph.inputs).items()}
        return DrafterStructure(
            roles,
            layers,
            list_other_constants(graph, roles),
            soft_cap,
            self.require_one_epsilon(),
            self.require_one_activation(),
            MappingProxyType(caches),
            tuple(reading.rounded),
            reading,
        )

    @convert_errors("The graph")
    def read_outside_attentions(self) -> None:
        """Take the roles outside attentions, of a graph that was not read strictly; ``has_head`` says whether the head
        is among them.

        Raises:
            RoleError, UnsupportedError: the stream cannot be followed from the projected state to the activations.
        """
        self.reading.require_all()
        self._take_stream()
        with suppress(RoleError):
            self.soft_cap, _ = self.take_lm_head(*self.read_output(LOGITS))
            self.has_head = True

    def _take_stream(self) -> Expr:
        """Take all roles but the head's, and return what the post projection reads."""
        head = self.take_matrix("post_projection", *self.read_output(PROJECTED))
        stream, factor = self.take_norm("final_norm", head)
        for index in reversed(range(self.count_layers(stream, sums=2))):
            self.take_layer_scalar(f"layers.{index}", stream, factor)
            _, stream, factor = self.take_attention(f"layers.{index}", stream, self._find_query)
        self.require_input("pre_projection", self.take_matrix("pre_projection", stream, factor), ACTIVATIONS)
        return head

    def _find_query(self, name: str, mixed: Expr) -> Expr:
        """Return the normed query of the attention whose result is ``mixed``."""
        self.matched = mixed
        attention = self.reading.attentions.get(mixed)
        if attention is None and mixed.kind == "unread":
            norms = self.find_norms()
            queries = {
                norms[id(value)] for value in walk_ancestors(mixed.parts[0], frozenset(norms)) if id(value) in norms
            }
            if len(queries) != 1:
                raise RoleError(f"{name}.q_norm: expected one norm of a query before its scores, found {len(queries)}.")
            return queries.pop()
        if attention is None:
            raise RoleError(f"{name}.o_proj: expected it to read one attention, its heads in order.")
        self.mixed_by_layer[name] = mixed
        return attention.scores.rotated.query

    def _read_layer(self, name: str, mixed: Expr, masks: Masks) -> Layer:
        self.matched = mixed
        attention = self.reading.attentions[mixed]
        scores = attention.scores
        query = scores.rotated.query
        norm = self.match_norm(query)
        kv_heads, width = read_heads_and_width(self.graph.inputs[scores.key].tensor.shape, scores.axes)
        if norm is None or width != norm.width or query.size % width:
            raise RoleError(f"{name}: its query and its caches do not fit together.")
        heads = query.size // width
        rotation = read_rotation(name, scores, heads, kv_heads, self.reading.positions)
        frequencies, rounding = rotation.measure_frequencies()
        inputs = find_input_names(scores.tree.values)
        return Layer(
            scores.key,
            attention.value,
            kv_heads,
            width,
            heads,
            masks.count_visible_slots(attention),
            tuple(sorted(filter(is_mask, inputs))),
            frequencies,
            rounding,
            attention,
            rotation,
            self.find_scale(query),
        )
