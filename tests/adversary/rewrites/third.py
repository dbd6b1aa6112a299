"""A third round: the same function as exporters plausibly write it, in words that a reader of graphs ought to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, Edit, Sample, cases, chain, each, edge, mul, with_number
from adversary.mutations.norms import normed_by
from adversary.mutations.rope import angle
from adversary.mutations.second import plus_number
from adversary.mutations.third_files import scalar
from adversary.rewrites.norms import every_norm

LAYERS = (0, 1)


# Softmaxes that are safe where a row shows nothing.


def safe(dead: Callable[[Graph, int, int], int], lowest: float = -np.inf) -> Change:
    """0 for the rows that ``dead(g, mask, masked scores)`` says show nothing, else the softmax."""

    def change(g: Graph) -> None:
        for index in LAYERS:
            place = g.layer(index)
            shape = g.shape(place.scores)
            mask = g.call("SELECT_V2", place.visible, 0.0, np.float32(lowest), shape=g.shape(place.visible))
            masked = g.add(place.scores, mask)
            weights = g.call("SOFTMAX", masked, beta=1.0)
            nothing = dead(g, place.visible, masked)
            g.rewire(place.probabilities, g.call("SELECT_V2", nothing, 0.0, weights, shape=shape))

    return change


def all_lowest(g: Graph, mask: int, masked: int) -> int:
    """torch's own: whether every score of the row is −∞."""
    alive = g.logical_not(g.equal(masked, np.float32(-np.inf)), dtype=np.bool_)
    return g.logical_not(g.reduce("REDUCE_ANY", alive, 3), dtype=np.bool_)


SOFTMAXES: dict[str, Change] = {"safe_by_scores": safe(all_lowest)}


# Weights in parts.


WEIGHTS: dict[str, Change] = {}


# Caches as codes.


def coded(back: Callable[[float, int], Edit], zero_point: int = 0, which: str = "kv") -> Change:
    """Caches of INT8 codes that plain operators bring back."""

    def change(g: Graph) -> None:
        for name in (f"kv_cache_{w}_{n}" for w in which for n in (2, 3)):
            scale = 0.02 if "_k_" in name else 0.05
            tensor = g.input(name)
            readers = g.readers(tensor)
            g.main.tensors[tensor].type = schema.TensorType.INT8
            g.rewire(tensor, back(scale, zero_point)(g, tensor), readers)
            g.adapt[name] = lambda a, s=scale: np.clip(np.round(a / s) + zero_point, -128, 127).astype(np.int8)

    return change


def cast(dtype: Any) -> Edit:
    return lambda g, x: g.cast(x, dtype)


CACHES: dict[str, Change] = {
    "cast_times_scale": coded(lambda s, z: chain(cast(np.float32), mul(s))),
    "cast_over_steps": coded(lambda s, z: chain(cast(np.float32), with_number("DIV", np.float32(1 / s)))),
    "cast_twice_times_scale": coded(lambda s, z: chain(cast(np.int32), cast(np.float32), mul(s))),
    "values_cast_and_attended_scaled": each(
        coded(lambda s, z: cast(np.float32), which="v"), *(edge(f"{n}.attended", mul(0.05)) for n in LAYERS)
    ),
}


# Constants, ones, and bounds that are none.


def eps_by(build: Callable[[Graph], int]) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        index = next(n for n, i in enumerate(norm.add.inputs) if g.is_constant(int(i)))
        g.set_input(norm.add, index, build(g))

    return edit


def every_eps(build: Callable[[Graph], int]) -> Change:
    return every_norm(eps_by(build))


def ones(g: Graph, x: int) -> int:
    return g.mul(x, g.constant(np.ones(g.shape(x))))


CONSTANTS: dict[str, Change] = {
    "eps_of_two_thousandths": every_eps(lambda g: g.mul(g.constant(1e-3), g.constant(1e-3))),
    "eps_by_power": every_eps(lambda g: g.pow(g.constant(1e-3), g.constant(2.0))),
    "eps_by_sum": every_eps(lambda g: g.add(g.constant(4e-7), g.constant(6e-7))),
    "eps_over_a_million": every_eps(lambda g: g.div(g.constant(1.0), g.constant(1e6))),
    "eps_of_one_norm_by_product": normed_by("final_norm", eps_by(lambda g: g.mul(*map(g.constant, (1e-4, 1e-2))))),
    "angles_times_ones": angle(ones),
    "scalar_of_one_number_in_three_axes": scalar(lambda s: np.full([1, 1, 1], s)),
    "query_plus_what_overflows": edge("1.query_normed", plus_number(lambda g: g.div(1.0, g.pow(1e-5, -9.0)))),
    "query_larger_and_scores_smaller": each(edge("1.queries", mul(8.0)), edge("1.scores", mul(0.125))),
}


# Names.


def named(rename: Callable[[int, bytes, int], bytes]) -> Change:
    """Tensors get the name that ``rename(index, name, count)`` says."""

    def change(g: Graph) -> None:
        count = len(g.main.tensors)
        for index, tensor in enumerate(g.main.tensors):
            tensor.name = rename(index, tensor.name, count)

    return change


def exchanged(*pairs: tuple[bytes, bytes]) -> Change:
    def rename(index: int, name: bytes, count: int) -> bytes:
        for a, b in pairs:
            name = name.replace(a, b"\0").replace(b, a).replace(b"\0", b)
        return name

    return named(rename)


def names_turned(g: Graph) -> None:
    """Every tensor has the name of the one that stands opposite."""
    found = [tensor.name for tensor in g.main.tensors]
    for tensor, name in zip(g.main.tensors, reversed(found), strict=True):
        tensor.name = name


NAMES: dict[str, Change] = {
    "of_another_layer": exchanged((b"layer_0", b"layer_1")),
    "gate_called_up": exchanged((b"gate", b"up")),
    "key_called_value": exchanged((b"_k_", b"_v_"), (b"key", b"value")),
    "query_called_output": exchanged((b"q_", b"o_"), (b"query", b"output")),
    "before_called_after": exchanged((b"pre_", b"post_")),
    "turned_around": names_turned,
    "none": named(lambda index, name, count: b""),
    "all_the_same": named(lambda index, name, count: b"lm_head"),
    "of_control_signs": named(lambda index, name, count: b"\x1b[2J\n%d" % index),
    "cos_called_sin": exchanged((b"cos", b"sin")),
}

_SHOWS = (Sample(230, mask="past"), Sample(40, keys=3.0))

THIRD = (
    *cases("same: third softmaxes", SOFTMAXES, *_SHOWS),
    *cases("same: third weights", WEIGHTS, *_SHOWS),
    *cases("same: third caches", CACHES, rounding=0.1),
    *cases("same: third constants", CONSTANTS, *_SHOWS),
    *cases("same: third names", NAMES),
)
