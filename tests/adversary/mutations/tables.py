"""cos, sin and masks as tables with a row a position, wrong in rows that a sample may not ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import WINDOW, Case, Change, Sample, parameters
from adversary.mutations.masks import both, visible
from adversary.mutations.rope import frequencies

Array = np.ndarray
Rows = Callable[[Array], Array]


def angles(g: Graph, layer: int) -> Array:
    """F32 angles of every position, [256, width of cos]."""
    table = g.value(frequencies(g, layer)).reshape(-1).astype(np.float32)
    made = np.arange(256, dtype=np.float32)[:, None] * table
    width = g.shape(g.layer(layer).cos)[-1]
    return np.tile(made, width // made.shape[1])


def row(g: Graph, table: int, how: str = "GATHER") -> int:
    """The position's row of ``table``, [1, width]."""
    shape = [1, g.shape(table)[1]]
    if how == "EMBEDDING_LOOKUP":
        return g.call(how, g.input("input_pos"), table, shape=shape, dtype=np.float32)
    if how == "SLICE":
        start = g.join([g.input("input_pos"), g.constant(np.zeros(1), np.int32)], 0)
        return g.call(how, table, start, np.array(shape, np.int32), shape=shape)
    if how == "ONE_HOT":
        hot = g.call(
            how, g.input("input_pos"), np.array(256, np.int32), 1.0, 0.0, shape=[1, 256],
            dtype=np.float32, axis=-1,
        )  # fmt: skip
        return g.call("BATCH_MATMUL", hot, table, shape=shape)
    return g.call("GATHER", table, g.input("input_pos"), shape=shape, axis=0)


def stored(g: Graph, values: Array, kind: str) -> Callable[[str], int]:
    """A table as FP16, INT8, INT16 or floats; returns what reads a row of it as floats."""
    if kind == "float":
        return lambda how: row(g, g.constant(values), how)
    dtype: Any = {"fp16": np.float16, "int8": np.int8, "int16": np.int16}[kind]
    if kind == "fp16":
        half = g.constant(values.astype(np.float16), np.float16)
        return lambda how: g.cast(row(g, half, how), np.float32)
    largest = np.iinfo(dtype).max
    codes = g.constant(np.round(values * largest), dtype)
    g.main.tensors[codes].quantization = parameters(1 / largest)

    def read(how: str) -> int:
        picked = row(g, codes, how)
        g.main.tensors[picked].quantization = parameters(1 / largest)
        return g.call("DEQUANTIZE", picked, dtype=np.float32)

    return read


def tabled(
    cos: Rows = lambda t: t, sin: Rows = lambda t: t, angle: Rows = lambda t: t, *, layers: tuple[int, ...] = (0, 1),
    kind: str = "float", how: str = "GATHER",
) -> Change:  # fmt: skip
    """cos and sin by tables; ``angle``, ``cos`` and ``sin`` change their rows."""

    def change(g: Graph) -> None:
        for layer in layers:
            place, all_angles = g.layer(layer), angle(angles(g, layer)).astype(np.float32)
            readers = g.readers(place.cos), g.readers(place.sin)
            for old, values, into in zip(
                (place.cos, place.sin), (cos(np.cos(all_angles)), sin(np.sin(all_angles))), readers, strict=True
            ):
                g.rewire(old, g.reshape(stored(g, values, kind)(how), g.shape(old)), into)

    return change


def rows(first: int, last: int, then: Rows) -> Rows:
    """``then`` of the rows ``first`` … ``last``."""

    def edit(t: Array) -> Array:
        made = t.copy()
        made[first : last + 1] = then(t[first : last + 1])
        return made

    return edit


def order(pick: Callable[[Array], Array]) -> Rows:
    """Rows in another order."""
    return lambda t: t[pick(np.arange(256))]


def exchanged(a: int, b: int) -> Rows:
    return order(lambda p: np.where(p == a, b, np.where(p == b, a, p)))


def windows(g: Graph, edit: Callable[[Array, Array], Array]) -> int:
    """The window as a table of bool, a row a position."""
    p, s = np.arange(256)[:, None], np.arange(256)[None]
    table = edit((s <= p) & (s > p - WINDOW), p - s + 0 * s)
    return g.reshape(row(g, g.constant(table, np.bool_)), g.shape(g.input("mask")))


def window_table(edit: Callable[[Array, Array], Array]) -> Change:
    return visible(0, lambda g, _: both(g, g.input("mask"), windows(g, edit)))


def one(at: int, column: int, value: float) -> Rows:
    def edit(t: Array) -> Array:
        made = t.copy()
        made[at, column] = value
        return made

    return edit


def clear(first: int, last: int, distance: int) -> Callable[[Array, Array], Array]:
    """A slot so far back is not seen from some rows."""

    def edit(seen: Array, far: Array) -> Array:
        made = seen.copy()
        made[first : last + 1] &= far[first : last + 1] != distance
        return made

    return edit


_ROWS: dict[int, dict[str, Change]] = {
    37: {
        "row_37_of_cos_is_1": tabled(cos=rows(37, 37, np.ones_like)),
        "row_37_is_36": tabled(angle=order(lambda p: np.where(p == 37, 36, p))),
        "rows_37_and_73_exchanged": tabled(angle=exchanged(37, 73)),
        "one_entry_of_row_37": tabled(sin=one(37, 0, 0.0)),
        "one_entry_by_lookup": tabled(cos=one(37, 1, 0.5), how="EMBEDDING_LOOKUP"),
        "one_entry_by_slice": tabled(sin=one(37, 1, 0.5), how="SLICE", layers=(1,)),
        "one_entry_by_one_hot": tabled(sin=one(37, 1, 0.5), how="ONE_HOT", layers=(0,)),
        "row_37_not_a_number": tabled(cos=rows(37, 37, lambda t: t * np.nan)),
        "fp16_with_a_wrong_row": tabled(cos=rows(37, 37, lambda t: -t), kind="fp16"),
        "int8_with_a_wrong_row": tabled(sin=rows(37, 37, lambda t: -t), kind="int8"),
        "int16_with_a_wrong_entry": tabled(cos=one(37, 0, 0.3), kind="int16"),
        "window_table_row_37": window_table(clear(37, 37, 3)),
        "window_table_of_row_36_at_37": window_table(
            lambda seen, far: seen[np.where(np.arange(256) == 37, 36, np.arange(256))]
        ),
    },
    180: {
        "angles_of_rows_120_to_250_a_row_late": tabled(
            angle=order(lambda p: np.where((p > 119) & (p < 251), p + 1, p))
        ),
        "sin_of_rows_120_to_250_negated": tabled(sin=rows(120, 250, np.negative)),
        "other_theta_in_rows_120_to_250": tabled(angle=rows(120, 250, lambda t: t * 0.8)),
        "rows_repeat_from_128_to_250": tabled(angle=order(lambda p: np.where((p > 127) & (p < 251), p - 128, p))),
        "rows_stop_at_170": tabled(angle=order(lambda p: np.minimum(p, 170))),
        "fp16_off_by_a_hundredth": tabled(cos=rows(120, 250, lambda t: t + 0.01), kind="fp16"),
        "int8_off_by_four_steps": tabled(cos=rows(120, 250, lambda t: t - 4 / 127), kind="int8"),
        "int8_clipped_rows": tabled(sin=rows(120, 250, lambda t: np.clip(t, -0.7, 0.7)), kind="int8"),
        "window_table_of_15_from_120_to_250": window_table(clear(120, 250, 15)),
        "window_table_lies_from_120_to_250": window_table(clear(120, 250, 0)),
    },
}

TABLES = tuple(
    Case(
        "tables",
        name,
        change,
        shows=(Sample(position, mask="past"), Sample(position)),
        rounding=0.02 if "int8" in name else 1e-3 if "fp16" in name else 0.0,
    )
    for position, changes in _ROWS.items()
    for name, change in changes.items()
)
