"""Scales of static activations, put into a bundle anew: as wide as what a drafter computes beside its base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mtp_extract.architecture.activation import Activation
from mtp_extract.bundle import Shard
from mtp_extract.graph.flat import Value
from mtp_extract.insertion.plan import Overlay
from mtp_extract.litertlm.storage import Storage
from mtp_extract.litertlm.tflite import Tensor, TensorType

_QUANTIZED_TYPES = (TensorType.INT8, TensorType.INT16)
_PRODUCTS = {"FULLY_CONNECTED", "BATCH_MATMUL"}

Range = tuple[float, float]
"""The least and the largest value that was seen."""

Grids = Mapping[str, tuple[Activation | None, Activation | None]]
"""Role of a matrix → the static grids of what goes into it and what comes out; None where that is float."""

Ranges = Mapping[str, tuple[Range, Range]]
"""Role of a matrix → what went into it and what came out."""


def calibrate_activations(
    drafter: Shard, changed: bool, measure: Callable[[], Ranges] | None
) -> tuple[list[Overlay], list[str]]:
    """New scales of static activations, and notes on them.

    Args:
        changed: whether any weight is.
        measure: gives the ranges of a drafter that has such; None to leave the scales.
    """
    static = [role for role in drafter.walk.roles if role.input is not None]
    if measure is None:
        note = (
            "The graph quantizes activations statically, with scales that were calibrated for the old weights: drafts "
            "may be accepted less often than the checkpoint's. A base and prompts give new ones."
        )
        return [], [note] if static and changed else []
    if not static:
        return [], ["The graph has no static activations: nothing was calibrated."]
    # what several roles read has one range
    ranges = measure()
    written = dict[int, bytes]()
    unmeasured = list[str]()
    for role in static:
        node = role.result.producer if role.result is not None else None
        if node is None or role.role not in ranges:
            continue
        for value, bounds in zip((node.operand(0), node.outputs[0]), ranges[role.role], strict=True):
            if _can_be_rescaled(value):
                written.update(_encode_scale(drafter.model.region.begin, value.tensors[-1], bounds))
            else:
                unmeasured.append(role.role)
    notes = [f"Static activations of {len(static)} matrices were calibrated anew."]
    if unmeasured:
        notes.append(f"Shared with other operators, so left: {', '.join(dict.fromkeys(unmeasured))}.")
    return [*written.items()], notes


def describe_static_activations(grids: Grids, measure: Callable[[Grids], tuple[float, float]] | None) -> list[str]:
    """What to know of the grids of a base, which stay as they are; ``measure`` gives the share of numbers that they cut
    off, of the base that was there and of the one that is put in."""
    if not grids:
        return [] if measure is None else ["The base has no static activations: nothing was measured."]
    if measure is None:
        note = "Activations are quantized statically, with scales that were calibrated for the old weights."
        return [f"{note} What they cut off is measured where the old base is given."]
    before, after = measure(grids)
    return [
        f"Static grids of activations stay, which were calibrated for the old weights: of what {len(grids)} matrices "
        f"read and make they cut off {before:.3%} with the old base, {after:.3%} with the new one."
    ]


def _can_be_rescaled(value: Value) -> bool:
    """Whether ``value`` is quantized, and lies between floats and products with matrices only."""
    maker, readers = value.producer, {node.kind for node, _ in value.consumers}
    if value.tensors[-1].type not in _QUANTIZED_TYPES or maker is None:
        return False
    enters, leaves = maker.kind == "QUANTIZE" and readers <= _PRODUCTS, readers <= {"DEQUANTIZE"}
    return enters or (maker.kind in _PRODUCTS and leaves)


def _encode_scale(begin: int, tensor: Tensor, bounds: Range) -> Iterator[tuple[int, bytes]]:
    """What to write where, by the rule for weights; a range of nothing keeps its scale."""
    quantization, type_ = tensor.quantization, tensor.type
    assert quantization is not None and type_ is not None
    storage = Storage(type_, (2,), "per_tensor", symmetric=not quantization.zero_point.any())
    scale, zero_point, _ = storage.quantized(np.array(bounds, np.float32))
    if any(bounds) and np.isfinite(scale[0]):
        yield begin + quantization.scales.start, scale.astype("<f4").tobytes()
        if not storage.symmetric:
            yield begin + quantization.zero_points.start, zero_point.astype("<i8").tobytes()
