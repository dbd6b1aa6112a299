"""Rotated queries against the config's RoPE, at every position that the caches have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.call import CONVERSIONS, grid_of
from mtp_extract.graph.drafter import Layer, Walk
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.rope import frequencies
from mtp_extract.litertlm.storage import CODE_TYPES, FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import TensorType

_OF_A_COSINE, _OF_AN_ANGLE = 2e-6, 3.5e-8
"""How far a cosine may be off, and an angle, as a share of it, that is computed in float32."""
_OF_A_FREQUENCY = 2e-7
"""How far a frequency that is computed in float32 may be off, as a share of it: in files of exporters 8.2e-8."""
_FURTHEST = 0.02
"""By how much the last angle may be off."""
_HALF_STEP = 0.51
_COARSEST = 0.009
"""How far rounding may move a cosine or sine; one on a grid of INT8 from −1 to 1 does by 0.004, and again where it goes
through another.
"""
_SHARES: dict[TensorType | None, float] = {TensorType.FLOAT16: 2.0**-12 * 1.001, TensorType.BFLOAT16: 2.0**-9 * 1.001}
"""How far a number below 1 is rounded by a type."""
_LARGEST_TABLE = 1 << 20


@dataclass(frozen=True)
class CoarseTable:
    """A RoPE table that a file stores in few bits, within half a step of its type, and that is written as exact theta.

    Attributes:
        layer: whose it is.
        kind: the types of few bits.
    """

    layer: int
    kind: str


def hold_rotations(graph: FlatGraph, walk: Walk, config: DrafterConfig) -> tuple[CoarseTable, ...]:
    """Hold how every layer rotates its queries; returns what is coarser than the config.

    Raises:
        ProofError: a query is rotated otherwise than by the config's RoPE.
        UnsupportedError: few bits leave too little of it.
    """
    held: dict[tuple[object, ...], str] = {}
    found = []
    for index, layer in enumerate(walk.layers):
        key = *layer.rotation.key, config.layers[index].rope
        if key not in held:
            held[key] = _hold(graph, index, layer, frequencies(config.layers[index].rope, layer.head_dim))
        if held[key]:
            found.append(CoarseTable(index, held[key]))
    return tuple(found)


def _hold(graph: FlatGraph, index: int, layer: Layer, exact: npt.NDArray[np.float64]) -> str:
    """Hold the rotation of a layer; the types of few bits that it is stored in, empty where there are none."""
    values, slots = layer.rotation.values, layer.rotation.positions.slots
    stored = _types_of_few_bits(source for source in chain(*map(ancestors, values)) if source.constant)
    doubt, tables = (max(each) for each in zip(*(_roundings(graph, value) for value in values), strict=True))
    if not doubt <= _COARSEST:
        raise UnsupportedError(
            f"layers.{index}: its cosines and sines are held in steps of {2 * doubt:.2g}: too little of them is left. "
            "Nothing is written."
        )
    rounding = layer.frequency_rounding if stored or doubt else 0.0
    off = np.abs(layer.inverse_frequencies - exact)
    wrong = (off > exact * _OF_A_FREQUENCY + rounding + _OF_A_COSINE / slots) | (off * slots > _FURTHEST)
    if wrong.any():
        worst = int(wrong.argmax())
        raise ProofError(
            f"layers.{index}.attention: a query is turned by {layer.inverse_frequencies[worst]:.8g} from position to "
            f"position where the config's RoPE has {exact[worst]:.8g}. Nothing is written. Please report the file."
        )
    own = (exact if doubt else layer.inverse_frequencies).astype(np.float32)
    try:
        _hold_at_every_position(index, layer, own, doubt)
    except ProofError:
        # Exporters that store a table compute it in float64.
        if not tables:
            raise
        _hold_at_every_position(index, layer, exact, doubt)
    if not stored and not doubt:
        return ""
    return stored or _types_of_few_bits(chain(*map(ancestors, values))) or "half precision"


def _hold_at_every_position(index: int, layer: Layer, own: npt.NDArray[np.floating], doubt: float) -> None:
    """Hold cosines and sines; angles are computed in the type of ``own``, the frequencies."""
    for positions, made in layer.rotation.at():
        angle = positions.astype(own.dtype)[:, None] * own
        allowed = np.float32(_OF_A_COSINE + doubt) + np.float32(_OF_AN_ANGLE * (positions[-1] + 1)) * own
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        for coefficient, wanted in zip(made, (cos, cos, sin, sin), strict=True):
            apart = np.abs(coefficient - wanted)
            wrong = ~(apart <= allowed)
            if wrong.any():
                row, entry = (int(i) for i in np.argwhere(wrong)[0])
                raise ProofError(
                    f"layers.{index}.attention: at position {positions[row]} its query is rotated by a number that is "
                    f"{apart[row, entry]:.3g} off that of its RoPE (frequency {entry}). Nothing is written. "
                    "Please report the file."
                )


# Tables that a file stores.


def _roundings(graph: FlatGraph, value: Value) -> tuple[float, bool]:
    """How far cosines and sines are off by the types that hold them, and whether a table of them is stored."""
    made = {id(v): v.producer.kind for v in ancestors(value) if v.producer is not None}
    # A table is taken from, or converted, and nothing is computed of it.
    computed = frozenset(key for key, kind in made.items() if kind not in LAYOUT and kind not in CONVERSIONS)
    tables = [v for v in ancestors(value, computed) if v.constant and v.tensor.elements > 1]
    stored = [_rounding_of(graph, table) for table in tables if table.tensor.type in NUMBER_TYPES]
    sines = frozenset(key for key, kind in made.items() if kind in ("SIN", "COS", "GATHER"))
    # What is looked up is on the grid of its table, which counts by itself.
    passed = [v for v in ancestors(value, sines) if not v.constant and made.get(id(v)) != "GATHER"]
    grids = ((grid_of(v.tensor) or (0.0, 0))[0] * _HALF_STEP for v in passed)
    few = sum(grids) + sum(_SHARES.get(v.tensor.type, 0.0) for v in passed)
    return max(stored, default=0.0) + few, bool(stored)


def _rounding_of(graph: FlatGraph, table: Value) -> float:
    """How far the numbers of a stored table of cosines or sines may be off, by its type."""
    tensor = table.tensor
    if tensor.type in FLOAT_TYPES:
        # Converters turn constants of half precision into float32: that all are such is no chance.
        half = tensor.type is TensorType.FLOAT32 and tensor.elements <= _LARGEST_TABLE and _is_half(graph.floats(table))
        return _SHARES[TensorType.FLOAT16] if half else _SHARES.get(tensor.type, 0.0)
    scales = tensor.quantization.scale if tensor.quantization is not None else np.zeros(1)
    return float(scales.max(initial=0.0)) * _HALF_STEP


def _is_half(numbers: npt.NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(numbers, numbers.astype(np.float16).astype(np.float32)))


def _types_of_few_bits(values: Iterable[Value]) -> str:
    """The types of few bits that ``values`` are held in, joined; empty where there are none."""
    few = {*_SHARES, *CODE_TYPES, TensorType.INT16}
    held = [value.tensor for value in values if value.tensor.elements > 1 and value.tensor.type in few]
    return " and ".join(sorted({tensor.type_name for tensor in held}))
