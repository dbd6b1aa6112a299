"""Other words for the same drafter, by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from helpers.surgery import Graph, Norm

from adversary import edits as e
from adversary.edits import Change, Edit, NormEdit, Sample, a_change, cases, edge, edges
from adversary.mutations.attention import (
    bounded,
    compare,
    hidden_sum,
    in_reverse,
    laid_out,
    slots,
    softmax_spelled,
    summed,
    visible,
)
from adversary.mutations.blocks import capped, every_norm, normed_by, weighted
from adversary.mutations.numbers import OUT, real_weight
from adversary.mutations.positions import cos_and_sin, frequencies, number, position, rotated_by, tabled, window_table

LAYERS = (0, 1)


def axis_of(g: Graph, norm: Norm) -> int:
    return len(g.shape(norm.x)) - 1


def variance(g: Graph, norm: Norm) -> int:
    return g.add(g.reduce("MEAN", g.mul(norm.x, norm.x), axis_of(g, norm)), 1e-6)


def rebuilt(build: Callable[[Graph, Any], int]) -> NormEdit:
    """x over its root, written otherwise; the product with the weight stays."""
    return lambda g, norm: g.rewire(int(norm.scale.outputs[0]), build(g, norm))


def squared(g: Graph, norm: Norm) -> None:
    old = int(norm.square.outputs[0])
    x = norm.x if g.shape(norm.x) == g.shape(old) else g.reshape(norm.x, g.shape(old))
    g.rewire(old, g.square(x))


def root_times_weight(g: Graph, norm: Norm) -> None:
    factor = g.mul(int(norm.root.outputs[0]), norm.weight)
    g.rewire(norm.out, g.mul(norm.x, factor, shape=g.shape(norm.out)))


NORMS: dict[str, Change] = {
    "square": every_norm(squared),
    "divided_by_root": every_norm(rebuilt(lambda g, n: g.div(n.x, g.sqrt(variance(g, n))))),
    "inverse_of_root": every_norm(rebuilt(lambda g, n: g.mul(n.x, g.div(1.0, g.sqrt(variance(g, n)))))),
    "root_times_weight": every_norm(root_times_weight),
    "eps_on_the_left": every_norm(lambda g, n: setattr(n.add, "inputs", list(n.add.inputs)[::-1])),
}

BLOCKS: dict[str, Change] = {
    "cap_divides": capped(lambda g, x: g.mul(g.tanh(g.div(x, 30.0)), 30.0)),
    "cap_multiplies": capped(lambda g, x: g.mul(30.0, g.tanh(g.mul(np.float32(1 / 30), x)))),
    "cap_divides_twice": capped(lambda g, x: g.div(g.tanh(g.div(x, 30.0)), np.float32(1 / 30))),
    "cap_in_steps": capped(lambda g, x: g.mul(g.tanh(g.div(g.div(x, 5.0), 6.0)), 30.0)),
    "cap_bound_in_steps": capped(lambda g, x: g.mul(g.mul(g.tanh(g.div(x, 30.0)), 5.0), 6.0)),
}

ABSORBED: dict[str, Change] = {
    "result_doubled": edge("0.attended", e.mul(2.0)),
    "attention_out_halved": edge("0.attention_out", e.mul(0.5)),
    "up_scaled": edge("0.up", e.mul(3.0)),
}


def real_weights(g: Graph) -> None:
    for role in [role for role in g.roles if role.endswith(("_proj", "_projection", "lm_head"))]:
        real_weight(role, lambda g, w: w)(g)


def half_norms(g: Graph) -> None:
    """Norm weights at FP16 precision, behind a CAST or DEQUANTIZE."""
    for index, role in enumerate([role for role in g.roles if role.endswith("_norm")]):
        weight = g.roles[role]
        stored = g.constant(g.value(weight).astype(np.float16), np.float16)
        g.rewire(weight, g.call(("CAST", "DEQUANTIZE")[index % 2], stored, dtype=np.float32))


def scalar_quantized(g: Graph) -> None:
    """A layer's scalar as an INT8 code and its scale."""
    scalar = g.roles["layers.0.layer_scalar"]
    value = float(g.value(scalar).reshape(-1)[0])
    stored = g.constant(np.full(g.shape(scalar), 127), np.int8)
    g.main.tensors[stored].quantization = e.parameters(value / 127)
    g.rewire(scalar, e.dequantized(g, stored))


def layer_twice(g: Graph) -> None:
    """Layer 1 of these three is layer 0 again, with the same constants."""
    for role, tensor in g.roles.items():
        if role.startswith("layers.1."):
            g.rewire(tensor, g.roles[role.replace("layers.1.", "layers.0.")])


WEIGHTS: dict[str, Change] = {
    "dequantized_by_an_operator": real_weights,
    "floats_of_one": lambda g: g.insert(g.roles[OUT], lambda w: g.constant(g.floats(w))),
    "quantized_scalar": scalar_quantized,
}


def strided_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    shape, half = g.shape(q), g.shape(q)[-1] // 2
    parts = []
    for start in (0, half):
        begin, end = np.array([0, 0, 0, start], np.int32), np.array([*shape[:3], start + half], np.int32)
        parts.append(g.call("STRIDED_SLICE", q, begin, end, np.ones(4, np.int32), shape=[*shape[:3], half]))
    return g.join(e.turn(g, *parts, cos, sin))


def split_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    shape = [*g.shape(q)[:-1], g.shape(q)[-1] // 2]
    parts = [g.tensor(shape), g.tensor(shape)]
    g.emit("SPLIT", [g.constant(np.array(3), np.int32), q], parts, numSplits=2)
    return g.join(e.turn(g, *parts, cos, sin))


SCORES: dict[str, Change] = {
    "scale_and_back": e.each(edge("0.queries", e.mul(0.25)), edge("0.scores", e.mul(4.0))),
    "key_scaled_and_back": e.each(edge("0.queries", e.with_number("DIV", 8.0)), edge("0.scores", e.mul(8.0))),
    "rope_strided": rotated_by(strided_rotation, LAYERS),
    "rope_split": rotated_by(split_rotation, LAYERS),
}


def respelled(g: Graph, caches: Sequence[int], front: list[int]) -> None:
    """The sliding layer's attention by K and V in ``caches``, with axes ``front`` before the last one."""
    layer, (key, value) = g.layer(0), caches
    scores = g.call("BATCH_MATMUL", g.reshape(layer.queries, [*front, 32]), key, shape=[*front, 256], adjY=True)
    mask = layer.visible if len(front) == 3 else g.reshape(layer.visible, [*[1] * len(front), 256])
    hidden = g.call("SELECT_V2", mask, scores, e.LOWEST, shape=[*front, 256])
    weights = g.call("SOFTMAX", hidden, beta=1.0)
    mixed = g.call("BATCH_MATMUL", weights, value, shape=[*front, 32], adjY=True)
    g.rewire(layer.merged, g.reshape(mixed, g.shape(layer.merged)))


def repeated_heads(g: Graph) -> None:
    """Every query head has a KV head of its own: the caches' heads are repeated."""
    respelled(g, [g.gather(g.input(f"kv_cache_{which}_2"), [0, 0, 1, 1], 1) for which in "kv"], [1, 4, 1])


def by_unpack(g: Graph, query: int) -> int:
    """The query's heads by UNPACK, and PACK."""
    parts = [g.tensor([1, 1, 32]) for _ in range(4)]
    g.emit("UNPACK", [query], parts, num=4, axis=2)
    return g.call("PACK", *parts, shape=[1, 1, 4, 32], valuesCount=4, axis=2)


def cut_to_its_end(g: Graph, x: int) -> int:
    """All of a cache by SLICE, whose sizes of −1 reach to the end."""
    return g.call("SLICE", x, np.zeros(4, np.int32), np.full(4, -1, np.int32), shape=g.shape(x))


CACHES: dict[str, Change] = {
    "key_transposed": laid_out("k", [0, 1, 3, 2]),
    "key_by_slot": laid_out("k", [0, 2, 1, 3]),
    "key_cut_to_its_end": edge("0.key", cut_to_its_end),
    "heads_repeated": repeated_heads,
    "heads_by_unpack": edge("0.query_normed", by_unpack),
}


@a_change
def selected(g: Graph, build: Callable[[Graph, Any], int]) -> None:
    """Another way to choose between scores and a number far below."""
    for layer in map(g.layer, LAYERS):
        g.set_input(layer.softmax, 0, build(g, layer))


def within(build: Callable[[Graph], int]) -> Change:
    """Another way to say the window, beside the mask input."""
    return visible(0, lambda g, _: g.logical_and(g.input("mask"), build(g)))


MASKS: dict[str, Change] = {
    "float_sum": summed(lambda g, m: g.call("SELECT_V2", m, 0.0, e.LOWEST, shape=g.shape(m))),
    "one_minus_mask": summed(hidden_sum),
    "mask_minus_one": summed(lambda g, m: g.mul(g.sub(g.cast(m, np.float32), 1.0), 1e9)),
    "mask_spread_over_heads": selected(
        lambda g, p: g.call(
            "SELECT_V2",
            g.call("BROADCAST_TO", p.visible, np.array(g.shape(p.scores), np.int32), shape=g.shape(p.scores)),
            p.scores,
            g.constant(np.full(g.shape(p.scores), e.LOWEST)),
        )
    ),
    "not_or": within(
        lambda g: g.logical_not(g.logical_or(compare("LESS", 0)(g), compare("GREATER_EQUAL", e.WINDOW)(g)))
    ),
    "strict": bounded(compare("GREATER", -1), compare("LESS_EQUAL", e.WINDOW - 1)),
    "two_sided": within(lambda g: g.less(g.abs(g.sub(g.input("input_pos"), slots(g))), np.array([e.WINDOW], np.int32))),
    "two_sided_by_bounds": bounded(compare("GREATER", -e.WINDOW), compare("LESS", e.WINDOW)),
    "two_sums": summed(lambda g, m: g.add(hidden_sum(g, g.input("mask")), hidden_sum(g, m)), (0,)),
}


def turned_twice(g: Graph, x: int) -> int:
    order = list(range(len(g.shape(x))))[::-1]
    return g.transpose(g.transpose(x, order), order)


def squeezed(g: Graph, x: int) -> int:
    shape = g.shape(x)
    narrow = g.call("SQUEEZE", x, shape=shape[1:], squeezeDims=[0])
    return g.call("EXPAND_DIMS", narrow, np.array([0], np.int32), shape=shape)


PLACES = (
    *("activations", "pre_projection", "1.stream", "0.query", "0.scores"),
    *("0.merged", "0.product", "state", "logits"),
)
NOTHING: dict[str, Edit] = {
    "times_1": e.mul(1.0),
    "plus_0": e.add(0.0),
    "minus_0": e.with_number("SUB", 0.0),
    "over_1": e.with_number("DIV", 1.0),
    "negated_twice": e.chain(e.unary("NEG"), e.unary("NEG")),
    "bounded_far_out": e.with_number("MAXIMUM", -3e38),
    "turned_twice": turned_twice,
    "reshaped_and_back": lambda g, x: g.reshape(g.reshape(x, [int(np.prod(g.shape(x)))]), g.shape(x)),
    "squeezed": squeezed,
    "cut_and_joined": lambda g, x: g.join(e.halves(g, x)),
    "reversed_twice": e.chain(in_reverse, in_reverse),
    "0_plus": lambda g, x: g.call("ADD", np.float32(0), x),
    "far_bound_first": lambda g, x: g.call("MINIMUM", np.float32(3e38), x),
}

DETOURS: dict[str, Change] = {
    **{
        f"{name}_{PLACES[(index + shift) % len(PLACES)]}": edge(PLACES[(index + shift) % len(PLACES)], edit)
        for index, (name, edit) in enumerate(NOTHING.items())
        for shift in (0, 4)
    },
    "state_quantized": edge("state", e.over_int(0.1)),
    "product_quantized_off_centre": edge("0.product", e.over_int(0.05, 20)),
    "composites_opened": lambda g: g.open_all(),
}


def outer_product(g: Graph) -> None:
    """Angles by BATCH_MATMUL of the position with the table."""
    for layer in LAYERS:
        angle = g.layer(layer).angle
        table = g.value(frequencies(g, layer)).reshape(1, 1, -1)
        width = g.shape(angle)[-1]
        tiled = g.constant(np.tile(table, width // table.shape[-1]))
        product = g.call("BATCH_MATMUL", g.reshape(number(g), [1, 1, 1]), tiled, shape=[1, 1, width])
        g.rewire(angle, g.reshape(product, g.shape(angle)))


EXACT: dict[str, Change] = {
    "cos_by_sine_in_one": cos_and_sin(lambda g, cos, sin: (g.sin(g.add(g.layer(0).angle, np.pi / 2)), sin)),
    "softmax_spelled_in_sliding": softmax_spelled(0),
    "never_below_lowest_float": edge("0.attended", e.with_number("MAXIMUM", float(np.finfo(np.float32).min))),
    "angles_by_outer_product": outer_product,
    "position_by_int64": position(
        lambda g, x: g.reshape(g.cast(g.cast(g.input("input_pos"), np.int64), np.float32), g.shape(x))
    ),
    "rope_tables": tabled(),
    "rope_tables_by_slice": tabled(how="SLICE"),
    "rope_table_of_one_layer": tabled(layers=(1,)),
    "window_table": window_table(),
    "mask_by_floats": visible(1, lambda g, x: g.greater(g.cast(x, np.float32), 0.5)),
}
ROUNDED: dict[str, Change] = {
    "fp16_rope_tables": tabled(kind="fp16"),
    "logits_by_int16_codes": edge("logits", e.over_int(30 / 32767, 0, np.int16)),
    "logits_given_as_int16": edge("logits", lambda g, x: e.quantized(g, x, 30 / 32767, 0, np.int16)),
    "activations_given_as_int16": lambda g: e.as_codes(g, "activations", np.int16, 40 / 32767),
    "norm_weight_cast_fp16": normed_by("layers.0.pre_ffw_norm", weighted(e.through(np.float16))),
    "cos_cast_fp16": edge("0.cos", e.through(np.float16)),
}
# However coarse a grid is, and whatever of ordinary numbers it cuts off: that is the runtime's.
ON_GRIDS = edges(
    {
        "activations": {"in_halves_int8": e.over_int(0.5), "within_1_int8": e.over_int(1 / 127)},
        "1.query_normed": {"of_2_int8": e.over_int(2 / 127)},
        "0.queries": {"within_a_half_int8": e.over_int(0.5 / 127)},
        "1.scores": {"in_halves_int8": e.over_int(0.5), "fp16": e.through(np.float16)},
        "1.probabilities": {"in_256ths": e.over_int(1 / 256, -128)},
        "0.key": {"within_a_tenth_int8": e.over_int(0.1 / 127)},
        "1.value": {"off_centre_int8": e.over_int(0.02, 100)},
        "0.product": {"in_quarters_int16": e.over_int(0.25, 0, np.int16)},
        "1.stream": {"bf16": e.through(ml_dtypes.bfloat16)},
        "logits": {"in_halves_int16": e.over_int(0.5, 0, np.int16)},
    }
)

CASES = (
    *cases("same: masks", MASKS),
    *cases("same: caches", CACHES),
    *cases("same: scores and rope", SCORES),
    *cases("same: norms", NORMS),
    *cases("same: blocks", BLOCKS),
    *cases("same: detours", DETOURS),
    *cases("same: weights", WEIGHTS),
    *cases("same: weights", {"fp16_norms": half_norms}, rounds=True),
    *cases("same: weights", {"layer_twice": layer_twice}, layers=(0, 1, 3), rounds=True),
    *cases("same: absorbed", ABSORBED),
    *cases("same: spelled", EXACT, Sample(230, mask="past"), exact=True),
    *cases("same: rounded", ROUNDED, exact=True, rounding=2e-3),
    *cases("same: on grids", ON_GRIDS),
)
