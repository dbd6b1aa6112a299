"""Static activations of a bundle: new scales for a drafter's, and notes on a base's, whose scales stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mtp_extract.architecture.activation import Activation
from mtp_extract.bundle import BundledDrafter
from mtp_extract.graph.flat import Value
from mtp_extract.insertion.plan import Overlay
from mtp_extract.litertlm.storage import Storage
from mtp_extract.litertlm.tflite import Tensor, TensorType

_QUANTIZED_TYPES = (TensorType.INT8, TensorType.INT16)
_PRODUCTS = {"FULLY_CONNECTED", "BATCH_MATMUL"}

Range = tuple[float, float]
"""The smallest and the largest value that was measured."""

Activations = tuple[Activation | None, Activation | None]
"""The static activations of a matrix's input and output; None if they are floats."""

StaticActivations = Mapping[str, Activations]
"""Role of a matrix → its static activations."""

Ranges = Mapping[str, tuple[Range, Range]]
"""Role of a matrix → the ranges of its input and its output."""


def calibrate_activations(
    drafter: BundledDrafter, changes_weights: bool, measure: Callable[[], Ranges] | None
) -> tuple[list[Overlay], list[str]]:
    """Return new scales of static activations, and notes for the user.

    Args:
        measure: measures the ranges, called only if the graph has static activations; None to keep the scales.
    """
    static = [role for role in drafter.structure.roles if role.input is not None]
    if measure is None:
        note = (
            "The graph quantizes activations statically, with scales that were calibrated for the old weights: drafts "
            "may be accepted less often than the checkpoint's. A base and prompts give new ones."
        )
        return [], [note] if static and changes_weights else []
    if not static:
        return [], ["The graph has no static activations: nothing was calibrated."]
    ranges = measure()
    scales = dict[int, bytes]()  # by offset in the file: roles that read one value share its scale
    unmeasured = list[str]()
    for role in static:
        node = role.result.producer if role.result is not None else None
        if node is None or role.role not in ranges:
            continue
        for value, bounds in zip((node.get_operand(0), node.outputs[0]), ranges[role.role], strict=True):
            if _can_be_rescaled(value):
                scales.update(_encode_scale(drafter.model.region.begin, value.tensors[-1], bounds))
            else:
                unmeasured.append(role.role)
    notes = [f"Static activations of {len(static)} matrices were calibrated anew."]
    if unmeasured:
        notes.append(f"Shared with other operators, so left: {', '.join(dict.fromkeys(unmeasured))}.")
    return [*scales.items()], notes


def describe_static_activations(
    grids: StaticActivations, measure: Callable[[StaticActivations], tuple[float, float]] | None
) -> list[str]:
    """Return notes on the static activations of a base, whose scales stay.

    Args:
        measure: measures the share of activations that they clip, for the old base and for the new one.
    """
    if not grids:
        return [] if measure is None else ["The base has no static activations: nothing was measured."]
    if measure is None:
        note = "Activations are quantized statically, with scales that were calibrated for the old weights."
        return [f"{note} Give the old base to measure how many activations they clip."]
    before, after = measure(grids)
    return [
        f"The scales of static activations stay as calibrated for the old weights: at {len(grids)} matrices they clip "
        f"{before:.3%} of the numbers with the old base, {after:.3%} with the new one."
    ]


def _can_be_rescaled(value: Value) -> bool:
    """Whether only matrix products and conversions from and to floats depend on the scale of ``value``."""
    producer, readers = value.producer, {node.kind for node, _ in value.consumers}
    if value.tensors[-1].type not in _QUANTIZED_TYPES or producer is None:
        return False
    is_input = producer.kind == "QUANTIZE" and readers <= _PRODUCTS
    return is_input or (producer.kind in _PRODUCTS and readers <= {"DEQUANTIZE"})


def _encode_scale(begin: int, tensor: Tensor, bounds: Range) -> Iterator[tuple[int, bytes]]:
    """Return the bytes of scale and zero point with their offsets, by the rule for weights; none if the range is 0."""
    quantization, type_ = tensor.quantization, tensor.type
    assert quantization is not None and type_ is not None
    storage = Storage(type_, (2,), "per_tensor", symmetric=not quantization.zero_point.any())
    scale, zero_point, _ = storage.quantized(np.array(bounds, np.float32))
    if any(bounds) and np.isfinite(scale[0]):
        yield begin + quantization.scales.start, scale.astype("<f4").tobytes()
        if not storage.symmetric:
            yield begin + quantization.zero_points.start, zero_point.astype("<i8").tobytes()
