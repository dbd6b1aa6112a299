"""The third attack on files and on the reader itself: attributes, huge numbers, what is declared, doubts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flatbuffers import flexbuffers
from helpers.surgery import Graph

from adversary.edits import (
    LOWEST,
    Case,
    Change,
    Edit,
    Sample,
    add,
    cases,
    chain,
    each,
    edge,
    mul,
    over_int,
    parameters,
    unary,
    with_number,
)
from adversary.mutations.attention import both, slots, visible
from adversary.mutations.files import body_number, body_of
from adversary.mutations.numbers import scales, weight
from adversary.mutations.positions import (
    angles,
    between,
    cos_and_sin,
    floats,
    is_at,
    number,
    position,
    row,
    table,
    when,
)
from adversary.mutations.second import EVERY, largest_gate, plus_number, row_of, times_number

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
    "of_the_last_layer_by_channel": scalar(channels(5, 9, factor=0.5), 1),
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
    *cases("third: stumbles", NOT_RUN, why="no runtime computes it"),
)


# Tables of the position: how far a grid explains that they are off.


def coarse_one(step: float) -> Callable[[Graph], int]:
    """1, which the position decides formally, on a grid of ``step`` that holds it."""
    return lambda g: over_int(step)(g, g.add(g.mul(number(g), 0.0), 1.0))


def times_coarse_one(step: float) -> Edit:
    return lambda g, x: g.mul(x, g.reshape(coarse_one(step)(g), [1] * len(g.shape(x))))


def rows_of_scales(off: Callable[[Array], Array], axis: int) -> Change:
    """cos by an INT8 table with a scale a row or a column, one of them as large as cos can be; ``off`` changes it."""

    def change(g: Graph) -> None:
        place = g.layer(0)
        readers = g.readers(place.cos)
        values = np.cos(angles(g, 0).astype(np.float32))
        scale = np.full(values.shape[axis], 1 / 127, np.float32)
        scale[0] = 1.0
        wide = scale[:, None] if axis == 0 else scale
        changed = off(values)
        if axis == 1:
            # The column of scale 1 is none that is read.
            changed = np.concatenate([np.ones([256, 1]), changed], 1)
            scale = np.concatenate([[1.0], np.full(values.shape[1], 1 / 127)]).astype(np.float32)
            wide = scale
        codes = g.constant(np.clip(np.round(changed / wide), -127, 127), np.int8)
        made = parameters(scale)
        made.quantizedDimension = axis
        g.main.tensors[codes].quantization = made
        floats = g.call("DEQUANTIZE", codes, dtype=np.float32)
        floats = g.part(floats, 1, values.shape[1]) if axis == 1 else floats
        g.rewire(place.cos, g.reshape(row(g, floats), g.shape(place.cos)), readers)

    return change


ROTATIONS: dict[str, Change] = {
    "cos_plus_0.1_at_37_times_a_coarse_1": edge("0.cos", chain(when(is_at(37), add(0.1)), times_coarse_one(0.25))),
    "cos_on_a_grid_of_0.035": edge("0.cos", over_int(0.035)),
    "cos_by_row_with_one_scale_of_1": rows_of_scales(lambda t: t + np.where(EVERY[:, None] > 190, 0.018, 0.0), 0),
    "cos_by_column_with_one_scale_of_1": rows_of_scales(lambda t: t + np.where(EVERY[:, None] > 190, 0.018, 0.0), 1),
    "frequencies_off_by_7e-5": table(lambda t: t * np.where(np.arange(t.size) % 2, 1 + 7e-5, 1 - 7e-5)),
    "first_frequency_off_by_7e-5": table(lambda t: np.where(np.arange(t.size) == 0, t * (1 + 7e-5), t)),
    "slow_frequencies_off_by_a_hundredth": table(lambda t: np.where(t < 5e-3, t * 1.01, t)),
    "cos_and_sin_by_two_layers_angles": cos_and_sin(lambda g, cos, sin: (cos, g.sin(when_far(g)))),
}


def when_far(g: Graph) -> int:
    return when(between(200, 254), mul(1.001))(g, g.layer(0).angle)


# Masks: a sum of floats is no exact integer.


def rounded_slots(large: float) -> Callable[[Graph], int]:
    """(slot + large) − large in floats, which rounds to multiples of a power of two."""

    def build(g: Graph) -> int:
        plain = g.constant(slots(g), np.float32)
        return g.sub(g.add(plain, np.float32(large)), np.float32(large))

    return build


def rounded_by_position(large: float) -> Callable[[Graph], int]:
    """The same, with ``large`` from the position formally."""

    def build(g: Graph) -> int:
        much = g.add(g.mul(number(g), 0.0), np.float32(large))
        return g.sub(g.add(g.constant(slots(g), np.float32), much), much)

    return build


def from_position(build: Callable[[Graph], int], shift: float) -> Edit:
    """What a layer shows, and of that only slots whose number by ``build`` is at most the position plus ``shift``."""

    def edit(g: Graph, x: int) -> int:
        there = g.add(number(g), np.float32(shift))
        return both(g, x, g.reshape(g.greater_equal(there, build(g)), g.shape(x)))

    return edit


FLOATS: dict[str, Change] = {
    "slots_in_256s": visible(1, from_position(rounded_slots(2.0**31), 1.0)),
    "slots_in_256s_by_position": visible(1, from_position(rounded_by_position(2.0**31), 1.0)),
    "slots_in_256s_in_sliding": visible(0, from_position(rounded_slots(2.0**31), 1.0)),
    "slots_in_8s": visible(1, from_position(rounded_slots(2.0**26), 1.0)),
}


# A gate that is GELU wherever it is tried.


def gate_by(argument: Callable[[Graph, int, int], int]) -> Change:
    """GELU as tanh of ``argument`` of x and of what it is by rights."""

    def change(g: Graph) -> None:
        place = g.layer(0)
        x = place.gate
        cube = g.mul(g.mul(x, x), x)
        plain = g.mul(g.add(x, g.mul(cube, 0.044715)), 0.7978845608)
        bend = g.add(g.tanh(argument(g, x, plain)), 1.0)
        g.rewire(place.activated, g.mul(g.mul(x, bend), 0.5))

    return change


def less_power(power: int, at: float) -> Callable[[Graph, int, int], int]:
    """Less c · xⁿ for an odd n, as large as the rest where x is ``at``."""

    def edit(g: Graph, x: int, plain: int) -> int:
        scaled = g.mul(x, np.float32(1 / at))
        square = g.mul(scaled, scaled)
        made = scaled
        for _ in range(power // 2):
            made = g.mul(made, square)
        return g.sub(plain, g.mul(made, np.float32(0.0357 * at**3)))

    return edit


GATES: dict[str, Change] = {
    "turns_near_its_largest": lambda g: gate_by(less_power(61, largest_gate(5, 0.88)(g)))(g),
    "overflows_where_a_norm_reaches": each(gate_by(less_power(9, 3e4)), scaled_norm("layers.0.pre_ffw_norm", 1e6)),
}


_AT = (*(Sample(p, mask="past") for p in (37, 201, 230, 254)), Sample(255), Sample(150, mask="past"))

THIRD_READERS: tuple[Case, ...] = (
    *cases("third: doubts", ROTATIONS, *_AT, rounding=1e-4, exact=True),
    *cases("third: sums of floats", FLOATS, *_AT),
    *cases("third: gates", GATES, Sample(40, change=row_of("layers.0.gate_proj", 5)), rounding=1e-4),
)
