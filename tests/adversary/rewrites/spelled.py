"""The same function in operators that an exporter or an optimizer may choose, each with what its rounding may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import (
    LOWEST,
    WINDOW,
    Case,
    Change,
    Edit,
    Sample,
    chain,
    each,
    edge,
    over_bfloat,
    over_int,
    through,
    unary,
    with_number,
)
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import both, compare, slots, summed, visible
from adversary.mutations.number_types import hidden_on
from adversary.mutations.rope import cos_and_sin, frequencies, position
from adversary.mutations.tables import tabled, window_table
from adversary.rewrites.blocks import capped, gelu_everywhere
from adversary.rewrites.detours import turned_twice
from adversary.rewrites.masks import floats, selected, within
from adversary.rewrites.norms import axis_of, every_norm, rebuilt, squares_by, variance
from adversary.rewrites.scores import spelled
from adversary.rewrites.weights import every_weight

LAYERS = (0, 1)


def in_layers(change: Callable[[int], Change]) -> Change:
    return each(*map(change, LAYERS))


def softmax_of(*layers: int, build: Callable[[Graph, int], int] = spelled) -> Change:
    """The softmax in other operators in these layers alone."""
    return each(
        *(
            lambda g, index=index: g.rewire(g.layer(index).probabilities, build(g, g.layer(index).masked))
            for index in layers
        )
    )


def shifted_maximum(g: Graph, x: int) -> int:
    powers = g.call("EXP", g.call("SUB", x, g.reduce("REDUCE_MAX", x, 3)))
    return g.call("MUL", powers, g.call("DIV", np.float32(1), g.reduce("SUM", powers, 3)))


def maximum_of_both(g: Graph, x: int) -> int:
    """A maximum over all heads is as good."""
    powers = g.call("EXP", g.call("SUB", x, g.reduce("REDUCE_MAX", g.reduce("REDUCE_MAX", x, 3), 2)))
    return g.call("DIV", powers, g.reduce("SUM", powers, 3))


def by_sine(layer: int) -> Change:
    return cos_and_sin(
        lambda g, cos, sin: (g.call("SIN", g.call("ADD", g.layer(layer).angle, np.float32(np.pi / 2))), sin), layer
    )


def by_cosine(layer: int) -> Change:
    return cos_and_sin(
        lambda g, cos, sin: (cos, g.call("COS", g.call("SUB", g.layer(layer).angle, np.float32(np.pi / 2)))), layer
    )


def outer_product(g: Graph) -> None:
    """Angles by BATCH_MATMUL of the position with the table."""
    for layer in LAYERS:
        angle = g.layer(layer).angle
        table = g.value(frequencies(g, layer)).reshape(1, 1, -1)
        width = g.shape(angle)[-1]
        tiled = g.constant(np.tile(table, width // table.shape[-1]))
        made = g.call("BATCH_MATMUL", g.reshape(floats(g), [1, 1, 1]), tiled, shape=[1, 1, width])
        g.rewire(angle, g.reshape(made, g.shape(angle)))


def by_convolution(role: str) -> Change:
    """A convolution of one by one, in place of FULLY_CONNECTED."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        values = g.floats(g.roles[role])
        rows, columns = values.shape
        x, out = int(op.inputs[0]), int(op.outputs[0])
        kernel, bias = g.constant(values.reshape(rows, 1, 1, columns)), g.constant(np.zeros(rows))
        made = g.tensor([1, 1, 1, rows])
        g.emit("CONV_2D", [g.reshape(x, [1, 1, 1, columns]), kernel, bias], [made], strideW=1, strideH=1)
        g.rewire(out, g.reshape(made, g.shape(out)))

    return change


def biased(zero: float) -> Callable[[str], Change]:
    def made(role: str) -> Change:
        def change(g: Graph) -> None:
            op = g.linear(role)
            rows = g.shape(int(op.outputs[0]))[-1]
            op.inputs = [*(int(i) for i in op.inputs[:2]), g.constant(np.full(rows, zero))]

        return change

    return made


def gate_and_up(split: str) -> Change:
    """One matrix for gate and up, parted by SPLIT or STRIDED_SLICE, in every layer."""

    def change(g: Graph) -> None:
        for index in LAYERS:
            layer = g.layer(index)
            roles = [g.roles[f"layers.{index}.{name}_proj"] for name in ("gate", "up")]
            wide = g.product(layer.ffw_in, g.constant(np.concatenate([g.floats(role) for role in roles])))
            *front, width = g.shape(wide)
            shape = [*front, width // 2]
            if split == "SPLIT":
                parts = [g.tensor(shape), g.tensor(shape)]
                g.emit("SPLIT", [g.constant(np.array(len(shape) - 1), np.int32), wide], parts, numSplits=2)
            else:
                ends = [([0] * len(front) + [at], [*front, at + width // 2]) for at in (0, width // 2)]
                parts = [
                    g.call(
                        "STRIDED_SLICE", wide, *(np.array(n, np.int32) for n in (*end, [1] * len(shape))), shape=shape
                    )
                    for end in ends
                ]
            g.rewire(layer.gate, parts[0])
            g.rewire(layer.up, parts[1])

    return change


def size(g: Graph, norm: Any) -> int:
    return g.shape(norm.x)[-1]


def mean_by_matrix(g: Graph, norm: Any) -> int:
    """The mean of squares as a product with 1/n."""
    ones = g.constant(np.full((1, size(g, norm)), 1 / size(g, norm)))
    mean = g.product(g.call("MUL", norm.x, norm.x), ones)
    return g.call("MUL", norm.x, g.call("RSQRT", g.call("ADD", mean, np.float32(1e-6))))


def mean_of_quotients(g: Graph, norm: Any) -> int:
    """The sum of x · (x / n)."""
    quotients = g.call("MUL", norm.x, g.call("MUL", norm.x, np.float32(1 / size(g, norm))))
    mean = g.call("ADD", g.reduce("SUM", quotients, axis_of(g, norm)), np.float32(1e-6))
    return g.call("MUL", norm.x, g.call("RSQRT", mean))


def by_logarithm(g: Graph, norm: Any) -> int:
    half = g.call("MUL", g.call("LOG", variance(g, norm)), np.float32(-0.5))
    return g.call("MUL", norm.x, g.call("EXP", half))


def one_plus(g: Graph, norm: Any) -> None:
    """Weights are stored less one."""
    stored = g.constant((g.value(norm.weight).astype(np.float64) - 1).astype(np.float32))
    g.insert(norm.weight, lambda w: g.call("ADD", np.float32(1), stored), [norm.weigh])


def gelu_in_other_order(g: Graph, x: int) -> int:
    """x/2 + x/2 · tanh(x · (a + b·x²))."""
    slope = (2 / np.pi) ** 0.5
    square = g.call("MUL", g.call("SQUARE", x), np.float32(slope * 0.044715))
    half = g.call("MUL", x, np.float32(0.5))
    tanh = g.call("TANH", g.call("MUL", x, g.call("ADD", square, np.float32(slope))))
    return g.call("ADD", half, g.call("MUL", half, tanh))


def padded_and_cut(g: Graph, x: int) -> int:
    shape = g.shape(x)
    pads = np.array([[0, 0]] * (len(shape) - 1) + [[3, 5]], np.int32)
    return g.part(g.call("PAD", x, pads, shape=[*shape[:-1], shape[-1] + 8]), 3, shape[-1])


def chosen_by_a_constant(g: Graph, x: int) -> int:
    return g.call("SELECT_V2", g.constant(np.ones(g.shape(x)), np.bool_), x, g.call("NEG", x), shape=g.shape(x))


def multiplied_mask(g: Graph, layer: Any) -> int:
    """scores · mask − 1e9 · (1 − mask)."""
    mask = g.cast(layer.visible, np.float32)
    hidden = g.call("MUL", g.call("SUB", mask, np.float32(1)), -LOWEST)
    return g.call("ADD", g.call("MUL", layer.scores, mask), hidden)


def position_through(*types: Any) -> Change:
    """The position of the angles through other types that hold it exactly."""

    def edit(g: Graph, x: int) -> int:
        made = g.input("input_pos")
        for dtype in (*types, np.float32):
            made = g.cast(made, dtype)
        return g.reshape(made, g.shape(x))

    return position(edit)


def stepwise(g: Graph, x: int) -> int:
    """1 / (1 + exp(−2·y)) as TANH's other form."""
    powers = g.call("EXP", g.call("MUL", x, np.float32(-2 / 30)))
    quotient = g.call("DIV", np.float32(60), g.call("ADD", powers, np.float32(1)))
    return g.call("SUB", quotient, np.float32(30))


def everywhere(places: Sequence[str], edit: Edit) -> Change:
    return each(*(edge(place, edit) for place in places))


EXACT: dict[str, Change] = {
    "cos_by_sine": in_layers(by_sine),
    "cos_by_sine_in_one": by_sine(0),
    "sin_by_cosine": in_layers(by_cosine),
    "softmax_spelled_in_sliding": softmax_of(0),
    "softmax_spelled_in_full": softmax_of(1),
    "softmax_by_inverse": softmax_of(0, 1, build=shifted_maximum),
    "softmax_with_shared_maximum": softmax_of(0, 1, build=maximum_of_both),
    "never_below_1e30": everywhere(("1.stream", "0.query", "activations"), with_number("MAXIMUM", -1e30)),
    "never_above_3e38": everywhere(("1.stream", "0.scores", "logits"), with_number("MINIMUM", 3e38)),
    "never_below_lowest_float": edge("0.attended", with_number("MAXIMUM", float(np.finfo(np.float32).min))),
    "relu_of_probabilities": everywhere(("0.probabilities", "1.probabilities"), unary("RELU")),
    "probabilities_at_most_1": edge("0.probabilities", with_number("MINIMUM", 1.0)),
    "squares_not_negative": every_norm(lambda g, n: g.insert(int(n.square.outputs[0]), lambda x: g.call("RELU", x))),
    "mean_at_least_0": every_norm(
        lambda g, n: g.insert(int(n.average.outputs[0]), lambda x: g.call("MAXIMUM", x, np.float32(0)))
    ),
    "convolution_of_one": by_convolution("layers.0.up_proj"),
    "convolutions": every_weight(by_convolution),
    "gate_and_up_by_split": gate_and_up("SPLIT"),
    "gate_and_up_by_strided_slice": gate_and_up("STRIDED_SLICE"),
    "bias_of_minus_0": every_weight(biased(-0.0)),
    "bias_of_plus_0": every_weight(biased(0.0)),
    "one_plus_weight": every_norm(one_plus),
    "norm_by_logarithm": every_norm(rebuilt(by_logarithm)),
    "norm_by_matrix": every_norm(rebuilt(mean_by_matrix)),
    "norm_by_quotients": every_norm(rebuilt(mean_of_quotients)),
    "norm_of_one_by_logarithm": lambda g: rebuilt(by_logarithm)(g, g.norm("layers.1.pre_ffw_norm")),
    "difference_with_0_squared": every_norm(squares_by("SQUARED_DIFFERENCE")),
    "angles_by_outer_product": outer_product,
    "position_by_int64": position_through(np.int64),
    "position_by_int16": position_through(np.int16),
    "position_by_uint8": position_through(np.uint8),
    "position_by_fp16": position_through(np.float16),
    "position_by_bf16": position(over_bfloat),
    "position_by_int8_codes": position(over_int(1.0, -128)),
    "position_by_int16_codes": position(over_int(1.0, 0, np.int16)),
    "rope_tables": tabled(),
    "rope_tables_by_lookup": tabled(how="EMBEDDING_LOOKUP"),
    "rope_tables_by_slice": tabled(how="SLICE"),
    "rope_tables_by_one_hot": tabled(how="ONE_HOT"),
    "rope_table_of_one_layer": tabled(layers=(1,)),
    "window_table": window_table(lambda seen, far: seen),
    "window_by_not_less": within(
        lambda g: both(
            g,
            g.call("LOGICAL_NOT", compare("LESS", 0)(g)),
            g.call("NOT_EQUAL", compare("GREATER_EQUAL", WINDOW)(g), g.constant(np.ones(256), np.bool_)),
        )
    ),
    "window_by_integer_product": within(
        lambda g: g.cast(
            g.call("MUL", *(g.cast(compare(*c)(g), np.int32) for c in (("GREATER_EQUAL", 0), ("LESS", WINDOW)))),
            np.bool_,
        )
    ),
    "mask_not_not": in_layers(lambda i: visible(i, chain(unary("LOGICAL_NOT"), unary("LOGICAL_NOT")))),
    "mask_multiplied": selected(multiplied_mask),
    "mask_of_minus_infinity": selected(
        lambda g, p: g.call("SELECT_V2", p.visible, p.scores, np.float32(-np.inf), shape=g.shape(p.scores))
    ),
    "mask_sum_of_lowest_float": summed(
        lambda g, m: g.call("SELECT_V2", m, np.float32(0), np.float32(np.finfo(np.float32).min), shape=g.shape(m))
    ),
    "mask_by_floats": visible(1, lambda g, x: g.call("GREATER", g.cast(x, np.float32), np.float32(0.5))),
    "mask_int8_of_1e9": hidden_on(over_int(1e9 / 127)),
    "gelu_in_other_order": gelu_everywhere(gelu_in_other_order),
    "cap_by_powers": capped(stepwise),
    "padded_and_cut": everywhere(("activations", "0.merged", "state"), padded_and_cut),
    "caches_turned_twice": each(*(cache_edit(which, turned_twice, i) for which in ("key", "value") for i in LAYERS)),
    "chosen_by_a_constant": everywhere(("1.stream", "0.queries"), chosen_by_a_constant),
    "slots_added_and_removed": visible(
        1,
        lambda g, x: both(
            g, g.call("LOGICAL_OR", x, g.constant(slots(g) < 0, np.bool_)), g.constant(slots(g) >= 0, np.bool_)
        ),
    ),
}
ROUNDED: dict[float, dict[str, Change]] = {
    2e-3: {
        "stream_by_fp16": edge("1.stream", through(np.float16)),
        "state_by_fp16": edge("state", through(np.float16)),
        "query_by_fp16": everywhere(("0.query_normed", "1.query_normed"), through(np.float16)),
        "probabilities_by_fp16": edge("0.probabilities", through(np.float16)),
        "caches_by_fp16": each(
            *(cache_edit(which, through(np.float16), i) for which in ("key", "value") for i in LAYERS)
        ),
        "fp16_rope_tables": tabled(kind="fp16"),
        "int16_rope_tables": tabled(kind="int16"),
        "logits_by_int16_codes": edge("logits", over_int(30 / 32767, 0, np.int16)),
    },
    0.04: {
        "stream_by_bf16": edge("1.stream", over_bfloat),
        "int8_rope_tables": tabled(kind="int8"),
        "cos_and_sin_by_int8_codes": everywhere(("0.cos", "0.sin", "1.cos", "1.sin"), over_int(1 / 127)),
        "stream_by_int16_codes": edge("1.stream", over_int(0.003, 0, np.int16)),
        "query_input_by_int8_codes": edge("0.query_in", over_int(0.06)),
        "logits_by_int8_codes": edge("logits", over_int(30 / 127)),
        "probabilities_by_int8_codes": edge("0.probabilities", over_int(1 / 256, -128)),
    },
}

SPELLED = (
    *(
        Case("same: spelled", name, change, exact=True, shows=(Sample(230, mask="past"),))
        for name, change in EXACT.items()
    ),
    *(
        Case("same: rounded", name, change, exact=True, rounding=rounding)
        for rounding, changes in ROUNDED.items()
        for name, change in changes.items()
    ),
)
