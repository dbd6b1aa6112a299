"""The fourth attack: what LiteRT's kernels make of types, which heads of a cache are read, what is stored where."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Case, Change, Sample, a_change, an_edit, cases, edge
from adversary.mutations.attention import both, slots, visible
from adversary.mutations.blocks import every_eps

Array = np.ndarray


@an_edit
def of_codes(g: Graph, x: int, name: str, *others: int, scale: float = 0.05) -> int:
    """An operator on codes, which LiteRT's kernel computes without their scales."""
    operands = [e.quantized(g, x, scale)]
    for code in others:
        operands.append(g.constant(np.array([code]), np.int8))
        g.main.tensors[operands[-1]].quantization = e.parameters(2.1e29)
    made = g.call(name, *operands, shape=g.shape(x), dtype=np.int8)
    g.main.tensors[made].quantization = e.parameters(2 * scale if name == "NEG" else scale)
    return g.call("DEQUANTIZE", made, dtype=np.float32)


KERNELS: dict[str, Change] = {
    "smaller_of_codes": edge("state", of_codes("MINIMUM", 5)),
    "larger_of_codes": edge("state", of_codes("MAXIMUM", -5)),
    "negative_of_codes": edge("state", e.chain(of_codes("NEG"), e.unary("NEG"))),
}


def shaped_by_int64(place: str) -> Change:
    """A RESHAPE whose operand is INT64: LiteRT takes its option, which says another shape."""

    def edit(g: Graph, x: int) -> int:
        count = int(np.prod(g.shape(x)))
        made = g.call("RESHAPE", x, np.array([1, count], np.int64), shape=[1, count])
        g.producer(made).builtinOptions.newShape = np.array([4, count // 4], np.int32)
        return g.reshape(g.transpose(made, [1, 0]), g.shape(x))

    return edge(place, edit)


SHAPES: dict[str, Change] = {f"{place}_by_int64": shaped_by_int64(place) for place in ("state", "0.query")}


@a_change
def of_codes_given(g: Graph, name: str, scale: float, zero_point: int = 0) -> None:
    """The input itself is INT8."""
    e.as_codes(g, name, np.int8, scale, zero_point)


GRIDS: dict[str, Change] = {
    "keys_by_a_scale_of_0": of_codes_given("kv_cache_k_3", 0.0),
    "keys_by_a_zero_point_that_is_no_code": of_codes_given("kv_cache_k_3", 0.02, 1000),
}


@a_change
def more_heads(g: Graph, *names: str) -> None:
    """Caches of four KV heads, of which two are read."""
    for name in names:
        tensor = g.input(f"kv_cache_{name}_2")
        shape, readers = g.shape(tensor), g.readers(tensor)
        g.main.tensors[tensor].shape = [1, 4, *shape[2:]]
        g.rewire(tensor, g.slice(tensor, [0, 0, 0, 0], shape), readers)
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
    return both(g, x, g.reshape(g.call("GREATER_EQUAL", there, begins, shape=g.shape(x)), g.shape(x)))


NO_ENGINE = "an engine hands over as many heads as the config says, and each type of layer its own caches"


@a_change
def stored_for(g: Graph, tensor: Callable[[Graph], int], values: Callable[[list[int]], Array]) -> None:
    """Numbers are stored for what an operator computes."""
    made = tensor(g)
    g.main.tensors[made].buffer = g.buffer(values(g.shape(made)).tobytes())


def plus_0(g: Graph) -> int:
    """The position plus 0, for the angles."""
    readers = [op for op in g.readers(g.input("input_pos")) if g.kind(op) in ("RESHAPE", "CAST")]
    return g.insert(g.input("input_pos"), lambda x: g.add(x, np.array([0], np.int32)), readers)


STORED: dict[str, Change] = {
    "position": stored_for(plus_0, lambda shape: np.full(shape, 7, np.int32)),
    "mask": stored_for(lambda g: g.layer(0).visible, lambda shape: np.ones(shape, np.bool_)),
    "input": stored_for(lambda g: g.input("mask"), lambda shape: np.ones(shape, np.bool_)),
    "state": stored_for(lambda g: g.normed("final_norm"), lambda shape: np.ones(shape, np.float32)),
}

CACHES: dict[str, Change] = {
    "two_of_four_heads": more_heads("k", "v"),
    "two_of_four_heads_of_values": more_heads("v"),
}

CASES = (
    *cases("fourth: kernels of codes", KERNELS, exact=True),
    *cases("fourth: shapes of another type", SHAPES),
    Case("fourth: constants", "infinite_epsilons", every_eps(np.inf)),
    *cases("fourth: grids of the interface", GRIDS, exact=True, why="runtimes hand over other numbers"),
    *cases("fourth: caches", CACHES, why=NO_ENGINE),
    *cases("fourth: caches", {"one_pair_for_both_types": one_pair_for_both}, layers=(0, 1), why=NO_ENGINE),
    *cases(
        "fourth: large integers", {"slot_100_late": visible(1, late)}, *(Sample(p, mask="past") for p in (100, 150))
    ),
    *cases("fourth: results that are stored", STORED, why="LiteRT computes with the one or the other"),
)
"""Cases that the interpreter cannot tell carry their reason."""
