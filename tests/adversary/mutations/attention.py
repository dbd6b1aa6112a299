"""What attentions compute: masks, windows of slots, heads and caches, the order of operators, scores, softmaxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, add, an_edit, cases, chain, edge, mul, unary, with_number

PAST = tuple(Sample(position, mask="past") for position in (40, 201, 255))


def slots(g: Graph) -> np.ndarray:
    return np.arange(g.shape(g.input("mask"))[-1], dtype=np.int32).reshape(1, 1, 1, -1)


@a_change
def visible(g: Graph, layer: int, edit: Edit) -> None:
    """Let ``layer`` select by ``edit`` of its mask."""
    place = g.layer(layer)
    g.insert(place.visible, lambda x: edit(g, x), [place.select])


def compare(name: str, offset: int) -> Callable[[Graph], int]:
    """``input_pos`` compared with slot + offset."""
    return lambda g: g.call(name, g.input("input_pos"), slots(g) + np.int32(offset))


def bounded(lower: Callable[[Graph], int], upper: Callable[[Graph], int], layer: int = 0) -> Change:
    """The mask input within two bounds, in place of the layer's own mask."""
    return visible(layer, lambda g, _: g.logical_and(g.input("mask"), g.logical_and(lower(g), upper(g))))


def window(size: int, *, layer: int = 0) -> Change:
    return bounded(compare("GREATER_EQUAL", 0), compare("LESS", size), layer)


@a_change
def masked_value(g: Graph, value: float) -> None:
    """Hidden scores get ``value`` more instead of −1e9 (added in torch style, set in place in JAX style)."""
    for index in range(2):
        layer = g.layer(index)
        if layer.select is layer.masker:
            g.set_input(layer.select, 2, g.add(layer.scores, value))
        else:
            g.set_input(layer.select, 2, g.constant(value))


@an_edit
def by_rest(g: Graph, x: int, size: int) -> int:
    """The mask, where slots are that have the same rest by ``size`` as the position."""
    position = g.call("FLOOR_MOD", g.input("input_pos"), np.array([size], np.int32))
    return g.logical_and(x, g.equal(position, slots(g) % np.int32(size)))


def constant_mask(pick: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """The mask, where ``pick`` of the slots holds."""
    return lambda g, x: g.logical_and(x, g.constant(pick(slots(g)), np.bool_))


@a_change
def summed(g: Graph, build: Callable[[Graph, int], int], layers: Sequence[int] = (0, 1)) -> None:
    """Scores plus ``build`` of the mask."""
    for index in layers:
        layer = g.layer(index)
        g.set_input(layer.softmax, 0, g.add(layer.scores, build(g, layer.visible)))


def hidden_sum(g: Graph, mask: int) -> int:
    """(1 − mask) · (−1e9)."""
    return g.mul(g.sub(1.0, g.cast(mask, np.float32)), e.LOWEST)


def second_head_sees_all(g: Graph) -> None:
    """The first of two KV heads sees by the mask, the second everything in the past."""
    layer = g.layer(0)
    past = g.reshape(compare("GREATER_EQUAL", 0)(g), g.shape(layer.visible))
    joined = g.cast(g.join([g.cast(layer.visible, np.int32), g.cast(past, np.int32)], 1), np.bool_)
    hidden = g.call("SELECT_V2", joined, layer.scores, -1e9, shape=g.shape(layer.scores))
    g.set_input(layer.softmax, 0, hidden)


def causal_by_param_tensor(g: Graph) -> None:
    for op in [op for op in g.ops if g.kind(op) == "LESS"]:
        g.set_input(op, 0, g.reshape(end_param(g), g.shape(int(op.inputs[0]))))


def end_param(g: Graph) -> int:
    """One past the last slot, where ``param_tensor`` is [start, end, end, …]."""
    return g.reshape(g.slice(g.input("param_tensor"), [0, 0, 0, 1], [1, 1, 1, 1]), [1])


MASKS: dict[str, Change] = {
    "window_plus_1": window(e.WINDOW + 1),
    "window_on_full_layer": window(e.WINDOW, layer=1),
    "window_of_the_future": bounded(compare("LESS_EQUAL", 0), compare("GREATER", -e.WINDOW)),
    "window_xor_mask": visible(0, lambda g, x: g.not_equal(x, g.input("mask"))),
    "mask_ignored_full": visible(1, lambda g, _: compare("GREATER_EQUAL", 0)(g)),
    "causal_is_reversed": lambda g: g.recode(next(op for op in g.ops if g.kind(op) == "GREATER_EQUAL"), "LESS_EQUAL"),
    "without_first_slot": visible(1, constant_mask(lambda s: s > 0)),
    "second_kv_head_sees_all": second_head_sees_all,
    "dilated": visible(1, by_rest(2)),
    "causal_by_param_tensor": causal_by_param_tensor,
}


def cut(g: Graph, x: int, size: int, begin: int) -> int:
    """``size`` slots of ``x`` from the position less ``begin`` on."""
    shape = g.shape(x)
    at = shape.index(256)
    shape[at] = size
    return g.call("SLICE", x, start(g, at, begin, size), np.array(shape, np.int32), shape=shape)


def start(g: Graph, axis: int, begin: int, size: int) -> int:
    far = g.maximum(g.sub(g.input("input_pos"), np.array([begin], np.int32)), np.array([0], np.int32))
    first, zero = g.minimum(far, np.array([256 - size], np.int32)), g.constant(np.zeros(1), np.int32)
    return g.join([first if i == axis else zero for i in range(4)], 0)


@a_change
def windowed(g: Graph, scored: int, mixed: int, begin: int = 31) -> bool | None:
    """The sliding layer scores ``scored`` slots and weighs ``mixed``, both from the position less ``begin`` on: by
    default twice as far back as it sees.
    """
    place = g.layer(0)
    if place.score.builtinOptions is None:
        return False
    shape, flip = [*g.shape(place.scores)[:-1], scored], bool(place.score.builtinOptions.adjY)
    some = g.call("BATCH_MATMUL", place.queries, cut(g, place.key, scored, begin), shape=shape, adjY=flip)
    around = g.constant(np.full(g.shape(place.scores), -1e9))
    placed = g.call("DYNAMIC_UPDATE_SLICE", around, some, start(g, 3, begin, scored), shape=g.shape(place.scores))
    weights, values = cut(g, place.probabilities, mixed, begin), cut(g, place.value, mixed, begin)
    flip = bool(place.mix.builtinOptions.adjY)
    part = g.call("BATCH_MATMUL", weights, values, shape=g.shape(place.attended), adjY=flip)
    g.rewire(place.scores, placed)
    g.rewire(place.attended, part)
    return None


# A window that is too short for some positions, of both products or of one.
WINDOWS: dict[str, Change] = {
    "fewer_scored_than_weighed": windowed(24, 32),
    "right_at_the_last_position_alone": windowed(32, 32, 10),
    "from_one_slot_late": windowed(e.WINDOW, e.WINDOW, e.WINDOW - 2),
    "up_to_one_slot_before": windowed(e.WINDOW - 1, e.WINDOW - 1, e.WINDOW - 1),
}


def by_first_entry(g: Graph) -> None:
    """The mask's first entry hides or shows every slot: by a row of scores that are spread along an axis more."""
    place = g.layer(1)
    shape = g.shape(place.scores)
    length, heads = shape[-1], int(np.prod(shape[:-1]))
    wide = [1, heads, length, length]
    x = g.call("BROADCAST_TO", g.reshape(place.scores, [1, heads, length, 1]), np.array(wide, np.int32), shape=wide)
    masked = g.call("SELECT_V2", g.input("mask"), x, -1e9, shape=wide)
    x = g.reshape(g.part(masked, 0, 1), shape)
    past = compare("GREATER_EQUAL", 0)(g)
    g.set_input(place.softmax, 0, g.call("SELECT_V2", past, x, -1e9, shape=shape))


def by_numbers(g: Graph, x: int) -> int:
    """A select whose condition is of floats, which LiteRT has none of."""
    return g.call("SELECT_V2", g.constant(np.ones((1, 1, 1, g.shape(x)[-1]))), x, -1e9, shape=g.shape(x))


ALONG: dict[str, Change] = {"mask_entry_0": by_first_entry, "condition_of_floats": edge("1.masked", by_numbers)}


@a_change
def cache_edit(g: Graph, which: str, edit: Edit, layer: int = 0) -> None:
    """``edit`` of a cache, as [1, heads, slots, width] for keys and values alike."""

    def upright(x: int) -> int:
        return g.transpose(edit(g, g.transpose(x, [0, 1, 3, 2])), [0, 1, 3, 2])

    tensor = g.input(f"kv_cache_{which[0]}_{2 + layer}")
    new = g.insert(tensor, upright if which == "value" else lambda x: edit(g, x))
    assert g.shape(new) == g.shape(tensor)


@a_change
def laid_out(g: Graph, name: str, order: Sequence[int]) -> None:
    """The cache ``name`` comes with its axes in ``order``, and is brought back."""
    for cache in (f"kv_cache_{name}_2", f"kv_cache_{name}_3"):
        tensor = g.input(cache)
        shape = g.shape(tensor)
        g.main.tensors[tensor].shape = [shape[i] for i in order]
        g.insert(tensor, lambda x: g.transpose(x, np.argsort(order).tolist()))
        g.adapt[cache] = lambda array: np.ascontiguousarray(array.transpose(order))


def key_of_full_layer(g: Graph) -> bool | None:
    """The sliding layer reads a part of the full layer's cache."""
    mine, theirs = g.input("kv_cache_k_2"), g.input("kv_cache_k_3")
    if g.shape(mine)[1] != g.shape(theirs)[1]:
        return False
    g.insert(mine, lambda x: g.slice(theirs, [0, 0, 0, 0], g.shape(x)))
    return None


def updated_slot(g: Graph, x: int) -> int:
    """The newest slot is overwritten."""
    update = g.constant(np.full([1, g.shape(x)[1], 1, 64], 0.5))
    zeros = [g.constant(np.zeros(1), np.int32) for _ in range(3)]
    start = g.join([zeros[0], zeros[1], g.input("input_pos"), zeros[2]])
    return g.call("DYNAMIC_UPDATE_SLICE", x, update, start, shape=g.shape(x))


HEADS: dict[str, Change] = {
    "value_is_key": edge("kv_cache_v_2", lambda g, _: g.transpose(g.input("kv_cache_k_2"), [0, 1, 3, 2])),
    "key_of_full_layer": key_of_full_layer,
    "kv_heads_swapped": e.each(*(cache_edit(which, e.gathered([1, 0], 1)) for which in ("key", "value"))),
    "first_key_head_twice": cache_edit("key", e.gathered([0, 0], 1)),
    "query_heads_averaged": edge("0.rotated", lambda g, x: g.add(g.reduce("MEAN", x, 2), g.mul(x, 0.0))),
    "query_halves_swapped": edge("0.query", lambda g, x: g.join(e.halves(g, x)[::-1])),
    "key_slots_reversed": cache_edit("key", e.gathered(range(255, -1, -1), 2), 1),
    "value_slots_reversed": cache_edit("value", e.gathered(range(255, -1, -1), 2), 1),
    "key_halves_swapped": cache_edit("key", lambda g, x: g.join(e.halves(g, x)[::-1])),
    "value_plus_key": cache_edit("value", lambda g, x: g.add(x, g.input("kv_cache_k_2"))),
    "newest_key_overwritten": cache_edit("key", updated_slot, 1),
    "result_minus_query": edge("0.attended", lambda g, x: g.sub(x, g.layer(0).queries)),
}


def in_reverse(g: Graph, x: int) -> int:
    return g.gather(x, range(g.shape(x)[-1] - 1, -1, -1), -1)


def halves_swapped(g: Graph, x: int) -> int:
    half = g.shape(x)[-1] // 2
    return g.gather(x, [*range(half, 2 * half), *range(half)], -1)


ORDER: dict[str, Change] = {
    "hidden_before_embedding": edge("activations", halves_swapped),
    "stream_reversed": edge("pre_projection", in_reverse),
    "gate_reversed": edge("0.gate", in_reverse),
    "up_halves_swapped": edge("0.up", halves_swapped),
    "state_reversed": edge("state", in_reverse),
    "state_for_head_rolled": e.put(
        "state", lambda g, x: g.join([g.part(x, 1, 63), g.part(x, 0, 1)]), lambda g: g.linear("lm_head")
    ),
    "logits_reversed": edge("logits", in_reverse),
}


def largest_score(g: Graph, x: int) -> int:
    return g.reduce("REDUCE_MAX", x, 3)


@a_change
def softmax_spelled(
    g: Graph,
    layer: int,
    powers: Edit = lambda g, x: g.exp(x),
    largest: Edit = largest_score,
    total: Edit = lambda g, x: x,
) -> None:
    """A softmax in its parts: ``powers`` of the scores less the ``largest``, over the ``total`` of their sum."""
    place = g.layer(layer)
    raised = powers(g, g.sub(place.masked, largest(g, place.masked)))
    g.rewire(place.probabilities, g.div(raised, total(g, g.reduce("SUM", raised, 3))))


SCORES: dict[str, Change] = {
    "doubled": edge("0.scores", lambda g, x: g.add(x, x)),
    "divided_by_2": edge("0.scores", with_number("DIV", 2.0)),
    "minus": edge("0.scores", unary("NEG")),
    "leaky": edge("0.scores", lambda g, x: g.maximum(x, g.mul(x, 0.1))),
    "minus_mean": edge("0.scores", lambda g, x: g.sub(x, g.mul(g.reduce("MEAN", x, 2), 0.5))),
    "softmax_base_2": softmax_spelled(0, lambda g, x: g.pow(2.0, x)),
    "softmax_plus_1": softmax_spelled(0, chain(unary("EXP"), add(1e-3))),
    "softmax_twice": edge("0.probabilities", lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "probabilities_of_other_head": edge("0.probabilities", e.gathered([1, 0], 1)),
    "probabilities_of_other_query": edge("0.probabilities", e.gathered([1, 0], 2)),
}

WEIGHTS: dict[str, Change] = {
    "logarithm_stretched_and_back": edge("1.probabilities", chain(unary("LOG"), mul(1.01), unary("EXP"))),
}


def over_heads(g: Graph, x: int) -> int:
    return g.call("REDUCE_MAX", x, np.array([1, 2, 3], np.int32), shape=[1] * len(g.shape(x)), keepDims=True)


def next_head(g: Graph, x: int) -> int:
    return g.gather(x, [*range(1, g.shape(x)[2]), 0], 2)


TOTALS: dict[str, Change] = {
    "total_to_0.999": softmax_spelled(1, total=with_number("POW", 0.999)),
    "total_plus_1e-3": softmax_spelled(1, total=add(1e-3)),
    "logarithm_stretched": edge(
        "1.probabilities", lambda g, _: g.exp(g.mul(g.call("LOG_SOFTMAX", g.layer(1).masked), 1.01))
    ),
}

LARGEST: dict[str, Change] = {
    "largest_of_all_heads": softmax_spelled(1, largest=over_heads),
    "largest_of_the_next_head": softmax_spelled(1, largest=chain(largest_score, next_head)),
    "largest_by_0.98": softmax_spelled(1, largest=chain(largest_score, mul(0.98)), total=add(1e-6)),
}


def floats(g: Graph) -> int:
    """The mask as numbers."""
    return g.cast(g.input("mask"), np.float32)


@an_edit
def bound(g: Graph, x: int, name: str, number: float) -> int:
    """By ``number`` as 0 · mask + number, for every slot where a value has slots, and else by one slot's mask."""
    shape = g.shape(x)
    by_slot = g.add(g.mul(floats(g), 0.0), np.float32(number))
    if 256 not in shape:
        return g.call(name, x, g.reshape(g.part(by_slot, 7, 1), [1] * len(shape)))
    return g.call(name, x, g.reshape(by_slot, [256 if i == shape.index(256) else 1 for i in range(len(shape))]))


BOUNDS: dict[str, Change] = {
    "keys_at_most_40": cache_edit("key", bound("MINIMUM", 40.0), 1),
    "weights_at_least_1e-4": edge("1.probabilities", bound("MAXIMUM", 1e-4)),
    "attended_at_most_500": edge("1.attended", bound("MINIMUM", 500.0)),
    "masked_scores_at_least_-300": edge("1.masked", bound("MAXIMUM", -300.0)),
}

_SHARP = (
    *(Sample(position, keys=loud) for loud in (3.0, 6.0, 8.0, 12.0, 20.0) for position in (40, 90, 201)),
    *(Sample(position, keys=0.01, mask="past") for position in (201, 250)),
)

_LOUD = (
    *(Sample(40, keys=loud) for loud in (40.0, 100.0, 400.0)),
    *(Sample(p, keys=400.0, mask="one") for p in (41, 42, 43)),
    Sample(40, keys=1e4),
    Sample(40, values=1e4),
    Sample(40, activations=1e3),
    *_SHARP,
)


def hidden_is_loud(arrays: dict[str, Any]) -> None:
    for name in ("kv_cache_k_3", "kv_cache_v_3"):
        axis = -2 if "_k_" in name else -1
        hidden = ~arrays["mask"].reshape(-1)
        np.moveaxis(arrays[name], axis, 0)[hidden] *= 1e3


_HIDDEN = (Sample(37, change=hidden_is_loud), Sample(100, change=hidden_is_loud))


CASES = (
    *cases("masks", MASKS),
    *cases("scores", SCORES),
    *cases("heads and caches", HEADS),
    *cases("order", ORDER),
    *cases("windows of slots", WINDOWS, *PAST),
    *cases("masks along another axis", ALONG, *PAST),
    *cases("third: weights of a softmax", WEIGHTS, *_SHARP, *_HIDDEN),
    *cases("third: sum of a softmax", TOTALS, *_SHARP, *_HIDDEN),
    *cases("third: largest score", LARGEST, *_LOUD, *_HIDDEN, rounding=1e-2),
    *cases("third: bounds by a mask", BOUNDS, *_LOUD, rounding=1e-3),
)
