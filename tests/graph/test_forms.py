"""Forms that look like a detour, a norm or a matrix, and are none: refused, and each for what it is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from adversary.edits import Case, Change, Edit, chain, edge, unary, with_number
from adversary.judge import try_case
from adversary.mutations.norms import normed_by
from adversary.rewrites.norms import axis_of, rebuilt
from adversary.rewrites.spelled import by_convolution
from helpers.make_bundle import Memory, load
from helpers.surgery import Graph
from helpers.variant_files import variant
from seam import UnsupportedError, prove

NORM = "layers.1.pre_ffw_norm"


def squares(g: Graph, norm: Any, edit: Edit) -> None:
    g.rewire(int(norm.square.outputs[0]), edit(g, norm.x))


def mean(g: Graph, norm: Any, edit: Edit) -> None:
    g.insert(int(norm.average.outputs[0]), lambda x: edit(g, x))


def by_row(row: np.ndarray) -> Change:
    """The mean of squares as a product with ``row``."""

    def build(g: Graph, norm: Any) -> int:
        average = g.product(g.call("MUL", norm.x, norm.x), g.constant(row.reshape(1, -1)))
        return g.call("MUL", norm.x, g.call("RSQRT", g.call("ADD", average, np.float32(1e-6))))

    return normed_by(NORM, rebuilt(build))


def by_power(exponent: float) -> Change:
    def build(g: Graph, norm: Any) -> int:
        average = g.reduce("MEAN", g.call("MUL", norm.x, norm.x), axis_of(g, norm))
        return g.call("MUL", norm.x, g.call("POW", g.call("ADD", average, np.float32(1e-6)), np.float32(exponent)))

    return normed_by(NORM, rebuilt(build))


def plus(number: float) -> Change:
    def edit(g: Graph, norm: Any) -> None:
        g.insert(norm.weight, lambda w: g.call("ADD", g.constant(g.value(w)), np.float32(number)), [norm.weigh])

    return normed_by(NORM, edit)


def cut(at: int) -> Edit:
    """Padded by 3 and 5, and cut out again from ``at`` on."""

    def edit(g: Graph, x: int) -> int:
        shape = g.shape(x)
        pads = np.array([[0, 0]] * (len(shape) - 1) + [[3, 5]], np.int32)
        return g.part(g.call("PAD", x, pads, shape=[*shape[:-1], shape[-1] + 8]), at, shape[-1])

    return edit


def chosen(g: Graph, x: int) -> int:
    most = np.ones(g.shape(x), bool)
    most[..., 5] = False
    return g.call("SELECT_V2", g.constant(most, np.bool_), x, g.call("NEG", x), shape=g.shape(x))


def of_squares(edit: Edit) -> Change:
    return normed_by(NORM, lambda g, n: squares(g, n, edit))


def of_mean(*edits: Edit) -> Change:
    return normed_by(NORM, lambda g, n: mean(g, n, chain(*edits)))


ROW = np.full(64, 1 / 64)
MISSED = "pre_ffw_norm: expected an RMSNorm"
REFUSED: dict[str, tuple[Change, str]] = {
    "x times its size": (of_squares(lambda g, x: g.call("MUL", x, g.call("ABS", x))), "ABS"),
    "squares from above": (of_squares(chain(unary("SQUARE"), with_number("MINIMUM", 0))), "MINIMUM"),
    "squared from 1": (of_squares(with_number("SQUARED_DIFFERENCE", 1.0)), "SQUARED_DIFFERENCE"),
    "less than the mean": (of_mean(with_number("MUL", -1.0), unary("RELU"), with_number("MUL", -1.0)), "RELU"),
    "a mean above a number": (of_mean(with_number("MAXIMUM", 1e-3)), "MAXIMUM"),
    "a mean less a number": (of_mean(with_number("SUB", 1e-3)), "may be negative"),
    "a row of unequal numbers": (by_row(ROW * np.linspace(0.5, 1.5, 64)), "may be negative"),
    "a row of others": (by_row(ROW * 1.01), "may be negative"),
    "another root": (by_power(-0.499), MISSED),
    "nearly 1 more": (plus(1.0000001), MISSED),
    "a bound within reach": (edge("1.stream", with_number("MAXIMUM", -9e29)), "MAXIMUM"),
    "a bound from the wrong side": (edge("1.stream", with_number("MINIMUM", -1e30)), "MINIMUM"),
    "cut elsewhere": (edge("state", cut(4)), "PAD"),
    "a choice that is not the same everywhere": (edge("1.stream", chosen), "SELECT_V2"),
    "nearly nothing": (edge("1.stream", with_number("ADD", 1e-3)), "expected the sum of the residual stream"),
    "a cap of another kind": (edge("logits", unary("TANH")), "lm_head"),
    "half a gate": (edge("0.activated", with_number("ADD", 1e-3)), "gate_proj"),
    "a convolution": (by_convolution("layers.0.up_proj"), "CONV_2D"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_alike_is_refused_for_what_it_is(name: str) -> None:
    change, why = REFUSED[name]
    verdict = try_case(Case("forms", name, change), "torch")
    assert verdict is not None
    assert verdict.outcome == "refused"
    assert re.search(why, verdict.detail), verdict.detail


def test_messages_count_layers_from_the_first() -> None:
    verdict = try_case(Case("forms", "another root", by_power(-0.499)), "torch")
    assert verdict is not None
    assert "layers.1.pre_ffw_norm" in verdict.detail


def gathered_windows(chosen: list[int]) -> Memory:
    """Of a window's weights and of its V the slots ``chosen``."""
    g = Graph(load(variant("jax_published").read_bytes()), {})
    g.open_all()

    def gathered(x: int) -> int:
        made = g.gather(x, chosen, 3)
        g.main.tensors[made].type = g.main.tensors[x].type
        g.main.tensors[made].quantization = g.main.tensors[x].quantization
        return made

    slices = [op for op in g.ops if g.kind(op) == "SLICE" and g.shape(int(op.inputs[0]))[-1] == 256]
    for op in slices:
        g.insert(int(op.outputs[0]), gathered)
    assert len(slices) == 6
    return Memory(g.data())


def test_every_slot_of_a_window_is_weighed() -> None:
    assert prove(gathered_windows([*range(16)])).positions
    with pytest.raises(UnsupportedError, match="weighs some slots alone"):
        prove(gathered_windows([0, 0, *range(2, 16)]))
