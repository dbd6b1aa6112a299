"""The same function in operators that an exporter or an optimizer may choose, each with what its rounding may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import WINDOW, Case, Change, Edit, Sample, chain, each, edge, over_int, unary, with_number
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import both, compare, slots, summed, visible
from adversary.mutations.rope import cos_and_sin, frequencies, position
from adversary.mutations.tables import tabled, window_table
from adversary.rewrites.detours import turned_twice
from adversary.rewrites.masks import floats, selected, within
from adversary.rewrites.norms import axis_of, every_norm, rebuilt
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
    powers = g.exp(g.sub(x, g.reduce("REDUCE_MAX", x, 3)))
    return g.mul(powers, g.div(1.0, g.reduce("SUM", powers, 3)))


def by_sine(layer: int) -> Change:
    return cos_and_sin(lambda g, cos, sin: (g.sin(g.add(g.layer(layer).angle, np.float32(np.pi / 2))), sin), layer)


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


def size(g: Graph, norm: Any) -> int:
    return g.shape(norm.x)[-1]


def mean_of_quotients(g: Graph, norm: Any) -> int:
    """The sum of x · (x / n)."""
    quotients = g.mul(norm.x, g.mul(norm.x, np.float32(1 / size(g, norm))))
    mean = g.add(g.reduce("SUM", quotients, axis_of(g, norm)), 1e-6)
    return g.mul(norm.x, g.rsqrt(mean))


def position_through(*types: Any) -> Change:
    """The position of the angles through other types that hold it exactly."""

    def edit(g: Graph, x: int) -> int:
        made = g.input("input_pos")
        for dtype in (*types, np.float32):
            made = g.cast(made, dtype)
        return g.reshape(made, g.shape(x))

    return position(edit)


def everywhere(places: Sequence[str], edit: Edit) -> Change:
    return each(*(edge(place, edit) for place in places))


EXACT: dict[str, Change] = {
    "cos_by_sine": in_layers(by_sine),
    "cos_by_sine_in_one": by_sine(0),
    "softmax_spelled_in_sliding": softmax_of(0),
    "softmax_spelled_in_full": softmax_of(1),
    "softmax_by_inverse": softmax_of(0, 1, build=shifted_maximum),
    "never_below_1e30": everywhere(("1.stream", "0.query", "activations"), with_number("MAXIMUM", -1e30)),
    "never_below_lowest_float": edge("0.attended", with_number("MAXIMUM", float(np.finfo(np.float32).min))),
    "bias_of_minus_0": every_weight(biased(-0.0)),
    "norm_by_quotients": every_norm(rebuilt(mean_of_quotients)),
    "angles_by_outer_product": outer_product,
    "position_by_int64": position_through(np.int64),
    "position_by_int16": position_through(np.int16),
    "position_by_uint8": position_through(np.uint8),
    "rope_tables": tabled(),
    "rope_tables_by_slice": tabled(how="SLICE"),
    "rope_table_of_one_layer": tabled(layers=(1,)),
    "window_table": window_table(lambda seen, far: seen),
    "window_by_not_less": within(
        lambda g: both(
            g,
            g.logical_not(compare("LESS", 0)(g)),
            g.not_equal(compare("GREATER_EQUAL", WINDOW)(g), g.constant(np.ones(256), np.bool_)),
        )
    ),
    "window_by_integer_product": within(
        lambda g: g.cast(
            g.mul(*(g.cast(compare(*c)(g), np.int32) for c in (("GREATER_EQUAL", 0), ("LESS", WINDOW)))), np.bool_
        )
    ),
    "mask_not_not": in_layers(lambda i: visible(i, chain(unary("LOGICAL_NOT"), unary("LOGICAL_NOT")))),
    "mask_of_minus_infinity": selected(
        lambda g, p: g.call("SELECT_V2", p.visible, p.scores, np.float32(-np.inf), shape=g.shape(p.scores))
    ),
    "mask_sum_of_lowest_float": summed(
        lambda g, m: g.call("SELECT_V2", m, 0.0, np.float32(np.finfo(np.float32).min), shape=g.shape(m))
    ),
    "mask_by_floats": visible(1, lambda g, x: g.greater(g.cast(x, np.float32), 0.5)),
    "caches_turned_twice": each(*(cache_edit(which, turned_twice, i) for which in ("key", "value") for i in LAYERS)),
    "slots_added_and_removed": visible(
        1,
        lambda g, x: both(g, g.logical_or(x, g.constant(slots(g) < 0, np.bool_)), g.constant(slots(g) >= 0, np.bool_)),
    ),
}
ROUNDED: dict[float, dict[str, Change]] = {
    2e-3: {
        "fp16_rope_tables": tabled(kind="fp16"),
        "logits_by_int16_codes": edge("logits", over_int(30 / 32767, 0, np.int16)),
    },
    0.04: {
        "stream_by_int16_codes": edge("1.stream", over_int(0.003, 0, np.int16)),
        "query_input_by_int8_codes": edge("0.query_in", over_int(0.06)),
        "logits_by_int8_codes": edge("logits", over_int(30 / 127)),
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
