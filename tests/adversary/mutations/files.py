"""What a file says beside its operators: composites, inputs, signatures, declared types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, at, cases, chain, edge, mul, unary
from adversary.mutations.attention import end_param, slots, visible

RMS, BMM = b"odml.rms_norm", b"odml.runtime_bmm"


def composites(g: Graph, name: bytes) -> list[Any]:
    return [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE" and op.builtinOptions2.name == name]


@a_change
def body_of(g: Graph, name: bytes, edit: Callable[[Graph], object]) -> bool:
    """``edit`` of the bodies of every composite called ``name``; their names go on to say what they were."""
    for op in composites(g, name):
        edit(g.body(op))
    return bool(composites(g, name))


@a_change
def body_number(g: Graph, old: float, new: float) -> None:
    for index, tensor in enumerate(g.main.tensors):
        floating = tensor.type == schema.TensorType.FLOAT32 and g.is_constant(index)
        if floating and g.value(index).size == 1 and np.isclose(g.value(index).item(), old, rtol=1e-5, atol=0):
            g.set_value(index, np.full(g.value(index).shape, new))


def result_tanh(body: Graph) -> None:
    """What the composite returns, by tanh."""
    (old,) = (int(i) for i in body.main.outputs)
    body.main.outputs = [body.tanh(old)]


COMPOSITES: dict[str, Change] = {
    "bmm_tanh": body_of(BMM, result_tanh),
    "norm_eps": body_of(RMS, body_number(1e-6, 1e-2)),
    "norm_of_a_sum": body_of(RMS, body_number(1 / 64, 1.0)),
}


@a_change
def renamed(g: Graph, names: dict[str, str]) -> None:
    """The signature calls its inputs otherwise."""
    for entry in g.model.signatureDefs[0].inputs:
        entry.name = names.get(entry.name.decode(), entry.name.decode()).encode()


NAMES: dict[str, Change] = {
    "key_and_value": renamed({"kv_cache_k_2": "kv_cache_v_2", "kv_cache_v_2": "kv_cache_k_2"}),
    "no_mask": renamed({"mask": "attention_bias"}),
}

_RUNTIME = "the runtime fills the signature by these names: it would pass something else, or nothing"


def embedding_halved(g: Graph, x: int) -> int:
    embedding, hidden = e.halves(g, x)
    return g.join([g.mul(embedding, 0.5), hidden])


INPUTS: dict[str, Change] = {
    "activations_doubled": edge("activations", mul(2.0)),
    "activations_tanh": edge("activations", unary("TANH")),
    "embedding_halved": edge("activations", embedding_halved),
    "mask_of_param_tensor": visible(1, lambda g, x: g.logical_and(x, g.greater(end_param(g), slots(g) + np.int32(8)))),
}


@a_change
def names_crossed(g: Graph, *pairs: tuple[str, str]) -> None:
    """Tensors are called what the other is; the signature is right."""
    for one, other in pairs:
        a, b = (g.main.tensors[g.input(name)] for name in (one, other))
        a.name, b.name = b.name, a.name


def logits_before_cap(g: Graph) -> None:
    """The signature's output is another tensor; the one that is called so stays an output of the graph."""
    uncapped = g.reshape(at(g, "lm_head"), g.shape(g.output("logits")))
    (entry,) = [entry for entry in g.model.signatureDefs[0].outputs if entry.name == b"logits"]
    entry.tensorIndex = uncapped
    g.main.outputs = [*map(int, g.main.outputs), uncapped]


@a_change
def decoy(g: Graph, name: str, other: str) -> None:
    """The signature's ``name`` is a tensor that nobody reads: all read ``other``."""
    real, inputs = g.input(name), g.model.signatureDefs[0].inputs
    unread = g.tensor(g.shape(real), g.dtype(real))
    g.main.tensors[unread].name = g.main.tensors[real].name + b"_0"
    (entry,) = [entry for entry in inputs if entry.name == name.encode()]
    entry.tensorIndex = unread
    inputs.append(schema.TensorMapT(name=other.encode(), tensorIndex=real))
    g.main.inputs = [*map(int, g.main.inputs), unread]


@a_change
def unmapped(g: Graph, name: str) -> None:
    """An input of the graph that the signature does not have: called like one, and never filled."""
    signature = g.model.signatureDefs[0]
    signature.inputs = [entry for entry in signature.inputs if entry.name.decode() != name]


@a_change
def options_of(g: Graph, kind: str, other: str) -> bool:
    """The options of every ``kind`` carry the type id of ``other``: LiteRT does not read them."""
    g.open_all()
    ops = [op for op in g.ops if g.kind(op) == kind and op.builtinOptions is not None]
    for op in ops:
        op.builtinOptionsType = getattr(schema.BuiltinOptions, other)
    return bool(ops)


KEYS_AND_VALUES = [(f"kv_cache_k_{n}", f"kv_cache_v_{n}") for n in (2, 3)]

_BY_SHAPES = "LiteRT joins along axis 0, transposes nothing and drops axes, and finds shapes that do not fit"

INTERFACES: dict[str, Change | tuple[Change, str]] = {
    "logits_before_cap": logits_before_cap,
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
def coded(g: Graph, which: str, back: Callable[[float], Edit]) -> None:
    """Caches of INT8 codes that plain operators bring back."""
    scale = 0.02 if which == "k" else 0.05
    for cache in (2, 3):
        e.as_codes(g, f"kv_cache_{which}_{cache}", np.int8, scale, back=back(scale), grid=False)


def typed(place: str, name: str) -> Change:
    """The value at ``place`` is declared as another type."""
    return lambda g: setattr(g.main.tensors[at(g, place)], "type", getattr(schema.TensorType, name))


@a_change
def third_operand(g: Graph, name: str) -> None:
    """An operator of two operands has three; what the third is must not be left out silently."""
    op = g.layer(0).first if name == "ADD" else g.layer(0).scaler
    op.inputs = [*map(int, op.inputs), g.layer(0).stream]


def neither_true_nor_false(g: Graph, x: int) -> int:
    """And with bools that are stored as 2."""
    constant = g.constant(np.ones((1, 1, 1, 256)), np.bool_)
    g.main.tensors[constant].buffer = g.buffer(bytes([2] * 256))
    return g.logical_and(x, constant)


def from_halves(scale: float) -> Edit:
    """Codes are halved, cut to whole numbers and doubled again."""
    return chain(lambda g, x: g.cast(x, np.float32), mul(0.5), e.through(np.int8), mul(2 * scale))


def compared(kind: str, name: str) -> Change:
    """Positions and slots compared as small integers, of which LiteRT does not look at the scales."""
    as_type = {"INT8": np.int8, "UINT8": np.uint8, "INT16": np.int16}[name]

    def edit(g: Graph, x: int) -> int:
        position = g.cast(g.reshape(g.input("input_pos"), [1, 1, 1, 1]), as_type)
        return g.logical_and(x, g.call(kind, g.constant(np.arange(256).reshape(1, 1, 1, 256) % 100, as_type), position))

    return visible(0, edit)


def mask_turned_around(g: Graph, x: int) -> int:
    """The mask input from its last slot to its first, by steps of −1, and what is past of that."""
    mask = g.input("mask")
    ends = [np.array(numbers, np.int32) for numbers in ([0, 0, 0, -1], [1, 1, 1, -257], [1, 1, 1, -1])]
    return g.logical_and(x, g.call("STRIDED_SLICE", mask, *ends, shape=g.shape(mask)))


_TYPES = ("FLOAT16", "BFLOAT16", "INT32", "FLOAT64", "INT8", "BOOL")

DECLARED: dict[str, Change] = {
    "mask_turned_around": visible(0, mask_turned_around),
    **{f"{which}_through_bool": coded(which, lambda scale: chain(e.through(np.bool_), mul(scale))) for which in "kv"},
    **{f"{which}_of_halved_codes": coded(which, from_halves) for which in "kv"},
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

CALLED: dict[str, Change] = {
    f"cache_called_{name!r}": renamed({"kv_cache_k_3": name.decode()}) for name in (b"kv_cache_k_-1", b"keys")
}


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
    *cases("declared", {"bools_stored_as_2": visible(0, neither_true_nor_false)}, why="LiteRT's kernels do not agree"),
)
