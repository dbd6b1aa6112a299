"""A second round: what someone tries who knows how the proof goes.

Every position is tried, masks row by row, operators that choose are refused, an attention is linear but for its
softmax, inputs are drawn anew. So these depend on a position by other ways than angles and masks, use the mask as
data, reach slots and numbers that no draw reaches, or are small where the draws are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, cases
from adversary.mutations.attention import visible
from adversary.mutations.blocks import eps, normed_by, recapped
from adversary.mutations.positions import (
    counted,
    is_at,
    position,
    row,
    rows,
    table,
    tabled,
    window_table,
)
from adversary.mutations.quiet import times

Array = np.ndarray
EVERY = np.arange(256)


def scalar(g: Graph, x: int, like: int) -> int:
    """One number as an array of as many axes as ``like``."""
    return g.reshape(x, [1] * len(g.shape(like)))


def plus_number(build: Callable[[Graph], int]) -> Edit:
    return lambda g, x: g.add(x, scalar(g, build(g), x))


def by_row(values: Array) -> Callable[[Graph], int]:
    """The position's row of a table of floats [256, n]."""
    return lambda g: row(g, g.constant(values))


def of_row(name: str, values: Array) -> Edit:
    """``name`` of a value and the position's row of a table, along the last axis."""
    return lambda g, x: g.call(name, x, by_row(values)(g))


def parameter(index: int) -> Callable[[Graph], int]:
    """An element of ``param_tensor`` as a float."""
    return lambda g: g.cast(g.slice(g.input("param_tensor"), [0, 0, 0, index], [1, 1, 1, 1]), np.float32)


def set_parameter(index: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays["param_tensor"][..., index] = value

    return change


def fp16(t: Array) -> Array:
    return t.astype(np.float16).astype(np.float32)


def gathered_heads(g: Graph, x: int) -> int:
    """Heads in an order that the position gives."""
    hit = g.cast(is_at(37)(g), np.int32)
    order = g.add(g.constant(np.arange(4), np.int32), g.mul(hit, np.array([1, -1, 0, 0], np.int32)))
    return g.call("GATHER", x, order, shape=g.shape(x), axis=2)


@a_change
def fused(g: Graph, place: Callable[[Graph], Any], activation: str) -> bool | None:
    op = place(g)
    if g.kind(op) == "CONCATENATION" or not hasattr(op.builtinOptions, "fusedActivationFunction"):
        return False
    op.builtinOptions.fusedActivationFunction = getattr(schema.ActivationFunctionType, activation)
    return None


PARAM: dict[str, Change] = {
    "parameter_times_0_and_nan": e.edge("1.stream", plus_number(lambda g: g.sqrt(g.neg(parameter(4)(g))))),
}

MASK: dict[str, Change] = {
    "position_is_count": position(lambda g, x: g.reshape(g.sub(counted(g), 1.0), g.shape(x))),
    "reversed": visible(1, lambda g, x: g.gather(x, range(255, -1, -1), 3)),
}

ATTENTION: dict[str, Change] = {
    "squared_and_renormed": e.edge("1.probabilities", lambda g, x: g.div(g.square(x), g.reduce("SUM", g.square(x), 3))),
    "result_plus_scores": e.edge("1.attended", lambda g, x: g.add(x, g.mul(g.part(g.layer(1).scores, 0, 64), 1e-2))),
    "weights_plus_1e-8": e.edge("1.probabilities", e.add(1e-8)),
    "heads_by_gathered_order": e.edge("1.query_normed", gathered_heads),
}

ROPE: dict[str, Change] = {
    "sin_by_row_of_less_than_fp16": tabled(sin=rows(120, 250, lambda t: t * (1 + 4e-4))),
    "int8_numbers_in_floats": tabled(cos=lambda t: np.round(t * 127) / 127, sin=lambda t: np.round(t * 127) / 127),
    "slow_frequency_zero_in_full": table(lambda t: np.where(np.arange(t.size) == np.flatnonzero(t)[-1], 0, t), 1),
}

WINDOWS: dict[str, Change] = {
    **{
        f"edge_late_at_{at_row}": window_table(
            lambda seen, far, r=at_row: np.where((EVERY[:, None] == r) & (far == e.WINDOW), True, seen)
        )
        for at_row in (16, 40, 201, 255)
    },
    **{
        f"edge_early_at_{at_row}": window_table(
            lambda seen, far, r=at_row: np.where((EVERY[:, None] == r) & (far == e.WINDOW - 1), False, seen)
        )
        for at_row in (40, 255)
    },
}

QUIET: dict[str, Change] = {
    "eps_doubled_in_one": normed_by("layers.0.pre_attention_norm", eps(2e-6)),
    "activations_scaled_below_the_norm": e.edge("pre_projection", e.mul(0.5)),
}

QUIET_VALUES: dict[str, Change] = {
    "attention_out_doubled": e.edge("0.attention_out", e.mul(2.0)),
    "attention_out_plus_1e-6": e.edge("0.attention_out", e.add(1e-6)),
}

LOUD: dict[str, Change] = {
    "stream_plus_other_channel": e.edge(
        "pre_projection", lambda g, x: g.add(x, g.mul(g.gather(x, [*range(1, 64), 0], -1), 1e-3))
    ),
    "activations_times_cos": e.edge("activations", times(e.mul(1e-5), e.unary("COS"))),
}

FUSED: dict[str, Change] = {
    "product_of_rope": fused(lambda g: g.producer(int(g.producer(g.layer(0).rotated).inputs[0])), "RELU"),
    "weighed_norm": fused(lambda g: g.norm("final_norm").weigh, "RELU6"),
    "angle": fused(lambda g: g.producer(int(g.producer(g.layer(0).angle).inputs[0])), "RELU6"),
}

CONSTANTS: dict[str, Change] = {
    "cap_bound_29.99": recapped(1 / 30, 29.99),
    "cap_slope_of_29.99": recapped(1 / 29.99, 30.0),
}


def sparse(g: Graph) -> None:
    """A weight that says that it is sparse."""
    made = schema.SparsityParametersT(traversalOrder=[0, 1], blockMap=[])
    dense = [schema.DimensionMetadataT() for _ in range(2)]
    for dimension, size in zip(dense, g.shape(g.roles["layers.0.o_proj"]), strict=True):
        dimension.format, dimension.denseSize = schema.DimensionType.DENSE, size
    made.dimMetadata = dense
    g.main.tensors[g.roles["layers.0.o_proj"]].sparsity = made


def variable(g: Graph) -> None:
    g.main.tensors[g.roles["layers.0.o_proj"]].isVariable = True


def external(g: Graph) -> bool | None:
    tensor = g.main.tensors[g.roles["layers.0.o_proj"]]
    if not hasattr(tensor, "externalBuffer"):
        return False
    tensor.externalBuffer = 1
    return None


def blocks_of_3(g: Graph) -> None:
    """Scales by block, of a size that does not divide the width."""
    tensor = g.main.tensors[g.roles["layers.0.o_proj"]]
    made = schema.BlockwiseQuantizationT(
        scales=g.constant(np.full((64, 42), 0.01), np.float16), zeroPoints=-1, blockSize=3
    )
    tensor.quantization.details = made
    tensor.quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization


@a_change
def twice_named(g: Graph, name: str) -> None:
    """The signature has the input ``name`` twice, once for a tensor of nobody's."""
    inputs, old = g.model.signatureDefs[0].inputs, g.input(name)
    inputs.append(schema.TensorMapT(name=name.encode(), tensorIndex=g.tensor(g.shape(old), g.dtype(old))))
    g.main.inputs = [*map(int, g.main.inputs), inputs[-1].tensorIndex]


STORAGE: dict[str, tuple[Change, str]] = {
    "sparse": (sparse, "what the bytes are depends on the sparsity's own tables"),
    "variable": (variable, "a variable is not a constant: LiteRT keeps no data in it"),
    "external": (external, "its numbers are in another file"),
    "blocks_of_3": (blocks_of_3, "a block is no part of a row"),
    "mask_twice": (twice_named("mask"), "which of both the runtime fills is not said"),
}


_AT_ROWS = (*(Sample(at_row, mask="past") for at_row in (37, 200, 254, 255)), Sample(254), Sample(253))

CASES = (
    *cases(
        "second: parameters",
        PARAM,
        Sample(40, change=set_parameter(4, 1)),
    ),
    *cases("second: mask as data", MASK, Sample(37), Sample(40, mask="all"), *_AT_ROWS),
    *cases("second: attention", ATTENTION, Sample(37), Sample(201, mask="past"), Sample(96), *_AT_ROWS),
    *cases("second: angles", ROPE, Sample(37), Sample(37, mask="past", keys=3.0), *_AT_ROWS),
    *cases(
        "second: windows",
        WINDOWS,
        Sample(16, mask="past"),
        Sample(40, mask="all"),
        Sample(201, mask="past"),
        Sample(180, mask="past"),
        *_AT_ROWS,
    ),
    *cases("second: quiet", QUIET, Sample(40, activations=1e-5), Sample(201, activations=1e-6)),
    *cases("second: quiet values", QUIET_VALUES, Sample(40, values=1e-3), Sample(201, values=1e-4)),
    *cases("second: loud", LOUD, Sample(40, activations=1e4), Sample(40, activations=1e5), rounding=2e-4),
    *cases("second: fused", FUSED),
    *cases("second: constants", CONSTANTS, Sample(37), Sample(99), Sample(254)),
    *cases("second: storage", STORAGE),
)
