"""Which constant of a base's graphs plays which role: decoder and embedders, backwards from their results.

::

    logits       ← soft cap ← lm_head ← final_norm ← stream
    stream       ← [layer_scalar ·] (h + post_per_layer_norm(per_layer_projection(gelu(per_layer_gate(h)) · ple[i])))
    h            ← feed-forward and attention, as in the drafter
    stream of the first layer ← embeddings
    ple          ← (projected + per_layer_embeddings) / √2
    projected    ← per_layer_projection_norm(per_layer_model_projection(embeddings) / √width), the root folded or not
    caches       ← k_norm(k_proj(x)) with RoPE, v_proj(x) normed;  x is the normed stream of the layer that owns them

A prefill gives caches and no logits: it ends with the K and V of the last layer that owns any, so that layer has no
more roles there. Norms, gates and the order of layers are read; what an attention computes between its projections
(RoPE, window, mask) is not looked at: weights are found here, not proven to be used alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph.attention import EXPONENTIALS, read_writing_attention, writes_cache
from mtp_extract.graph.blocks import Blocks, count_layers, in_order, is_matrix
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.graph.ledger import FoundRole, SetAside, activation_of, described, not_found
from mtp_extract.graph.patterns import (
    Aside,
    RmsNorm,
    constant_under,
    match_rms_norm,
    split_scalar,
    strip,
    walk_to_norms,
    without_factors,
)

EMBEDDINGS = "embeddings"
PER_LAYER = "per_layer_embeddings"
LOGITS = "logits"
ACTIVATIONS = "activations"
_KEYS, _VALUES = "kv_cache_k_", "kv_cache_v_"

_SLICES = frozenset({"SLICE", "STRIDED_SLICE"})
# Factors such as √width are rounded to the type that the exporter computes them in, bfloat16 at the coarsest.
_RELATIVE = 4e-3
_MOST_TABLES = 1024
_NOT_LOOKED_AT = "a number between the roles, which is not looked at"


@dataclass(frozen=True)
class BaseWalk:
    """What the graph of one signature says of the base's weights."""

    roles: tuple[FoundRole, ...]
    aside: tuple[SetAside, ...]
    layers: int  # it computes, the one that only fills its caches included
    width: int  # of the residual stream
    soft_cap: float | None  # of the logits; None without one, or without logits
    rms_norm_eps: float | None  # of every norm; None in an embedder


def walk_base(graph: FlatGraph) -> BaseWalk:
    """Find every role in the graph of a decoder's signature: decode, verify or a prefill.

    Raises:
        RoleError: a role is missing, or a constant is left over.
        UnsupportedError: the graph computes something that Gemma 4 does not.
    """
    return _Walker(graph).run()


class _Walker(Blocks):
    def run(self) -> BaseWalk:
        graph = self.graph
        if EMBEDDINGS not in graph.inputs:
            names = ", ".join(map(escape, graph.inputs)) or "none"
            raise RoleError(
                f"The signature has no input {EMBEDDINGS!r} (it has: {names}): this is no decoder of a base."
            )
        self.refuse_rotation()
        cap: float | None = None
        normed: dict[int, int] = {}
        writers: dict[int, tuple[Node, Node]] = {}
        readers: dict[int, set[int]] = {}
        if LOGITS in graph.outputs:
            cap, head = self.lm_head(graph.outputs[LOGITS])
            stream = self.norm("final_norm", head, "which feeds the head").x
            if ACTIVATIONS in graph.outputs:
                self.require_same("activations", graph.outputs[ACTIVATIONS], head)
            self.count = count_layers(graph)
        else:
            top = self._unread_caches()
            self.count = count_layers(graph)
            name = f"layers.{self.count}"
            fed = self._matrix_input(self._key(top[0], name)[0].x, f"{name}.k_proj")
            stream = self.norm(f"{name}.pre_attention_norm", fed, "which feeds the K projection").x
            normed[id(strip(fed))] = self.count
            writers[id(top[0])] = top
            readers[id(top[0])] = {self.count}
        sources: list[tuple[int, Value]] = []
        for index in reversed(range(self.count)):
            name = f"layers.{index}"
            out = self.layer_scalar(name, stream)
            if PER_LAYER in graph.inputs:
                out = self._per_layer(name, out, sources, index)
            attention, stream, own = self.layer(name, out, read_writing_attention)
            normed[id(own)] = index
            # Layers that share a K share its V.
            if writers.setdefault(id(attention.key), (attention.key, attention.value))[1] is not attention.value:
                raise RoleError(f"{name}: it reads the K of one layer and the V of another.")
            readers.setdefault(id(attention.key), set()).add(index)
        self.require_input("layers.0", stream, EMBEDDINGS)
        if sources:
            self._per_layer_inputs(sources)
        for key, value in writers.values():
            self._owner(key, value, normed, readers[id(key)])
        self.account(_NOT_LOOKED_AT)
        return BaseWalk(
            tuple(in_order(self.roles)),
            tuple(self.aside_list()),
            self.count + (LOGITS not in graph.outputs),
            graph.inputs[EMBEDDINGS].tensor.shape[-1],
            cap,
            self.one_epsilon(),
        )

    def _per_layer(self, name: str, out: Value, sources: list[tuple[int, Value]], index: int) -> Value:
        """The branch that adds the layer's own embedding of the token; returns the stream before it."""
        role = f"{name}.post_per_layer_norm"
        norm, middle = self.residual(role, out, "on the branch of the layer's own embedding")
        product = self.linear(f"{name}.per_layer_projection", norm.x, f"which feeds {role}")
        gate, own = self.gated(
            f"{name}.per_layer_gate",
            f"{name}'s own embedding",
            product,
            f"{name}.per_layer_projection",
            lambda value, node: is_matrix(node) or node.kind in _SLICES,
        )
        gate_in = self.linear(f"{name}.per_layer_gate", gate, "whose output goes through GELU")
        self.require_same(f"{name}.per_layer_gate", gate_in, middle)
        sources.append((index, own))
        return strip(middle)

    def _per_layer_inputs(self, sources: list[tuple[int, Value]]) -> None:
        """What the layers' slices are of: the projection of the embeddings plus the per-layer embeddings."""
        taken: dict[int, Value] = {}
        for index, own in sources:
            node = own.producer
            source = strip(node.operand(0)) if node is not None and node.kind in _SLICES else None
            if node is None or source is None:
                raise not_found(f"layers.{index}", "a slice of the per-layer embeddings", own)
            self._require_slice(node, index)
            taken[id(source)] = source
        if len(taken) != 1:
            raise RoleError(f"The layers take their own embeddings from {len(taken)} values; expected one.")
        root = next(iter(taken.values()))
        inner = self._scaled(root, 2**-0.5, "the per-layer embeddings")
        why = "whose result meets per_layer_embeddings"
        norm, other = self.residual("per_layer_projection_norm", inner, why, "an addition after it")
        if strip(other).input_name != PER_LAYER:
            raise not_found("per_layer_projection_norm", f"its result to be added to the input {PER_LAYER!r}", other)
        factor, role = self.graph.inputs[EMBEDDINGS].tensor.shape[-1] ** -0.5, "per_layer_model_projection"
        matrix = strip(norm.x).producer
        if matrix is not None and is_matrix(matrix):
            # The exporter has multiplied the weight, or its scales, by the factor.
            source = self.linear(role, norm.x, "whose output, the factor in it, is normed per layer", factor)
        else:
            projected = self._scaled(norm.x, factor, role)
            source = self.linear(role, projected, "whose output is normed per layer")
        self.require_input(role, source, EMBEDDINGS)

    def _require_slice(self, node: Node, index: int) -> None:
        """Whether ``node`` takes the part of layer ``index``: the parts lie one after the other."""
        shape, part = node.operand(0).tensor.shape, node.outputs[0].tensor.shape
        starts = constant_under(node.operand(1))
        begin = self.graph.integers(starts).tolist() if starts is not None else []
        if len(begin) != len(shape) or len(shape) < 2 or not part or any(begin[:-2]):
            raise RoleError(f"layers.{index}: {node.op.label} is no slice of the per-layer embeddings.")
        at, own = begin[-2] * shape[-1] + begin[-1], part[-1]
        if at != index * own:
            raise RoleError(
                f"layers.{index}: expected the part of the per-layer embeddings at {index * own}, "
                f"{node.op.label} takes that at {at}."
            )

    def _scaled(self, value: Value, factor: float, what: str) -> Value:
        """``value`` before a factor that must be there."""
        node = strip(value).producer
        scaled = split_scalar(self.graph, node) if node is not None else None
        if scaled is None or not math.isclose(scaled[2], factor, rel_tol=_RELATIVE):
            found = f"{scaled[2]:g}" if scaled is not None else described(strip(value))
            raise RoleError(f"{what}: expected the factor {factor:g} after it, found {found}.")
        return scaled[0]

    def _unread_caches(self) -> tuple[Node, Node]:
        """In a prefill: the ops that write the K and V which no attention of the graph reads."""
        below: set[int] = set()
        for node in self.graph.nodes:
            if node.kind in EXPONENTIALS:
                below.update(id(value) for value in ancestors(node.outputs[0]))
        found = []
        for name, output in self.graph.outputs.items():
            writer = strip(output).producer
            if name.startswith(_KEYS) and writer is not None and id(strip(output)) not in below:
                found.append((name, writer))
        names = ", ".join(escape(name) for name, _ in found) or "none"
        if len(found) != 1 or not writes_cache(found[0][1]):
            raise RoleError(
                f"The signature gives no logits; expected one K cache that DYNAMIC_UPDATE_SLICE writes and no layer "
                f"reads, that of the last layer that owns one; found {names}."
            )
        name, key = found[0]
        partner = self.graph.outputs.get(_VALUES + name.removeprefix(_KEYS))
        value = strip(partner).producer if partner is not None else None
        if value is None or not writes_cache(value):
            raise RoleError(f"{escape(name)}: expected a V cache of the same number that DYNAMIC_UPDATE_SLICE writes.")
        return key, value

    def _key(self, writer: Node, name: str) -> tuple[RmsNorm, Value]:
        """The norm before the RoPE of the K that ``writer`` writes, and its result."""
        norms, _, _ = walk_to_norms(self.graph, [writer.operand(1)], is_matrix)
        if len(norms) != 1:
            raise RoleError(f"{name}.k_norm: expected one RMSNorm before {writer.op.label}, found {len(norms)}.")
        return norms[0]

    def _matrix_input(self, value: Value, role: str) -> Value:
        """What the matrix behind ``value`` reads."""
        node = strip(value).producer
        if node is None or not is_matrix(node):
            raise not_found(role, "a FULLY_CONNECTED op", value)
        return node.operand(0)

    def _owner(self, key: Node, value: Node, normed: dict[int, int], readers: set[int]) -> None:
        """The roles of the layer that owns the caches which ``key`` and ``value`` write, and ``readers`` read."""
        cache = escape(strip(key.operand(0)).input_name)
        norm, result = self._key(key, cache)
        index = normed.get(id(strip(self._matrix_input(norm.x, f"k_proj of {cache}"))))
        if index is None:
            raise RoleError(f"{cache}: its K is computed from the normed stream of no layer.")
        name = f"layers.{index}"
        if index != min(readers):
            raise RoleError(f"{name}: its K goes to {cache}, whose first reader is layers.{min(readers)}.")
        self.take_norm(f"{name}.k_norm", norm, "between the K projection and RoPE", result)
        k_in = self.linear(f"{name}.k_proj", norm.x, f"which feeds {name}.k_norm")
        v_norm = match_rms_norm(self.graph, value.operand(1))
        if v_norm is None:
            raise not_found(f"{name}.v_proj", "an RMSNorm after it", value.operand(1))
        self.eps.add(float(f"{v_norm.eps:.6g}"))
        self.set_aside(v_norm.aside)
        if v_norm.weight is not None:
            if any(self.graph.floats(v_norm.weight) + v_norm.offset != 1):
                raise UnsupportedError(f"{name}: its V norm has a weight, {v_norm.weight.label}; Gemma 4's has none.")
            self.set_aside((Aside(v_norm.weight, "ones of the V norm, which has no weight"),))
        if strip(v_norm.x) is strip(norm.x):
            raise UnsupportedError(f"{name}: K and V come from one projection, which this release cannot read.")
        v_in = self.linear(f"{name}.v_proj", v_norm.x, f"whose normed output goes to {escape(_VALUES)}…")
        self.require_same(f"{name}.v_proj", v_in, k_in)


def walk_table(graph: FlatGraph, role: str) -> BaseWalk:
    """Find the table of an embedder: one lookup, or one a layer; ``role`` is what the table is called.

    Several tables become roles ``role.0``, ``role.1``, … in the order in which their rows are joined.

    Raises:
        RoleError: the result is no lookup times the root of its width.
    """
    return _Table(graph).run(role)


class _Table(Blocks):
    def run(self, role: str) -> BaseWalk:
        if len(self.graph.outputs) != 1:
            raise RoleError(f"{role}: expected one output, found {len(self.graph.outputs)}.")
        name, output = next(iter(self.graph.outputs.items()))
        tables: list[tuple[Node, float]] = []
        self._collect(output, 1.0, tables, role)
        tokens = tables[0][0].operand(0).tensor.elements
        if len(tables) > 1 and tokens != 1:
            raise UnsupportedError(f"{role}: {len(tables)} tables, looked up for {tokens} tokens at once.")
        shape = output.tensor.shape
        width = shape[-1]
        for index, (node, factor) in enumerate(tables):
            if not math.isclose(factor, width**0.5, rel_tol=_RELATIVE):
                raise RoleError(
                    f"{role}: expected the factor {width**0.5:g}, the root of the width of {escape(name)}, after "
                    f"{node.op.label}, found {factor:g}."
                )
            self._lookup(f"{role}.{index}" if len(tables) > 1 else role, node)
        self.account(_NOT_LOOKED_AT)
        return BaseWalk(tuple(self.roles), tuple(self.aside_list()), 0, width, None, None)

    def _collect(self, value: Value, factor: float, tables: list[tuple[Node, float]], role: str) -> None:
        """The lookups that ``value`` joins, each with the number its rows are multiplied by."""
        root, number, _ = without_factors(self.graph, value)
        node, factor = root.producer, factor * number
        if node is not None and node.kind in ("CONCATENATION", "PACK") and len(tables) < _MOST_TABLES:
            for position in range(len(node.inputs)):
                self._collect(node.operand(position), factor, tables, role)
        elif node is not None and node.kind == "EMBEDDING_LOOKUP" and node.binary:
            tables.append((node, factor))
        else:
            raise not_found(role, "an EMBEDDING_LOOKUP", root)

    def _lookup(self, role: str, node: Node) -> None:
        table = constant_under(node.operand(1))
        if table is None or len(table.tensor.shape) != 2:
            raise RoleError(f"{role}: {node.op.label} looks up no table [vocabulary, width] of constants.")
        result = node.outputs[0]
        quantized = activation_of(node.operand(0)), activation_of(result)
        why = f"the table of {node.op.label}"
        self.found(FoundRole(role, table.tensor, table.tensor.shape, 1.0, why, (), *quantized, result=result))
