"""Bodies of composites, and the names of the signature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, mul, unary


def body_of(name: bytes, edit: Callable[[Graph], object]) -> Change:
    """``edit`` of the bodies of every composite called ``name``; their names go on to say what they were."""

    def change(g: Graph) -> bool | None:
        ops = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE" and op.builtinOptions2.name == name]
        if not ops:
            return False
        for op in ops:
            edit(g.body(op))
        return None

    return change


def body_number(old: float, new: float) -> Callable[[Graph], object]:
    def edit(g: Graph) -> None:
        for index, tensor in enumerate(g.main.tensors):
            floating = tensor.type == schema.TensorType.FLOAT32 and g.is_constant(index)
            if floating and g.value(index).size == 1 and np.isclose(g.value(index).item(), old, rtol=1e-5, atol=0):
                g.set_value(index, np.full(g.value(index).shape, new))

    return edit


def body_result(edit: Edit) -> Callable[[Graph], object]:
    """``edit`` of what the composite returns."""

    def change(g: Graph) -> None:
        (old,) = (int(i) for i in g.main.outputs)
        g.main.outputs = [edit(g, old)]

    return change


COMPOSITES: dict[str, Change] = {
    "bmm_scaled": body_of(b"odml.runtime_bmm", body_result(mul(0.5))),
    "bmm_plus": body_of(b"odml.runtime_bmm", body_result(add(0.1))),
    "bmm_tanh": body_of(b"odml.runtime_bmm", body_result(unary("TANH"))),
    "norm_doubled": body_of(b"odml.rms_norm", body_result(mul(2.0))),
    "norm_shifted": body_of(b"odml.rms_norm", body_result(add(0.1))),
    "norm_eps": body_of(b"odml.rms_norm", body_number(1e-6, 1e-2)),
    "norm_without_root": body_of(
        b"odml.rms_norm", lambda g: [g.recode(op, "SQRT") for op in g.ops if g.kind(op) == "RSQRT"]
    ),
    "norm_of_a_sum": body_of(b"odml.rms_norm", body_number(1 / 64, 1.0)),
    "gelu_cubic": body_of(b"odml.gelu_tanh", body_number(0.044715, 0.1)),
    "gelu_relu": body_of(b"odml.gelu_tanh", lambda g: setattr(g.main, "outputs", [g.relu(int(g.main.inputs[0]))])),
    "gelu_sigmoid": body_of(
        b"odml.gelu_tanh", lambda g: [g.recode(op, "LOGISTIC") for op in g.ops if g.kind(op) == "TANH"]
    ),
}


def renamed(names: dict[str, str], which: str = "inputs") -> Change:
    """The signature calls its tensors otherwise."""

    def change(g: Graph) -> None:
        for entry in getattr(g.model.signatureDefs[0], which):
            entry.name = names.get(entry.name.decode(), entry.name.decode()).encode()

    return change


NAMES: dict[str, Change] = {
    "key_and_value": renamed({"kv_cache_k_2": "kv_cache_v_2", "kv_cache_v_2": "kv_cache_k_2"}),
    "key_and_value_of_both": renamed(
        {f"kv_cache_{a}_{n}": f"kv_cache_{b}_{n}" for n in (2, 3) for a, b in (("k", "v"), ("v", "k"))}
    ),
    "sliding_and_full_keys": renamed({"kv_cache_k_2": "kv_cache_k_3", "kv_cache_k_3": "kv_cache_k_2"}),
    "outputs": renamed({"logits": "projected_activations", "projected_activations": "logits"}, "outputs"),
    "no_mask": renamed({"mask": "attention_bias"}),
}
RUNTIME = "the runtime fills the signature by these names: it would pass something else, or nothing"
