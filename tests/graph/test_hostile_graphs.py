"""Whatever operators a graph has: it is read, or refused with one error of ours, in bounded time and memory."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
from adversary.edits import Edit, edge
from helpers.bounds import bounded
from helpers.make_bundle import Memory, pack
from helpers.make_drafter import plain_model
from helpers.surgery import Graph, sound
from seam import MtpExtractError, prove

PLACES = ["1.stream", "0.rotated", "0.scores", "0.key", "0.cos"]


def try_edits(place: str, *edits: Edit) -> None:
    """Each edit at ``place`` of a sound drafter ends in a proof or in an error of ours."""
    for edit in edits:
        graph = sound("torch")
        edge(place, edit)(graph)
        with bounded(20), suppress(MtpExtractError):
            prove(Memory(graph.data()))


def repeat(count: int, step: Edit) -> Edit:
    def edit(g: Graph, x: int) -> int:
        for _ in range(count):
            x = step(g, x)
        return x

    return edit


def call(name: str, *operands: Any, **options: Any) -> Edit:
    """The operator ``name``, which says that its result has the shape of its operand."""
    return lambda g, x: g.call(name, x, *operands, **{"shape": g.shape(x), **options})


def call_twice(name: str, **options: Any) -> Edit:
    return lambda g, x: g.call(name, x, x, shape=g.shape(x), **options)


def call_with(name: str, value: Any, kind: Any = np.float32) -> Edit:
    return lambda g, x: g.call(name, x, g.constant(np.asarray(value), kind), shape=g.shape(x))


def add_result(g: Graph, x: int) -> int:
    made = g.call("NEG", x)
    g.producer(made).outputs = [made, g.tensor([1])]
    return made


def join_with_itself(g: Graph, x: int) -> int:
    return g.part(g.join([x, x]), 0, g.shape(x)[-1])


def gate_by_deep_sum(g: Graph, activated: int) -> int:
    """GELU spelled out, of a sum of sums."""
    gate = g.layer(0).gate
    half = g.call("TANH", repeat(1200, lambda g, x: g.call("ADD", x, gate))(g, gate))
    return g.call("MUL", gate, g.call("ADD", g.call("MUL", half, np.float32(0.5)), np.float32(0.5)))


NUMBERS = (np.nan, 0.0, 1e38, 1e-45, -1e9, 0.5)
KINDS = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_, np.float16)
SHAPES = ([], [0], [1, 0, 1, 1], [1] * 6, [2, 2])
AXES = (-9, 9, (1 << 31) - 1, -(1 << 31))
NAMES = ("ADD", "MUL", "SUM", "BATCH_MATMUL", "FULLY_CONNECTED", "SLICE", "TRANSPOSE", "SOFTMAX", "POW", "CONV_2D")


@pytest.mark.parametrize("place", PLACES)
def test_constants_of_every_kind(place: str) -> None:
    some = set(product(("MUL", "ADD", "POW", "DIV", "MAXIMUM"), NUMBERS)) - {("DIV", 0.0)}
    try_edits(place, *(call_with(name, [number]) for name, number in some))
    try_edits(place, *(call_with("MUL", value, kind) for kind in KINDS for value in (1, [1])))
    try_edits(place, *(call("CAST", dtype=kind) for kind in KINDS), call("SOFTMAX", beta=float("nan")))


@pytest.mark.parametrize("place", PLACES)
def test_shapes_of_every_kind(place: str) -> None:
    moves = ("RESHAPE", "TRANSPOSE", "TILE", "BROADCAST_TO", "GATHER", "SUM")
    some = [shape for shape in SHAPES if place != "0.cos" or np.prod(shape) > 1]  # Those are below.
    try_edits(place, *(call_with(name, shape, np.int32) for name in moves for shape in some))
    try_edits(place, *(call_with(name, np.ones(shape)) for name in ("MUL", "BATCH_MATMUL") for shape in some))
    try_edits(place, *(call("MUL", np.float32(1), shape=shape) for shape in some))


@pytest.mark.parametrize("place", PLACES)
def test_axes_of_every_kind(place: str) -> None:
    for axis in AXES:
        try_edits(
            place,
            call_twice("CONCATENATION", axis=axis),
            call_twice("PACK", axis=axis),
            call("UNPACK", axis=axis),
        )
        try_edits(place, call("GATHER", np.array([0], np.int32), axis=axis), call("SQUEEZE", squeezeDims=[axis]))
        try_edits(place, call_with("EXPAND_DIMS", axis, np.int32), call_with("MEAN", [axis], np.int32))


@pytest.mark.parametrize("place", PLACES)
def test_operands_that_are_not_there(place: str) -> None:
    try_edits(place, *(call(name, *others) for name in NAMES for others in ((), (-1,), (-1, -1, -1))))
    try_edits(place, lambda g, x: g.call("SELECT_V2", -1, x, -1, shape=g.shape(x)))


@pytest.mark.parametrize("size", [0, 2, 1 << 17, (1 << 31) - 1])
@pytest.mark.parametrize("name", [b"kv_cache_k_1", b"mask", b"input_pos", b"activations"])
def test_inputs_of_another_size(name: bytes, size: int) -> None:
    """Each axis of an input in turn."""
    for axis in range(1 if name == b"input_pos" else 3):
        model = plain_model()
        (entry,) = (entry for entry in model.signatureDefs[0].inputs if entry.name == name)
        model.subgraphs[0].tensors[entry.tensorIndex].shape[axis] = size
        with bounded(20), suppress(MtpExtractError):
            prove(Memory(pack(model)))


TRIED = {
    "1.stream": [
        *(
            repeat(9_800, call("TANH")),
            repeat(1200, call_with("ADD", 1)),
            repeat(1200, call_twice("MUL")),
        ),
        add_result,
        call_with("MUL", np.ones([1] * 40)),
    ],
    "0.rotated": [
        *(repeat(1200, lambda g, x: g.reshape(x, g.shape(x))), repeat(700, join_with_itself)),
        *(call_with("DIV", [0]), call_with("MUL", np.inf)),
    ],
    "0.scores": [
        repeat(1200, call("NEG")),
        repeat(1200, call_twice("MUL")),
        repeat(1200, call_with("ADD", 1)),
    ],
    "0.key": [repeat(1200, call_with("MUL", 1)), repeat(700, join_with_itself)],
    "0.angle": [repeat(1200, call("NEG"))],
    "0.cos": [repeat(700, join_with_itself), call_with("MUL", np.ones([1, 0, 1, 1]))],
    "0.masked": [repeat(1200, call("NEG"))],
    "0.visible": [repeat(1200, call("LOGICAL_NOT"))],
    "0.activated": [gate_by_deep_sum],
    "0.attended": [call_with("POW", 0)],
}
"""Thousands of operators in a row, and what was a traceback once."""


@pytest.mark.parametrize("place", TRIED)
def test_what_was_a_traceback_or_may_take_hours(place: str) -> None:
    try_edits(place, *TRIED[place])


@pytest.mark.parametrize("place", ["0.rotated", "0.scores"])
def test_a_query_that_is_doubled_again_and_again(place: str) -> None:
    """2⁴⁰ terms, which would be terabytes."""
    graph = sound("torch")
    edge(place, repeat(40, call_twice("ADD")))(graph)
    with bounded(20, memory=1 << 28), pytest.raises(MtpExtractError) as raised:
        prove(Memory(graph.data()))
    assert "Unable to allocate" not in str(raised.value)
