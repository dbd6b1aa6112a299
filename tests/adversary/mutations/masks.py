"""Masks and windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import LOWEST, WINDOW, Change, Edit, edge


def slots(g: Graph) -> np.ndarray:
    return np.arange(g.shape(g.input("mask"))[-1], dtype=np.int32).reshape(1, 1, 1, -1)


def visible(layer: int, edit: Edit) -> Change:
    """Let ``layer`` select by ``edit`` of its mask."""

    def change(g: Graph) -> None:
        place = g.layer(layer)
        g.insert(place.visible, lambda x: edit(g, x), [place.select])

    return change


def compare(name: str, offset: int) -> Callable[[Graph], int]:
    """``input_pos`` compared with slot + offset."""
    return lambda g: g.call(name, g.input("input_pos"), slots(g) + np.int32(offset))


def both(g: Graph, a: int, b: int) -> int:
    return g.logical_and(a, b)


def bounded(lower: Callable[[Graph], int], upper: Callable[[Graph], int], layer: int = 0) -> Change:
    """The mask input within two bounds, in place of the layer's own mask."""
    return visible(layer, lambda g, _: both(g, g.input("mask"), both(g, lower(g), upper(g))))


def window(size: int, *, layer: int = 0) -> Change:
    return bounded(compare("GREATER_EQUAL", 0), compare("LESS", size), layer)


def masked_value(value: float) -> Change:
    """Hidden scores get ``value`` more instead of −1e9 (added in torch style, set in place in JAX style)."""

    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            if layer.select is layer.masker:
                g.set_input(layer.select, 2, g.add(layer.scores, value))
            else:
                g.set_input(layer.select, 2, g.constant(value))

    return change


def by_distance(name: str, size: int) -> Edit:
    """The mask, where slots of the same group of ``size`` (or of the same rest) as the position are."""

    def edit(g: Graph, x: int) -> int:
        position = g.call(name, g.input("input_pos"), np.array([size], np.int32))
        kept = slots(g) // size if name == "FLOOR_DIV" else slots(g) % size
        return both(g, x, g.equal(position, kept.astype(np.int32)))

    return edit


def constant_mask(pick: Callable[[np.ndarray], np.ndarray]) -> Edit:
    return lambda g, x: both(g, x, g.constant(pick(slots(g)), np.bool_))


def after_softmax(g: Graph) -> None:
    """Everything is scored; what is hidden is cleared from the probabilities."""
    layer = g.layer(0)
    g.set_input(layer.softmax, 0, layer.scores)
    kept = g.cast(layer.visible, np.float32)
    g.insert(layer.probabilities, lambda p: g.mul(p, kept), [layer.mix])


def select_swapped(g: Graph) -> None:
    layer = g.layer(0)
    condition, yes, no = (int(i) for i in layer.select.inputs)
    layer.select.inputs = [condition, no, yes]


def unmasked(index: int) -> Change:
    def change(g: Graph) -> None:
        layer = g.layer(index)
        g.set_input(layer.softmax, 0, layer.scores)

    return change


def multiplied_mask(g: Graph) -> None:
    layer = g.layer(0)
    kept = g.cast(layer.visible, np.float32)
    g.set_input(layer.softmax, 0, g.mul(layer.scores, kept))


def masked_sums(build: Callable[[Graph, Any], int]) -> Change:
    """The scores of layer 0 with ``build`` (a mask in floats) added instead of its mask."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.set_input(layer.softmax, 0, g.add(layer.scores, build(g, layer)))

    return change


def summed(build: Callable[[Graph, int], int], layers: Sequence[int] = (0, 1)) -> Change:
    """Scores plus ``build`` of the mask."""

    def change(g: Graph) -> None:
        for index in layers:
            layer = g.layer(index)
            g.set_input(layer.softmax, 0, g.add(layer.scores, build(g, layer.visible)))

    return change


def hidden_sum(g: Graph, mask: int) -> int:
    """(1 − mask) · (−1e9)."""
    return g.mul(g.sub(1.0, g.cast(mask, np.float32)), LOWEST)


def group_sees_all(axis: int) -> Change:
    """The first of two KV heads (axis 1) or queries (axis 2) sees by the mask, the second everything in the past."""

    def change(g: Graph) -> bool | None:
        layer = g.layer(0)
        past = g.reshape(compare("GREATER_EQUAL", 0)(g), g.shape(layer.visible))
        joined = g.cast(g.join([g.cast(layer.visible, np.int32), g.cast(past, np.int32)], axis), np.bool_)
        hidden = g.call("SELECT_V2", joined, layer.scores, -1e9, shape=g.shape(layer.scores))
        g.set_input(layer.softmax, 0, hidden)
        return None

    return change


def other_mask(index: int) -> Change:
    def change(g: Graph) -> None:
        mine, theirs = g.layer(index), g.layer(1 - index)
        g.insert(mine.visible, lambda _: theirs.visible, [mine.select])

    return change


def comparison(old: str, new: str) -> Change:
    """Another comparison of the position with the slots."""

    def change(g: Graph) -> None:
        (op,) = [op for op in g.ops if g.kind(op) == old]
        g.recode(op, new)

    return change


def compared_with(old: str, number: Callable[[Graph], int]) -> Change:
    """A comparison of something else than ``input_pos``."""

    def change(g: Graph) -> None:
        for op in [op for op in g.ops if g.kind(op) == old]:
            g.set_input(op, 0, g.reshape(number(g), g.shape(int(op.inputs[0]))))

    return change


def end_param(g: Graph) -> int:
    """One past the last slot, where ``param_tensor`` is [start, end, end, …]."""
    return g.reshape(g.slice(g.input("param_tensor"), [0, 0, 0, 1], [1, 1, 1, 1]), [1])


def joined_comparison(g: Graph) -> None:
    (op,) = [op for op in g.ops if g.kind(op) == "LOGICAL_AND" and g.input("mask") not in list(op.inputs)]
    g.recode(op, "LOGICAL_OR")


MASKS: dict[str, Change] = {
    "window_plus_1": window(WINDOW + 1),
    "window_minus_1": window(WINDOW - 1),
    "window_of_1": window(1),
    "window_on_full_layer": window(WINDOW, layer=1),
    "window_of_the_future": bounded(compare("LESS_EQUAL", 0), compare("GREATER", -WINDOW)),
    "window_outside": visible(0, lambda g, x: both(g, g.input("mask"), g.logical_not(x))),
    "window_gap_of_one": bounded(compare("GREATER_EQUAL", 1), compare("LESS", WINDOW)),
    "window_position_plus_1": bounded(compare("GREATER_EQUAL", -1), compare("LESS", WINDOW - 1)),
    "window_position_minus_1": bounded(compare("GREATER_EQUAL", 1), compare("LESS", WINDOW + 1)),
    "window_or_mask": visible(
        0, lambda g, x: g.logical_or(x, both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW)(g)))
    ),
    "window_xor_mask": visible(0, lambda g, x: g.not_equal(x, g.input("mask"))),
    "bounds_or": joined_comparison,
    "mask_ignored_sliding": visible(
        0, lambda g, _: both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW)(g))
    ),
    "mask_ignored_full": visible(1, lambda g, _: compare("GREATER_EQUAL", 0)(g)),
    "mask_negated_sliding": visible(0, lambda g, x: g.logical_not(x)),
    "mask_negated_full": visible(1, lambda g, x: g.logical_not(x)),
    "no_mask_sliding": unmasked(0),
    "no_mask_full": unmasked(1),
    "stale_slots_visible": visible(1, lambda g, x: g.logical_or(x, compare("LESS", 0)(g))),
    "causal_is_strict": comparison("GREATER_EQUAL", "GREATER"),
    "causal_is_reversed": comparison("GREATER_EQUAL", "LESS_EQUAL"),
    "window_is_closed": comparison("LESS", "LESS_EQUAL"),
    "window_is_reversed": comparison("LESS", "GREATER"),
    "window_is_one_slot": comparison("LESS", "EQUAL"),
    "value_minus_5": masked_value(-5.0),
    "value_minus_30_of_one": masked_value(-1.0),
    "value_0": masked_value(0.0),
    "values_swapped": select_swapped,
    "after_softmax": after_softmax,
    "multiplied": multiplied_mask,
    "added_as_0_and_1": masked_sums(lambda g, p: g.cast(p.visible, np.float32)),
    "added_as_minus_4": masked_sums(lambda g, p: g.mul(g.sub(1.0, g.cast(p.visible, np.float32)), -4.0)),
    "linear_bias": edge(
        "1.scores", lambda g, x: g.add(x, g.mul(g.cast(g.sub(slots(g), g.input("input_pos")), np.float32), 0.02))
    ),
    "first_slot_always": visible(0, lambda g, x: g.logical_or(x, g.constant(slots(g) == 0, np.bool_))),
    "even_slots": visible(1, constant_mask(lambda s: s % 2 == 0)),
    "without_first_slot": visible(1, constant_mask(lambda s: s > 0)),
    "early_slots_only": visible(1, constant_mask(lambda s: s < 100)),
    "shifted_by_a_slot": visible(
        1,
        lambda g, x: g.cast(
            g.join([g.part(g.cast(x, np.int32), 1, slots(g).size - 1), g.part(g.cast(x, np.int32), 0, 1)]), np.bool_
        ),
    ),
    "sliding_sees_all": other_mask(0),
    "full_sees_window": other_mask(1),
    "second_kv_head_sees_all": group_sees_all(1),
    "second_query_sees_all": group_sees_all(2),
    "in_chunks": visible(1, by_distance("FLOOR_DIV", 16)),
    "dilated": visible(1, by_distance("FLOOR_MOD", 2)),
    "causal_by_param_tensor": compared_with("LESS", end_param),
    "position_doubled": compared_with("LESS", lambda g: g.add(g.input("input_pos"), g.input("input_pos"))),
    "window_below_128": compared_with("LESS", lambda g: g.minimum(g.input("input_pos"), np.array([128], np.int32))),
}
