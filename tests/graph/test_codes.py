"""Which of LiteRT's kernels compute with what codes stand for, and how each value of a static export is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adversary.edits import Edit, an_edit, over_int, quantized, through
from ai_edge_litert import schema_py_generated as schema
from helpers.one_op import Grid, OneOp, const
from helpers.surgery import Graph
from proof.test_grids import prove_with
from seam import MtpExtractError

from mtp_extract.graph.call import read_activation_scale
from mtp_extract.graph.reading import COMPUTED_BY_SCALES

LAST_AXIS = const(np.array([1], np.int32))
KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "ADD": (np.add, (), schema.AddOptionsT()),
    "SUB": (np.subtract, (), schema.SubOptionsT()),
    "MUL": (np.multiply, (), schema.MulOptionsT()),
    "DIV": (np.divide, (), schema.DivOptionsT()),
    "MINIMUM": (np.minimum, (), None),
    "MAXIMUM": (np.maximum, (), None),
    "SQRT": (np.sqrt, (), None),
    "RSQRT": (lambda x: 1 / np.sqrt(x), (), None),
    "NEG": (np.negative, (), None),
    "SUM": (lambda x: x.sum(1), (LAST_AXIS,), schema.ReducerOptionsT()),
    "MEAN": (lambda x: x.mean(1), (LAST_AXIS,), schema.ReducerOptionsT()),
    "GELU": (
        lambda x: x / (1 + np.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))),
        (),
        schema.GeluOptionsT(approximate=True),
    ),
}


def measure_error_in_steps(kind: str, step: float) -> float:
    """How far the INT8 kernel is from the function of what its codes stand for, in steps of its result."""
    function, others, options = KERNELS[kind]
    generator = np.random.default_rng(3)
    operands = tuple(generator.integers(20, 120, (4, 6)).astype(np.int8) for _ in range(getattr(function, "nin", 1)))
    grid = Grid((0.01,), (-10,))
    case = OneOp(kind, (*operands, *others), options, ("int8",), Grid((step,), (-20,)), grid)
    (found,) = case.interpreted()
    wanted = function(*((codes.astype(np.float64) + 10) * 0.01 for codes in operands))
    return float(np.abs(found - wanted).max() / step)


STEPS = {"ADD": 0.02, "SUB": 0.01, "MUL": 0.012, "DIV": 0.03, "SUM": 0.06, "RSQRT": 0.016}


@pytest.mark.parametrize("kind", sorted(set(KERNELS) - {"MINIMUM", "MAXIMUM", "NEG"}))
def test_a_kernel_that_is_read_computes_by_scales(kind: str) -> None:
    assert kind in COMPUTED_BY_SCALES
    assert measure_error_in_steps(kind, STEPS.get(kind, 0.011)) <= 1


@pytest.mark.parametrize("kind", ["MINIMUM", "MAXIMUM", "NEG"])
def test_a_kernel_that_takes_codes_for_numbers_is_not_read(kind: str) -> None:
    assert kind not in COMPUTED_BY_SCALES
    assert measure_error_in_steps(kind, 0.02) > 5


def test_int16_has_no_zero_point() -> None:
    """The kernel of GELU ignores it; most others refuse the file."""
    grid = Grid((0.001,), (0,))
    codes = np.random.default_rng(3).integers(20, 120, 6).astype(np.int16)
    case = OneOp("GELU", (codes,), KERNELS["GELU"][2], ("int16",), Grid((0.001,), (9000,)), grid)
    (tensor,) = (value.tensor for value in case.flat().outputs.values())
    assert np.abs(case.interpreted()[0]).max() > 8
    with pytest.raises(MtpExtractError, match="zero point 9000"):
        read_activation_scale(tensor)


def list_rounded_with(place: str, edit: Edit) -> Any:
    """What a sound drafter rounds with ``edit`` behind ``place``."""
    return prove_with(place, edit)["rounded_activations"]


INSIDE = ("0.query_normed", "0.rotated", "0.queries", "0.scores", "0.probabilities", "0.attended", "0.key", "0.value")


@pytest.mark.parametrize("place", INSIDE)
@pytest.mark.parametrize("dtype", [np.int8, np.float16, ml_dtypes.bfloat16])
def test_what_is_rounded_inside_an_attention_is_read_and_said(place: str, dtype: Any) -> None:
    edit = over_int(0.05, 3) if dtype is np.int8 else through(dtype)
    (entry,) = list_rounded_with(place, edit)
    assert (entry["type"], entry["count"]) == (np.dtype(dtype).name.upper(), 1)


@an_edit
def reshape_codes(g: Graph, x: int) -> int:
    """RESHAPE while the value is held as codes, as Google's q projections are."""
    codes = quantized(g, x, 0.1)
    shape = g.shape(x)
    moved = g.call("RESHAPE", codes, np.array([1, *shape], np.int32), shape=[1, *shape], dtype=np.int8)
    g.main.tensors[moved].quantization = g.main.tensors[codes].quantization
    return g.reshape(g.call("DEQUANTIZE", moved, dtype=np.float32), shape)


def test_codes_that_are_moved_are_one_rounding() -> None:
    (entry,) = list_rounded_with("0.query", reshape_codes())
    assert (entry["count"], entry["steps"]) == (1, [0.1, 0.1])


@an_edit
def add_codes(g: Graph, x: int) -> int:
    """The value and itself, halved, added as codes: of another scale than the result."""
    one, half = quantized(g, x, 0.1), quantized(g, g.mul(x, np.float32(0.5)), 0.05, 4)
    made = g.call("ADD", one, half, shape=g.shape(x), dtype=np.int8)
    g.main.tensors[made].quantization = g.main.tensors[one].quantization
    return g.mul(g.call("DEQUANTIZE", made, dtype=np.float32), np.float32(1 / 1.5))


def test_a_sum_of_codes_is_the_sum_of_what_they_stand_for() -> None:
    (entry,) = list_rounded_with("1.stream", add_codes())
    assert (entry["count"], entry["steps"]) == (3, [0.05, 0.1])


WRONG: dict[str, tuple[str, Edit, str]] = {
    "a grid that does not reach down to what hides a slot": ("0.masked", over_int(0.05), "not lowered"),
    "codes that are taken for numbers": ("state", lambda g, x: g.cast(quantized(g, x, 0.05), np.float32), "INT8"),
    "a query turned by codes": ("0.cos", over_int(1 / 127), "QUANTIZE"),
    "angles in half precision": ("0.angle", through(np.float16), "turned by"),
    "half precision that overflows": (
        "1.stream",
        lambda g, x: g.mul(through(np.float16)(g, g.mul(x, np.float32(1e4))), np.float32(1e-4)),
        "FLOAT16",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_more_than_rounding_is_refused(fault: str) -> None:
    place, edit, noun = WRONG[fault]
    with pytest.raises(MtpExtractError, match=noun):
        list_rounded_with(place, edit)
