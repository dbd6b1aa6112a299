"""Find which constant of a base's graphs plays which role, in decoder and embedders, from results to inputs.

::

    logits       ← soft cap ← lm_head ← final_norm ← stream
    stream       ← [layer_scalar ·] (h + post_per_layer_norm(per_layer_projection(gelu(per_layer_gate(h)) · ple[i])))
    h            ← feed-forward and attention, as in the drafter
    stream of the first layer ← embeddings
    ple          ← (projected + per_layer_embeddings) / √2
    projected    ← per_layer_projection_norm(per_layer_model_projection(embeddings) / √width)
    caches       ← k_norm(k_proj(x)) with RoPE, v_proj(x) normed;  x is the normed stream of the layer that owns them

Three roots belong to the per-layer embeddings: √P on the table's rows, 1/√width on the result of the model projection,
and 1/√2 on their sum. Exporters put √P into the embedder, the decoder or the table's scales; the graph tells where. The
other two are followed by a norm, which cancels any factor: exporters may leave them out or fold them into a matrix's
scales, and the graph cannot tell. Then :attr:`FoundRole.other_factors` lists what else the factor may be.

This is read from the signature that computes logits of the fewest tokens. What an attention computes between its
projections (RoPE, window, mask) is not checked: weights are found here, their use is not proven. Other signatures share
the constants, so there a weight is recognized by its place in the file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from mtp_extract.architecture.roles import GEMMA4, list_roles
from mtp_extract.errors import RoleError, UnsupportedError, escape, list_few
from mtp_extract.graph.blocks import Blocks
from mtp_extract.graph.call import CONVERSIONS, convert_errors
from mtp_extract.graph.expressions import Expr, Term
from mtp_extract.graph.flat import FlatGraph, Node, Value, find_source, walk_ancestors
from mtp_extract.graph.forms import ReadGraph
from mtp_extract.graph.reading import read_graph
from mtp_extract.graph.roles import FoundRole, OtherConstant, list_other_constants, read_activation, sort_roles
from mtp_extract.litertlm.storage import NUMBER_TYPES
from mtp_extract.litertlm.tflite import Signature, Tensor, TfliteModel

EMBEDDINGS = "embeddings"
PER_LAYER = "per_layer_embeddings"
BASE_LOGITS = "logits"
BASE_ACTIVATIONS = "activations"
_KEYS, _VALUES = "kv_cache_k_", "kv_cache_v_"

_FACTOR_TOLERANCE = 4e-3
"""Relative error that factors such as √width may have: the coarsest exporters compute them in bfloat16."""
_HALF_ROOT = 2**-0.5
"""The factor on the sum of two values of ordinary size."""
_NORMED = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "per_layer_projection", "per_layer_model_projection")
)
"""Matrices whose product is normalized, which cancels any factor on it."""
_MOST_TABLES = 1024
_UPDATE = "DYNAMIC_UPDATE_SLICE"
_LARGEST_NUMBER = 1 << 11
"""Elements of the largest constant that is no weight: a RoPE table, a vector of ones."""
_LARGEST_COMPARED = 1 << 14
"""Elements of the largest constant that is recognized by its numbers: a norm's weight, as wide as the stream."""


@dataclass(frozen=True)
class BaseStructure:
    """Roles and geometry of the base in the graph of one signature."""

    roles: tuple[FoundRole, ...]
    other_constants: tuple[OtherConstant, ...]
    layers: int
    width: int  # of the residual stream
    soft_cap: float | None  # on the logits; None without one, or without logits
    rms_norm_eps: float | None  # None in an embedder
    hidden_activation: str | None = None  # transformers' name of the gates' function; None in an embedder
    per_layer_factor: float = 1.0  # the decoder's factor on the per-layer embeddings, relative to their projection


def choose_decoder_signature(model: TfliteModel) -> Signature:
    """Return the signature that computes logits of the fewest tokens; raise RoleError if there is none."""
    candidates = [s for s in model.signatures if BASE_LOGITS in s.outputs and EMBEDDINGS in s.inputs]
    if not candidates:
        raise RoleError(f"No signature computes {BASE_LOGITS!r} of {EMBEDDINGS!r}: this is not the decoder of a base.")
    return min(candidates, key=lambda s: model.tensor(s.subgraph, s.inputs[EMBEDDINGS]).elements)


@convert_errors("The graph")
def read_base_structure(graph: FlatGraph) -> BaseStructure:
    """Find every role in the graph of a decoder's signature, which has to compute logits.

    Raises:
        RoleError: a role is missing, or a constant is left over.
        UnsupportedError: the graph computes something that Gemma 4 does not.
    """
    return _BaseReader(graph).read_structure()


class _BaseReader(Blocks):
    factor_tolerance = _FACTOR_TOLERANCE

    def __init__(self, graph: FlatGraph) -> None:
        outputs = [name for name in (BASE_LOGITS, BASE_ACTIVATIONS) if name in graph.outputs]
        super().__init__(read_graph(graph, (*outputs, *_list_caches(graph)), strict=False).require_all())
        self.first_readers: dict[str, int] = {}  # K cache → the first layer that reads it
        self.layer_embeddings: dict[int, Expr] = {}  # layer → its part of the per-layer embeddings
        self.layer_of_normed: dict[Expr, int] = {}  # normed stream → the layer whose projections read it
        self.per_layer_factor = 1.0
        self.cache_writers = _find_cache_writers(graph)
        self.norms = self.find_norms()
        # Only of caches: DYNAMIC_UPDATE_SLICE also writes the scores of a window.
        updated = (value for node in self.cache_writers.values() for value in node.outputs)
        self.stops = frozenset({*self.norms, *map(id, updated)})

    def read_structure(self) -> BaseStructure:
        graph = self.graph
        soft_cap, head = self.take_lm_head(*self.read_output(BASE_LOGITS))
        stream, factor = self.take_norm("final_norm", head)
        if BASE_ACTIVATIONS in graph.outputs and self.read_output(BASE_ACTIVATIONS)[0] is not head:
            raise RoleError(f"The output {BASE_ACTIVATIONS!r} is not what lm_head reads.")

        count = self.count_layers(stream, sums=3 if PER_LAYER in graph.inputs else 2)
        for index in reversed(range(count)):
            stream, factor = self._take_layer(index, stream, factor)
        self.require_input("layers.0", stream, EMBEDDINGS)
        if self.layer_embeddings:
            self._take_per_layer_inputs()
        for key, first in self.first_readers.items():
            self._take_keys_and_values(key, first)

        roles = sort_roles([_allow_factor_of_one(role) for role in self.roles])
        width = graph.inputs[EMBEDDINGS].tensor.shape[-1]
        aside = list_other_constants(graph, roles)
        return BaseStructure(
            roles,
            aside,
            count,
            width,
            soft_cap,
            self.require_one_epsilon(),
            self.require_one_activation(),
            self.per_layer_factor,
        )

    def _take_layer(self, index: int, out: Expr, factor: float) -> tuple[Expr, float]:
        """Take the layer whose result is ``factor × out``, and return the stream below it and that stream's factor."""
        name = f"layers.{index}"
        self.take_layer_scalar(name, out, factor)
        if PER_LAYER in self.graph.inputs:
            out = self._take_per_layer_branch(index, out)
        normed, stream, below = self.take_attention(name, out, self._find_query)
        self.layer_of_normed[normed] = index
        return stream, below

    # Per-layer embeddings.

    def _take_per_layer_branch(self, index: int, out: Expr) -> Expr:
        """Take the branch that adds the layer's embedding of the token, and return the stream before it."""
        name = f"layers.{index}"
        branch, middle, factor = self.split_residual(name, out)
        product, norm_factor = self.take_norm(f"{name}.post_per_layer_norm", branch)
        if product.kind != "matrix" or factor != 1:
            found = self.describe(product)
            raise RoleError(f"{name}.per_layer_projection: expected a product with a matrix, found {found}.")

        gate, scale, embedding, share = self.split_gated_product(f"{name}.per_layer_gate", product.parts[1])
        self.layer_embeddings[index] = embedding
        sum_factor = abs(norm_factor * share * self._find_sum_factor(embedding))
        is_halved = _is_near(sum_factor, _HALF_ROOT)
        if not is_halved and not _is_near(sum_factor, 1.0):
            raise RoleError(
                f"the per-layer embeddings: expected the factor {_HALF_ROOT:g} on their sum, found {sum_factor:g}."
            )
        self.take_matrix(f"{name}.per_layer_projection", product, norm_factor, meant=norm_factor)
        if not is_halved:
            self.roles[-1] = replace(self.roles[-1], other_factors=(_HALF_ROOT,))
        if self.take_matrix(f"{name}.per_layer_gate", gate, scale) is not middle:
            raise RoleError(f"{name}.per_layer_gate: it does not read the residual stream.")
        return middle

    def _find_sum_factor(self, embedding: Expr) -> float:
        """Return the factor on the sum of the two per-layer embeddings that ``embedding`` is a part of."""
        total = embedding.parts[0] if embedding.kind == "part" else embedding
        factors = (factor / self.find_scale(e) for e, factor in total.terms.items() if e.kind != "input")
        return next(factors, 1.0)

    def _take_per_layer_inputs(self) -> None:
        """Take the projection of the embeddings, whose sum with the per-layer embeddings the layers take parts of."""
        totals = {part.parts[0] if part.kind == "part" else part for part in self.layer_embeddings.values()}
        total = totals.pop()
        if totals or total.kind != "sum" or len(total.terms) != 2:
            raise RoleError("The layers take their per-layer embeddings from different values; expected one sum.")
        for index, part in sorted(self.layer_embeddings.items()):
            chosen = part.element_ids if part.kind == "part" else np.arange(part.size)
            if not np.array_equal(chosen, np.arange(index * part.size, (index + 1) * part.size)):
                raise RoleError(
                    f"layers.{index}: expected the part of the per-layer embeddings at {index * part.size}, found "
                    f"{chosen[0]}."
                )

        projected, norm_factor = self.take_norm("per_layer_projection_norm", self._find_normed_summand(total))
        factor = self.graph.inputs[EMBEDDINGS].tensor.shape[-1] ** -0.5
        role = "per_layer_model_projection"
        operand = self.take_matrix(role, projected, norm_factor, meant=factor)
        stored = self.roles[-1].factor
        # The exporter may have multiplied the weight, or its scales, by the factor.
        if not any(_is_near(stored, allowed) for allowed in (1.0, factor)):
            raise RoleError(f"{role}: expected the factor {factor:g} after it, found {factor / stored:g}.")
        self.require_input(role, operand, EMBEDDINGS)

    def _find_normed_summand(self, total: Expr) -> Expr:
        """Return the norm that is added to the per-layer embeddings; ``per_layer_factor`` gets their factor."""
        table = next((e for e in total.terms if e.kind == "input" and e.parts[0] == PER_LAYER), None)
        normed = next(e for e in total.terms if e is not table)
        factor = 0.0 if table is None else total.terms[table] * self.find_scale(normed) / total.terms[normed]
        allowed = (1.0, self.graph.inputs[PER_LAYER].tensor.shape[-1] ** 0.5)
        if not any(_is_near(factor, number) for number in allowed):
            raise RoleError(f"per_layer_projection_norm: expected its result to be added to the input {PER_LAYER!r}.")
        self.per_layer_factor = factor
        return normed

    # Attentions and their caches.

    def _find_query(self, name: str, mixed: Expr) -> Expr:
        """Return the normed query of the attention with the result ``mixed``; ``first_readers`` gets its K cache."""
        if mixed.kind != "unread":
            raise RoleError(f"{name}.o_proj: expected it to read an attention, found {self.describe(mixed)}.")
        queries, caches = self._find_sources(mixed.parts[0])
        if len(queries) != 1:
            raise RoleError(f"{name}.q_norm: expected one norm of a query before its scores, found {len(queries)}.")
        key = min(caches, default="")
        if caches != {key, key.replace(_KEYS, _VALUES)} or not key.startswith(_KEYS):
            raise RoleError(
                f"{name}: expected it to read one K and one V cache that DYNAMIC_UPDATE_SLICE writes, found "
                f"{', '.join(map(escape, sorted(caches))) or 'none'}."
            )
        self.first_readers[key] = int(name.rpartition(".")[2])
        return queries.pop()

    def _find_sources(self, start: Value) -> tuple[set[Expr], set[str]]:
        """Return the nearest norms, and the names of the written caches, that ``start`` is computed from."""
        sources = list(walk_ancestors(start, self.stops))
        norms = {self.norms[id(value)] for value in sources if id(value) in self.norms}
        producers = {value.producer for value in sources}
        return norms, {name for name, node in self.cache_writers.items() if node in producers}

    def _find_cache_norm(self, cache: str) -> Expr:
        norms, _ = self._find_sources(self.cache_writers[cache].get_operand(1))
        if len(norms) != 1:
            raise RoleError(f"{escape(cache)}: expected one RMSNorm before it is written, found {len(norms)}.")
        return norms.pop()

    def _take_keys_and_values(self, cache: str, first: int) -> None:
        """Take K and V of the layer that writes the K cache ``cache``, which layer ``first`` is the first to read."""
        k_norm = self._find_cache_norm(cache)
        v_norm = self._find_cache_norm(cache.replace(_KEYS, _VALUES))
        key_norm = self.match_norm(k_norm)
        normed = key_norm.of.parts[1] if key_norm is not None and key_norm.of.kind == "matrix" else None
        if normed not in self.layer_of_normed:
            raise RoleError(f"{escape(cache)}: its K is computed from the normed stream of no layer.")
        name = f"layers.{self.layer_of_normed[normed]}"
        if self.layer_of_normed[normed] != first:
            raise RoleError(f"{name}: its K goes to {escape(cache)}, whose first reader is layers.{first}.")
        self.take_matrix(f"{name}.k_proj", *self.take_norm(f"{name}.k_norm", k_norm))
        value_norm = None if v_norm is k_norm else self.match_norm(v_norm)
        if value_norm is None or not self._is_ones(value_norm.weight):
            raise UnsupportedError(f"{name}: its V norm has a weight, or is that of K; Gemma 4's has none.")
        self.eps.add(float(f"{value_norm.eps:.6g}"))
        if self.take_matrix(f"{name}.v_proj", value_norm.of, value_norm.factor) is not normed:
            raise RoleError(f"{name}.v_proj does not read what k_proj reads.")

    def _is_ones(self, weight: Expr | None) -> bool:
        if weight is None:
            return True
        vector = weight.parts[0] if weight.kind == "tiled" else weight
        return vector.kind == "weight" and bool((self.graph.read_small_floats(vector.parts[0]) == 1).all())


def _is_near(factor: float, expected: float) -> bool:
    return math.isclose(factor, expected, rel_tol=_FACTOR_TOLERANCE)


def _allow_factor_of_one(role: FoundRole) -> FoundRole:
    """Add 1 to the possible factors of ``role`` if a norm cancels any factor on its product."""
    if role.factor == 1.0 or role.role.rpartition(".")[2] not in _NORMED:
        return role
    return replace(role, other_factors=(*role.other_factors, 1.0))


def _list_caches(graph: FlatGraph) -> list[str]:
    return [name for name in graph.outputs if name.startswith((_KEYS, _VALUES))]


def _find_cache_writers(graph: FlatGraph) -> dict[str, Node]:
    """Return the DYNAMIC_UPDATE_SLICE that writes each cache output."""
    through = ("RESHAPE", *CONVERSIONS)
    writers = {name: find_source(graph.outputs[name], through).producer for name in _list_caches(graph)}
    return {name: node for name, node in writers.items() if node is not None and node.kind == _UPDATE}


def match_base_roles(graph: FlatGraph, decoder: BaseStructure) -> BaseStructure:
    """Find the roles of ``decoder`` in the graph of another signature, which shares the bytes of its constants.

    The signature computes the first layers of ``decoder``, or all of them. Roles of these layers that share no bytes
    are searched by their numbers: converters may store norms once per signature. If several roles hold the same
    numbers, a constant plays each of them, so that they can only be changed together.

    Raises:
        UnsupportedError: the graph has a weight that ``decoder`` lacks, lacks one, or has one that may be no weight.
    """
    by_place: dict[_Place, list[FoundRole]] = defaultdict(list)
    for role in decoder.roles:
        if role.tensor is not None:
            by_place[_locate_constant(graph, role.tensor)].append(role)
    numbers = [value for value in graph.constants.values() if value.tensor.type in NUMBER_TYPES]
    roles_of_value = [(value, by_place.get(_locate_constant(graph, value.tensor), [])) for value in numbers]
    matched = [replace(role, tensor=value.tensor, result=None) for value, roles in roles_of_value for role in roles]

    unmatched = [value for value, roles in roles_of_value if not roles]
    # A constant of several roles does not tell which of them the signature computes.
    computed = {roles[0].role for _, roles in roles_of_value if len(roles) == 1}
    present = {role.role for role in matched}
    missing = [role for role in _list_expected_roles(decoder, computed) if role.role not in present]
    matched += _match_by_numbers(graph, decoder, missing, unmatched)
    keys = {role.key for role in matched}
    for value in unmatched:
        tensor = value.tensor
        if tensor.elements > _LARGEST_NUMBER and (tensor.subgraph, tensor.index) not in keys:
            raise UnsupportedError(f"{value.label} is a weight that the signature of the logits does not have.")
    roles = sort_roles(matched)
    return BaseStructure(roles, list_other_constants(graph, roles), 0, decoder.width, None, None)


_Place = tuple[int, tuple[int, ...]]
"""Offset and shape of a constant."""


def _locate_constant(graph: FlatGraph, tensor: Tensor) -> _Place:
    return graph.model.locate(tensor).begin, tuple(tensor.shape)


def _match_by_numbers(
    graph: FlatGraph, decoder: BaseStructure, missing: Sequence[FoundRole], unmatched: Sequence[Value]
) -> Iterator[FoundRole]:
    """Yield the ``missing`` roles, each with a constant among ``unmatched`` that holds the same numbers."""
    by_numbers: dict[object, list[FoundRole]] = defaultdict(list)
    for role in missing:
        if role.tensor is not None:
            by_numbers[_make_content_key(graph, role.tensor)].append(role)
    if not by_numbers:
        return
    other_tensors = (constant.tensor for constant in decoder.other_constants)
    no_weights = {_make_content_key(graph, tensor) for tensor in other_tensors if tensor.type in NUMBER_TYPES}
    present = set[object]()
    for value in unmatched:
        content = _make_content_key(graph, value.tensor)
        roles = by_numbers.get(content, [])
        if roles and content in no_weights:
            names = " or ".join(role.role for role in roles)
            raise UnsupportedError(
                f"{value.label} may be {names}, or no weight: a constant that is no weight holds the same numbers."
            )
        present.add(content)
        for role in roles:
            yield replace(role, tensor=value.tensor, result=None)
    if absent := [role.role for content, roles in by_numbers.items() if content not in present for role in roles]:
        raise UnsupportedError(
            f"{list_few(absent)}: expected the numbers with which the logits are computed, found others or none. All "
            "signatures of a base compute with the same weights; take the bundle as it was published."
        )


def _list_expected_roles(decoder: BaseStructure, computed: Set[str]) -> Iterator[FoundRole]:
    """Yield the roles of ``decoder`` up to the last that is ``computed``, in the order of execution.

    A signature that only fills the caches ends with K and V of a layer, whose query it does not compute.
    """
    by_name = {role.role: role for role in decoder.roles}
    names = [role.name for role in list_roles(decoder.layers, architecture=GEMMA4) if role.name in by_name]
    last = max((index for index, name in enumerate(names) if name in computed), default=-1)
    query = {f"{names[last].rpartition('.')[0]}.{part}" for part in ("q_proj", "q_norm")} if last >= 0 else set()
    return (by_name[name] for name in names[: last + 1] if name not in query or query & computed)


def _make_content_key(graph: FlatGraph, tensor: Tensor) -> object:
    """Return a key that is equal for equal contents; for a large tensor, which is not read, for equal places."""
    if tensor.elements > _LARGEST_COMPARED:
        return _locate_constant(graph, tensor)
    return tuple(tensor.shape), graph.read_small_floats(Value([tensor])).tobytes()


# Embedders.


def read_embedder(graph: FlatGraph, role: str, later: float = 1.0) -> BaseStructure:
    """Find the tables of an embedder, which does one lookup, or one per layer.

    One table is named ``role``; several are ``role.0``, ``role.1``, … in the order in which their rows are joined. Rows
    have to be multiplied by √width of the output: in this graph, in the decoder (by ``later``), or by their scales.

    Raises:
        RoleError: the result is not a lookup, or is multiplied by another number.
    """
    if len(graph.outputs) != 1:
        raise RoleError(f"{role}: expected one output, found {len(graph.outputs)}.")
    ((name, output),) = graph.outputs.items()
    tables = list(_find_lookups(read_graph(graph, (name,), strict=False).require_all(), output, 1.0, role))
    tokens, width = tables[0][0].get_operand(0).tensor.elements, output.tensor.shape[-1]
    if len(tables) > 1 and tokens != 1:
        raise UnsupportedError(f"{role}: {len(tables)} tables, looked up for {tokens} tokens at once.")

    root = width**0.5
    roles = []
    for index, (node, factor) in enumerate(tables):
        name = f"{role}.{index}" if len(tables) > 1 else role
        stored = root / (factor * later)
        exact = next((number for number in (1.0, root) if _is_near(stored, number)), None)
        if exact is None:
            raise RoleError(
                f"{role}: expected the factor {root / later:g} after {node.op.label} (the root of the output's width, "
                f"less what the decoder multiplies by), or 1, found {factor:g}."
            )
        roles.append(_make_table_role(role, name, node, exact))
    return BaseStructure(tuple(roles), list_other_constants(graph, roles), 0, width, None, None)


def _make_table_role(role: str, name: str, node: Node, factor: float) -> FoundRole:
    table = find_source(node.get_operand(1), ("DEQUANTIZE", "RESHAPE"))
    if not table.constant or len(table.tensor.shape) != 2:
        raise RoleError(f"{role}: {node.op.label} looks up no table [vocabulary, width] of constants.")
    quantized = read_activation(node.get_operand(0)), read_activation(node.outputs[0])
    why = f"the table of {node.op.label}"
    return FoundRole(name, table.tensor, table.tensor.shape, factor, why, (), *quantized, node.outputs[0])


def _find_lookups(reading: ReadGraph, value: Value, factor: float, role: str) -> Iterator[tuple[Node, float]]:
    """Yield the lookups whose rows ``value`` joins, each with the factor on its rows."""
    term = reading.forms.get(id(value))
    source = term.expr.parts[0] if isinstance(term, Term) and term.expr.kind == "unread" else None
    node = source.producer if isinstance(source, Value) else None
    if node is None or not isinstance(term, Term):
        raise RoleError(f"{role}: expected an EMBEDDING_LOOKUP behind {value.label}.")
    if node.kind in ("CONCATENATION", "PACK") and len(node.inputs) < _MOST_TABLES:
        for position in range(len(node.inputs)):
            yield from _find_lookups(reading, node.get_operand(position), factor * term.factor, role)
    elif node.kind == "EMBEDDING_LOOKUP" and len(node.inputs) == 2:
        yield node, factor * term.factor
    else:
        raise RoleError(f"{role}: expected an EMBEDDING_LOOKUP, found {node.op.label}.")
