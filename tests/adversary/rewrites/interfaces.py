"""Signatures, names and options that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, each
from adversary.mutations.interfaces import KEYS_AND_VALUES, UPRIGHT, crossed, names_crossed

RELU = schema.ActivationFunctionType.RELU


def optioned(place: Callable[[Graph], Any], other: str, **fields: Any) -> Change:
    """An operator carries the options of another: LiteRT does not read them."""

    def change(g: Graph) -> None:
        op = place(g)
        op.builtinOptions = getattr(schema, f"{other}T")()
        op.builtinOptionsType = getattr(schema.BuiltinOptions, other)
        for key, value in fields.items():
            setattr(op.builtinOptions, key, value)

    return change


def called(name: bytes) -> Change:
    """Every input tensor has the same name."""

    def change(g: Graph) -> None:
        for tensor in map(int, g.main.inputs):
            g.main.tensors[tensor].name = name

    return change


def second_options(g: Graph) -> bool | None:
    """An ADD carries a composite's options in its second field."""
    found = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE"]
    if not found:
        return False
    add = g.layer(0).first
    add.builtinOptions2, add.builtinOptions2Type = found[0].builtinOptions2, found[0].builtinOptions2Type
    return None


def reordered(g: Graph) -> None:
    signature = g.model.signatureDefs[0]
    signature.inputs, signature.outputs = signature.inputs[::-1], signature.outputs[::-1]
    g.main.inputs, g.main.outputs = [*map(int, g.main.inputs)][::-1], [*map(int, g.main.outputs)][::-1]


INTERFACES: dict[str, Change] = {
    "key_and_value_called_crosswise": names_crossed(*KEYS_AND_VALUES),
    "sliding_and_full_called_crosswise": names_crossed(
        ("kv_cache_k_2", "kv_cache_k_3"), ("kv_cache_v_2", "kv_cache_v_3")
    ),
    "crossed_twice": each(
        UPRIGHT, crossed(*KEYS_AND_VALUES), crossed(*KEYS_AND_VALUES), names_crossed(KEYS_AND_VALUES[1])
    ),
    "mask_called_position": names_crossed(("mask", "input_pos")),
    "all_called_alike": called(b"x"),
    "all_called_activations": called(b"activations"),
    "reordered": reordered,
    "residual_with_options_of_sub": optioned(lambda g: g.layer(0).first, "SubOptions", fusedActivationFunction=RELU),
    "residual_with_options_of_mul": optioned(lambda g: g.layer(1).second, "MulOptions", fusedActivationFunction=RELU),
    "scalar_with_options_of_add": optioned(lambda g: g.layer(0).scaler, "AddOptions", fusedActivationFunction=RELU),
    "second_options_on_a_sum": second_options,
}
