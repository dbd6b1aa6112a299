"""What a file says beside its operators: composites, inputs, signatures, declared types and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, at, cases, chain, edge, mul, unary
from adversary.mutations.attention import both, end_param, slots, visible


@a_change
def body_of(g: Graph, name: bytes, edit: Callable[[Graph], object]) -> bool | None:
    """``edit`` of the bodies of every composite called ``name``; their names go on to say what they were."""
    ops = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE" and op.builtinOptions2.name == name]
    if not ops:
        return False
    for op in ops:
        edit(g.body(op))
    return None


@a_change
def body_number(g: Graph, old: float, new: float) -> None:
    for index, tensor in enumerate(g.main.tensors):
        floating = tensor.type == schema.TensorType.FLOAT32 and g.is_constant(index)
        if floating and g.value(index).size == 1 and np.isclose(g.value(index).item(), old, rtol=1e-5, atol=0):
            g.set_value(index, np.full(g.value(index).shape, new))


@a_change
def body_result(g: Graph, edit: Edit) -> None:
    """``edit`` of what the composite returns."""
    (old,) = (int(i) for i in g.main.outputs)
    g.main.outputs = [edit(g, old)]


COMPOSITES: dict[str, Change] = {
    "bmm_tanh": body_of(b"odml.runtime_bmm", body_result(unary("TANH"))),
    "norm_eps": body_of(b"odml.rms_norm", body_number(1e-6, 1e-2)),
    "norm_of_a_sum": body_of(b"odml.rms_norm", body_number(1 / 64, 1.0)),
}


@a_change
def renamed(g: Graph, names: dict[str, str], which: str = "inputs") -> None:
    """The signature calls its tensors otherwise."""
    for entry in getattr(g.model.signatureDefs[0], which):
        entry.name = names.get(entry.name.decode(), entry.name.decode()).encode()


NAMES: dict[str, Change] = {
    "key_and_value": renamed({"kv_cache_k_2": "kv_cache_v_2", "kv_cache_v_2": "kv_cache_k_2"}),
    "no_mask": renamed({"mask": "attention_bias"}),
}
_RUNTIME = "the runtime fills the signature by these names: it would pass something else, or nothing"


def half(which: int, edit: Edit) -> Change:
    """``edit`` of the embedding (0) or the hidden state (1)."""

    def change(g: Graph, x: int) -> int:
        parts = [g.part(x, 0, 64), g.part(x, 64, 64)]
        parts[which] = edit(g, parts[which])
        return g.join(parts)

    return edge("activations", change)


INPUTS: dict[str, Change] = {
    "activations_doubled": edge("activations", mul(2.0)),
    "activations_tanh": edge("activations", unary("TANH")),
    "embedding_halved": half(0, mul(0.5)),
    "mask_of_param_tensor": visible(1, lambda g, x: both(g, x, g.greater(end_param(g), slots(g) + np.int32(8)))),
}


def entries(g: Graph, which: str = "inputs") -> dict[str, Any]:
    return {entry.name.decode(): entry for entry in getattr(g.model.signatureDefs[0], which)}


@a_change
def names_crossed(g: Graph, *pairs: tuple[str, str]) -> None:
    """Tensors are called what the other is; the signature is right."""
    for one, other in pairs:
        a, b = (g.main.tensors[g.input(name)] for name in (one, other))
        a.name, b.name = b.name, a.name


@a_change
def points_at(g: Graph, output: str, place: Callable[[Graph], int]) -> None:
    """The signature's output is another tensor; the one that is called so stays an output of the graph."""
    made = g.reshape(place(g), g.shape(g.output(output)))
    entries(g, "outputs")[output].tensorIndex = made
    g.main.outputs = [*map(int, g.main.outputs), made]


@a_change
def decoy(g: Graph, name: str, other: str, readers: Callable[[Graph], list[Any]] | None = None) -> None:
    """The signature's ``name`` is a tensor that ``readers`` read (default: nobody), the rest read ``other``."""
    real = g.input(name)
    into = [] if readers is None else readers(g)
    made = g.tensor(g.shape(real), g.dtype(real))
    g.main.tensors[made].name = g.main.tensors[real].name + b"_0"
    entries(g)[name].tensorIndex = made
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = other.encode(), real
    g.model.signatureDefs[0].inputs.append(entry)
    g.main.inputs = [*map(int, g.main.inputs), made]
    g.rewire(real, made, into)


@a_change
def unmapped(g: Graph, name: str) -> None:
    """An input of the graph that the signature does not have: called like one, and never filled."""
    signature = g.model.signatureDefs[0]
    signature.inputs = [entry for entry in signature.inputs if entry.name.decode() != name]


@a_change
def options_of(g: Graph, kind: str, other: str, edit: Callable[[Any], object] = lambda options: None) -> bool | None:
    """The options of every ``kind`` carry the type id of ``other``: LiteRT does not read them."""
    g.open_all()
    found = [op for op in g.ops if g.kind(op) == kind and op.builtinOptions is not None]
    for op in found:
        edit(op.builtinOptions)
        op.builtinOptionsType = getattr(schema.BuiltinOptions, other)
    return None if found else False


KEYS_AND_VALUES = [(f"kv_cache_k_{n}", f"kv_cache_v_{n}") for n in (2, 3)]

_BY_SHAPES = "LiteRT joins along axis 0, transposes nothing and drops axes, and finds shapes that do not fit"
INTERFACES: dict[str, Change | tuple[Change, str]] = {
    "logits_before_cap": points_at("logits", lambda g: at(g, "lm_head")),
    "activations_not_read": decoy("activations", "activations_2"),
    "position_not_read": decoy("input_pos", "input_pos_2"),
    "mask_unmapped": unmapped("mask"),
    "value_unmapped": unmapped("kv_cache_v_3"),
    "gelu_without_its_options": options_of("GELU", "AddOptions"),
    "joined_without_its_options": (options_of("CONCATENATION", "AddOptions"), _BY_SHAPES),
    "weights_without_their_options": (options_of("FULLY_CONNECTED", "AddOptions"), _BY_SHAPES),
    "gelu_without_a_type": options_of("GELU", "NONE"),
}


@a_change
def coded(g: Graph, back: Callable[[float, int], Edit], zero_point: int = 0, which: str = "kv") -> None:
    """Caches of INT8 codes that plain operators bring back."""
    for kind, number in ((kind, number) for kind in which for number in (2, 3)):
        scale = 0.02 if kind == "k" else 0.05
        e.as_codes(g, f"kv_cache_{kind}_{number}", np.int8, scale, zero_point, back(scale, zero_point), grid=False)


def cast(dtype: Any) -> Edit:
    return lambda g, x: g.cast(x, dtype)


def typed(place: str, name: str) -> Change:
    """The value at ``place`` is declared as another type."""
    return lambda g: setattr(g.main.tensors[at(g, place)], "type", getattr(schema.TensorType, name))


@a_change
def third_operand(g: Graph, name: str) -> None:
    """An operator of two operands has three; what the third is must not be left out silently."""
    op = g.layer(0).first if name == "ADD" else g.layer(0).scaler
    op.inputs = [*map(int, op.inputs), g.layer(0).stream]


@a_change
def cache_called(g: Graph, name: bytes) -> None:
    """No runtime fills a cache of that name."""
    entries = g.model.signatureDefs[0].inputs
    next(entry for entry in entries if entry.name == b"kv_cache_k_3").name = name


def neither_true_nor_false(g: Graph, x: int) -> int:
    """And with bools that are stored as 2."""
    constant = g.constant(np.ones((1, 1, 1, 256)), np.bool_)
    g.main.tensors[constant].buffer = g.buffer(bytes([2] * 256))
    return both(g, x, constant)


def through_bool(which: str) -> Change:
    """A cache of codes of which two are left."""
    return coded(lambda scale, zero_point: chain(cast(np.bool_), cast(np.float32), mul(scale)), which=which)


def through_fewer(which: str) -> Change:
    """A cache of codes that are halved, cut to whole numbers and doubled again."""
    halved = chain(cast(np.float32), mul(0.5), cast(np.int8))
    return coded(lambda scale, zero_point: chain(halved, cast(np.float32), mul(2 * scale)), which=which)


def compared(kind: str, name: str) -> Change:
    """Positions and slots compared as small integers, of which LiteRT does not look at the scales."""
    as_type = {"INT8": np.int8, "UINT8": np.uint8, "INT16": np.int16}[name]

    def edit(g: Graph, x: int) -> int:
        position = g.cast(g.reshape(g.input("input_pos"), [1, 1, 1, 1]), as_type)
        return both(g, x, g.call(kind, g.constant(np.arange(256).reshape(1, 1, 1, 256) % 100, as_type), position))

    return visible(0, edit)


def mask_turned_around(g: Graph) -> None:
    """The mask input from its last slot to its first, by steps of −1, and what is past of that."""

    def edit(g: Graph, x: int) -> int:
        mask = g.input("mask")
        rank = len(g.shape(mask))
        begins = g.constant([*[0] * (rank - 1), -1], np.int32)
        ends = g.constant([*g.shape(mask)[:-1], -257], np.int32)
        steps = g.constant([*[1] * (rank - 1), -1], np.int32)
        turned = g.call("STRIDED_SLICE", mask, begins, ends, steps, shape=g.shape(mask), dtype=np.bool_)
        return both(g, x, turned)

    visible(0, edit)(g)


_TYPES = ("FLOAT16", "BFLOAT16", "INT32", "FLOAT64", "INT8", "BOOL")
DECLARED: dict[str, Change] = {
    "mask_turned_around": mask_turned_around,
    **{f"{which}_through_bool": through_bool(which) for which in "kv"},
    **{f"{which}_of_halved_codes": through_fewer(which) for which in "kv"},
}
COMPARED: dict[str, Change] = {
    f"{kind}_of_{name}": compared(kind, name)
    for kind, name in (("LESS_EQUAL", "INT8"), ("GREATER", "UINT8"), ("LESS_EQUAL", "INT16"))
}
TYPED: dict[str, Change] = {
    f"{place}_as_{name}": typed(place, name) for place in ("0.attended", "1.attended") for name in ("FLOAT16", "INT8")
}
NOT_RUN: dict[str, Change] = {
    **{f"{p}_as_{name}": typed(p, name) for p, name in zip(("1.stream", "0.cos", "logits") * 2, _TYPES, strict=True)},
    **{f"third_operand_of_{name}": third_operand(name) for name in ("ADD", "MUL")},
}
CALLED: dict[str, Change] = {f"cache_called_{name!r}": cache_called(name) for name in (b"kv_cache_k_-1", b"keys")}
STORED: dict[str, Change] = {"bools_stored_as_2": visible(0, neither_true_nor_false)}

CASES = (
    *cases("inputs", INPUTS),
    *cases("composites", COMPOSITES),
    *cases("names", NAMES, why=_RUNTIME),
    *cases("interfaces", INTERFACES),
    *cases("declared", DECLARED, Sample(40)),
    *cases("declared", COMPARED, why="LiteRT's kernels abort or take codes for numbers"),
    *cases("declared", TYPED, why="LiteRT writes what the type says"),
    *cases("declared", NOT_RUN, why="LiteRT refuses the file"),
    *cases("declared", CALLED, why="no runtime fills it"),
    *cases("declared", STORED, why="LiteRT's kernels do not agree"),
)
