"""Rotated queries against the config's RoPE, at every position that the caches have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.errors import ProofError
from mtp_extract.graph.call import CONVERSIONS
from mtp_extract.graph.drafter import Layer, Walk
from mtp_extract.graph.evaluate import LAYOUT
from mtp_extract.graph.expressions import Doubles, Ids
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.graph.rotation import frequencies
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TensorType

_OF_A_COSINE, _OF_AN_ANGLE = 2e-6, 3.5e-8
"""How far a cosine may be off, and an angle, as a share of it, that is computed in float32."""
_OF_A_FREQUENCY = 2e-7
"""How far a frequency that is computed in float32 may be off, as a share of it: in files of exporters 8.2e-8."""
_FURTHEST = 0.02
"""By how much the last angle may be off."""
_SHARES: dict[TensorType | None, float] = {TensorType.FLOAT16: 2.0**-12 * 1.001, TensorType.BFLOAT16: 2.0**-9 * 1.001}
"""How far a number below 1 is rounded by a type."""
_LARGEST_TABLE = 1 << 20


def check_rotations(graph: FlatGraph, walk: Walk, config: DrafterConfig) -> list[dict[str, Any]]:
    """Check how every layer rotates its queries.

    Returns:
        the layers whose cosines and sines the file holds in half precision, and its types; the exact theta is written.

    Raises:
        ProofError: a query is rotated otherwise than by the config's RoPE.
    """
    types_by_rotation: dict[tuple[object, ...], str] = {}
    coarse_tables = []
    for index, layer in enumerate(walk.layers):
        rope = config.layers[index].rope
        key = *layer.rotation.key, rope
        if key not in types_by_rotation:
            types_by_rotation[key] = _check(graph, index, layer, frequencies(rope, layer.head_dim))
        if types_by_rotation[key]:
            coarse_tables.append({"layer": index, "held_in": types_by_rotation[key]})
    return coarse_tables


def _check(graph: FlatGraph, index: int, layer: Layer, exact: Doubles) -> str:
    """Check the rotation of a layer; the types of half precision that it is stored in, empty where there are none."""
    slots = layer.rotation.positions.slots
    doubt, held_in = _rounding(graph, layer.rotation.values)
    rounding = layer.frequency_rounding if held_in else 0.0
    off = np.abs(layer.inverse_frequencies - exact)
    wrong = (off > exact * _OF_A_FREQUENCY + rounding + _OF_A_COSINE / slots) | (off * slots > _FURTHEST)
    if wrong.any():
        worst = int(wrong.argmax())
        raise ProofError(
            f"layers.{index}.attention: a query is turned by {layer.inverse_frequencies[worst]:.8g} from position to "
            f"position where the config's RoPE has {exact[worst]:.8g}. Nothing is written."
        )
    frequencies_in_use = (exact if doubt else layer.inverse_frequencies).astype(np.float32)
    # Exporters that store a table compute it in float64.
    if (apart := _apart(layer, frequencies_in_use, doubt)) and _apart(layer, exact, doubt):
        raise ProofError(f"layers.{index}.attention: {apart}. Nothing is written.")
    return held_in


def _apart(layer: Layer, frequencies_in_use: npt.NDArray[np.floating], doubt: float) -> str:
    """Where cosines and sines differ from those of ``frequencies_in_use``, in whose type angles are computed."""
    for positions, computed in layer.rotation.at():
        # Positions last, as the graph's own numbers lie in memory.
        angle = frequencies_in_use[:, None] * positions.astype(frequencies_in_use.dtype)
        allowed = np.float32(_OF_A_COSINE + doubt) + np.float32(_OF_AN_ANGLE * (positions[-1] + 1)) * frequencies_in_use
        for function, coefficients in ((np.cos, computed[:2]), (np.sin, computed[2:])):
            wanted = function(angle).astype(np.float32)
            for coefficient in {id(c): c for c in coefficients}.values():
                if apart := _first_apart(positions, np.abs(coefficient.T - wanted), allowed):
                    return apart
    return ""


def _first_apart(positions: Ids, difference: Floats, allowed: npt.NDArray[np.floating]) -> str:
    """The first frequency and position at which a ``difference``, ``[half, positions]``, is more than ``allowed``."""
    wrong = ~(difference.max(1) <= allowed)
    if not wrong.any():
        return ""
    entry = int(wrong.argmax())
    row = int((~(difference[entry] <= allowed[entry])).argmax())
    return (
        f"at position {positions[row]} its query is rotated by a number that is {difference[entry, row]:.3g} off that "
        f"of its RoPE (frequency {entry})"
    )


def _rounding(graph: FlatGraph, values: Sequence[Value]) -> tuple[float, str]:
    """How far cosines and sines are rounded by their type, and the types of half precision that they are held in."""
    sources = [source for value in values for source in ancestors(value) if source.tensor.elements > 1]
    tables = _tables(values, sources)
    # Converters turn constants of half precision into float32: that all are such is no chance.
    doubts = [_SHARES[TensorType.FLOAT16] for table in tables if table.constant and _is_half(graph, table)]
    # What is computed may be rounded to half precision by a CAST before it meets a query.
    doubts += [_SHARES.get(table.tensor.type, 0.0) for table in tables]
    doubt = max(doubts, default=0.0)
    types = {source.tensor.type_name for source in sources if source.tensor.type in _SHARES}
    return doubt, " and ".join(sorted(types)) or ("half precision" if doubt else "")


def _tables(values: Sequence[Value], sources: Sequence[Value]) -> list[Value]:
    """Those of ``sources`` that ``values`` are taken from, or converted: nothing is computed of them."""
    kinds = {id(source): source.producer.kind for source in sources if source.producer is not None}
    computed = frozenset(key for key, kind in kinds.items() if kind not in LAYOUT and kind not in CONVERSIONS)
    return [table for value in values for table in ancestors(value, computed) if table.tensor.elements > 1]


def _is_half(graph: FlatGraph, table: Value) -> bool:
    if table.tensor.type is not TensorType.FLOAT32 or table.tensor.elements > _LARGEST_TABLE:
        return False
    numbers = graph.floats(table)
    return bool(np.array_equal(numbers, numbers.astype(np.float16).astype(np.float32)))
