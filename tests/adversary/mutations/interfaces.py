"""What the signature says against what tensors are called, and options of another operator's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Case, Change, at, each
from adversary.mutations.heads import laid_out


def entries(g: Graph, which: str = "inputs") -> dict[str, Any]:
    return {entry.name.decode(): entry for entry in getattr(g.model.signatureDefs[0], which)}


def crossed(*pairs: tuple[str, str]) -> Change:
    """The signature hands each to the tensor of the other; tensors keep their names and what is done to them."""

    def change(g: Graph) -> None:
        found = entries(g)
        for one, other in pairs:
            found[one].tensorIndex, found[other].tensorIndex = found[other].tensorIndex, found[one].tensorIndex

    return change


def names_crossed(*pairs: tuple[str, str]) -> Change:
    """Tensors are called what the other is; the signature is right."""

    def change(g: Graph) -> None:
        for one, other in pairs:
            a, b = (g.main.tensors[g.input(name)] for name in (one, other))
            a.name, b.name = b.name, a.name

    return change


def points_at(output: str, place: Callable[[Graph], int]) -> Change:
    """The signature's output is another tensor; the one that is called so stays an output of the graph."""

    def change(g: Graph) -> None:
        made = g.reshape(place(g), g.shape(g.output(output)))
        entries(g, "outputs")[output].tensorIndex = made
        g.main.outputs = [*map(int, g.main.outputs), made]

    return change


def decoy(name: str, other: str, readers: Callable[[Graph], list[Any]] | None = None) -> Change:
    """The signature's ``name`` is a tensor that ``readers`` read (default: nobody), the rest read ``other``."""

    def change(g: Graph) -> None:
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

    return change


def unmapped(name: str) -> Change:
    """An input of the graph that the signature does not have: called like one, and never filled."""

    def change(g: Graph) -> None:
        signature = g.model.signatureDefs[0]
        signature.inputs = [entry for entry in signature.inputs if entry.name.decode() != name]

    return change


def options_of(kind: str, other: str, edit: Callable[[Any], object] = lambda options: None) -> Change:
    """The options of every ``kind`` carry the type id of ``other``: LiteRT does not read them."""

    def change(g: Graph) -> bool | None:
        g.open_all()
        found = [op for op in g.ops if g.kind(op) == kind and op.builtinOptions is not None]
        for op in found:
            edit(op.builtinOptions)
            op.builtinOptionsType = getattr(schema.BuiltinOptions, other)
        return None if found else False

    return change


UPRIGHT = laid_out("v", [0, 1, 3, 2])
KEYS_AND_VALUES = [(f"kv_cache_k_{n}", f"kv_cache_v_{n}") for n in (2, 3)]

_CHANGES: dict[str, Change] = {
    "keys_and_values_crossed": each(UPRIGHT, crossed(*KEYS_AND_VALUES)),
    "keys_and_values_of_sliding_crossed": each(UPRIGHT, crossed(KEYS_AND_VALUES[0])),
    "keys_and_values_crossed_and_called": each(UPRIGHT, crossed(*KEYS_AND_VALUES), names_crossed(*KEYS_AND_VALUES)),
    "logits_before_cap": points_at("logits", lambda g: at(g, "lm_head")),
    "projected_is_state": points_at("projected_activations", lambda g: at(g, "state")),
    "projected_is_stream": points_at("projected_activations", lambda g: g.layer(1).out),
    "activations_not_read": decoy("activations", "activations_2"),
    "mask_not_read": decoy("mask", "mask_2"),
    "mask_read_by_one_layer": decoy("mask", "mask_2", lambda g: [g.layer(1).select]),
    "position_not_read": decoy("input_pos", "input_pos_2"),
    "position_not_read_by_rope": decoy(
        "input_pos",
        "positions",
        lambda g: [op for op in g.readers(g.input("input_pos")) if op not in list(g.before(g.layer(0).angle))],
    ),
    "key_not_read": decoy("kv_cache_k_2", "kv_cache_k_0"),
    "mask_unmapped": unmapped("mask"),
    "position_unmapped": unmapped("input_pos"),
    "value_unmapped": unmapped("kv_cache_v_3"),
    "softmax_with_options_of_local_response": options_of("SOFTMAX", "LocalResponseNormalizationOptions"),
    "gelu_without_its_options": options_of("GELU", "AddOptions"),
    "joined_without_its_options": options_of("CONCATENATION", "AddOptions"),
    "products_without_their_options": options_of("BATCH_MATMUL", "FullyConnectedOptions"),
    "weights_without_their_options": options_of("FULLY_CONNECTED", "AddOptions"),
    "softmax_without_a_type": options_of("SOFTMAX", "NONE"),
    "gelu_without_a_type": options_of("GELU", "NONE"),
}
_WHY = dict.fromkeys(
    ("joined_without_its_options", "products_without_their_options", "weights_without_their_options"),
    "LiteRT joins along axis 0, transposes nothing and drops axes, and finds shapes that do not fit",
)
INTERFACES = tuple(Case("interfaces", name, change, why=_WHY.get(name, "")) for name, change in _CHANGES.items())
