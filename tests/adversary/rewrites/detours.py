"""Operators, inputs and outputs that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, Edit, chain, edge, halves, quantized, unary, with_number


def dead_operator(g: Graph) -> None:
    """An operator whose result nothing reads is there, as some converters leave it."""
    g.main.outputs = [*map(int, g.main.outputs), g.call("NEG", g.layer(1).out)]


def extra_output(name: str, build: Callable[[Graph], int]) -> Change:
    def change(g: Graph) -> None:
        made = build(g)
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name.encode(), made
        g.model.signatureDefs[0].outputs.append(entry)
        g.main.outputs = [*map(int, g.main.outputs), made]

    return change


def extra_input(g: Graph) -> None:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = b"mask_local", g.tensor([1, 1, 1, 256], np.bool_)
    g.model.signatureDefs[0].inputs.append(entry)
    g.main.inputs = [*map(int, g.main.inputs), entry.tensorIndex]


def arg_max(g: Graph) -> int:
    return g.call(
        "ARG_MAX",
        g.output("logits"),
        np.array([2], np.int32),
        shape=[1, 1],
        dtype=np.int32,
        outputType=schema.TensorType.INT32,
    )


def turned_twice(g: Graph, x: int) -> int:
    order = list(range(len(g.shape(x))))[::-1]
    return g.transpose(g.transpose(x, order), order)


def there_and_back(g: Graph, x: int) -> int:
    return g.reshape(g.reshape(x, [int(np.prod(g.shape(x)))]), g.shape(x))


def squeezed(g: Graph, x: int) -> int:
    shape = g.shape(x)
    narrow = g.call("SQUEEZE", x, shape=shape[1:], squeezeDims=[0])
    return g.call("EXPAND_DIMS", narrow, np.array([0], np.int32), shape=shape)


def cut_and_joined(g: Graph, x: int) -> int:
    return g.join(halves(g, x))


def reversed_twice(g: Graph, x: int) -> int:
    order = range(g.shape(x)[-1] - 1, -1, -1)
    return g.gather(g.gather(x, order, -1), order, -1)


def on_a_grid(scale: float, zero_point: int = 0) -> Edit:
    """INT8 activations, statically quantized: what the numbers are meant to be does not change."""
    return lambda g, x: g.call("DEQUANTIZE", quantized(g, x, scale, zero_point), dtype=np.float32)


PLACES = (
    "activations",
    "pre_projection",
    "1.stream",
    "0.query",
    "0.scores",
    "0.merged",
    "0.product",
    "state",
    "logits",
)
NOTHING: dict[str, Edit] = {
    "times_1": with_number("MUL", 1.0),
    "plus_0": with_number("ADD", 0.0),
    "minus_0": with_number("SUB", 0.0),
    "over_1": with_number("DIV", 1.0),
    "negated_twice": chain(unary("NEG"), unary("NEG")),
    "bounded_far_out": with_number("MAXIMUM", -3e38),
    "turned_twice": turned_twice,
    "reshaped_and_back": there_and_back,
    "squeezed": squeezed,
    "cut_and_joined": cut_and_joined,
    "reversed_twice": reversed_twice,
}

DETOURS: dict[str, Change] = {
    **{
        f"{name}_{PLACES[(index + shift) % len(PLACES)]}": edge(PLACES[(index + shift) % len(PLACES)], edit)
        for index, (name, edit) in enumerate(NOTHING.items())
        for shift in (0, 4)
    },
    "state_quantized": edge("state", on_a_grid(0.1)),
    "product_quantized_off_centre": edge("0.product", on_a_grid(0.05, 20)),
    "query_input_quantized": edge("0.query_in", on_a_grid(0.05)),
    "composites_opened": lambda g: g.open_all(),
    "token_as_output": extra_output("token", arg_max),
    "state_as_output": extra_output("state", lambda g: g.normed("final_norm")),
    "output_without_a_name": dead_operator,
    "input_that_nothing_reads": extra_input,
}
