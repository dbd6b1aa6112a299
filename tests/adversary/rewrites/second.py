"""Other words that came with the later attacks: softmaxes, constants, names, inputs, interfaces."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, cases, edge
from adversary.mutations.attention import summed
from adversary.mutations.blocks import epsilon, every_norm
from adversary.mutations.files import KEYS_AND_VALUES, names_crossed
from adversary.mutations.kernels import scalar
from adversary.mutations.positions import tabled
from adversary.mutations.quiet import fp16, plus_number
from adversary.rewrites.spelled import LAYERS, respelled, selected


def additive(value: float) -> Change:
    """0 or ``value`` is added."""
    return summed(lambda g, m: g.call("SELECT_V2", m, 0.0, np.float32(value), shape=g.shape(m)))


def chosen(value: float) -> Change:
    return selected(lambda g, p: g.call("SELECT_V2", p.visible, p.scores, np.float32(value), shape=g.shape(p.scores)))


@a_change
def reshaped_input(g: Graph, name: str, shape: list[int]) -> None:
    tensor = g.input(name)
    old = g.shape(tensor)
    g.main.tensors[tensor].shape = shape
    g.insert(tensor, lambda x: g.reshape(x, old))
    g.adapt[name] = lambda a: a.reshape(shape)


CACHE_NAMES = [f"kv_cache_{which}_{number}" for which in "kv" for number in (2, 3)]


def half_caches(g: Graph) -> None:
    for name in CACHE_NAMES:
        g.main.tensors[g.input(name)].type = schema.TensorType.FLOAT16
        g.insert(g.input(name), lambda x: g.cast(x, np.float32))
        g.adapt[name] = lambda a: a.astype(np.float16)


@a_change
def int16_caches(g: Graph, back: Edit = e.dequantized) -> None:
    for name in CACHE_NAMES:
        e.as_codes(g, name, np.int16, 80 / 32767, back=back)


def wide(g: Graph, cache: int) -> int:
    """K or V of a head for every query of its group."""
    one, heads, *rest = g.shape(cache)
    shape = [one, heads, 2, *rest]
    narrow = g.reshape(cache, [one, heads, 1, *rest])
    spread = g.call("BROADCAST_TO", narrow, np.array(shape, np.int32), shape=shape)
    return g.reshape(spread, [one, heads * 2, *rest])


def composites_renamed(g: Graph) -> bool:
    composites = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE"]
    for op in composites:
        op.builtinOptions2.name = b"some.function"
    return bool(composites)


def asymmetric(g: Graph) -> None:
    for op in g.ops:
        if g.kind(op) in ("FULLY_CONNECTED", "BATCH_MATMUL"):
            op.builtinOptions.asymmetricQuantizeInputs = True


def both_products_by_einsum(g: Graph) -> None:
    """Five axes, [batch, heads, group, query, slots], as einsum leaves it."""
    key = g.reshape(g.input("kv_cache_k_2"), [1, 2, 1, 256, 32])
    respelled(g, [key, g.reshape(g.input("kv_cache_v_2"), [1, 2, 1, 32, 256])], [1, 2, 2, 1])


EXACT: dict[str, dict[str, Change]] = {
    "masks": {
        "sum_of_-45824": additive(-45824.0),
        "select_of_-45824": chosen(-45824.0),
        "sum_of_-2.4e38": additive(-2.3819763e38),
        "sum_of_minus_infinity": additive(-np.inf),
        "sum_of_-1e4": additive(-1e4),
        "sum_of_-65504": additive(-65504.0),
        "logarithm": summed(lambda g, m: g.log(g.cast(m, np.float32))),
        "squares_of_mask": summed(lambda g, m: g.mul(g.sub(g.square(g.cast(m, np.float32)), 1.0), 1e9)),
    },
    "scores": {"scaled_by_1": edge("1.scores", e.with_number("DIV", 1.0))},
    "caches": {
        "spread_by_broadcast": lambda g: respelled(
            g, [wide(g, g.input(f"kv_cache_{which}_2")) for which in "kv"], [1, 4, 1]
        ),
        "five_axes": both_products_by_einsum,
    },
    "rope": {"angle_negated_twice": edge("0.angle", e.chain(e.unary("NEG"), e.unary("NEG")))},
    "norms": {
        "power_by_three_steps": every_norm(
            lambda g, n: g.rewire(int(n.root.outputs[0]), g.div(1.0, g.sqrt(int(n.root.inputs[0]))))
        )
    },
    "inputs": {
        "position_scalar": reshaped_input("input_pos", []),
        "position_1x1": reshaped_input("input_pos", [1, 1]),
        "mask_flat": reshaped_input("mask", [256]),
        "mask_of_two_axes": reshaped_input("mask", [1, 256]),
    },
    "kinds": {"composites_of_other_names": composites_renamed, "asymmetric_inputs": asymmetric},
}
ROUNDED: dict[str, Change] = {
    "caches_fp16": half_caches,
    "caches_int16": int16_caches(),
    "caches_int16_cast_and_scaled": int16_caches(lambda g, x: g.mul(g.cast(x, np.float32), 80 / 32767)),
}


def safe_by_scores(g: Graph) -> None:
    """The softmax, but 0 for the rows of which every score is −∞: torch's own, safe where a row shows nothing."""
    for place in map(g.layer, LAYERS):
        mask = g.call("SELECT_V2", place.visible, 0.0, -np.inf, shape=g.shape(place.visible))
        masked = g.add(place.scores, mask)
        weights = g.call("SOFTMAX", masked, beta=1.0)
        alive = g.logical_not(g.equal(masked, -np.inf), dtype=np.bool_)
        nothing = g.logical_not(g.reduce("REDUCE_ANY", alive, 3), dtype=np.bool_)
        g.rewire(place.probabilities, g.call("SELECT_V2", nothing, 0.0, weights, shape=g.shape(place.scores)))


# Constants, ones, and bounds that are none.
CONSTANTS: dict[str, Change] = {
    "eps_of_two_thousandths": every_norm(epsilon(lambda g, _: g.mul(g.constant(1e-3), g.constant(1e-3)))),
    "scalar_of_one_number_in_three_axes": scalar(lambda s: np.full([1, 1, 1], s)),
    "query_plus_what_overflows": edge("1.query_normed", plus_number(lambda g: g.div(1.0, g.pow(1e-5, -9.0)))),
    "query_larger_and_scores_smaller": e.each(edge("1.queries", e.mul(8.0)), edge("1.scores", e.mul(0.125))),
}


@a_change
def exchanged(g: Graph, *pairs: tuple[bytes, bytes]) -> None:
    """In the tensors' names, one for the other."""
    for tensor in g.main.tensors:
        for a, b in pairs:
            tensor.name = tensor.name.replace(a, b"\0").replace(b, a).replace(b"\0", b)


NAMES: dict[str, Change] = {
    "of_another_layer": exchanged((b"layer_0", b"layer_1")),
    "gate_called_up": exchanged((b"gate", b"up")),
    "key_called_value": exchanged((b"_k_", b"_v_"), (b"key", b"value")),
    "query_called_output": exchanged((b"q_", b"o_"), (b"query", b"output")),
}

_SHOWS = (Sample(230, mask="past"), Sample(40, keys=3.0))


def second_options(g: Graph) -> bool | None:
    """An ADD carries a composite's options in its second field."""
    found = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE"]
    if not found:
        return False
    add = g.layer(0).first
    add.builtinOptions2, add.builtinOptions2Type = found[0].builtinOptions2, found[0].builtinOptions2Type
    return None


INTERFACES: dict[str, Change] = {
    "key_and_value_called_crosswise": names_crossed(*KEYS_AND_VALUES),
    "sliding_and_full_called_crosswise": names_crossed(
        ("kv_cache_k_2", "kv_cache_k_3"), ("kv_cache_v_2", "kv_cache_v_3")
    ),
    "mask_called_position": names_crossed(("mask", "input_pos")),
    "second_options_on_a_sum": second_options,
}

CASES = (
    *cases("same: interfaces", INTERFACES),
    *(
        case
        for family, changes in EXACT.items()
        for case in cases(f"same: second {family}", changes, Sample(230, mask="past"), exact=True)
    ),
    # Numbers of half precision that a converter made floats: read, and said to be coarse.
    *cases("same: second rounded", {"fp16_numbers_in_floats": tabled(cos=fp16, sin=fp16)}, exact=True, rounding=0.05),
    *cases("same: second rounded", ROUNDED, exact=True, rounding=2e-3),
    *cases("same: third softmaxes", {"safe_by_scores": safe_by_scores}, *_SHOWS),
    *cases("same: third constants", CONSTANTS, *_SHOWS),
    *cases("same: third names", NAMES),
)
