"""What LiteRT's kernels make of a file: huge numbers, attributes, codes, large integers, last bits, stored results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Case, Change, Sample, a_change, an_edit, at, cases, edge
from adversary.mutations.attention import compare, slots, visible
from adversary.mutations.blocks import eps, every_norm
from adversary.mutations.files import BMM, RMS, composites
from adversary.mutations.numbers import scales, weight
from adversary.mutations.positions import number, position


def scaled_norm(role: str, factor: float) -> Change:
    return lambda g: g.set_value(g.roles[role], g.value(g.roles[role]) * np.float32(factor))


def scaled_weight(role: str, factor: float) -> Change:
    """The weight's scales, larger or smaller."""
    return weight(role, scales(lambda s: s * np.float32(factor)))


HUGE: dict[str, Change] = {
    "pre_ffw_norm_1e20_overflows": scaled_norm("layers.0.pre_ffw_norm", 1e20),
    "attention_out_1e-25_vanishes": scaled_weight("layers.0.o_proj", 1e-25),
    "final_norm_1e7": scaled_norm("final_norm", 1e7),
    "pre_projection_1e-20": scaled_weight("pre_projection", 1e-20),
}


@a_change
def scalar(g: Graph, values: Callable[[float], Any], layer: int = 0) -> None:
    """Other numbers as a layer's scalar."""
    old = g.roles[f"layers.{layer}.layer_scalar"]
    made = g.constant(np.asarray(values(float(g.value(old).reshape(-1)[0]))))
    g.set_input(g.layer(layer).scaler, list(g.layer(layer).scaler.inputs).index(old), made)


SCALARS: dict[str, Change] = {
    "not_a_number": scalar(lambda s: np.nan),
    "infinite": scalar(lambda s: np.inf),
}


@a_change
def attribute(g: Graph, name: bytes, attributes: dict[str, Any]) -> bool:
    """What composites called ``name`` say of themselves."""
    for op in composites(g, name):
        op.builtinOptions2.compositeAttributes = np.frombuffer(bytes(flexbuffers.Dumps(attributes)), np.uint8)
    return bool(composites(g, name))


ATTRIBUTES: dict[str, tuple[Change, str]] = {
    "epsilon_of_0.01": (attribute(RMS, {"epsilon": 0.01}), "CPUs run the body, an accelerator what the attribute says"),
    "products_transposed": (attribute(BMM, {"adj_y": True, "adj_x": True}), "the body transposes otherwise"),
}


def from_long_range(g: Graph, x: int) -> int:
    """A number from a RANGE that no memory holds."""
    numbers = (np.array(n, np.int32) for n in (0, 2**31 - 1, 1))
    span = g.call("RANGE", *numbers, shape=[2**31 - 1])
    return g.reshape(g.cast(g.part(span, 3, 1), np.float32), g.shape(x))


# Masks: a sum of floats is no exact integer.


def slots_in_256s(g: Graph, x: int) -> int:
    """Slots up to the position plus 1, by (slot + 2³¹) − 2³¹ in floats, which rounds to multiples of a power of two."""
    there = g.add(number(g), 1.0)
    rounded = g.sub(g.add(g.constant(slots(g)), 2.0**31), 2.0**31)
    return g.logical_and(x, g.reshape(g.greater_equal(there, rounded), g.shape(x)))


_AT = (*(Sample(p, mask="past") for p in (37, 201, 230, 254)), Sample(255), Sample(150, mask="past"))


@an_edit
def of_codes(g: Graph, x: int, name: str, *others: int, scale: float = 0.05) -> int:
    """An operator on codes, which LiteRT's kernel computes without their scales."""
    operands = [e.quantized(g, x, scale)]
    for code in others:
        operands.append(g.constant(np.array([code]), np.int8))
        g.main.tensors[operands[-1]].quantization = e.parameters(2.1e29)
    result = g.call(name, *operands, shape=g.shape(x), dtype=np.int8)
    g.main.tensors[result].quantization = e.parameters(2 * scale if name == "NEG" else scale)
    return e.dequantized(g, result)


KERNELS: dict[str, Change] = {
    "smaller_of_codes": edge("state", of_codes("MINIMUM", 5)),
    "larger_of_codes": edge("state", of_codes("MAXIMUM", -5)),
    "negative_of_codes": edge("state", e.chain(of_codes("NEG"), e.unary("NEG"))),
}


def shaped_by_int64(g: Graph, x: int) -> int:
    """A RESHAPE whose operand is INT64: LiteRT takes its option, which says another shape."""
    count = int(np.prod(g.shape(x)))
    reshaped = g.call("RESHAPE", x, np.array([1, count], np.int64), shape=[1, count])
    g.producer(reshaped).builtinOptions.newShape = np.array([4, count // 4], np.int32)
    return g.reshape(g.transpose(reshaped, [1, 0]), g.shape(x))


SHAPES: dict[str, Change] = {f"{place}_by_int64": edge(place, shaped_by_int64) for place in ("state", "0.query")}

GRIDS_OF_CACHES: dict[str, Change] = {
    "keys_by_a_scale_of_0": lambda g: e.as_codes(g, "kv_cache_k_3", np.int8, 0.0),
    "keys_by_a_zero_point_that_is_no_code": lambda g: e.as_codes(g, "kv_cache_k_3", np.int8, 0.02, 1000),
}


@a_change
def multiplied_codes(g: Graph, name: str) -> None:
    """The products take the codes of the cache ``name`` themselves, which have a zero point: kernels ignore it."""
    g.open_all()
    e.as_codes(g, name, np.int8, 0.05, 20, back=lambda g, x: x)


@an_edit
def beside_codes(g: Graph, x: int, bits: int) -> int:
    """The mask but for slot 2, whose code alone is 1: a CAST makes codes of it, whatever they stand for."""
    codes = g.constant(slots(g) == 2, np.int8)
    stored = g.main.tensors[codes]
    if bits == 2:
        stored.type = schema.TensorType.INT2
        stored.buffer = g.buffer(bytes([1 << 4, *[0] * 63]))
        stored.quantization = e.parameters(0.0)
    else:
        blocks = schema.BlockwiseQuantizationT(scales=g.constant(np.zeros(1), np.float16), zeroPoints=-1, blockSize=256)
        stored.quantization = schema.QuantizationParametersT(
            detailsType=schema.QuantizationDetails.BlockwiseQuantization, details=blocks
        )
    return g.logical_and(x, g.equal(g.cast(codes, np.float32), 0.0))


CAST_CODES: dict[str, Change] = {
    "int2_that_is_cast": visible(1, beside_codes(2)),
    "blocks_that_are_cast": visible(1, beside_codes(8)),
}


@an_edit
def where_rounded(g: Graph, x: int, name: str, function: Callable[[Any], Any]) -> int:
    """The mask where LiteRT rounds ``name`` as NumPy does."""
    numbers = np.linspace(0.1, 3, 256, dtype=np.float32).reshape(1, 1, 1, -1)
    return g.logical_and(x, g.equal(g.call(name, numbers), function(numbers)))


ROUNDED: dict[str, Change] = {
    name: visible(1, where_rounded(name.upper(), function))
    for name, function in {"sin": np.sin, "cos": np.cos, "exp": np.exp, "log": np.log}.items()
}


def last_bits(g: Graph) -> int:
    """What rounding leaves of an exponential: 0 where it is NumPy's, or a large number on hardware that rounds it
    otherwise.
    """
    number = np.float32(1.7)
    rounded = g.sub(g.call("EXP", g.constant(np.full(1, number))), float(np.exp(number)))
    return g.mul(rounded, 1e6)


AMPLIFIED: dict[str, Change] = {
    "of_an_angle": position(lambda g, x: g.add(x, g.reshape(last_bits(g), (1,) * len(g.shape(x))))),
    "of_a_factor": edge("0.attended", lambda g, x: g.mul(x, g.add(last_bits(g), 1.0))),
}


@a_change
def softmax_of_codes(g: Graph, scale: float) -> None:
    """A softmax in UINT8, whose result says ``scale``."""
    g.open_all()
    place = g.layer(1)
    weights = g.call("SOFTMAX", e.quantized(g, place.masked, 40.0, 200, np.uint8), beta=1.0)
    g.main.tensors[weights].quantization = e.parameters(scale)
    g.rewire(place.probabilities, e.dequantized(g, weights))


@a_change
def more_heads(g: Graph, *names: str) -> None:
    """Caches of four KV heads, of which two are read."""
    for name in names:
        tensor = g.input(f"kv_cache_{name}_2")
        shape = g.shape(tensor)
        g.main.tensors[tensor].shape = [1, 4, *shape[2:]]
        g.insert(tensor, lambda x, shape=shape: g.slice(x, [0, 0, 0, 0], shape))
        g.adapt[f"kv_cache_{name}_2"] = lambda a: np.concatenate([a, a], 1)


def one_pair_for_both(g: Graph) -> None:
    """The second sliding layer sees everything, with the caches of the first."""
    place = g.layer(1)
    hidden = g.call("SELECT_V2", g.input("mask"), place.scores, -1e9, shape=g.shape(place.scores))
    g.set_input(place.softmax, 0, hidden)


LARGE = 2**61
"""float64 holds no neighbours of it."""


def late(g: Graph, x: int) -> int:
    """Slot 100 is seen from position 200 on: by INT64, which in floats were all the same."""
    there = g.add(g.cast(g.input("input_pos"), np.int64), np.array([LARGE], np.int64))
    begins = LARGE + np.where(slots(g) == 100, 200, slots(g)).astype(np.int64)
    return g.logical_and(x, g.reshape(g.call("GREATER_EQUAL", there, begins, shape=g.shape(x)), g.shape(x)))


def position_64(g: Graph) -> int:
    return g.cast(g.input("input_pos"), np.int64)


def steep(g: Graph, x: int) -> int:
    """Slots rise by 2⁵³, positions by 2⁵³ + 1: position 101 to 120 do not see their own slot."""
    there = g.mul(position_64(g), np.array([2**53 + 1], np.int64))
    ahead_of = {at: g.call("GREATER_EQUAL", slots(g) * np.int64(2**53) + at, there) for at in (100, 120)}
    return g.logical_and(x, g.logical_or(ahead_of[100], g.logical_not(ahead_of[120])))


def wrapping(g: Graph, x: int) -> int:
    """Slot 50 is seen from 100 to 120 slots after it: the numbers of slots wrap around there."""
    low = g.sub(position_64(g), np.array([2**61], np.int64))
    after_49, after_50 = (g.call("LESS", slots(g) + np.int64(2**63 - at), low) for at in (50, 51))
    far = g.logical_and(compare("GREATER_EQUAL", 100)(g), compare("LESS_EQUAL", 120)(g))
    only_50 = g.logical_and(after_49, g.logical_not(after_50))
    return g.logical_or(x, g.logical_and(g.input("mask"), g.logical_and(only_50, far)))


def through_zero(g: Graph, x: int) -> int:
    """Position 50 does not see its own slot: slots rise by 2³⁰ in floats, and slot 50 is 1 instead of 0."""
    begins = ((slots(g) - 50) * 2.0**30 + (slots(g) == 50)).astype(np.float32)
    there = g.mul(g.sub(number(g), 50.0), 2.0**30)
    return g.logical_and(x, g.call("LESS_EQUAL", begins, there))


ROUNDED_SLOPES: dict[str, Change] = {
    "steep": visible(0, steep),
    "wrapping": visible(0, wrapping),
    "through_zero": visible(0, through_zero),
}


def all_by_nan(g: Graph, x: int) -> int:
    """The mask input alone: MAXIMUM of NaN and a number is that number on CPUs, and compares as it."""
    number = g.maximum(np.full((1, 1, 1, 1), np.nan, np.float32), g.cast(g.input("mask"), np.float32))
    return g.call("SELECT_V2", g.not_equal(number, number), x, g.input("mask"))


NO_ENGINE = "an engine hands over as many heads as the config says, and each type of layer its own caches"


@a_change
def stored_for(g: Graph, tensor: Callable[[Graph], int], number: int = 1) -> None:
    """Numbers are stored for what an operator computes."""
    result = tensor(g)
    g.set_value(result, np.full(g.shape(result), number))


def plus_0(g: Graph) -> int:
    """The position plus 0, for the angles."""
    readers = [op for op in g.readers(g.input("input_pos")) if g.kind(op) in ("RESHAPE", "CAST")]
    return g.insert(g.input("input_pos"), lambda x: g.add(x, np.array([0], np.int32)), readers)


STORED_RESULTS: dict[str, Change] = {
    "position": stored_for(plus_0, 7),
    "mask": stored_for(lambda g: at(g, "0.visible")),
    "input": stored_for(lambda g: g.input("mask")),
    "state": stored_for(lambda g: at(g, "state")),
}

CACHES: dict[str, Change] = {
    "two_of_four_heads": more_heads("k", "v"),
    "two_of_four_heads_of_values": more_heads("v"),
}
"""Cases that the interpreter cannot tell carry their reason."""


CASES = (
    *cases("third: huge numbers", HUGE, Sample(40, keys=100.0), rounding=0.02),
    *cases("third: layer scalars", SCALARS),
    *cases("third: attributes", ATTRIBUTES),
    *cases("third: stumbles", {"angle_over_nothing": position(lambda g, x: g.div(x, g.sub(x, x)))}),
    *cases("third: stumbles", {"range_of_2_to_the_31": position(from_long_range)}, why="no runtime computes it"),
    *cases("third: sums of floats", {"slots_in_256s": visible(1, slots_in_256s)}, *_AT),
    *cases("fourth: kernels of codes", KERNELS, exact=True),
    *cases("fourth: shapes of another type", SHAPES),
    Case("fourth: constants", "infinite_epsilons", every_norm(eps(np.inf))),
    *cases("fourth: grids of the interface", GRIDS_OF_CACHES, exact=True, why="runtimes hand over other numbers"),
    *cases("fourth: caches", CACHES, why=NO_ENGINE),
    *cases("fourth: caches", {"one_pair_for_both_types": one_pair_for_both}, layers=(0, 1), why=NO_ENGINE),
    *cases(
        "fourth: large integers", {"slot_100_late": visible(1, late)}, *(Sample(p, mask="past") for p in (100, 150))
    ),
    *cases("fifth: large numbers", ROUNDED_SLOPES, *(Sample(p, mask="past") for p in (50, 110, 160))),
    *cases("fifth: not a number", {"all_by_maximum": visible(0, all_by_nan)}, Sample(150, mask="past")),
    *cases("fifth: zero points", {"of_values": multiplied_codes("kv_cache_v_3")}, exact=True, rounding=0.1),
    *cases("fifth: kernels of codes", {"softmax_in_uint8": softmax_of_codes(1e-6)}, exact=True, rounding=0.2),
    *cases("fifth: codes that are cast", CAST_CODES, Sample(40, mask="past")),
    *cases("fifth: last bits", AMPLIFIED, why="hardware rounds in ways of its own"),
    *cases("fifth: last bits", ROUNDED, Sample(201, mask="past"), why="hardware rounds in ways of its own"),
    *cases("fourth: results that are stored", STORED_RESULTS, why="LiteRT computes with the one or the other"),
)
