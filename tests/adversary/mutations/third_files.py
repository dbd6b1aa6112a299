"""The third attack on files and on the reader itself: attributes, huge numbers, what is declared, doubts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flatbuffers import flexbuffers
from helpers.surgery import Graph

from adversary.edits import Change, Sample, a_change, an_edit, cases
from adversary.mutations.attention import both, slots, visible
from adversary.mutations.numbers import scales, weight
from adversary.mutations.positions import number, position

Array = np.ndarray


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
def attribute(g: Graph, name: bytes, attributes: dict[str, Any]) -> bool | None:
    """What composites called ``name`` say of themselves."""
    found = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE" and op.builtinOptions2.name == name]
    for op in found:
        op.builtinOptions2.compositeAttributes = np.frombuffer(bytes(flexbuffers.Dumps(attributes)), np.uint8)
    return None if found else False


RMS, BMM, GELU = b"odml.rms_norm", b"odml.runtime_bmm", b"odml.gelu_tanh"
ATTRIBUTES: dict[str, tuple[Change, str]] = {
    "epsilon_of_0.01": (attribute(RMS, {"epsilon": 0.01}), "CPUs run the body, an accelerator what the attribute says"),
    "products_transposed": (attribute(BMM, {"adj_y": True, "adj_x": True}), "the body transposes otherwise"),
}


def span(g: Graph, delta: int) -> int:
    """A number from a RANGE that no memory holds."""
    made = g.call("RANGE", *(g.constant(np.array(n), np.int32) for n in (0, 2**31 - 1, delta)), shape=[2**31 - 1])
    return g.cast(g.part(made, 3, 1), np.float32)


STUMBLES: dict[str, Change] = {
    "angle_over_nothing": position(lambda g, x: g.div(x, g.sub(x, x))),
}
NOT_RUN: dict[str, Change] = {
    "range_of_2_to_the_31": position(lambda g, x: g.reshape(span(g, 1), g.shape(x))),
}


# Masks: a sum of floats is no exact integer.


@a_change
def rounded_slots(g: Graph, large: float) -> int:
    """(slot + large) − large in floats, which rounds to multiples of a power of two."""
    plain = g.constant(slots(g), np.float32)
    return g.sub(g.add(plain, np.float32(large)), np.float32(large))


@an_edit
def from_position(g: Graph, x: int, build: Callable[[Graph], int], shift: float) -> int:
    """What a layer shows, and of that only slots whose number by ``build`` is at most the position plus ``shift``."""
    there = g.add(number(g), np.float32(shift))
    return both(g, x, g.reshape(g.greater_equal(there, build(g)), g.shape(x)))


FLOATS: dict[str, Change] = {
    "slots_in_256s": visible(1, from_position(rounded_slots(2.0**31), 1.0)),
}


_AT = (*(Sample(p, mask="past") for p in (37, 201, 230, 254)), Sample(255), Sample(150, mask="past"))

CASES = (
    *cases("third: huge numbers", HUGE, Sample(40, keys=100.0), rounding=0.02),
    *cases("third: layer scalars", SCALARS),
    *cases("third: attributes", ATTRIBUTES),
    *cases("third: stumbles", STUMBLES),
    *cases("third: stumbles", NOT_RUN, why="no runtime computes it"),
    *cases("third: sums of floats", FLOATS, *_AT),
)
