"""Output guards: the selection between what heads mixed and 0, by whether a mask shows any slot."""

from __future__ import annotations

from mtp_extract.graph.call import NUMPY_TYPES, Call, axis_of, has_few_bits, ints
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, ancestors
from mtp_extract.graph.forms import OutputGuard
from mtp_extract.graph.mask_trees import MaskValue

_ANY_SLOT = ("REDUCE_MAX", "REDUCE_ANY")


def output_guard(graph: FlatGraph, slots: int, condition: Value, *, keeps: bool) -> OutputGuard:
    """The guard that chooses by ``condition``, which must be computed of one reduction over all slots and of constants.

    Args:
        slots: of the caches.
        keeps: the condition's truth that chooses what heads mixed.

    Raises:
        UnreadableError: it chooses by something else.
    """
    if condition.depends & Depends.DATA:
        raise UnreadableError("chooses by what is computed of activations or caches")
    reduced, node = _reduction(condition)
    # What decides the condition beside the reduction.
    others = [value for value in ancestors(condition, frozenset([id(reduced)])) if value.producer is None]
    if any(value.depends for value in others):
        raise UnreadableError("chooses by more than whether any slot is shown")
    mask = node.operand(0)
    _check_reduction(graph, slots, node)
    return OutputGuard(condition, reduced, MaskValue(mask, len(mask.tensor.shape) - 1), keeps)


def _check_reduction(graph: FlatGraph, slots: int, node: Node) -> None:
    """Check that ``node`` reduces a mask over all slots, into a tensor of the shape and type that its readers see."""
    mask = node.operand(0).tensor
    reduced = node.outputs[0].tensor
    rank = len(mask.shape)
    stated = [] if node.operand(1).depends else ints(graph.integers(node.operand(1)))
    axes = {axis_of(axis, rank) for axis in stated}
    if mask.shape[-1:] != (slots,) or rank - 1 not in axes:
        raise UnreadableError("chooses by some slots of a mask alone")
    keeps_axes = bool(Call(graph, node).option(0, "?", False))
    sizes = (1 if axis in axes else size for axis, size in enumerate(mask.shape) if keeps_axes or axis not in axes)
    if tuple(sizes) != tuple(reduced.shape):
        raise UnreadableError(f"chooses by {reduced.label}, which has another shape: the file is damaged")
    if mask.type != reduced.type or reduced.type not in NUMPY_TYPES or has_few_bits(mask):
        raise UnreadableError(f"chooses by a mask of {mask.type_name}")


def _reduction(condition: Value) -> tuple[Value, Node]:
    """The one value that ``condition`` is computed of by reducing a mask, and its operator."""
    values = {id(value): value for value in ancestors(condition)}
    reductions = [(v, v.producer) for v in values.values() if v.producer is not None and v.producer.kind in _ANY_SLOT]
    if len(reductions) != 1:
        raise UnreadableError(
            f"chooses by {len(reductions)} reductions; expected one {' or '.join(_ANY_SLOT)} over all slots"
        )
    return reductions[0]
