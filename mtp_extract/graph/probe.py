"""Measuring what a region of the graph does, by running it: how far a query sees, and how fast it turns.

Exporters write the mask of a sliding window, and the angles of RoPE, in more ways than can be listed. What they compute
is the same: so it is computed, on inputs whose result says the number that is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, RoleError, UnsupportedError
from mtp_extract.graph.arrays import Array, Coded, Numbers, gelu
from mtp_extract.graph.call import DTYPES, grid_of
from mtp_extract.graph.evaluate import Samples, evaluate, inputs_of
from mtp_extract.graph.fill import fill_mask, fill_param, fill_position, is_mask
from mtp_extract.graph.flat import INPUT_POS, PARAM_TENSOR, FlatGraph, Node, Value
from mtp_extract.graph.rope import Doubles, rounding_of
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor

_LARGEST_INPUT = 1 << 28
_MOST_QUERIES = 1 << 8
_MOST_POSITIONAL = 64
_LARGEST_TABLE = 1 << 16
# How far a ratio may be from a whole number of slots: up to 1 000 of them, and in proportion beyond.
_COUNT_TOLERANCE = 0.05
_TOLERANCE_PER_SLOT = 1e-3
# What adding a number of the size of 1 in float32 leaves of a small one.
_OF_AN_ANGLE = 2e-7
_ABOUT_ONE = 1e-2
_MOST_DOUBLINGS = 12


def measure_frequencies(graph: FlatGraph, nodes: Sequence[Node], head_dim: int, name: str) -> tuple[Doubles, Doubles]:
    """By how much a query turns from one position to the next, and how far each number may be off.

    Args:
        graph: the operators.
        nodes: those of one layer's attention.
        head_dim: width of a head.
        name: of the layer, for messages.

    Returns:
        two of float64 ``[head_dim / 2]``; the first is 0 where the query does not turn.

    Raises:
        UnsupportedError: nothing in ``nodes`` turns with the position alone, or two things turn differently.
    """
    angles = [node.operand(0) for node in nodes if node.kind in ("SIN", "COS") and node.unary]
    candidates = angles or _positional(graph, nodes)
    if not candidates or INPUT_POS not in graph.inputs:
        raise UnsupportedError(f"{name}: nothing before its softmax turns with the position: it has no RoPE.")
    tensor = graph.inputs[INPUT_POS].tensor
    if not 0 < tensor.elements <= _MOST_QUERIES:
        raise RoleError(f"The input {tensor.label} is none of a drafter: it asks for {tensor.elements} positions.")
    steps = [0, *(1 << k for k in range(_MOST_DOUBLINGS) if (1 << k) + tensor.elements <= cache_slots(graph) or not k)]
    positions = steps[:2] if angles else steps
    fed = {INPUT_POS: tuple(fill_position(tensor, np.arange(at, at + tensor.elements)) for at in positions)}
    rows = [np.asarray(found, np.float64) for found in evaluate(graph, fed, candidates, rounds=False)]
    if not all(np.isfinite(row).all() for row in rows):
        raise FormatError(f"{name}: its RoPE table holds values that are not finite: the file is damaged.")
    found = list(_of_angles(rows, head_dim)) if angles else list(_of_tables(rows, positions, head_dim))
    if not found:
        raise UnsupportedError(f"{name}: nothing before its softmax turns with the position: it has no RoPE.")
    first, doubt = min(found, key=lambda each: float(each[1].max(initial=0.0)))
    for other, own in found:
        if other.size != first.size or not (np.abs(other - first) <= own + doubt + 1e-6 * np.abs(first)).all():
            raise UnsupportedError(f"{name}: its query is turned by more than one RoPE table.")
    table, rounding = np.zeros(head_dim // 2), np.zeros(head_dim // 2)
    table[: first.size] = first
    rounding[: first.size] = 0 if angles else doubt
    return table, np.maximum(rounding, rounding_of(table, graph))


def _of_angles(rows: Sequence[Array], head_dim: int) -> Iterator[tuple[Doubles, Doubles]]:
    """From what sines and cosines are taken of; a cosine may be the sine of an angle that begins at a quarter turn."""
    for values in rows:
        row = _rows(values[1:] - values[0], head_dim)
        if row is not None:
            yield row[0], np.full(row[0].shape, _OF_AN_ANGLE * float(np.abs(values[0]).max(initial=0.0)))


def _of_tables(rows: Sequence[Array], positions: Sequence[int], head_dim: int) -> Iterator[tuple[Doubles, Doubles]]:
    """From stored cosines and sines: the angle is followed from position to position, each twice as far."""
    whole = [each for values in rows if (each := _rows(values, head_dim)) is not None]
    sines = [each for each in whole if not each[0].any()]
    cosines = [each for each in whole if np.allclose(each[0], 1, atol=_ABOUT_ONE)]
    for sine in sines:
        cosine = next((each for each in cosines if each.shape == sine.shape), None)
        if cosine is None:
            yield np.arcsin(np.clip(sine[1], -1, 1)), np.zeros(sine.shape[1])
            continue
        found = np.zeros(sine.shape[1])
        for at, position in enumerate(positions):
            if position:
                turned = np.arctan2(sine[at], cosine[at])
                turns = np.rint((found * position - turned) / (2 * np.pi)) if position > 1 else 0
                found = (turned + 2 * np.pi * turns) / position
        noise = 2 * float(np.abs(np.hypot(sine, cosine) - 1).max())
        yield found, np.full(found.shape, (noise + _OF_AN_ANGLE) / positions[-1])


def _rows(values: Array, head_dim: int) -> Doubles | None:
    """Of ``[positions, …]`` the first query's entries, once: exporters write half a head, or that twice.

    Returns:
        ``[positions, entries]``, at most half a head of them; None where it is neither.
    """
    if values.ndim < 2 or values.shape[-1] > head_dim:
        return None
    rows: Doubles = np.asarray(values, np.float64).reshape(len(values), -1, values.shape[-1])[:, 0]
    half = rows.shape[1] // 2
    twice = rows.shape[1] % 2 == 0 and half > 0 and np.array_equal(rows[:, :half], rows[:, half:])
    if rows.shape[1] > head_dim // 2 and not twice:
        return None
    return rows[:, :half] if twice else rows


def _positional(graph: FlatGraph, nodes: Sequence[Node]) -> list[Value]:
    """Values of floats that are computed from the position and nothing else, the last of each chain."""
    found: dict[int, Value] = {}
    for node in nodes:
        for value in node.inputs:
            if value is None or value.producer is None or value.tensor.type not in FLOAT_TYPES or id(value) in found:
                continue
            if 1 < value.tensor.elements <= _LARGEST_TABLE and inputs_of([value]) == {INPUT_POS}:
                found[id(value)] = value
                if len(found) > _MOST_POSITIONAL:
                    return []
    return list(found.values())


def measure_windows(
    graph: FlatGraph, mixed: Sequence[Value], queries: Sequence[Value], values: Sequence[str]
) -> list[int | None]:
    """How many slots a query of each layer sees, itself included; None for all.

    K is 0 and every slot in view has the same weight. V is 1 everywhere in one run and 1 at the query's own slot in the
    other, so the ratio of the results counts the slots.

    Args:
        graph: the operators.
        mixed: per layer, what its o projection reads.
        queries: per layer, the normalized query: with K at 0 no score depends on it, so no weight is read for it.
        values: per layer, the name of its V cache.

    Raises:
        UnsupportedError: an input that this release cannot fill, or weights that are not alike.
    """
    needed, slots = inputs_of(mixed), cache_slots(graph)
    for query in queries:
        _type_of(query.tensor)
    given = [(query, (np.ones(query.tensor.shape, np.float32),)) for query in queries]
    count = max((graph.inputs[n].tensor.elements for n in (INPUT_POS,) if n in needed), default=1)
    if not 0 < count <= min(slots, _MOST_QUERIES):
        raise RoleError(f"A call has {count} queries, and its caches {slots} slots: this is no drafter's.")
    positions = np.arange(slots - count, slots)
    floats = any(is_mask(name) and graph.inputs[name].tensor.type in FLOAT_TYPES for name in needed)
    # A mask of floats is added to the scores, or multiplied into them: read the wrong way it hides nothing.
    found: list[list[int | None]] = []
    for additive in (True, False) if floats else (True,):
        fed = dict(_feed(graph, needed, set(values), slots, positions, additive))
        results = evaluate(graph, fed, mixed, given)
        found.append([_count(of_all, of_own, int(positions[0])) for of_all, of_own in results])
    return max(found, key=lambda windows: sum(window is not None for window in windows))


def _count(of_all: Array, of_own: Array, position: int) -> int | None:
    own = float(np.abs(of_own).min()) if of_own.size else 0.0
    ratio = float(np.abs(of_all).max()) / own if own else math.inf
    if not math.isfinite(ratio) or abs(ratio - round(ratio)) > _COUNT_TOLERANCE * max(1.0, ratio * _TOLERANCE_PER_SLOT):
        # The weights are not alike or see nothing; execution will tell what is different.
        return None
    seen = round(ratio)
    return None if seen > position else seen


def _is_cache(graph: FlatGraph, name: str) -> bool:
    return len(graph.inputs[name].tensor.shape) == 4 and not is_mask(name) and name != PARAM_TENSOR


def cache_slots(graph: FlatGraph) -> int:
    """Slots of the caches: the axis that they share with a mask, or with one another."""
    for name, value in graph.inputs.items():
        if is_mask(name) and value.tensor.shape:
            return value.tensor.shape[-1]
    shapes = [set(value.tensor.shape) for name, value in graph.inputs.items() if _is_cache(graph, name)]
    return max(set.intersection(*shapes), default=1) if shapes else 1


def _feed(
    graph: FlatGraph,
    needed: frozenset[str],
    values: set[str],
    slots: int,
    positions: npt.NDArray[np.int64],
    additive: bool,
) -> Iterator[tuple[str, Samples]]:
    shown = np.arange(slots) <= positions[:, None]
    for name in needed:
        tensor = graph.inputs[name].tensor
        if name in values:
            yield name, tuple(_cache(graph, name, own, slots, int(positions[0])) for own in (False, True))
        elif _is_cache(graph, name):
            yield name, (_as_cache(tensor, np.broadcast_to(np.zeros((), _code_type(tensor)), tensor.shape)),)
        elif name == INPUT_POS:
            yield name, (fill_position(tensor, positions),)
        elif name == PARAM_TENSOR:
            yield name, (fill_param(tensor, positions),)
        elif is_mask(name):
            yield name, (fill_mask(tensor, shown, additive=additive),)
        else:
            # The activations: with K at 0 no score depends on them.
            yield name, (np.ones(tensor.shape, np.float32),)


def _cache(graph: FlatGraph, name: str, own: bool, slots: int, position: int) -> Numbers:
    """A V cache of ones, or with ones at ``position`` alone, along every axis that may be the slots'."""
    tensor = graph.inputs[name].tensor
    one = np.ones((), _code_type(tensor))
    codes = np.broadcast_to(one, tensor.shape)
    if own:
        # Only the axes that may be the slots' are real: a cache of 32 003 slots takes no memory.
        codes = np.zeros([size if size == slots else 1 for size in tensor.shape], one.dtype)
        for axis, size in enumerate(tensor.shape):
            if size == slots:
                codes[(slice(None),) * axis + (position,)] = 1
        codes = np.broadcast_to(codes, tensor.shape)
    return _as_cache(tensor, codes)


def _code_type(tensor: Tensor) -> type[np.generic]:
    """Integers for a cache of floats too: they are multiplied block by block, and never exist as floats as a whole."""
    kind = _type_of(tensor)
    return np.int8 if tensor.type in FLOAT_TYPES else kind


def _as_cache(tensor: Tensor, codes: Array) -> Numbers:
    grid = grid_of(tensor) or ((1.0, 0) if tensor.type in FLOAT_TYPES else None)
    return codes if grid is None else Coded(codes, grid[0])


# Scattered, so that however few there are of them they lie on either side of 0.
_POINTS = (12 * (np.arange(1, 98) * (math.sqrt(5) - 1) / 2 % 1) - 6).astype(np.float32)
_GATES = {"gelu_pytorch_tanh": gelu(_POINTS, tanh=True), "gelu": gelu(_POINTS, tanh=False)}
_FAR_FROM_ANY_GATE = 1e-2


def measure_gate(
    graph: FlatGraph, product: Value, branches: Sequence[Value], roles: str, reader: str
) -> tuple[int, str]:
    """Which of two ``branches`` is the gate of ``product``, activation(gate) · up, and which activation it is.

    The product is linear in up and not in the gate; with up at 1 it is the activation. ``roles`` are what messages call
    the two, ``reader`` what reads the product.

    Returns:
        index of the gate, and transformers' name of the nearest activation.

    Raises:
        RoleError: the product is linear in neither or both, or no activation of a drafter is near.
    """
    _type_of(branches[0].tensor)
    for gate in (0, 1):
        tiled = np.resize(_POINTS, branches[gate].tensor.shape).astype(np.float32)
        one, two = (np.full(branches[1 - gate].tensor.shape, number, np.float32) for number in (1, 2))
        given = [(branches[gate], (tiled, tiled)), (branches[1 - gate], (one, two))]
        at_one, at_two = (values.reshape(-1)[: _POINTS.size] for values in evaluate(graph, {}, [product], given)[0])
        if not np.allclose(at_two, 2 * at_one, rtol=1e-4, atol=1e-6):
            continue
        errors = {kind: float(np.abs(at_one - values[: at_one.size]).max()) for kind, values in _GATES.items()}
        nearest = min(errors, key=lambda kind: errors[kind])
        if errors[nearest] < _FAR_FROM_ANY_GATE:
            return gate, nearest
    raise RoleError(
        f"{roles}: expected a product of GELU(gate) and up before {reader}; what the graph computes of the two is "
        "another function."
    )


def _type_of(tensor: Tensor) -> type[np.generic]:
    if not 0 < tensor.elements <= _LARGEST_INPUT:
        raise UnsupportedError(f"The input {tensor.label} is none of a drafter: it has {tensor.elements} elements.")
    kind = DTYPES.get(tensor.type)
    if kind is None:
        raise UnsupportedError(f"The input {tensor.label} is {tensor.type_name}, which this release cannot fill.")
    return kind
