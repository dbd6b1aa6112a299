"""What a file declares of its operators, tensors and inputs, and LiteRT does not take as it is declared.

Found by somebody who had read docs/proof.md alone.
"""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Case, Change, at
from adversary.mutations.masks import both, visible

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


DECLARED: tuple[Case, ...] = (
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
