"""Operators that look like a detour, a norm or a matrix, and are none: each is refused by its name."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from adversary.edits import Case, Change, Edit, chain, edge, unary, with_number
from adversary.judge import try_case
from adversary.mutations.blocks import normed_by
from adversary.rewrites.spelled import axis_of, rebuilt
from helpers.make_bundle import Memory, load
from helpers.surgery import Graph
from helpers.variant_files import variant
from seam import UnsupportedError, prove

NORM = "layers.1.pre_ffw_norm"


def mean(g: Graph, norm: Any, edit: Edit) -> None:
    g.insert(int(norm.average.outputs[0]), lambda x: edit(g, x))


def divide_by_power(exponent: float) -> Change:
    def build(g: Graph, norm: Any) -> int:
        average = g.reduce("MEAN", g.call("MUL", norm.x, norm.x), axis_of(g, norm))
        return g.call("MUL", norm.x, g.call("POW", g.call("ADD", average, np.float32(1e-6)), np.float32(exponent)))

    return normed_by(NORM, rebuilt(build))


def add_to_weight(number: float) -> Change:
    def edit(g: Graph, norm: Any) -> None:
        g.insert(norm.weight, lambda w: g.call("ADD", g.constant(g.value(w)), np.float32(number)), [norm.weigh])

    return normed_by(NORM, edit)


def edit_mean(*edits: Edit) -> Change:
    return normed_by(NORM, lambda g, n: mean(g, n, chain(*edits)))


MISSED = "layers.1.pre_ffw_norm: expected an RMSNorm"


def slice_to_end(begin: int) -> Edit:
    """The elements from ``begin`` to the end of the last axis, which a size of −1 says."""

    def edit(g: Graph, x: int) -> int:
        *others, last = g.shape(x)
        begins, sizes = np.array([0, 0, 0, begin], np.int32), np.full(4, -1, np.int32)
        return g.call("SLICE", x, begins, sizes, shape=[*others, last - begin])

    return edit


def slice_from_position(g: Graph, x: int) -> int:
    begins = g.join([g.constant([0, 0, 0], np.int32), g.input("input_pos")])
    return g.call("SLICE", x, begins, np.full(4, -1, np.int32), shape=g.shape(x))


REFUSED: dict[str, tuple[Change, str]] = {
    "a mean above a number": (edit_mean(with_number("MAXIMUM", 1e-3)), "MAXIMUM"),
    "a mean less a number": (edit_mean(with_number("SUB", 1e-3)), "may be negative"),
    "another root": (divide_by_power(-0.499), MISSED),
    "nearly 1 more": (add_to_weight(1.0000001), MISSED),
    "a bound within reach": (edge("1.stream", with_number("MAXIMUM", -9e29)), "MAXIMUM"),
    "a bound from the wrong side": (edge("1.stream", with_number("MINIMUM", -1e30)), "MINIMUM"),
    "a bound that is no number": (edge("1.stream", with_number("MAXIMUM", math.nan)), "MAXIMUM"),
    "nearly nothing": (edge("1.stream", with_number("ADD", 1e-3)), "expected the sum of the residual stream"),
    "a cap of another kind": (edge("logits", unary("TANH")), "lm_head"),
    "half a gate": (edge("0.activated", with_number("ADD", 1e-3)), "gate_proj"),
    "a cache but for its first slot": (edge("0.key", slice_to_end(1)), "with the shape .*255"),
    "a cache from the position to its end": (edge("0.key", slice_from_position), "slices beyond the 256"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_alike_is_refused_for_what_it_is(name: str) -> None:
    change, why = REFUSED[name]
    verdict = try_case(Case("forms", name, change), "torch")
    assert verdict is not None
    assert verdict.outcome == "refused"
    assert re.search(why, verdict.detail), verdict.detail


READ: dict[str, Change] = {
    "0 plus an activation": edge("0.merged", lambda g, x: g.call("ADD", np.float32(0), x)),
    "5 plus a score": edge("0.scores", lambda g, x: g.call("ADD", np.float32(5), x)),
    "the least of a far bound and an activation": edge("1.stream", lambda g, x: g.call("MINIMUM", np.float32(1e30), x)),
    "a cache to its end": edge("0.key", slice_to_end(0)),
}
"""The same function in other words."""


@pytest.mark.parametrize("name", READ)
def test_what_is_the_same_is_read(name: str) -> None:
    verdict = try_case(Case("forms", name, READ[name]), "torch")
    assert str(verdict).startswith("same"), verdict


def gather_windows(chosen: list[int]) -> Memory:
    """Return a drafter that picks the slots ``chosen`` of a window, in its weights and in its V."""
    g = Graph(load(variant("jax_published").read_bytes()), {})
    g.open_all()

    def gather_chosen(x: int) -> int:
        picked = g.gather(x, chosen, 3)
        g.main.tensors[picked].type = g.main.tensors[x].type
        g.main.tensors[picked].quantization = g.main.tensors[x].quantization
        return picked

    slices = [op for op in g.ops if g.kind(op) == "SLICE" and g.shape(int(op.inputs[0]))[-1] == 256]
    for op in slices:
        g.insert(int(op.outputs[0]), gather_chosen)
    assert len(slices) == 6
    return Memory(g.data())


def test_every_slot_of_a_window_is_weighed() -> None:
    assert prove(gather_windows([*range(16)]))["positions"]
    with pytest.raises(UnsupportedError, match="the weights of some slots alone"):
        prove(gather_windows([0, 0, *range(2, 16)]))
