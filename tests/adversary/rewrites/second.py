"""A second round: the same function as exporters plausibly write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import LOWEST, WINDOW, Case, Change, Sample, each, edge, parameters, turn, with_number
from adversary.mutations.masks import both, compare, hidden_sum, slots, summed, visible
from adversary.mutations.rope import angle, position, rotated_by
from adversary.mutations.second import EVERY, fp16
from adversary.mutations.tables import row, tabled
from adversary.rewrites.masks import distance, selected, within
from adversary.rewrites.norms import every_norm

Array = np.ndarray


def additive(value: float) -> Change:
    """0 or ``value`` is added."""
    return summed(lambda g, m: g.call("SELECT_V2", m, 0.0, np.float32(value), shape=g.shape(m)))


def chosen(value: float) -> Change:
    return selected(lambda g, p: g.call("SELECT_V2", p.visible, p.scores, np.float32(value), shape=g.shape(p.scores)))


def old_select(g: Graph, layer: Any) -> int:
    """SELECT, which does not broadcast."""
    shape = g.shape(layer.scores)
    wide = g.call("BROADCAST_TO", layer.visible, np.array(shape, np.int32), shape=shape)
    return g.call("SELECT", wide, layer.scores, g.constant(np.full(shape, LOWEST)), shape=shape)


def window_by_quotient(g: Graph) -> int:
    quotient = g.call("FLOOR_DIV", distance(g), np.array([WINDOW], np.int32))
    return g.equal(quotient, np.array([0], np.int32))


def band(g: Graph) -> int:
    """The window as a part of a vector that begins by the position."""
    vector = np.zeros(511)
    vector[255 - WINDOW + 1 : 256] = 1
    begin = g.sub(g.constant(np.array([255]), np.int32), g.input("input_pos"))
    return g.cast(g.call("SLICE", g.constant(vector), begin, np.array([256], np.int32), shape=[256]), np.bool_)


def typed_input(name: str, kind: Any, back: Callable[[Graph, int], int]) -> Change:
    """The input comes as another type, and is brought back."""

    def change(g: Graph) -> None:
        tensor = g.input(name)
        readers = g.readers(tensor)
        old = g.dtype(tensor)
        g.main.tensors[tensor].type = {
            np.int8: schema.TensorType.INT8,
            np.uint8: schema.TensorType.UINT8,
            np.int32: schema.TensorType.INT32,
            np.int64: schema.TensorType.INT64,
            np.float32: schema.TensorType.FLOAT32,
            np.float16: schema.TensorType.FLOAT16,
        }[kind]
        made = back(g, tensor)
        assert g.dtype(made) == old
        g.rewire(tensor, made, readers)
        g.adapt[name] = lambda a: a.astype(kind)

    return change


def reshaped_input(name: str, shape: list[int]) -> Change:
    def change(g: Graph) -> None:
        tensor = g.input(name)
        readers, old = g.readers(tensor), g.shape(tensor)
        g.main.tensors[tensor].shape = shape
        g.rewire(tensor, g.reshape(tensor, old), readers)
        g.adapt[name] = lambda a: a.reshape(shape)

    return change


def additive_input(g: Graph) -> None:
    """The mask comes as 0 and −1e9 in floats."""
    tensor = g.input("mask")
    readers = g.readers(tensor)
    g.main.tensors[tensor].type = schema.TensorType.FLOAT32
    g.rewire(tensor, g.greater_equal(tensor, -1.0), readers)
    g.adapt["mask"] = lambda a: np.where(a, 0, -1e9).astype(np.float32)


def caches(kind: Any, scale: float, zero_point: int = 0, which: str = "kv") -> Change:
    """Caches of integers or halves, brought back by DEQUANTIZE or CAST."""

    def coded(array: Array) -> Array:
        ends = np.iinfo(kind)
        return np.clip(np.round(array / scale) + zero_point, ends.min, ends.max).astype(kind)

    def change(g: Graph) -> None:
        for name in (f"kv_cache_{w}_{n}" for w in which for n in (2, 3)):
            tensor = g.input(name)
            readers = g.readers(tensor)
            described = g.main.tensors[tensor]
            if kind == np.float16:
                described.type = schema.TensorType.FLOAT16
                g.rewire(tensor, g.cast(tensor, np.float32), readers)
                g.adapt[name] = lambda a: a.astype(np.float16)
                continue
            described.type = {np.int8: schema.TensorType.INT8, np.int16: schema.TensorType.INT16}[kind]
            described.quantization = parameters(scale, zero_point)
            g.rewire(tensor, g.call("DEQUANTIZE", tensor, dtype=np.float32), readers)
            g.adapt[name] = coded

    return change


def spread_heads(how: str) -> Change:
    """K and V of a head for every query of its group, by BROADCAST_TO, TILE or CONCATENATION."""

    def wide(g: Graph, cache: int) -> int:
        one, heads, *rest = g.shape(cache)
        shape = [one, heads, 2, *rest]
        narrow = g.reshape(cache, [one, heads, 1, *rest])
        if how == "BROADCAST_TO":
            made = g.call(how, narrow, np.array(shape, np.int32), shape=shape)
        elif how == "TILE":
            made = g.call(how, narrow, np.array([1, 1, 2, 1, 1], np.int32), shape=shape)
        else:
            made = g.join([narrow, narrow], 2)
        return g.reshape(made, [one, heads * 2, *rest])

    def change(g: Graph) -> None:
        layer = g.layer(0)
        key, value = (wide(g, g.input(f"kv_cache_{w}_2")) for w in "kv")
        query = g.reshape(layer.queries, [1, 4, 1, 32])
        scores = g.call("BATCH_MATMUL", query, key, shape=[1, 4, 1, 256], adjY=True)
        hidden = g.call("SELECT_V2", layer.visible, scores, LOWEST, shape=[1, 4, 1, 256])
        weights = g.call("SOFTMAX", hidden, beta=1.0)
        mixed = g.call("BATCH_MATMUL", weights, value, shape=[1, 4, 1, 32], adjY=True)
        g.rewire(layer.merged, g.reshape(mixed, g.shape(layer.merged)))

    return change


def interleaved(g: Graph) -> None:
    """Pairs stand side by side: of the query, and of K, which is brought into that order."""
    layer = g.layer(0)
    order = [i // 2 + i % 2 * 16 for i in range(32)]
    key = g.input("kv_cache_k_2")
    readers = g.readers(key)
    g.rewire(key, g.gather(key, order, 3), readers)

    def build(g: Graph, q: int, cos: int, sin: int) -> int:
        q = g.gather(q, order, -1)
        even, odd = (g.gather(q, range(start, 32, 2), -1) for start in (0, 1))
        left, right = turn(g, even, odd, cos, sin)
        *front, width = g.shape(left)
        pairs = g.join([g.reshape(t, [*front, width, 1]) for t in (left, right)])
        return g.reshape(pairs, [*front, 2 * width])

    rotated_by(build)(g)
    assert layer


def composite_called(name: bytes) -> Change:
    def change(g: Graph) -> bool | None:
        found = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE"]
        for op in found:
            op.builtinOptions2.name = name
        return None if found else False

    return change


def asymmetric(g: Graph) -> None:
    for op in g.ops:
        if g.kind(op) in ("FULLY_CONNECTED", "BATCH_MATMUL"):
            op.builtinOptions.asymmetricQuantizeInputs = True


def signature_called(name: bytes) -> Change:
    return lambda g: setattr(g.model.signatureDefs[0], "signatureKey", name)


def both_products_by_einsum(g: Graph) -> None:
    """Five axes, [batch, heads, group, query, slots], as einsum leaves it."""
    layer = g.layer(0)
    key = g.reshape(g.input("kv_cache_k_2"), [1, 2, 1, 256, 32])
    value = g.reshape(g.input("kv_cache_v_2"), [1, 2, 1, 32, 256])
    query = g.reshape(layer.queries, [1, 2, 2, 1, 32])
    scores = g.call("BATCH_MATMUL", query, key, shape=[1, 2, 2, 1, 256], adjY=True)
    mask = g.reshape(layer.visible, [1, 1, 1, 1, 256])
    hidden = g.call("SELECT_V2", mask, scores, LOWEST, shape=[1, 2, 2, 1, 256])
    mixed = g.call("BATCH_MATMUL", g.call("SOFTMAX", hidden, beta=1.0), value, shape=[1, 2, 2, 1, 32], adjY=True)
    g.rewire(layer.merged, g.reshape(mixed, g.shape(layer.merged)))


EXACT: dict[str, dict[str, Change]] = {
    "masks": {
        "sum_of_-45824": additive(-45824.0),
        "select_of_-45824": chosen(-45824.0),
        "sum_of_-2.4e38": additive(-2.3819763e38),
        "select_of_-2.4e38": chosen(-2.3819763e38),
        "sum_of_minus_infinity": additive(-np.inf),
        "sum_of_-1e4": additive(-1e4),
        "sum_of_-65504": additive(-65504.0),
        "select_of_-3.4e38": chosen(-3.4e38),
        "old_select": selected(old_select),
        "logarithm": summed(lambda g, m: g.log(g.cast(m, np.float32))),
        "subtracted": selected(lambda g, p: g.sub(p.scores, g.mul(g.cast(g.logical_not(p.visible), np.float32), 1e9))),
        "squares_of_mask": summed(lambda g, m: g.mul(g.sub(g.square(g.cast(m, np.float32)), 1.0), 1e9)),
        "window_by_quotient": within(window_by_quotient),
        "band_by_slice": within(band),
        "from_first_seen": within(
            lambda g: both(
                g,
                g.greater_equal(
                    g.constant(slots(g), np.int32),
                    g.maximum(g.sub(g.input("input_pos"), np.array([WINDOW - 1], np.int32)), np.array([0], np.int32)),
                ),
                compare("GREATER_EQUAL", 0)(g),
            )
        ),
        "int16_positions": within(
            lambda g: both(
                g, g.greater_equal(g.cast(distance(g), np.float32), 0.0), g.less(g.cast(distance(g), np.float32), 15.5)
            )
        ),
        "past_for_the_full_layer": visible(
            1, lambda g, x: both(g, x, g.reshape(compare("GREATER_EQUAL", 0)(g), g.shape(x)))
        ),
        "window_sum_and_mask_sum": summed(
            lambda g, m: g.add(
                hidden_sum(g, g.input("mask")),
                g.reshape(
                    hidden_sum(
                        g,
                        g.reshape(both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW)(g)), [1, 1, 1, 256]),
                    ),
                    [1, 1, 1, 256],
                ),
            ),
            (0,),
        ),
        "row_of_sums": each(
            summed(
                lambda g, m: g.add(
                    hidden_sum(g, g.input("mask")),
                    g.reshape(
                        row(
                            g,
                            g.constant(
                                np.where((EVERY[:, None] >= EVERY) & (EVERY[:, None] - WINDOW < EVERY), 0.0, -1e9)
                            ),
                        ),
                        [1, 1, 1, 256],
                    ),
                ),
                (0,),
            )
        ),
    },
    "scores": {"scaled_by_1": edge("1.scores", with_number("DIV", 1.0))},
    "caches": {"spread_by_broadcast": spread_heads("BROADCAST_TO"), "five_axes": both_products_by_einsum},
    "rope": {
        "interleaved": interleaved,
        "angle_negated_twice": angle(lambda g, x: g.neg(g.neg(x))),
        "position_plus_1_minus_1": position(lambda g, x: g.sub(g.add(x, 1.0), 1.0)),
    },
    "norms": {
        "power_by_three_steps": every_norm(
            lambda g, n: g.rewire(int(n.root.outputs[0]), g.div(1.0, g.sqrt(int(n.root.inputs[0]))))
        )
    },
    "inputs": {
        "position_int64": typed_input("input_pos", np.int64, lambda g, x: g.cast(x, np.int32)),
        "position_scalar": reshaped_input("input_pos", []),
        "position_1x1": reshaped_input("input_pos", [1, 1]),
        "mask_int8": typed_input("mask", np.int8, lambda g, x: g.cast(x, np.bool_)),
        "mask_int32": typed_input("mask", np.int32, lambda g, x: g.not_equal(x, np.array(0, np.int32))),
        "mask_of_sums": additive_input,
        "mask_flat": reshaped_input("mask", [256]),
        "mask_of_two_axes": reshaped_input("mask", [1, 256]),
        "activations_of_two_axes": reshaped_input("activations", [1, 128]),
        "activations_flat": reshaped_input("activations", [128]),
        "signature_called_otherwise": signature_called(b"mtp_drafter"),
    },
    "kinds": {"composites_of_other_names": composite_called(b"some.function"), "asymmetric_inputs": asymmetric},
}
ROUNDED: dict[float, dict[str, Change]] = {
    # Numbers of half precision that a converter made floats: read, and said to be coarse.
    0.05: {"fp16_numbers_in_floats": tabled(cos=fp16, sin=fp16)},
    2e-3: {"caches_fp16": caches(np.float16, 1.0), "caches_int16": caches(np.int16, 80 / 32767)},
    0.1: {
        "caches_int8": caches(np.int8, 0.05),
        "caches_int8_off_centre": caches(np.int8, 0.05, 3),
        "values_int8": caches(np.int8, 0.05, 0, "v"),
    },
}

SECOND = (
    *(
        Case(f"same: second {family}", name, change, exact=True, shows=(Sample(230, mask="past"),))
        for family, changes in EXACT.items()
        for name, change in changes.items()
    ),
    *(
        Case("same: second rounded", name, change, exact=True, rounding=rounding)
        for rounding, changes in ROUNDED.items()
        for name, change in changes.items()
    ),
)
