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


def tried(place: str, *edits: Edit) -> None:
    """Each edit at ``place`` of a sound drafter ends in a proof or in an error of ours."""
    for edit in edits:
        graph = sound("torch")
        edge(place, edit)(graph)
        with bounded(20), suppress(MtpExtractError):
            prove(Memory(graph.data()))


def again(count: int, step: Edit) -> Edit:
    def edit(g: Graph, x: int) -> int:
        for _ in range(count):
            x = step(g, x)
        return x

    return edit


def call(name: str, *operands: Any, **options: Any) -> Edit:
    """The operator ``name``, which says that its result has the shape of its operand."""
    return lambda g, x: g.call(name, x, *operands, **{"shape": g.shape(x), **options})


def itself(name: str, **options: Any) -> Edit:
    return lambda g, x: g.call(name, x, x, shape=g.shape(x), **options)


def with_constant(name: str, value: Any, kind: Any = np.float32) -> Edit:
    return lambda g, x: g.call(name, x, g.constant(np.asarray(value), kind), shape=g.shape(x))


def one_more_result(g: Graph, x: int) -> int:
    made = g.call("NEG", x)
    g.producer(made).outputs = [made, g.tensor([1])]
    return made


def joined(g: Graph, x: int) -> int:
    return g.part(g.join([x, x]), 0, g.shape(x)[-1])


def gate_of_a_deep_sum(g: Graph, activated: int) -> int:
    """GELU spelled out, of a sum of sums."""
    gate = g.layer(0).gate
    half = g.call("TANH", again(1200, lambda g, x: g.call("ADD", x, gate))(g, gate))
    return g.call("MUL", gate, g.call("ADD", g.call("MUL", half, np.float32(0.5)), np.float32(0.5)))


NUMBERS = (np.nan, 0.0, 1e38, 1e-45, -1e9, 0.5)
KINDS = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_, np.float16)
SHAPES = ([], [0], [1, 0, 1, 1], [1] * 6, [2, 2])
AXES = (-9, 9, (1 << 31) - 1, -(1 << 31))
NAMES = ("ADD", "MUL", "SUM", "BATCH_MATMUL", "FULLY_CONNECTED", "SLICE", "TRANSPOSE", "SOFTMAX", "POW", "CONV_2D")


@pytest.mark.parametrize("place", PLACES)
def test_constants_of_every_kind(place: str) -> None:
    some = set(product(("MUL", "ADD", "POW", "DIV", "MAXIMUM"), NUMBERS)) - {("DIV", 0.0)}
    tried(place, *(with_constant(name, [number]) for name, number in some))
    tried(place, *(with_constant("MUL", value, kind) for kind in KINDS for value in (1, [1])))
    tried(place, *(call("CAST", dtype=kind) for kind in KINDS), call("SOFTMAX", beta=float("nan")))


@pytest.mark.parametrize("place", PLACES)
def test_shapes_of_every_kind(place: str) -> None:
    moves = ("RESHAPE", "TRANSPOSE", "TILE", "BROADCAST_TO", "GATHER", "SUM")
    some = [shape for shape in SHAPES if place != "0.cos" or np.prod(shape) > 1]  # Those are below.
    tried(place, *(with_constant(name, shape, np.int32) for name in moves for shape in some))
    tried(place, *(with_constant(name, np.ones(shape)) for name in ("MUL", "BATCH_MATMUL") for shape in some))
    tried(place, *(call("MUL", np.float32(1), shape=shape) for shape in some))


@pytest.mark.parametrize("place", PLACES)
def test_axes_of_every_kind(place: str) -> None:
    for axis in AXES:
        tried(place, itself("CONCATENATION", axis=axis), itself("PACK", axis=axis), call("UNPACK", axis=axis))
        tried(place, call("GATHER", np.array([0], np.int32), axis=axis), call("SQUEEZE", squeezeDims=[axis]))
        tried(place, with_constant("EXPAND_DIMS", axis, np.int32), with_constant("MEAN", [axis], np.int32))


@pytest.mark.parametrize("place", PLACES)
def test_operands_that_are_not_there(place: str) -> None:
    tried(place, *(call(name, *others) for name in NAMES for others in ((), (-1,), (-1, -1, -1))))
    tried(place, lambda g, x: g.call("SELECT_V2", -1, x, -1, shape=g.shape(x)))


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
        *(again(9_800, call("TANH")), again(1200, with_constant("ADD", 1)), again(1200, itself("MUL"))),
        one_more_result,
        with_constant("MUL", np.ones([1] * 40)),
    ],
    "0.rotated": [
        *(again(1200, lambda g, x: g.reshape(x, g.shape(x))), again(700, joined)),
        *(with_constant("DIV", [0]), with_constant("MUL", np.inf)),
    ],
    "0.scores": [again(1200, call("NEG")), again(1200, itself("MUL")), again(1200, with_constant("ADD", 1))],
    "0.key": [again(1200, with_constant("MUL", 1)), again(700, joined)],
    "0.angle": [again(1200, call("NEG"))],
    "0.cos": [again(700, joined), with_constant("MUL", np.ones([1, 0, 1, 1]))],
    "0.masked": [again(1200, call("NEG"))],
    "0.visible": [again(1200, call("LOGICAL_NOT"))],
    "0.activated": [gate_of_a_deep_sum],
    "0.attended": [with_constant("POW", 0)],
}
"""Thousands of operators in a row, and what was a traceback once."""


@pytest.mark.parametrize("place", TRIED)
def test_what_was_a_traceback_or_may_take_hours(place: str) -> None:
    tried(place, *TRIED[place])


@pytest.mark.parametrize("place", ["0.rotated", "0.scores"])
def test_a_query_that_is_doubled_again_and_again(place: str) -> None:
    """2⁴⁰ terms, which would be terabytes."""
    graph = sound("torch")
    edge(place, again(40, itself("ADD")))(graph)
    with bounded(20, memory=1 << 28), pytest.raises(MtpExtractError) as raised:
        prove(Memory(graph.data()))
    assert "Unable to allocate" not in str(raised.value)
