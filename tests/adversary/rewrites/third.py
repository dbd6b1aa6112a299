"""A third round: the same function as exporters plausibly write it, in words that a reader of graphs ought to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, Edit, Sample, at, cases, chain, each, edge, mul, parameters, with_number
from adversary.mutations.heads import cache_edit
from adversary.mutations.norms import normed_by
from adversary.mutations.rope import angle
from adversary.mutations.second import plus_number
from adversary.mutations.third_files import scalar
from adversary.mutations.third_numbers import in_window, wrapped_distance
from adversary.mutations.third_weights import bound
from adversary.rewrites.norms import every_norm
from adversary.rewrites.weights import in_two_parts

LAYERS = (0, 1)


# Softmaxes that are safe where a row shows nothing.


def safe(dead: Callable[[Graph, int, int], int], lowest: float = -np.inf) -> Change:
    """0 for the rows that ``dead(g, mask, masked scores)`` says show nothing, else the softmax."""

    def change(g: Graph) -> None:
        for index in LAYERS:
            place = g.layer(index)
            shape = g.shape(place.scores)
            mask = g.call("SELECT_V2", place.visible, np.float32(0), np.float32(lowest), shape=g.shape(place.visible))
            masked = g.call("ADD", place.scores, mask)
            weights = g.call("SOFTMAX", masked, beta=1.0)
            nothing = dead(g, place.visible, masked)
            g.rewire(place.probabilities, g.call("SELECT_V2", nothing, np.float32(0), weights, shape=shape))

    return change


def all_lowest(g: Graph, mask: int, masked: int) -> int:
    """torch's own: whether every score of the row is −∞."""
    alive = g.call("LOGICAL_NOT", g.call("EQUAL", masked, np.float32(-np.inf)), dtype=np.bool_)
    return g.call("LOGICAL_NOT", g.reduce("REDUCE_ANY", alive, 3), dtype=np.bool_)


def none_shown(g: Graph, mask: int, masked: int) -> int:
    return g.call("LOGICAL_NOT", g.reduce("REDUCE_ANY", mask, 3), dtype=np.bool_)


def count_is_0(g: Graph, mask: int, masked: int) -> int:
    return g.call("EQUAL", g.reduce("SUM", g.cast(mask, np.float32), 3), np.float32(0))


def largest_is_lowest(g: Graph, mask: int, masked: int) -> int:
    return g.call("EQUAL", g.reduce("REDUCE_MAX", masked, 3), np.float32(-np.inf))


def times_any(g: Graph) -> None:
    """Weights times whether the row shows anything, as a number."""
    for index in LAYERS:
        place = g.layer(index)
        shown = g.cast(g.reduce("REDUCE_ANY", place.visible, 3), np.float32)
        g.insert(place.probabilities, lambda p, shown=shown: g.call("MUL", p, shown))


SOFTMAXES: dict[str, Change] = {
    "safe_by_scores": safe(all_lowest),
    "safe_by_mask": safe(none_shown),
    "safe_by_count": safe(count_is_0),
    "safe_by_largest": safe(largest_is_lowest),
    "safe_by_mask_with_-1e9": safe(none_shown, -1e9),
    "safe_by_product": times_any,
    "less_the_largest_first": each(
        *(edge(f"{n}.masked", lambda g, x: g.call("SUB", x, g.reduce("REDUCE_MAX", x, 3))) for n in LAYERS)
    ),
    "hidden_at_least_-3.4e38": edge("1.masked", with_number("MAXIMUM", -3.4e38)),
}


# Weights in parts.


def codes_of(g: Graph, role: str) -> tuple[Any, Any]:
    """The codes of an INT8 or INT4 weight, and its scales."""
    described = g.main.tensors[g.roles[role]]
    rows, width = g.shape(g.roles[role])
    codes = np.frombuffer(bytes(g.model.buffers[described.buffer].data), np.int8)
    if described.type == schema.TensorType.INT4:
        codes = np.stack([codes << 4 >> 4, codes >> 4], -1)
    scale = np.asarray(described.quantization.scale, np.float32)
    return codes.reshape(rows, width), np.broadcast_to(scale, rows).copy()


def like(g: Graph, role: str, codes: Any, scale: Any) -> int:
    """A weight of the type that ``role`` has, of other codes."""
    flat, kind = np.ascontiguousarray(codes).reshape(-1), g.main.tensors[g.roles[role]].type
    made = g.constant(codes, np.int8)
    if kind == schema.TensorType.INT4:
        g.main.tensors[made].buffer = g.buffer(((flat[1::2] << 4) | (flat[::2] & 15)).astype(np.int8).tobytes())
    g.main.tensors[made].type = kind
    g.main.tensors[made].quantization = parameters(scale)
    return made


def padded_head(count: int, *, after_cap: bool = False, as_codes: bool = False, fill: float = 0.0) -> Change:
    """Rows for tokens that there are not, and a SLICE that takes them away."""

    def change(g: Graph) -> None:
        op = g.linear("lm_head")
        values = g.floats(g.roles["lm_head"])
        rows, width = values.shape
        if as_codes:
            codes, scale = codes_of(g, "lm_head")
            wide = np.concatenate([codes, np.full([count, width], int(fill), np.int8)])
            weight = like(g, "lm_head", wide, np.concatenate([scale, np.ones(count, np.float32)]))
        else:
            weight = g.constant(np.concatenate([values, np.full([count, width], fill)]))
        made = g.product(int(op.inputs[0]), weight)
        end = g.output("logits")
        if after_cap:
            capped = g.call("MUL", g.call("TANH", g.call("MUL", made, np.float32(1 / 30))), np.float32(30))
            g.rewire(end, g.part(capped, 0, rows))
        else:
            g.rewire(int(op.outputs[0]), g.part(made, 0, rows))

    return change


def split_codes(role: str, axis: int, at_: int) -> Change:
    """A weight of codes in two: rows side by side, or columns added."""

    def change(g: Graph) -> None:
        op, (codes, scale) = g.linear(role), codes_of(g, role)
        x, out = int(op.inputs[0]), int(op.outputs[0])
        scales = np.split(scale, [at_]) if axis == 0 else [scale, scale]
        weights = [like(g, role, c, s) for c, s in zip(np.split(codes, [at_], axis), scales, strict=True)]
        if axis == 0:
            g.rewire(out, g.join([g.product(x, weight) for weight in weights]))
        else:
            halves = g.part(x, 0, at_), g.part(x, at_, codes.shape[1] - at_)
            g.rewire(out, g.call("ADD", *(g.product(a, b) for a, b in zip(halves, weights, strict=True))))

    return change


def capped_parts(g: Graph) -> None:
    """The LM head in two, each with its soft cap, joined at the end."""
    x = int(g.linear("lm_head").inputs[0])
    parts = []
    for values in np.split(g.floats(g.roles["lm_head"]), [200]):
        made = g.call("MUL", g.product(x, g.constant(values)), np.float32(1 / 30))
        parts.append(g.call("MUL", g.call("TANH", made), np.float32(30)))
    g.rewire(g.output("logits"), g.join(parts))


def embedding_and_state(g: Graph) -> None:
    """The first matrix as one for the embedding and one for the state, on parts of the input."""
    op = g.linear("pre_projection")
    values = g.floats(g.roles["pre_projection"])
    parts = [
        g.product(g.part(g.input("activations"), begin, 64), g.constant(values[:, begin : begin + 64]))
        for begin in (0, 64)
    ]
    g.rewire(int(op.outputs[0]), g.reshape(g.call("ADD", *parts), g.shape(int(op.outputs[0]))))


WEIGHTS: dict[str, Change] = {
    "head_padded_before_the_cap": padded_head(64),
    "head_padded_after_the_cap": padded_head(64, after_cap=True),
    "head_padded_with_ones": padded_head(7, fill=1.0),
    "head_padded_in_codes": padded_head(64, as_codes=True),
    "head_padded_with_codes_of_5": padded_head(64, as_codes=True, fill=5),
    "head_in_two": in_two_parts("lm_head", 0),
    "head_in_two_of_codes": split_codes("lm_head", 0, 200),
    "head_in_two_with_two_caps": capped_parts,
    "head_of_halves_of_the_state": in_two_parts("lm_head", 1),
    "head_of_codes_of_halves": split_codes("lm_head", 1, 32),
    "embedding_and_state": embedding_and_state,
    "down_of_halves": in_two_parts("layers.0.down_proj", 1),
    "down_of_codes_of_halves": split_codes("layers.0.down_proj", 1, 64),
    "out_by_heads": split_codes("layers.1.o_proj", 1, 64),
    "query_by_heads": split_codes("layers.1.q_proj", 0, 128),
    "gate_in_two_of_codes": split_codes("layers.0.gate_proj", 0, 64),
}


# Caches as codes.


def coded(back: Callable[[float, int], Edit], zero_point: int = 0, which: str = "kv") -> Change:
    """Caches of INT8 codes that plain operators bring back."""

    def change(g: Graph) -> None:
        for name in (f"kv_cache_{w}_{n}" for w in which for n in (2, 3)):
            scale = 0.02 if "_k_" in name else 0.05
            tensor = g.input(name)
            readers = g.readers(tensor)
            g.main.tensors[tensor].type = schema.TensorType.INT8
            g.rewire(tensor, back(scale, zero_point)(g, tensor), readers)
            g.adapt[name] = lambda a, s=scale: np.clip(np.round(a / s) + zero_point, -128, 127).astype(np.int8)

    return change


def cast(dtype: Any) -> Edit:
    return lambda g, x: g.cast(x, dtype)


CACHES: dict[str, Change] = {
    "cast_times_scale": coded(lambda s, z: chain(cast(np.float32), mul(s))),
    "cast_less_zero_point_times_scale": coded(
        lambda s, z: chain(cast(np.float32), with_number("SUB", z), mul(s)), zero_point=3
    ),
    "cast_over_steps": coded(lambda s, z: chain(cast(np.float32), with_number("DIV", np.float32(1 / s)))),
    "cast_twice_times_scale": coded(lambda s, z: chain(cast(np.int32), cast(np.float32), mul(s))),
    "less_zero_point_in_int32": coded(
        lambda s, z: chain(
            cast(np.int32), lambda g, x: g.call("SUB", x, np.array(z, np.int32)), cast(np.float32), mul(s)
        ),
        zero_point=-5,
    ),
    "scale_times_cast_plus_offset": coded(
        lambda s, z: chain(cast(np.float32), mul(s), with_number("ADD", -s * z)), zero_point=3
    ),
    "keys_cast_and_scores_scaled": each(
        coded(lambda s, z: cast(np.float32), which="k"), *(edge(f"{n}.scores", mul(0.02)) for n in LAYERS)
    ),
    "values_cast_and_attended_scaled": each(
        coded(lambda s, z: cast(np.float32), which="v"), *(edge(f"{n}.attended", mul(0.05)) for n in LAYERS)
    ),
}


# Constants, ones, and bounds that are none.


def eps_by(build: Callable[[Graph], int]) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        index = next(n for n, i in enumerate(norm.add.inputs) if g.is_constant(int(i)))
        g.set_input(norm.add, index, build(g))

    return edit


def every_eps(build: Callable[[Graph], int]) -> Change:
    return every_norm(eps_by(build))


PLACES = ("activations", "0.query", "0.rotated", "1.scores", "1.probabilities", "1.attended", "0.product", "1.stream",
          "state", "logits", "projected_activations")  # fmt: skip


def everywhere(edit: Edit) -> Change:
    """``edit`` of a value of every kind; the places are found before the first is changed."""

    def change(g: Graph) -> None:
        for tensor in [at(g, place) for place in PLACES]:
            g.insert(tensor, lambda x: edit(g, x))

    return change


def ones(g: Graph, x: int) -> int:
    return g.call("MUL", x, g.constant(np.ones(g.shape(x))))


CONSTANTS: dict[str, Change] = {
    "eps_of_two_thousandths": every_eps(lambda g: g.call("MUL", g.constant(1e-3), g.constant(1e-3))),
    "eps_by_power": every_eps(lambda g: g.call("POW", g.constant(1e-3), g.constant(2.0))),
    "eps_by_sum": every_eps(lambda g: g.call("ADD", g.constant(4e-7), g.constant(6e-7))),
    "eps_over_a_million": every_eps(lambda g: g.call("DIV", g.constant(1.0), g.constant(1e6))),
    "eps_of_one_norm_by_product": normed_by(
        "final_norm", eps_by(lambda g: g.call("MUL", *map(g.constant, (1e-4, 1e-2))))
    ),
    "times_ones_everywhere": everywhere(ones),
    "times_one_everywhere": everywhere(mul(1.0)),
    "plus_zeros_everywhere": everywhere(lambda g, x: g.call("ADD", x, g.constant(np.zeros(g.shape(x))))),
    "keys_times_ones": cache_edit("key", ones, 1),
    "angles_times_ones": angle(ones),
    "scalar_of_64_numbers": scalar(lambda s: np.full([1, 1, 64], s)),
    "scalar_of_one_number_in_three_axes": scalar(lambda s: np.full([1, 1, 1], s)),
    "bound_by_a_mask_that_never_binds": edge("1.scores", bound("MINIMUM", 1e30)),
    "query_plus_what_overflows": edge(
        "1.query_normed",
        plus_number(lambda g: g.call("DIV", np.float32(1), g.call("POW", np.float32(1e-5), np.float32(-9)))),
    ),
    "window_by_distance_times_2^24": in_window(wrapped_distance(24)),
    "query_larger_and_scores_smaller": each(edge("1.queries", mul(8.0)), edge("1.scores", mul(0.125))),
}


# Names.


def named(rename: Callable[[int, bytes, int], bytes]) -> Change:
    """Tensors get the name that ``rename(index, name, count)`` says."""

    def change(g: Graph) -> None:
        count = len(g.main.tensors)
        for index, tensor in enumerate(g.main.tensors):
            tensor.name = rename(index, tensor.name, count)

    return change


def exchanged(*pairs: tuple[bytes, bytes]) -> Change:
    def rename(index: int, name: bytes, count: int) -> bytes:
        for a, b in pairs:
            name = name.replace(a, b"\0").replace(b, a).replace(b"\0", b)
        return name

    return named(rename)


def names_turned(g: Graph) -> None:
    """Every tensor has the name of the one that stands opposite."""
    found = [tensor.name for tensor in g.main.tensors]
    for tensor, name in zip(g.main.tensors, reversed(found), strict=True):
        tensor.name = name


NAMES: dict[str, Change] = {
    "of_another_layer": exchanged((b"layer_0", b"layer_1")),
    "gate_called_up": exchanged((b"gate", b"up")),
    "key_called_value": exchanged((b"_k_", b"_v_"), (b"key", b"value")),
    "query_called_output": exchanged((b"q_", b"o_"), (b"query", b"output")),
    "before_called_after": exchanged((b"pre_", b"post_")),
    "turned_around": names_turned,
    "none": named(lambda index, name, count: b""),
    "all_the_same": named(lambda index, name, count: b"lm_head"),
    "of_control_signs": named(lambda index, name, count: b"\x1b[2J\n%d" % index),
    "cos_called_sin": exchanged((b"cos", b"sin")),
}

_SHOWS = (Sample(230, mask="past"), Sample(40, keys=3.0))

THIRD = (
    *cases("same: third softmaxes", SOFTMAXES, *_SHOWS),
    *cases("same: third weights", WEIGHTS, *_SHOWS),
    *cases("same: third caches", CACHES, rounding=0.1),
    *cases("same: third constants", CONSTANTS, *_SHOWS),
    *cases("same: third names", NAMES),
)
