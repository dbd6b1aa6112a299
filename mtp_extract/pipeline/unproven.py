"""Reads as much as possible of a drafter whose graph cannot be proven.

First, every unknown operator is replaced by its operand, and the rest is read and proven as usual. If that fails,
weights are found by their places in the graph outside of attention, or else by published names. Theta, window and types
of layers, which only attention shows, are then taken from the known geometry that has the same shapes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.architecture.roles import Role
from mtp_extract.bundle import BundledDrafter, ModelFile, name_file_in_errors
from mtp_extract.data import load_mapping
from mtp_extract.errors import (
    AnotherKindError,
    OperatorError,
    ProofError,
    RoleError,
    UnsupportedError,
    escape,
    format_count,
)
from mtp_extract.graph.drafter import DrafterReader, DrafterStructure, read_drafter_graph
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.flat import FlatGraph, Value
from mtp_extract.graph.kinds import require_kind
from mtp_extract.graph.matrices import PRODUCT, find_weight
from mtp_extract.graph.positions import find_caches
from mtp_extract.graph.roles import FoundRole, find_named_roles, list_other_constants, sort_roles
from mtp_extract.proof.proof import Proof

_Candidates = dict[str, dict[int, tuple[Value, tuple[str, ...]]]]
"""Role → id of a constant that may play it → that constant, with the names that say so."""

_MOST_PASSED = 64
"""Most operators that are replaced by their operand: a few kinds, once or twice in a layer."""


@contextmanager
def suggest_unproven(opened: ModelFile) -> Iterator[None]:
    """Let an error for a graph that this release does not know suggest an extraction without a proof."""
    try:
        with name_file_in_errors(opened.source.name):
            yield
    except (RoleError, UnsupportedError) as error:
        if not error.remedies and not isinstance(error, AnotherKindError):
            text = str(error).removesuffix(" Please report the file.").removesuffix(".")
            error.args = (f"{text}. Report the file, or extract it without a proof.",)
            error.remedies = ("unproven",)
        raise


def read_unproven(
    opened: ModelFile, sliding_window: int | None, prove: Callable[[BundledDrafter], Proof]
) -> tuple[BundledDrafter, Proof | None]:
    """Read the drafter of ``opened``, and prove it if possible; without a proof its ``not_proven`` says why.

    Args:
        sliding_window: as for :meth:`~mtp_extract.bundle.ModelFile.read_drafter`.
        prove: proves a drafter.

    Raises:
        ProofError: the graph was read, and does not compute a drafter.
        UnsupportedError: too little of the graph can be read, or it is known to be no drafter.
        MtpExtractError: as for :meth:`~mtp_extract.bundle.ModelFile.read_drafter`.
    """
    passed = dict[tuple[int, int], str]()
    refusals = list[str]()
    drafter = None
    while len(passed) <= _MOST_PASSED:
        drafter = None
        try:
            drafter = opened.read_drafter(sliding_window, passed)
            proof = prove(drafter)
        except OperatorError as error:
            refusals.append(_shorten_error(error, opened))
            if error.place in passed:
                break
            passed[error.place] = error.label
        except (RoleError, UnsupportedError, ProofError) as error:
            # Not caused by missing knowledge: an option that the user can set, a drafter of another kind, and a graph
            # that was read as it is and does not compute a drafter.
            is_refuted = isinstance(error, ProofError) and not passed
            if error.remedies or isinstance(error, AnotherKindError) or is_refuted:
                raise
            if drafter is not None or not refusals:
                refusals.append(_shorten_error(error, opened))
            break
        else:
            if not passed:
                return drafter, proof
            operands = "its operand" if len(passed) == 1 else "their operands"
            return _mark_unproven(drafter, refusals, f"taken for {operands}, all else was proven"), None
    try:
        with name_file_in_errors(opened.source.name):
            return _read_by_place_and_name(opened, sliding_window, refusals), None
    except UnsupportedError:
        if drafter is None:
            raise
    # The geometry is not a known one: the graph as it was read is all there is.
    return _mark_unproven(drafter, refusals, "what it computes was read, and not proven"), None


def _mark_unproven(drafter: BundledDrafter, refusals: Collection[str], read: str) -> BundledDrafter:
    return replace(drafter, not_proven=(*_merge_refusals(refusals), read, _describe_counts(drafter.structure.roles)))


def _merge_refusals(refusals: Collection[str]) -> list[str]:
    """Keep the first of ``refusals`` of each kind, with the number of further operators behind it."""
    kinds = dict[str, list[str]]()
    for refusal in refusals:
        kinds.setdefault(re.sub(r"^op \d+ | of subgraph \d+", "", refusal), []).append(refusal)
    return [
        first + (f" ({format_count(len(more), 'more operator')} likewise)" if more else "")
        for first, *more in kinds.values()
    ]


def _shorten_error(error: Exception, opened: ModelFile) -> str:
    return str(error).removeprefix(f"{opened.source.name}: ").split(". ")[0].split("; ")[0].removesuffix(".")


def _describe_counts(roles: Collection[FoundRole], named: Collection[str] = ()) -> str:
    """Describe how many matrices and vectors were found by place and by name; a shared constant counts once."""
    parts = []
    for noun, rank in (("matrices", 2), ("vectors", 1)):
        stored = {role.key: role.role in named for role in roles if role.key is not None and len(role.shape) == rank}
        by_name = sum(stored.values())
        for count, how in ((len(stored) - by_name, "by place"), (by_name, "by name")):
            if count:
                parts.append(f"{count} of {len(stored)} {noun} {how}")
    return ", ".join(parts)


def _read_by_place_and_name(opened: ModelFile, sliding_window: int | None, refusals: Collection[str]) -> BundledDrafter:
    """Read weights by place and name for the known geometry that fits; UnsupportedError if none does."""
    graph = opened.flatten_graph()
    require_kind(graph)
    walked = DrafterReader(read_drafter_graph(graph, strict=False))
    placed = dict[str, FoundRole]()
    # Weights outside of attention have places if the residual stream can be followed to its end.
    with suppress(RoleError, UnsupportedError):
        walked.read_outside_attentions()
        placed = {role.role: role for role in walked.roles}
    candidates = _find_candidates(graph)
    for geometry in load_mapping("geometries")["geometries"]:
        config = _build_config(geometry, walked if placed else None, sliding_window)
        named = _find_missing_roles(graph, config, placed, candidates)
        kv = _find_caches(graph, config)
        if named is None or len(kv) < len(config.kv_layers):
            continue
        drafter = opened.make_drafter(graph, _build_walk(walked, config, [*placed.values(), *named]), config, kv)
        assumed = f"theta, window and types of layers are those of {geometry['name']}, whose shapes these are"
        counts = _describe_counts(drafter.structure.roles, {role.role for role in named})
        return replace(drafter, not_proven=(*_merge_refusals(refusals), assumed, counts))
    raise UnsupportedError(
        f"{'; '.join(_merge_refusals(refusals))}. It cannot be read without a proof either: the weights that "
        "places and names identify fit no known geometry. Please report the file."
    )


def _find_missing_roles(
    graph: FlatGraph, config: DrafterConfig, placed: Mapping[str, FoundRole], candidates: _Candidates
) -> list[FoundRole] | None:
    """Find by name the roles that were not ``placed``; None if a role is missing or has another shape."""
    shapes = {role: shape for role, shape in list_shapes(config).items() if role.name not in placed}
    named = {role.role: role for role in _choose_named(candidates, shapes)}
    shape_of_role = {role.name: shape for role, shape in list_shapes(config).items()}
    if any(shape_of_role.get(role.role) != role.shape for role in placed.values()):
        return None
    if any(role.name not in named and not role.optional for role in shapes):
        return None
    _require_named_factors(graph, config, [*placed.values(), *named.values()])
    return list(named.values())


def _build_walk(walked: DrafterReader, config: DrafterConfig, roles_found: Collection[FoundRole]) -> DrafterStructure:
    roles = sort_roles(roles_found)
    caches = {name: value.tensors[-1] for name, value in find_caches(walked.graph.inputs).items()}
    return DrafterStructure(
        roles,
        (),
        list_other_constants(walked.graph, roles),
        config.final_logit_softcap,
        config.rms_norm_eps,
        config.hidden_activation,
        MappingProxyType(caches),
        (),
        walked.reading,
    )


def _build_config(
    geometry: Mapping[str, Any], walked: DrafterReader | None, sliding_window: int | None
) -> DrafterConfig:
    """Build the config of a known geometry, with epsilon, activation and soft cap that ``walked`` read, if any."""
    published = geometry["published"]
    window = sliding_window or geometry["sliding_window"]
    layers = tuple(
        LayerConfig(
            kind, head_dim, kv_heads, window if "sliding" in kind else None, RopeConfig(**published["rope"][kind])
        )
        for kind, head_dim, kv_heads in zip(
            published["layer_types"], geometry["head_dims"], geometry["num_kv_heads"], strict=True
        )
    )
    sizes = ("backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size", "num_heads")
    config = DrafterConfig(**{size: geometry[size] for size in sizes}, layers=layers, **published["numbers"])
    if walked is None:
        return config
    config = replace(
        config, rms_norm_eps=walked.require_one_epsilon(), hidden_activation=walked.require_one_activation()
    )
    return replace(config, final_logit_softcap=walked.soft_cap) if walked.has_head else config


def _find_candidates(graph: FlatGraph) -> _Candidates:
    """Find the constants that have a published name of a role; UnsupportedError if a matrix cannot be a weight."""
    matrices = list[tuple[Value, tuple[str, ...]]]()
    for node in graph.nodes:
        if node.kind == PRODUCT and not node.get_operand(1).depends:
            try:
                value = find_weight(graph, node)
            except UnreadableError as why:
                raise UnsupportedError(f"{node.op.label} {why}. Please report the file.") from None
            matrices.append((value, (value.tensor.name,)))
    vectors = [
        (value, tuple(tensor.name for tensor in node.outputs[0].tensors))
        for node in graph.nodes
        if node.kind == "MUL"
        for value in node.inputs
        if value is not None and value.constant
    ]
    candidates: _Candidates = defaultdict(dict)
    for is_matrix, named_values in ((True, matrices), (False, vectors)):
        for constant, names in named_values:
            for role in find_named_roles(names, is_matrix=is_matrix):
                candidates[role][id(constant)] = (constant, names)
    return candidates


def _choose_named(candidates: _Candidates, shapes: Mapping[Role, tuple[int, ...]]) -> Iterator[FoundRole]:
    """Yield each role of ``shapes`` for which exactly one candidate has the right number of elements."""
    for role, shape in shapes.items():
        of_shape = [
            (value, names)
            for value, names in candidates.get(role.name, {}).values()
            if value.tensor.elements == math.prod(shape)
        ]
        if len(of_shape) == 1:
            ((value, names),) = of_shape
            yield FoundRole(role.name, value.tensor, shape, 1.0, f"the name {escape(names[0])}", names)


def _require_named_factors(graph: FlatGraph, config: DrafterConfig, named: Collection[FoundRole]) -> None:
    """Raise UnsupportedError if a number without a role may be the scalar of a layer, which would be taken for 1."""
    named_keys = {role.key for role in named}
    for node in graph.nodes:
        if node.kind != "MUL" or node.outputs[0].tensor.elements != config.hidden_size:
            continue
        inputs = [value for value in node.inputs if value is not None]
        numbers = [value.tensor for value in inputs if value.constant and value.tensor.elements == 1]
        has_sum = any(value.producer is not None and value.producer.kind == "ADD" for value in inputs)
        if has_sum and any((number.subgraph, number.index) not in named_keys for number in numbers):
            raise UnsupportedError(f"{node.op.label} may be the scalar of a layer, but does not have its name.")


def _find_caches(graph: FlatGraph, config: DrafterConfig) -> dict[str, tuple[str, str]]:
    """Choose the inputs that hold K and V for each layer type: the first of that shape, for full layers the last."""
    cache_names = dict[str, tuple[str, str]]()
    for kind, layer in config.kv_layers.items():
        wanted = {layer.num_kv_heads, layer.head_dim}
        keys = sorted(
            (name for name, value in find_caches(graph.inputs).items() if wanted <= set(value.tensor.shape)),
            key=lambda name: int("".join(filter(str.isdigit, name)) or 0),
        )
        pairs = [(name, name.replace("_k_", "_v_")) for name in keys if "_k_" in name]
        pairs = [pair for pair in pairs if pair[1] in keys]
        if pairs:
            cache_names[kind] = pairs[0] if "sliding" in kind else pairs[-1]
    return cache_names
