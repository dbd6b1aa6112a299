"""Strict loading: both layouts, and an error by name for every way of being wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.random_assistants import GEOMETRIES, Geometry, random_assistant
from safetensors.torch import load_file, save_file

from mtp_extract.drafter.load import load_drafter
from mtp_extract.errors import CheckpointError, DrafterError
from mtp_extract.formats import detect_format, read_checkpoint
from mtp_extract.formats.transformers import parse_config
from mtp_extract.pipeline.check import find_unexpected_files

Save = Callable[..., Path]


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; ``__`` in a name stands for a dot."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}))


def test_every_tensor_lands_in_its_place(saved: Save, geometry: Geometry) -> None:
    directory = saved(geometry)
    stored = load_file(directory / "model.safetensors")
    drafter = load_drafter(directory)
    loaded = sorted((tuple(t.shape), float(t.double().sum())) for t in drafter.state_dict().values())
    assert loaded == sorted((tuple(t.shape), float(t.double().sum())) for t in stored.values())
    assert len(drafter.state_dict()) == 5 + 11 * len(geometry.layers) - 1 + 2 * bool(geometry.centroids)
    assert not drafter.training and not any(p.requires_grad or p.is_meta for p in drafter.parameters())


def test_missing_unexpected_and_mis_shaped_are_named_together(saved: Save) -> None:
    directory = saved(GEOMETRIES["dense"])
    edit(
        directory,
        model__layers__1__layer_scalar=None,
        model__layers__2__self_attn__k_proj__weight=torch.zeros(2, 2),
        post_projection__weight=torch.zeros(16, 24),
    )
    with pytest.raises(CheckpointError) as caught:
        load_drafter(directory)
    message = str(caught.value)
    assert "model.layers.1.layer_scalar: expected a tensor, found none" in message
    assert "model.layers.2.self_attn.k_proj.weight: expected no such tensor, found [2, 2]" in message
    assert "post_projection.weight: expected shape [24, 16], found [16, 24]" in message


def test_float16_is_refused_with_the_reason(saved: Save) -> None:
    directory = saved(GEOMETRIES["dense"])
    for dtype, message in ((torch.float16, r"float16 is asked for.*65504"), (torch.int8, r"torch\.int8 is asked for")):
        with pytest.raises(DrafterError, match=message):
            load_drafter(directory, dtype=dtype)
    half = {name: t.half() for name, t in load_file(directory / "model.safetensors").items()}
    save_file(half, directory / "model.safetensors")
    with pytest.raises(DrafterError, match=r"float16 is stored.*torch\.bfloat16.*65504"):
        load_drafter(directory)
    assert load_drafter(directory, dtype=torch.float32).lm_head.weight.dtype == torch.float32


def test_other_dtypes(saved: Save) -> None:
    drafter = load_drafter(saved(GEOMETRIES["ordered"]), dtype=torch.bfloat16)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert drafter.ordered_head is not None and drafter.ordered_head.token_ordering.dtype == torch.long


@pytest.fixture
def litert(sample_directories: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the sample in the ``litert`` layout."""
    for file in ("mtp_drafter.safetensors", "mtp_drafter_config.json"):
        (tmp_path / file).write_bytes((sample_directories["litert"] / file).read_bytes())
    return tmp_path


def test_litert_shared_constants_and_absent_scalars(litert: Path) -> None:
    path, weights = litert / "mtp_drafter_config.json", litert / "mtp_drafter.safetensors"
    table = json.loads(path.read_text())["tensors"]
    tensors = load_file(weights)
    for layer in (1, 2):
        tensors.pop(table[f"layers.{layer}.q_norm"], None)
        table[f"layers.{layer}.q_norm"] = table["layers.0.q_norm"]
    tensors.pop(table.pop("layers.3.layer_scalar"))
    save_file(tensors, weights)
    edit_json(path, tensors=table)
    drafter = load_drafter(litert)
    assert torch.equal(drafter.layers[2].q_norm.weight, tensors[table["layers.0.q_norm"]])
    assert drafter.layers[3].layer_scalar.tolist() == [1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "says format_version 2"),
        ({"tensors": None}, "tensors"),
        ({"tensors": {"pre_projection": "x"}}, r"expected no such tensor"),
        ({"head_dims": [32, 32]}, "expected head_dims"),
        ({"sliding_windows": [16, 16, 16, 16]}, "windows of sliding layers alone"),
        ({"kv_bank_ids": [0, 0, 1, 1]}, "says kv_bank_ids"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"num_heads": 3}, "layer 0: expected num_kv_heads to divide the 3 query heads"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_litert_config_errors(litert: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(litert / "mtp_drafter_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(litert)


@pytest.mark.parametrize(
    ("changes", "text_changes", "message"),
    [
        ({"model_type": "gemma4"}, {}, "found gemma4. Give the drafter's directory, not the base model's"),
        ({}, {"attention_bias": True}, "says text_config.attention_bias True"),
        ({}, {"layer_types": None}, "text_config: Object missing required field `layer_types`"),
        ({}, {"layer_types": ["sliding_attention", "full_attention"]}, "says text_config.num_hidden_layers 3"),
        ({}, {"layer_types": ["linear", "linear", "linear"]}, "text_config.layer_types"),
        ({}, {"hidden_size": 0}, "text_config.hidden_size"),
        ({}, {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "text_config.rope_parameters"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "num_centroids to divide the vocabulary of 60"),
    ],
)
def test_transformers_config_errors(
    saved: Save, changes: dict[str, Any], text_changes: dict[str, Any], message: str
) -> None:
    text = GEOMETRIES["dense"].config()["text_config"] | text_changes
    text = {key: value for key, value in text.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        load_drafter(saved(GEOMETRIES["dense"], text_config=text, **changes))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"expected config\.json, .* there, found none of them"),
        ("model.safetensors", None, "expected model.safetensors there, or its parts, found none"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "not a safetensors file"),
    ],
)
def test_files_that_are_not_there_or_not_right(saved: Save, file: str, content: bytes | None, message: str) -> None:
    path = saved(GEOMETRIES["dense"]) / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(path.parent)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_what_transformers_saves_is_read(name: str, tmp_path: Path) -> None:
    """It has keys that nothing computes from, and per-layer widths of full layers."""
    model = random_assistant(GEOMETRIES[name])
    model.save_pretrained(tmp_path)
    config = read_checkpoint(tmp_path).config
    assert config == replace(parse_config(GEOMETRIES[name].config()), max_position_embeddings=4096)
    assert not [*find_unexpected_files(tmp_path, detect_format(tmp_path))]
    edit_json(tmp_path / "config.json", rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match="says rope_scaling"):
        read_checkpoint(tmp_path)
