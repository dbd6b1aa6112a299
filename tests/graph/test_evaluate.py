"""Every operator of the evaluator against Google's interpreter, on models of one operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers.one_op import Grid, OneOp, const

from mtp_extract.errors import FormatError, MtpExtractError, UnsupportedError
from mtp_extract.graph.evaluate import Stacked, evaluate
from mtp_extract.graph.kernels import KERNELS

Array = np.ndarray
RNG = np.random.default_rng(5)


def floats(*shape: int, low: float = -3, high: float = 3) -> Array:
    return RNG.uniform(low, high, shape).astype(np.float32)


def ints(*shape: int, low: int = -9, high: int = 9, kind: Any = np.int32) -> Array:
    return RNG.integers(low, high, shape, endpoint=True).astype(kind)


def bools(*shape: int) -> Array:
    return RNG.random(shape) < 0.5


def index(*values: int) -> const:
    return const(np.array(values, np.int32))


def number(value: int) -> const:
    return const(np.array(value, np.int32))


def options(kind: str, **fields: Any) -> Any:
    made = getattr(schema, f"{kind}OptionsT")()
    for name, value in fields.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def elementwise() -> Iterator[OneOp]:
    """Operators of one operand, over the numbers they take."""
    anywhere = ("ABS", "CEIL", "COS", "ELU", "EXP", "FLOOR", "LOGISTIC", "NEG", "RELU", "RELU6", "ROUND", "SIGN", "SIN")
    for kind in (*anywhere, "SQUARE", "TANH"):
        yield OneOp(kind, (floats(2, 1, 5),))
    for kind in ("LOG", "RSQRT", "SQRT"):
        yield OneOp(kind, (floats(3, 4, low=0.01, high=50),))
    yield OneOp("ROUND", (np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4999], np.float32),))
    yield OneOp("COS", (np.array([24000.0, 31999.5, 7.0], np.float32),))
    yield OneOp("SIN", (np.array([24000.0, 31999.5, 7.0], np.float32),))
    yield OneOp("NEG", (ints(4),), results=("int32",))
    yield OneOp("ABS", (ints(4),), results=("int32",))
    yield OneOp("LOGICAL_NOT", (bools(3, 4),), results=("bool",))
    for approximate in (False, True):
        yield OneOp("GELU", (floats(2, 9, low=-7, high=7),), options("Gelu", approximate=approximate))
    yield OneOp("LOG_SOFTMAX", (floats(2, 7),))
    for beta in (0.5, 1.0):
        yield OneOp("SOFTMAX", (floats(1, 2, 3, 8),), options("Softmax", beta=beta))


SHAPES = (((2, 3, 4), (2, 3, 4)), ((1, 1, 2, 5), (5,)), ((1, 4, 1, 3), (1, 1, 6, 1)), ((1, 3), (4, 1)), ((5,), ()))


def binary() -> Iterator[OneOp]:
    """Operators of two operands, broadcast."""
    names = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div"}
    for kind, option in names.items():
        for left, right in SHAPES:
            yield OneOp(kind, (floats(*left), const(floats(*right, low=0.5))), options(option))
        for activation in (1, 2, 3):
            yield OneOp(kind, (floats(6), floats(6, low=0.5)), options(option, fusedActivationFunction=activation))
        yield OneOp(kind, (ints(7), ints(7, low=1)), options(option), results=("int32",))
    yield OneOp(
        "DIV", (np.array([-7, 7, -7, 7], np.int32), np.array([2, 2, -2, -2], np.int32)), options("Div"), ("int32",)
    )
    most = np.array([2**31 - 1, -(2**31)], np.int32)
    yield OneOp("ADD", (most, np.array([1, -1], np.int32)), options("Add"), results=("int32",))
    yield OneOp("MUL", (most, np.array([3, 5], np.int32)), options("Mul"), results=("int32",))
    for kind in ("MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"):
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
    for kind in ("FLOOR_DIV", "FLOOR_MOD"):
        yield OneOp(kind, (np.array([-7, 7, -7, 7], np.int32), np.array([2, 2, -2, -2], np.int32)), results=("int32",))
        yield OneOp(kind, (floats(5), floats(5, low=0.5)))


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
    yield OneOp("EXPAND_DIMS", (x, number(-2)))
    yield OneOp("SQUEEZE", (floats(1, 3, 1, 2),), options("Squeeze", squeezeDims=[0]))
    yield OneOp("SQUEEZE", (floats(1, 3, 1, 2),), options("Squeeze", squeezeDims=[]))
    yield OneOp("BROADCAST_TO", (floats(3, 1), index(2, 3, 4)))
    yield OneOp("TILE", (floats(2, 3), index(2, 2)))
    yield OneOp("REVERSE_V2", (x, index(1)))
    yield OneOp("PAD", (floats(2, 3), const(np.array([[1, 0], [0, 2]], np.int32))))
    yield OneOp("PADV2", (floats(2, 3), const(np.array([[1, 0], [0, 2]], np.int32)), const(np.float32(7))))
    for axis in (0, -1):
        yield OneOp("CONCATENATION", (x, x + 1), options("Concatenation", axis=axis))
        yield OneOp("PACK", (x, x + 1), options("Pack", valuesCount=2, axis=axis))
    yield OneOp("UNPACK", (floats(2, 3),), options("Unpack", num=3, axis=1), ("float32",) * 3)
    yield OneOp("SPLIT", (number(-1), floats(2, 6)), options("Split", numSplits=3), ("float32",) * 3)
    yield OneOp("SPLIT_V", (floats(2, 6), index(1, -1, 2), number(1)), options("SplitV", numSplits=3), ("float32",) * 3)
    for axis in (0, 1, -1):
        yield OneOp("GATHER", (x, ints(2, 2, low=0, high=1)), options("Gather", axis=axis))
    yield OneOp("GATHER", (x, ints(2, 2, low=0, high=2)), options("Gather", axis=1, batchDims=1))
    yield OneOp("GATHER_ND", (x, ints(4, 1, low=0, high=1)))
    yield OneOp("GATHER_ND", (x, ints(3, 2, low=0, high=1)))
    for begin in (-2, 0, 1, 9):
        yield OneOp("DYNAMIC_UPDATE_SLICE", (floats(3, 5), floats(2, 2), np.array([begin, 1], np.int32)))
    rows = np.array([1, 0], np.int32), np.array([3, 4], np.int32), np.array([1, 2], np.int32)
    for masks in ({}, {"beginMask": 1}, {"endMask": 2}, {"shrinkAxisMask": 1}, {"beginMask": 3, "endMask": 3}):
        yield OneOp("STRIDED_SLICE", (floats(4, 5), *map(const, rows)), options("StridedSlice", **masks))
    back = np.array([-1], np.int32), np.array([-4], np.int32), np.array([-1], np.int32)
    yield OneOp("STRIDED_SLICE", (floats(6), *map(const, back)), options("StridedSlice"))
    for condition in (bools(2, 3, 4), np.array(True)):
        yield OneOp("SELECT", (condition, x, x + 1))
    yield OneOp("SELECT", (np.array([True, False]), x, x + 1))
    for shapes in SHAPES[:4]:
        yield OneOp("SELECT_V2", (bools(*shapes[1]), floats(*shapes[0]), const(np.float32(-1e9))))
    yield OneOp("SELECT_V2", (bools(2, 3), floats(2, 3), const(np.float32(-np.inf))))
    yield OneOp("SELECT_V2", (bools(1, 3), ints(2, 1), ints(2, 3)), results=("int32",))
    yield OneOp("EMBEDDING_LOOKUP", (np.array([2, 0], np.int32), const(floats(3, 4))))


def counted() -> Iterator[OneOp]:
    """Reductions, and operators whose results are indices or shapes."""
    for kind in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"):
        for axes in ((2,), (-1,), (0, 2)):
            for keep in (False, True):
                yield OneOp(kind, (floats(2, 3, 4), index(*axes)), options("Reducer", keepDims=keep))
    for kind in ("REDUCE_ANY", "REDUCE_ALL"):
        yield OneOp(kind, (bools(3, 4), index(1)), options("Reducer"), results=("bool",))
    yield OneOp("SUM", (ints(3, 4), index(1)), options("Reducer"), results=("int32",))
    for kind, option in (("ARG_MAX", "ArgMax"), ("ARG_MIN", "ArgMin")):
        for wide in (False, True):
            kinds = schema.TensorType.INT64 if wide else schema.TensorType.INT32
            yield OneOp(
                kind,
                (floats(2, 7), number(-1)),
                options(option, outputType=kinds),
                results=("int64" if wide else "int32",),
            )
    for exclusive in (False, True):
        for reverse in (False, True):
            yield OneOp(
                "CUMSUM", (ints(2, 5), number(1)), options("Cumsum", exclusive=exclusive, reverse=reverse), ("int32",)
            )
    one_hot = (np.array([0, 2, 5], np.int32), number(4), const(np.float32(3)), const(np.float32(-1)))
    for axis in (-1, 0):
        yield OneOp("ONE_HOT", one_hot, options("OneHot", axis=axis))
    yield OneOp("SHAPE", (floats(2, 3),), options("Shape", outType=schema.TensorType.INT32), results=("int32",))
    yield OneOp("RANK", (floats(2, 3),), options("Rank"), results=("int32",))
    yield OneOp("RANGE", tuple(np.array(n, np.int32) for n in (2, 11, 3)), results=("int32",))
    yield OneOp("FILL", (index(2, 3), np.array(4.5, np.float32)))
    yield OneOp("ZEROS_LIKE", (floats(2, 3),))
    wanted = (("float32", "int32"), ("int32", "float32"), ("bool", "float32"), ("float32", "bool"), ("int32", "int64"))
    for source, target in (*wanted, ("int64", "int32"), ("int32", "int8")):
        x = floats(2, 5, low=-300, high=300).astype(source)
        yield OneOp("CAST", (x,), options("Cast"), results=(target,))
    far = np.array([-3.7, 300, -300, 127.6, 70000, -70000, 3e9, -3e9, 1e19, -1e19, np.nan, np.inf, -np.inf], np.float32)
    for target in ("uint8", "int8", "int16", "int32", "int64"):
        yield OneOp("CAST", (far,), options("Cast"), results=(target,))
        yield OneOp("CAST", (np.array([-3, 300, 70000, -70000], np.int32),), options("Cast"), results=(target,))


def multiplied() -> Iterator[OneOp]:
    """Products of matrices."""
    for keep in (False, True):
        yield OneOp(
            "FULLY_CONNECTED", (floats(1, 2, 8), const(floats(5, 8)), None), options("FullyConnected", keepNumDims=keep)
        )
    yield OneOp(
        "FULLY_CONNECTED",
        (floats(3, 8), const(floats(5, 8)), const(floats(5))),
        options("FullyConnected", fusedActivationFunction=1),
    )
    yield OneOp("FULLY_CONNECTED", (floats(3, 8), floats(5, 8), None), options("FullyConnected"))
    for right, adj_y in (((8, 5), False), ((1, 5, 8), True)):
        yield OneOp("BATCH_MATMUL", (floats(1, 3, 8), const(floats(*right))), options("BatchMatMul", adjY=adj_y))
    for padding, activation in ((0, 0), (1, 1)):
        once = options("Conv2D", padding=padding, strideW=1, strideH=1, fusedActivationFunction=activation)
        yield OneOp("CONV_2D", (floats(1, 2, 3, 8), const(floats(5, 1, 1, 8)), const(floats(5))), once)
    wide = const(floats(80_000, 4))
    yield OneOp("FULLY_CONNECTED", (floats(3, 4), wide, None), options("FullyConnected"))
    yield OneOp("BATCH_MATMUL", (floats(1, 2, 4), wide), options("BatchMatMul", adjY=True))
    yield OneOp("BATCH_MATMUL", (floats(1, 2, 80_000, low=0, high=1e-3), wide), options("BatchMatMul"))
    for left, right in (((2, 3, 4), (2, 4, 5)), ((1, 2, 3, 4), (4, 5)), ((2, 1, 3, 4), (1, 3, 4, 5))):
        for adj_x in (False, True):
            for adj_y in (False, True):
                a, b = floats(*left), floats(*right)
                yield OneOp(
                    "BATCH_MATMUL",
                    (np.swapaxes(a, -1, -2).copy() if adj_x else a, np.swapaxes(b, -1, -2).copy() if adj_y else b),
                    options("BatchMatMul", adjX=adj_x, adjY=adj_y),
                )


def quantized() -> Iterator[OneOp]:
    """From codes to numbers."""
    grid = Grid((0.25,), (3,))
    yield OneOp("DEQUANTIZE", (ints(2, 5, kind=np.int8),), options("Dequantize"), input_grid=grid)
    yield OneOp("DEQUANTIZE", (ints(2, 5, kind=np.int16),), options("Dequantize"), input_grid=Grid((0.25,), (0,)))
    rows = Grid((0.5, 0.25, 2.0), (1, 0, -2))
    yield OneOp("DEQUANTIZE", (const(ints(3, 4, kind=np.int8), rows),), options("Dequantize"))
    yield OneOp("DEQUANTIZE", (const(floats(3, 4).astype(np.float16)),), options("Dequantize"))
    # The codes themselves, which a MUL may scale instead.
    yield OneOp("CAST", (ints(2, 5, kind=np.int8),), options("Cast"), input_grid=Grid((0.25,), (0,)))


CASES = [*elementwise(), *binary(), *moved(), *counted(), *multiplied(), *quantized()]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{n}" for n, case in enumerate(CASES)])
def test_an_operator_is_what_the_interpreter_computes(case: OneOp) -> None:
    for expected, found in zip(case.interpreted(), case.evaluated(), strict=True):
        assert found[0].shape == expected.shape
        assert found[0].dtype == expected.dtype
        np.testing.assert_allclose(found[0], expected, rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{n}" for n, case in enumerate(CASES)])
def test_samples_in_lock_step_are_each_on_its_own(case: OneOp) -> None:
    for alone, together in zip(case.evaluated(), case.evaluated(samples=3), strict=True):
        for sample in together:
            np.testing.assert_allclose(sample, alone[0], rtol=1e-6, atol=1e-6)


PLAIN = [case for case in CASES if case.inputs() and case.input_grid is None]


@pytest.mark.parametrize("case", PLAIN, ids=[f"{case.kind}-{n}" for n, case in enumerate(PLAIN)])
def test_samples_side_by_side_are_each_on_its_own(case: OneOp) -> None:
    """Thousands of positions are computed as one array; three here, the others with their elements in another order."""
    graph, inputs = case.flat(), case.inputs()
    turned = {name: [np.roll(v, by).copy() for by in range(3)] for name, v in inputs.items()}
    wanted = list(graph.outputs.values())
    try:
        one_by_one = evaluate(graph, {name: tuple(v) for name, v in turned.items()}, wanted)
    except MtpExtractError:
        # Shapes or offsets that only fit in their own order.
        return
    together = evaluate(graph, {name: Stacked(np.stack(v)) for name, v in turned.items()}, wanted)
    for single, whole in zip(one_by_one, together, strict=True):
        for sample in range(3):
            np.testing.assert_allclose(whole[sample], single[sample], rtol=1e-5, atol=1e-6)


def test_every_operator_of_the_list_is_tried() -> None:
    # QUANTIZE is an identity here and rounds there: drafters with static activations try it.
    assert {case.kind for case in CASES} == set(KERNELS) - {"QUANTIZE"}


REFUSED: list[tuple[OneOp, str]] = [
    (OneOp("UNIQUE", (ints(4),), options("Unique"), ("int32", "int32")), "UNIQUE"),
    (OneOp("ADD", (floats(4), floats(4)), options("Add", fusedActivationFunction=4)), "fused activation"),
    (OneOp("ADD", (floats(4), ints(4)), options("Add")), "mixes"),
    (
        OneOp("FULLY_CONNECTED", (floats(1, 4), const(ints(4, 4, kind=np.int8), Grid((0.1,) * 4, (0,) * 4, 1)), None)),
        "along axis 1",
    ),
    (
        OneOp("FULLY_CONNECTED", (floats(1, 4), const(ints(4, 4, kind=np.int8), Grid((0.1,) * 4, (1,) * 4)), None)),
        "zero points",
    ),
    (
        OneOp("FULLY_CONNECTED", (floats(1, 4), const(floats(4, 4)), None), options("FullyConnected", weightsFormat=1)),
        "shuffled",
    ),
    (
        OneOp(
            "RESHAPE",
            (ints(4, kind=np.int8), index(2, 2)),
            results=("int8",),
            input_grid=Grid((0.5,), (0,)),
            result_grid=Grid((0.25,), (0,)),
        ),
        "another scale",
    ),
    (OneOp("SLICE", (floats(4), index(2), index(3))), "takes"),
    *(
        (OneOp("CONV_2D", (floats(1, 4, 4, 8), const(floats(*shape)), const(floats(5))), options("Conv2D", **how)), why)
        for shape, how, why in (
            ((5, 2, 2, 8), {"strideW": 1, "strideH": 1}, "a filter of "),
            ((5, 1, 1, 8), {"strideW": 1, "strideH": 2}, "strides of "),
            ((5, 1, 1, 8), {"strideW": 1, "strideH": 1, "dilationWFactor": 2}, "dilations of "),
        )
    ),
    (
        OneOp(
            "CONV_2D",
            (
                floats(1, 1, 1, 4),
                const(ints(4, 1, 1, 4, kind=np.int8), Grid((0.1,) * 4, (0,) * 4, 3)),
                const(floats(4)),
            ),
            options("Conv2D", strideW=1, strideH=1),
        ),
        "along axis 3",
    ),
    (OneOp("GATHER", (floats(4), index(4)), options("Gather")), "lacks"),
]


@pytest.mark.parametrize(("case", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_not_known_is_refused_by_name(case: OneOp, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        case.evaluated()


def test_shapes_that_do_not_fit_are_an_error_of_ours() -> None:
    case = OneOp("ADD", (floats(3), floats(4)), options("Add"))
    with pytest.raises(FormatError, match="op 0 ADD"):
        case.evaluated()
    assert issubclass(FormatError, MtpExtractError)
