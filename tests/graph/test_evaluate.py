"""Compare every operator of the evaluator with Google's interpreter, on models of one operator."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers.make_drafter import DrafterSpec, plain_drafter
from helpers.one_op import Grid, OneOp, const
from seam import FormatError, MtpExtractError, UnsupportedError, evaluate, flat

from mtp_extract.graph.evaluate import find_input_names
from mtp_extract.graph.flat import Depends
from mtp_extract.graph.kernels import KERNELS

Array = np.ndarray
RNG = np.random.default_rng(5)
LEAST, MOST = -(2**31), 2**31 - 1


def floats(*shape: int, low: float = -3, high: float = 3) -> Array:
    return RNG.uniform(low, high, shape).astype(np.float32)


def ints(*shape: int, low: int = -9, high: int = 9, kind: Any = np.int32) -> Array:
    return RNG.integers(low, high, shape, endpoint=True).astype(kind)


def bools(*shape: int) -> Array:
    return RNG.random(shape) < 0.5


def exact(*values: int, kind: Any = np.int32) -> Array:
    return np.array(values, kind)


def index(*values: int) -> const:
    return const(exact(*values))


def number(value: int) -> const:
    return const(np.array(value, np.int32))


def options(kind: str, **fields: Any) -> Any:
    return getattr(schema, f"{kind}OptionsT")(**fields)


def elementwise() -> Iterator[OneOp]:
    """Operators of one operand, over the numbers they take."""
    for kind in ("ABS", "COS", "EXP", "NEG", "SIN", "SQUARE"):
        yield OneOp(kind, (floats(2, 1, 5),))
    for kind in ("LOG", "RSQRT", "SQRT"):
        yield OneOp(kind, (floats(3, 4, low=0.01, high=50),))
    for kind in ("COS", "SIN"):
        yield OneOp(kind, (np.array([24000.0, 31999.5, 7.0], np.float32),))
    for kind in ("NEG", "ABS"):
        yield OneOp(kind, (ints(4),), results=("int32",))
    yield OneOp("LOGICAL_NOT", (bools(3, 4),), results=("bool",))


SHAPES = (((2, 3, 4), (2, 3, 4)), ((1, 1, 2, 5), (5,)), ((1, 4, 1, 3), (1, 1, 6, 1)), ((1, 3), (4, 1)), ((5,), ()))


def binary() -> Iterator[OneOp]:
    """Operators of two operands, broadcast."""
    names = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div"}
    for kind, option in names.items():
        for left, right in SHAPES:
            yield OneOp(kind, (floats(*left), const(floats(*right, low=0.5))), options(option))
        if kind != "DIV":
            yield OneOp(kind, (ints(7), ints(7, low=1)), options(option), results=("int32",))
    signs = exact(-7, 7, -7, 7, 6), exact(2, 2, -2, -2, -3)
    yield OneOp("FLOOR_DIV", signs, results=("int32",))
    yield OneOp("FLOOR_DIV", (floats(5), floats(5, low=0.5)))
    yield OneOp("FLOOR_DIV", (np.array([1, 0.9], np.float32), np.array([0.1, 0.3], np.float32)))
    yield OneOp("ADD", (exact(MOST, LEAST), exact(-1, 1)), options("Add"), results=("int32",))
    yield OneOp("MUL", (exact(2**30, -(2**30)), exact(-2, 2)), options("Mul"), results=("int32",))
    for kind in ("MAXIMUM", "MINIMUM"):
        for left, right in SHAPES[:4]:
            yield OneOp(kind, (floats(*left), floats(*right)))
        yield OneOp(kind, (ints(2, 5), ints(2, 5)), results=("int32",))
    for kind in ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"):
        for left, right in SHAPES[:4]:
            yield OneOp(kind, (ints(*left, low=-2, high=2), ints(*right, low=-2, high=2)), results=("bool",))
        yield OneOp(kind, (floats(1, 4), floats(1, 4)), results=("bool",))
    for kind in ("LOGICAL_AND", "LOGICAL_OR"):
        for left, right in SHAPES[:4]:
            yield OneOp(kind, (bools(*left), bools(*right)), results=("bool",))
    yield OneOp("POW", (floats(2, 3, low=0.1), const(np.float32(-0.5))))
    yield OneOp("POW", (floats(2, 3), const(np.float32(2))))
    yield OneOp("POW", (exact(-3, 2, 7), exact(3, 30, 0)), results=("int32",))


def moved() -> Iterator[OneOp]:
    """Operators that move elements."""
    x = floats(2, 3, 4)
    yield OneOp("RESHAPE", (x, index(4, 6)))
    yield OneOp("RESHAPE", (x, index(-1, 2)))
    yield OneOp("RESHAPE", (bools(2, 3), index(6)), results=("bool",))
    yield OneOp("RESHAPE", (x,), options("Reshape", newShape=[3, 8]))
    yield OneOp("TRANSPOSE", (x, index(2, 0, 1)))
    yield OneOp("TRANSPOSE", (const(floats(40_000, 2)), index(1, 0)))
    yield OneOp("SLICE", (x, index(0, 1, 1), index(2, -1, 2)), result_shape=(2, 2, 2))
    yield OneOp("SLICE", (const(floats(6)), exact(2), index(4)), result_shape=(4,))
    yield OneOp("EXPAND_DIMS", (x, number(-2)))
    yield OneOp("SQUEEZE", (floats(1, 3, 1, 2),), options("Squeeze", squeezeDims=[0]))
    yield OneOp("SQUEEZE", (floats(1, 3, 1, 2),), options("Squeeze", squeezeDims=[]))
    yield OneOp("BROADCAST_TO", (floats(3, 1), index(2, 3, 4)))
    yield OneOp("FILL", (index(2, 3), np.array(-1e30, np.float32)))
    yield OneOp("FILL", (index(4), np.array(7, np.int32)), results=("int32",))
    for axis in (0, -1):
        yield OneOp("CONCATENATION", (x, x + 1), options("Concatenation", axis=axis))
        yield OneOp("PACK", (x, x + 1), options("Pack", valuesCount=2, axis=axis))
    yield OneOp("UNPACK", (floats(2, 3),), options("Unpack", num=3, axis=1), ("float32",) * 3)
    yield OneOp("SPLIT", (number(-1), floats(2, 6)), options("Split", numSplits=3), ("float32",) * 3)
    for axis in (0, 1, -1):
        yield OneOp("GATHER", (x, ints(2, 2, low=0, high=1)), options("Gather", axis=axis))
        yield OneOp("GATHER", (const(x), ints(5, low=0, high=1)), options("Gather", axis=axis))
    rows = exact(1, 0), exact(3, 4), exact(1, 2)
    for masks in ({}, {"beginMask": 1}, {"endMask": 2}, {"shrinkAxisMask": 1}, {"beginMask": 3, "endMask": 3}):
        yield OneOp("STRIDED_SLICE", (floats(4, 5), *map(const, rows)), options("StridedSlice", **masks))
    yield OneOp("STRIDED_SLICE", (floats(6), index(-1), index(-4), index(-1)), options("StridedSlice"))
    for condition in (bools(2, 3, 4), np.array(True)):
        yield OneOp("SELECT", (condition, x, x + 1))
    for shapes in SHAPES[:4]:
        yield OneOp("SELECT_V2", (bools(*shapes[1]), floats(*shapes[0]), const(np.float32(-1e9))))
    yield OneOp("SELECT_V2", (bools(2, 3), floats(2, 3), const(np.float32(-np.inf))))
    yield OneOp("SELECT_V2", (bools(1, 3), ints(2, 1), ints(2, 3)), results=("int32",))


def cast() -> Iterator[OneOp]:
    """From one type to another."""
    wanted = (("int32", "float32"), ("bool", "float32"), ("float32", "bool"), ("int32", "int64"))
    for source, target in (*wanted, ("int64", "int32"), ("int32", "int8")):
        x = floats(2, 5, low=-120, high=120).astype(source)
        yield OneOp("CAST", (x,), options("Cast"), results=(target,))


def multiplied() -> Iterator[OneOp]:
    """Products of matrices."""
    for left, right in (((2, 3, 4), (2, 4, 5)), ((1, 2, 3, 4), (4, 5)), ((2, 1, 3, 4), (1, 3, 4, 5))):
        for adj_x in (False, True):
            for adj_y in (False, True):
                a, b = floats(*left), floats(*right)
                yield OneOp(
                    "BATCH_MATMUL",
                    (np.swapaxes(a, -1, -2).copy() if adj_x else a, np.swapaxes(b, -1, -2).copy() if adj_y else b),
                    options("BatchMatMul", adjX=adj_x, adjY=adj_y),
                )
    yield OneOp("BATCH_MATMUL", (const(floats(1, 32, 1)), floats(1, 1, 1)), options("BatchMatMul"))


def quantized() -> Iterator[OneOp]:
    """From codes to numbers."""
    grid = Grid((0.25,), (3,))
    yield OneOp("DEQUANTIZE", (ints(2, 5, kind=np.int8),), options("Dequantize"), input_grid=grid)
    yield OneOp("DEQUANTIZE", (ints(2, 5, kind=np.int16),), options("Dequantize"), input_grid=Grid((0.25,), (0,)))
    rows = Grid((0.5, 0.25, 2.0), (1, 0, -2))
    yield OneOp("DEQUANTIZE", (const(ints(3, 4, kind=np.int8), rows),), options("Dequantize"))
    yield OneOp("DEQUANTIZE", (const(floats(3, 4).astype(np.float16)),), options("Dequantize"))


CASES = [*elementwise(), *binary(), *moved(), *cast(), *multiplied(), *quantized()]
each_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{n}" for n, case in enumerate(CASES)])


@each_case
def test_an_operator_is_what_the_interpreter_computes(case: OneOp) -> None:
    for expected, computed in zip(case.interpreted(), case.evaluated(), strict=True):
        assert (computed.shape, computed.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(computed, expected, rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_cast_to_half_precision_is_rounded_to_the_nearest_even(half: str) -> None:
    near = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 1e-7, 1e5, -2.1, -np.inf], np.float32)
    graph = flat(OneOp("CAST", (near,), options("Cast"), (half,)).model([near.shape]))
    (halves,) = evaluate(graph, {"i0": near[None]}, list(graph.outputs.values()))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(halves[0], near.astype(ml_dtypes.finfo(half).dtype).astype(np.float32))


@each_case
def test_samples_that_are_computed_together_do_not_mix(case: OneOp) -> None:
    """For every choice of inputs that all samples share; the others have their elements in another order."""
    graph, samples = case.flat(), case.samples(3)
    wanted = list(graph.outputs.values())
    for shared in itertools.chain.from_iterable(itertools.combinations(samples, n) for n in range(len(samples) + 1)):
        inputs = {name: values[:1] if name in shared else values for name, values in samples.items()}
        count = max(map(len, inputs.values()), default=1)
        try:
            alone = [evaluate(graph, {n: v[[at % len(v)]] for n, v in inputs.items()}, wanted) for at in range(count)]
        except MtpExtractError:
            continue  # Offsets that only fit in their own order.
        if len({tuple(array.shape for array in arrays) for arrays in alone}) > 1:
            continue  # A shape that depends on the sample.
        for together, *singly in zip(evaluate(graph, inputs, wanted), *alone, strict=True):
            np.testing.assert_array_equal(together, np.concatenate(singly))


def test_every_kernel_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(KERNELS)


def test_thousands_of_positions_that_are_computed_together_do_not_mix() -> None:
    graph = flat(plain_drafter(DrafterSpec(windows=(4, None), cache=64)))
    positions = np.arange(5000, dtype=np.int32)[:, None]
    values = [v for node in graph.nodes for v in node.outputs if v.depends == Depends.POSITION]
    assert {v.producer.kind for v in values if v.producer} >= {"COS", "SIN", "MUL", "LESS"}
    assert find_input_names(values) == {"input_pos"}
    together = evaluate(graph, {"input_pos": positions}, values)
    for at in (0, 1, 63, 4096, 4999):
        for alone, table in zip(evaluate(graph, {"input_pos": positions[[at]]}, values), together, strict=True):
            np.testing.assert_array_equal(alone[0], table[at])


def test_more_samples_than_are_computed_at_once() -> None:
    case = OneOp("ADD", (floats(1), const(floats(1 << 20))), options("Add"), result_shape=(1 << 20,))
    graph, samples = case.flat(), floats(9, 1)
    (sums,) = evaluate(graph, {"i0": samples}, list(graph.outputs.values()))
    assert sums.shape == (9, 1 << 20)
    np.testing.assert_array_equal(sums, samples + case.operands[1].values)


WRAPS = [  # Integers that wrap around.
    OneOp("ADD", (exact(MOST), exact(1)), options("Add"), ("int32",)),
    OneOp("SUB", (exact(LEAST), exact(1)), options("Sub"), ("int32",)),
    OneOp("MUL", (exact(2**30), exact(2)), options("Mul"), ("int32",)),
    OneOp("MUL", (exact(2**62, kind=np.int64), exact(4, kind=np.int64)), options("Mul"), ("int64",)),
    OneOp("ADD", (exact(2**63 - 1, kind=np.int64), exact(1, kind=np.int64)), options("Add"), ("int64",)),
    OneOp("NEG", (exact(LEAST),), results=("int32",)),
    OneOp("ABS", (exact(LEAST),), results=("int32",)),
    OneOp("POW", (exact(10), exact(10)), results=("int32",)),
    OneOp("FLOOR_DIV", (exact(1), exact(0)), results=("int32",)),
    OneOp("CAST", (exact(300),), options("Cast"), ("int8",)),
    OneOp("CAST", (exact(-1),), options("Cast"), ("uint8",)),
    OneOp("CAST", (exact(2**31, kind=np.int64),), options("Cast"), ("int32",)),
]


WIDE = 1 << 13
LARGE = [
    OneOp("BROADCAST_TO", (floats(1), index(WIDE, WIDE, WIDE))),
    OneOp("ADD", (floats(WIDE, 1), floats(1, WIDE)), options("Add")),
    OneOp("BATCH_MATMUL", (floats(WIDE, 1), floats(1, WIDE)), options("BatchMatMul")),
    OneOp("GATHER", (floats(1, WIDE), ints(WIDE, low=0, high=0)), options("Gather")),
    OneOp("CONCATENATION", (const(np.zeros(1 << 24, np.int8)),) * 3, options("Concatenation"), ("int8",)),
]


@pytest.mark.parametrize("case", LARGE, ids=[f"{case.kind}-{n}" for n, case in enumerate(LARGE)])
def test_a_result_that_is_too_large_is_refused_before_it_is_allocated(case: OneOp) -> None:
    graph, inputs = case.flat(), case.samples()
    tracemalloc.start()
    with pytest.raises(UnsupportedError, match=f"{case.kind} makes [0-9]+ numbers"):
        evaluate(graph, inputs, list(graph.outputs.values()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 27


GRID = Grid((0.5,), (0,))
REFUSED: list[tuple[OneOp, str]] = [
    (OneOp("CAST", (ints(2, 5, kind=np.int8),), options("Cast"), input_grid=GRID), "few bits"),
    (OneOp("CAST", (floats(4),), options("Cast"), ("int32",)), "makes integers of floats"),
    (OneOp("DIV", (ints(4), ints(4)), options("Div"), ("int32",)), "makes float64"),
    (OneOp("RANGE", tuple(np.array(n, np.int32) for n in (0, 4, 1)), results=("int32",)), "RANGE"),
    (OneOp("UNIQUE", (ints(4),), options("Unique"), ("int32", "int32")), "UNIQUE"),
    (OneOp("ADD", (floats(4), floats(4)), options("Add", fusedActivationFunction=4)), "fused activation"),
    (OneOp("ADD", (floats(4), ints(4)), options("Add")), "mixes FLOAT32 and INT32"),
    (OneOp("SELECT_V2", (bools(4), floats(4), ints(4))), "makes float64"),
    (OneOp("SELECT", (bools(2), floats(2, 2), floats(2, 2))), "whole rows"),
    (OneOp("CONCATENATION", (floats(2), ints(2)), options("Concatenation")), "different types"),
    (OneOp("COS", (ints(4),)), "mixes"),
    (OneOp("CAST", (floats(4),), options("Cast"), ("int4",)), "where tensor 1 'o0' .INT4"),
    (OneOp("ADD", (ints(4), ints(4)), options("Add", fusedActivationFunction=1), ("int32",)), "fused activation"),
    (OneOp("BATCH_MATMUL", (ints(2, 2), ints(2, 2)), options("BatchMatMul"), ("int32",)), "other types"),
    (
        OneOp("RESHAPE", (ints(4, kind=np.int8), index(2, 2)), None, ("int8",), Grid((0.25,), (0,)), input_grid=GRID),
        "few bits",
    ),
    (OneOp("QUANTIZE", (floats(3),), options("Quantize"), ("int8",), GRID), "QUANTIZE"),
    (OneOp("CAST", (ints(3, kind=np.int8),), options("Cast"), ("float16",), input_grid=GRID), "few bits"),
    (OneOp("NEG", (const(floats(3, 4).astype(np.float16)),), None, ("float16",)), "few bits"),
    (OneOp("RESHAPE", (const(floats(3, 4).astype(np.float16)), index(12))), "few bits"),
    (OneOp("DEQUANTIZE", (ints(3, kind=np.int8),), options("Dequantize")), "makes int8"),
    (OneOp("SLICE", (floats(4), index(2), index(3))), "takes"),
    (OneOp("GATHER", (floats(4), index(4)), options("Gather")), "lacks"),
    (
        OneOp("STRIDED_SLICE", (floats(6), index(2), index(1), index(-1)), options("StridedSlice", shrinkAxisMask=1)),
        "backwards",
    ),
    *((OneOp(kind, (np.float32([np.nan]), floats(1))), "no number") for kind in ("MAXIMUM", "MINIMUM")),
    (OneOp("GATHER", (floats(2, 4), ints(2, 1, low=0, high=1)), options("Gather", axis=1, batchDims=1)), "each batch"),
    *((case, f"{case.kind}.*does not hold") for case in WRAPS),
]


@pytest.mark.parametrize(("case", "why"), REFUSED, ids=[f"{case.kind}: {why}" for case, why in REFUSED])
def test_an_unsupported_operator_is_refused_by_name(case: OneOp, why: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{case.kind}.*{why}|{why}"):
        case.evaluated()


@pytest.mark.parametrize(
    "case",
    [
        OneOp("ADD", (floats(3), floats(4)), options("Add")),
        OneOp("ADD", (floats(3),), options("Add")),
        OneOp("COS", (floats(3), floats(3))),
        OneOp("RESHAPE", (floats(3), index(2, 2))),
        OneOp("TRANSPOSE", (floats(3), index(2))),
    ],
    ids=lambda case: case.kind,
)
def test_operands_that_do_not_fit_are_a_format_error(case: OneOp) -> None:
    with pytest.raises(FormatError, match=f"op 0 {case.kind}"):
        case.evaluated()


def test_a_computation_that_would_take_hours_is_refused() -> None:
    case = OneOp("ADD", (floats(1), const(floats(1 << 20))), options("Add"), result_shape=(1 << 20,))
    graph = case.flat()
    with pytest.raises(UnsupportedError, match="more numbers are computed"):
        evaluate(graph, {"i0": np.zeros((1 << 16, 1), np.float32)}, list(graph.outputs.values()))


def test_an_input_that_is_not_given_is_refused() -> None:
    graph = OneOp("COS", (floats(3),)).flat()
    with pytest.raises(UnsupportedError, match="'i0'"):
        evaluate(graph, {}, list(graph.outputs.values()))
