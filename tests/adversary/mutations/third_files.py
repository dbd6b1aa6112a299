"""What a file says beside its arithmetic, numbers at the ends of their type, and what no reader may stumble over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flatbuffers import flexbuffers
from helpers.surgery import Graph

from adversary.edits import LOWEST, Case, Change, Sample, add, cases, chain, each, edge, mul, unary, with_number
from adversary.mutations.composites import body_number, body_of
from adversary.mutations.kinds import floats
from adversary.mutations.masks import visible
from adversary.mutations.positions import is_at, number, when
from adversary.mutations.rope import position
from adversary.mutations.second import plus_number, times_number
from adversary.mutations.weights import scales, weight

Array = np.ndarray


def with_buffer(name: str, values: Callable[[Graph, int], Array]) -> Change:
    """The input ``name`` also has data of its own."""

    def change(g: Graph) -> None:
        tensor = g.input(name)
        made = np.ascontiguousarray(values(g, tensor), g.dtype(tensor))
        g.main.tensors[tensor].buffer = g.buffer(made.tobytes())

    return change


def zeros(g: Graph, tensor: int) -> Array:
    return np.zeros(g.shape(tensor))


GIVEN_TWICE = "an input that has data of its own: whether the runtime's numbers are read, or these, is not said"
INPUTS: dict[str, Change] = {
    "mask_with_a_buffer": with_buffer("mask", lambda g, t: np.ones(g.shape(t))),
    "position_with_a_buffer": with_buffer("input_pos", lambda g, t: np.array([7])),
    "keys_with_a_buffer": with_buffer("kv_cache_k_3", zeros),
    "values_with_a_buffer": with_buffer("kv_cache_v_2", zeros),
    "activations_with_a_buffer": with_buffer("activations", zeros),
}


def scaled_norm(role: str, factor: float) -> Change:
    return lambda g: g.set_value(g.roles[role], g.value(g.roles[role]) * np.float32(factor))


def scaled_weight(role: str, factor: float) -> Change:
    """The weight's scales, larger or smaller."""
    return weight(role, scales(lambda s: s * np.float32(factor)))


HUGE: dict[str, Change] = {
    "q_norm_1e7": scaled_norm("layers.1.q_norm", 1e7),
    "q_norm_1e10_is_beyond_the_mask": scaled_norm("layers.1.q_norm", 1e10),
    "keys_times_1e9": edge("1.key", mul(1e9)),
    "pre_ffw_norm_1e20_overflows": scaled_norm("layers.0.pre_ffw_norm", 1e20),
    "gate_1e7_and_up_1e-7": each(scaled_weight("layers.0.gate_proj", 1e7), scaled_weight("layers.0.up_proj", 1e-7)),
    "attention_out_1e25_overflows": scaled_weight("layers.0.o_proj", 1e25),
    "attention_out_1e-25_vanishes": scaled_weight("layers.0.o_proj", 1e-25),
    "final_norm_1e7": scaled_norm("final_norm", 1e7),
    "pre_projection_1e-20": scaled_weight("pre_projection", 1e-20),
}


def scalar(values: Callable[[float], Any], layer: int = 0) -> Change:
    """Other numbers as a layer's scalar."""

    def change(g: Graph) -> None:
        old = g.roles[f"layers.{layer}.layer_scalar"]
        made = g.constant(np.asarray(values(float(g.value(old).reshape(-1)[0]))))
        g.set_input(g.layer(layer).scaler, list(g.layer(layer).scaler.inputs).index(old), made)

    return change


def channels(*changed: int, factor: float) -> Callable[[float], Array]:
    return lambda s: np.where(np.isin(np.arange(64), changed), s * factor, s).reshape(1, 1, 64)


SCALARS: dict[str, Change] = {
    "one_channel_differs": scalar(channels(63, factor=1.01)),
    "all_channels_but_the_first_differ": scalar(channels(*range(1, 64), factor=1.01)),
    "of_the_last_layer_by_channel": scalar(channels(5, 9, factor=0.5), 1),
    "flat_and_one_differs": scalar(lambda s: channels(31, factor=1.02)(s).reshape(64)),
    "by_position": edge("0.out", when(is_at(201), mul(1.01))),
    "of_two_numbers_one_by_channel": edge("0.summed", mul(np.linspace(0.99, 1.01, 64))),
    "of_both_terms": each(edge("0.middle", mul(1.01)), edge("0.ffw_branch", mul(0.99))),
    "not_a_number": scalar(lambda s: np.nan),
    "infinite": scalar(lambda s: np.inf),
}


def attribute(name: bytes, attributes: dict[str, Any]) -> Change:
    """What composites called ``name`` say of themselves."""

    def change(g: Graph) -> bool | None:
        found = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE" and op.builtinOptions2.name == name]
        for op in found:
            op.builtinOptions2.compositeAttributes = np.frombuffer(bytes(flexbuffers.Dumps(attributes)), np.uint8)
        return None if found else False

    return change


def beside(name: bytes, attributes: dict[str, Any], edit: Callable[[Graph], object]) -> Change:
    """The attribute says what is usual, the body does otherwise."""
    return lambda g: False if attribute(name, attributes)(g) is False else body_of(name, edit)(g)


RMS, BMM, GELU = b"odml.rms_norm", b"odml.runtime_bmm", b"odml.gelu_tanh"
ATTRIBUTES: dict[str, tuple[Change, str]] = {
    "epsilon_of_0.01": (attribute(RMS, {"epsilon": 0.01}), "CPUs run the body, an accelerator what the attribute says"),
    "epsilon_of_1e-5": (attribute(RMS, {"epsilon": 1e-5}), "CPUs run the body, an accelerator what the attribute says"),
    "products_transposed": (attribute(BMM, {"adj_y": True, "adj_x": True}), "the body transposes otherwise"),
}
BODIES: dict[str, Change] = {
    "epsilon_of_1e-6_beside_a_body_of_0.01": beside(RMS, {"epsilon": 1e-6}, body_number(1e-6, 1e-2)),
    "gelu_of_another_cube": beside(GELU, {"approximate": "tanh"}, body_number(0.044715, 0.05)),
}


def sink(value: float | Array, before_mask: bool = False) -> Change:
    """A 257th score that takes part in the softmax and has no value."""

    def change(g: Graph) -> None:
        place = g.layer(1)
        *front, slots = g.shape(place.scores)
        column = g.constant(np.broadcast_to(np.asarray(value, float), [*front, 1]))
        if before_mask:
            mask = g.join([g.cast(place.visible, np.int32), g.constant(np.ones([1, 1, 1, 1]), np.int32)])
            wide = g.join([place.scores, column])
            masked = g.call("SELECT_V2", g.cast(mask, np.bool_), wide, LOWEST, shape=[*front, slots + 1])
        else:
            masked = g.join([place.masked, column])
        weights = g.call("SOFTMAX", masked, beta=1.0)
        g.rewire(place.probabilities, g.part(weights, 0, slots))

    return change


def sink_with_value(g: Graph) -> None:
    """The sink's own V is mixed, too."""
    place = g.layer(1)
    front = g.shape(place.scores)[:-1]
    masked = g.join([place.masked, g.constant(np.zeros([*front, 1]))])
    weights = g.call("SOFTMAX", masked, beta=1.0)
    value = g.transpose(g.input("kv_cache_v_3"), [0, 1, 3, 2])
    shape = g.shape(value)
    shape[2] = 1
    wide = g.join([value, g.constant(np.full(shape, 0.1))], 2)
    g.rewire(place.attended, g.call("BATCH_MATMUL", weights, wide, shape=g.shape(place.attended)))


def flat_scores(g: Graph) -> None:
    """The mask is applied to scores of one axis, [256], of one head."""
    place = g.layer(1)
    shape = g.shape(place.scores)
    rows = [g.part(g.part(place.scores, h, 1, 1), q, 1, 2) for h in range(shape[1]) for q in range(shape[2])]
    mask = g.reshape(place.visible, [256])
    flat = [g.call("SELECT_V2", mask, g.reshape(row, [256]), -30.0, shape=[256]) for row in rows]
    weights = [g.reshape(g.call("SOFTMAX", g.reshape(row, [1, 256]), beta=1.0), [1, 1, 1, 256]) for row in flat]
    joined = g.join(weights, 2)
    g.rewire(place.probabilities, g.reshape(joined, shape))


def declared(shape: list[int]) -> Change:
    """Scores say that they are of another shape, and are half as large again."""

    def change(g: Graph) -> None:
        place = g.layer(1)
        g.insert(place.scores, lambda x: g.mul(x, 1.5))
        g.main.tensors[place.scores].shape = shape

    return change


def span(g: Graph, delta: int) -> int:
    """A number from a RANGE that no memory holds."""
    made = g.call("RANGE", *(g.constant(np.array(n), np.int32) for n in (0, 2**31 - 1, delta)), shape=[2**31 - 1])
    return g.cast(g.part(made, 3, 1), np.float32)


STUMBLES: dict[str, Change] = {
    "sink_of_0": sink(0.0),
    "sink_of_every_head": sink(np.array([[0.5], [-0.5]]).repeat(2, 0)[:1]),
    "sink_of_the_lowest_score": sink(-3.0, before_mask=True),
    "sink_that_is_masked_with_the_rest": sink(1.0, before_mask=True),
    "sink_with_a_value": sink_with_value,
    "scores_declared_as_256": declared([256]),
    "scores_declared_without_axes": declared([]),
    "weights_to_minus_9": edge("1.probabilities", chain(with_number("MAXIMUM", 1e-40), with_number("POW", -9.0))),
    "weights_plus_1e-40_to_minus_9": edge(
        "1.probabilities", chain(add(1e-40), with_number("POW", -9.0), with_number("MINIMUM", 1.0))
    ),
    "stream_times_a_power_of_1e-40": edge("1.stream", times_number(lambda g: g.pow(1e-40, -9.0))),
    "scores_by_a_power_of_the_position": edge("1.scores", times_number(lambda g: g.pow(number(g), -9.0))),
    "logarithm_of_no_mask": edge("1.stream", plus_number(lambda g: g.log(g.part(floats(g), 255, 1)))),
    "angle_over_nothing": position(lambda g, x: g.div(x, g.sub(x, x))),
    "square_root_of_less_than_nothing": edge("state", chain(unary("NEG"), add(-1e3), unary("SQRT"))),
}
NOT_RUN: dict[str, Change] = {
    "range_of_2_to_the_31": position(lambda g, x: g.reshape(span(g, 1), g.shape(x))),
    "range_of_no_step": position(lambda g, x: g.reshape(span(g, 0), g.shape(x))),
    "remainder_of_nothing": position(
        lambda g, x: g.reshape(
            g.cast(g.call("FLOOR_MOD", g.input("input_pos"), np.array([0], np.int32)), np.float32), g.shape(x)
        )
    ),
    "gather_beyond_the_end": visible(1, lambda g, x: g.gather(x, [*range(1, 256), 4000], 3)),
    "gather_before_the_start": visible(1, lambda g, x: g.gather(x, [-1, *range(255)], 3)),
}

THIRD_FILES: tuple[Case, ...] = (
    *cases("third: inputs with data", INPUTS, why=GIVEN_TWICE),
    *cases("third: huge numbers", HUGE, Sample(40, keys=100.0), rounding=0.02),
    *cases("third: layer scalars", SCALARS),
    *(Case("third: attributes", name, change, why=why) for name, (change, why) in ATTRIBUTES.items()),
    *cases("third: attributes", BODIES),
    *cases("third: stumbles", STUMBLES),
    *cases(
        "third: stumbles",
        {"scores_of_one_axis": flat_scores},
        *(Sample(p, keys=100.0, mask="one") for p in (40, 41, 42)),
        rounding=0.01,
    ),
    *cases("third: stumbles", NOT_RUN, why="no runtime computes it"),
)
