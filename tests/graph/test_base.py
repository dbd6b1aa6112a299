"""Roles of a base's graphs: where each is found, and what is refused when it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers.bases import edited_bundle
from helpers.make_bundle import DRAFTER, Part, bundle, code_of, drafter_of, kind, set_buffer
from seam import GEMMA4, MtpExtractError, RoleError, UnsupportedError, base, list_roles

DECODE = 1
DECODER = "prefill_decode"


def test_every_role_is_found_in_every_signature(sample: Path) -> None:
    found = base(sample)
    walk = found.structure
    assert (walk.layers, walk.width, walk.soft_cap, walk.rms_norm_eps) == (6, 64, 30.0, 1e-6)
    absent = {f"layers.{i}.layer_scalar" for i in range(6)}
    absent |= {f"layers.{i}.{name}" for i in (4, 5) for name in ("k_proj", "k_norm", "v_proj")}
    expected = {role.name for role in list_roles(6, architecture=GEMMA4)} - absent
    assert set(found.places) == expected
    for role, places in found.places.items():
        is_for_cache = role in [f"layers.3.{name}" for name in ("pre_attention_norm", "k_proj", "k_norm", "v_proj")]
        if role.startswith("embed_tokens"):
            assert len(places) == 1
        elif role.startswith(("layers.0.", "layers.1.", "layers.2.", "per_layer")) or is_for_cache:
            assert len(places) == 3, role  # prefill_32, decode, verify
        else:
            assert len(places) == 2, role  # decode, verify
    # Codes are shared by the signatures.
    for places in found.places.values():
        assert len({p.model.locate(p.found.tensor).begin for p in places if p.found.tensor}) == 1


def list_ops(model: Any, name: str) -> list[Any]:
    return [op for op in model.subgraphs[DECODE].operators if kind(model, op) == name]


def swap_per_layer_parts(model: Any) -> None:
    """Two layers take each other's part of the per-layer embeddings."""
    tensors, slices = model.subgraphs[DECODE].tensors, list_ops(model, "SLICE")
    parts = [op for op in slices if tensors[op.outputs[0]].shape[-2] == 1]
    tables = [op for op in parts if tensors[op.inputs[0]].shape[-2] == 6]
    tables[1].inputs[1], tables[2].inputs[1] = tables[2].inputs[1], tables[1].inputs[1]


def change_numbers(old: Any, new: Any, subgraph: int = DECODE) -> Callable[[Any], None]:
    """The first constant of floats that holds ``old`` holds ``new``."""

    def change(model: Any) -> None:
        data = np.asarray(old, np.float32).tobytes()
        floats = [t for t in model.subgraphs[subgraph].tensors if t.type == schema.TensorType.FLOAT32]
        stored = ((tensor, model.buffers[tensor.buffer].data) for tensor in floats)
        found = next(tensor for tensor, numbers in stored if numbers is not None and bytes(numbers) == data)
        set_buffer(model, found, np.asarray(new, np.float32).tobytes())

    return change


def compute_key_from_layer_0(model: Any) -> None:
    """K of layer 1 is computed from what layer 0 reads."""
    products, tensors = list_ops(model, "FULLY_CONNECTED"), model.subgraphs[DECODE].tensors
    first, second, *_ = [op for op in products if b"Linear_k_proj" in tensors[op.inputs[1]].name]
    second.inputs[0] = first.inputs[0]


def read_old_cache(model: Any) -> None:
    """The attention reads the cache as it was before this step."""
    writer = list_ops(model, "DYNAMIC_UPDATE_SLICE")[0]
    for op in list_ops(model, "BATCH_MATMUL"):
        op.inputs = [writer.inputs[0] if i == writer.outputs[0] else i for i in op.inputs]


def move_head_before_norm(model: Any) -> None:
    """The logits are computed from the stream before the last norm."""
    head = list_ops(model, "FULLY_CONNECTED")[-1]
    norm = next(op for op in reversed(model.subgraphs[DECODE].operators) if list(op.outputs) == [head.inputs[0]])
    head.inputs[0] = norm.inputs[0]


def make_gate_relu(model: Any) -> None:
    """The gate of the per-layer branch is another function."""
    tensors = model.subgraphs[DECODE].tensors
    gelu = next(op for op in list_ops(model, "GELU") if tensors[op.inputs[0]].shape[-1] == 32)
    gelu.opcodeIndex = code_of(model, "RELU")
    gelu.builtinOptions, gelu.builtinOptionsType = None, 0


@pytest.mark.parametrize(
    ("section", "edit", "error", "words"),
    [
        (DECODER, swap_per_layer_parts, RoleError, r"layers\.1: expected the part of the per-layer embeddings at 32"),
        (DECODER, change_numbers(np.ones(32), np.full(32, 2)), UnsupportedError, "its V norm has a weight"),
        (DECODER, change_numbers(2**-0.5, 0.5), RoleError, "the per-layer embeddings: expected the factor 0.707107"),
        (DECODER, change_numbers(0.125, 0.25), RoleError, "per_layer_model_projection: expected the factor 0.125"),
        (DECODER, compute_key_from_layer_0, RoleError, r"its K goes to kv_cache_k_1, whose first reader is layers\.1"),
        (DECODER, read_old_cache, RoleError, "cache that DYNAMIC_UPDATE_SLICE writes"),
        (DECODER, move_head_before_norm, RoleError, "final_norm"),
        (DECODER, make_gate_relu, RoleError, "per_layer_gate"),
        ("embedder", change_numbers(8, 4, 0), RoleError, "embed_tokens: expected the factor 8"),
        ("per_layer_embedder", change_numbers(32**0.5, 2, 0), RoleError, "embed_tokens_per_layer: expected .* 5.65685"),
    ],
)
def test_what_is_elsewhere_is_refused_by_name(
    tmp_path: Path, section: str, edit: Callable[[Any], None], error: type[MtpExtractError], words: str
) -> None:
    path = edited_bundle(tmp_path / "b.litertlm", **{section: edit})
    with pytest.raises(error, match=words) as raised:
        base(path)
    assert "signature" in str(raised.value)


def test_a_bundle_without_a_base_says_so(tmp_path: Path, sample: Path) -> None:
    path = tmp_path / "drafter.litertlm"
    path.write_bytes(bundle([Part(3, drafter_of(sample), DRAFTER)]))
    with pytest.raises(UnsupportedError, match=DECODER):
        base(path)
