"""What a file declares of its operators, tensors and inputs, and LiteRT does not take as it is declared.

Found by somebody who had read docs/proof.md alone.
"""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Case, Change, Sample, at, chain, mul
from adversary.mutations.masks import both, visible
from adversary.rewrites.third import cast, coded

__all__ = ["DECLARED"]

_NOT_RUN = "LiteRT refuses the file"


def typed(place: str, name: str) -> Change:
    """The value at ``place`` is declared as another type."""
    return lambda g: setattr(g.main.tensors[at(g, place)], "type", getattr(schema.TensorType, name))


def third_operand(name: str) -> Change:
    """An operator of two operands has three; what the third is must not be left out silently."""

    def change(g: Graph) -> None:
        op = g.layer(0).first if name == "ADD" else g.layer(0).scaler
        op.inputs = [*map(int, op.inputs), g.layer(0).stream]

    return change


def cache_called(name: bytes) -> Change:
    """No runtime fills a cache of that name."""

    def change(g: Graph) -> None:
        entries = g.model.signatureDefs[0].inputs
        next(entry for entry in entries if entry.name == b"kv_cache_k_3").name = name

    return change


def neither_true_nor_false(g: Graph, x: int) -> int:
    """And with bools that are stored as 2."""
    constant = g.constant(np.ones((1, 1, 1, 256)), np.bool_)
    g.main.tensors[constant].buffer = g.buffer(bytes([2] * 256))
    return both(g, x, constant)


def through_bool(which: str) -> Change:
    """A cache of codes of which two are left."""
    return coded(lambda scale, zero_point: chain(cast(np.bool_), cast(np.float32), mul(scale)), which=which)


def through_fewer(which: str) -> Change:
    """A cache of codes that are halved, cut to whole numbers and doubled again."""
    halved = chain(cast(np.float32), mul(0.5), cast(np.int8))
    return coded(lambda scale, zero_point: chain(halved, cast(np.float32), mul(2 * scale)), which=which)


def compared(kind: str, name: str) -> Change:
    """Positions and slots compared as small integers, of which LiteRT does not look at the scales."""
    as_type = {"INT8": np.int8, "UINT8": np.uint8, "INT16": np.int16}[name]

    def edit(g: Graph, x: int) -> int:
        position = g.cast(g.reshape(g.input("input_pos"), [1, 1, 1, 1]), as_type)
        return both(g, x, g.call(kind, g.constant(np.arange(256).reshape(1, 1, 1, 256) % 100, as_type), position))

    return visible(0, edit)


def mask_turned_around(g: Graph) -> None:
    """The mask input from its last slot to its first, by steps of −1, and what is past of that."""

    def edit(g: Graph, x: int) -> int:
        mask = g.input("mask")
        rank = len(g.shape(mask))
        begins = g.constant([*[0] * (rank - 1), -1], np.int32)
        ends = g.constant([*g.shape(mask)[:-1], -257], np.int32)
        steps = g.constant([*[1] * (rank - 1), -1], np.int32)
        turned = g.call("STRIDED_SLICE", mask, begins, ends, steps, shape=g.shape(mask), dtype=np.bool_)
        return both(g, x, turned)

    visible(0, edit)(g)


DECLARED: tuple[Case, ...] = (
    Case("declared", "mask_turned_around", mask_turned_around),
    *(Case("declared", f"{which}_through_bool", through_bool(which), shows=(Sample(40),)) for which in "kv"),
    *(Case("declared", f"{which}_of_halved_codes", through_fewer(which), shows=(Sample(40),)) for which in "kv"),
    *(
        Case(
            "declared",
            f"{kind}_of_{name}",
            compared(kind, name),
            why="LiteRT's kernels abort or take codes for numbers",
        )
        for kind in ("LESS_EQUAL", "GREATER")
        for name in ("INT8", "UINT8", "INT16")
    ),
    *(
        Case("declared", f"{place}_as_{name}", typed(place, name), why="LiteRT writes what the type says")
        for place in ("0.attended", "1.attended")
        for name in ("FLOAT16", "INT8")
    ),
    *(
        Case("declared", f"{place}_as_{name}", typed(place, name), why=_NOT_RUN)
        for place in ("1.stream", "0.cos", "logits")
        for name in ("FLOAT16", "BFLOAT16", "INT32", "FLOAT64", "INT8", "BOOL")
    ),
    *(Case("declared", f"third_operand_of_{n}", third_operand(n), why=_NOT_RUN) for n in ("ADD", "MUL")),
    *(
        Case("declared", f"cache_called_{name!r}", cache_called(name), why="no runtime fills it")
        for name in (b"kv_cache_k_", b"kv_cache_k_x", b"kv_cache_k_-1", b"keys")
    ),
    Case("declared", "bools_stored_as_2", visible(0, neither_true_nor_false), why="LiteRT's kernels do not agree"),
)
