"""Bases and bundles that are changed on purpose: the sample's, with a weight, a byte or an operator that is another."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file
from seam import DTYPES, TfliteModel, base

from helpers.first_pair import first_base, first_bundle
from helpers.make_bundle import bundle, load, pack, parts_of

PREFIX = "model.language_model."
Weights = dict[str, npt.NDArray[Any]]


def base_with(
    out: Path,
    change: Callable[[Weights], None] = lambda weights: None,
    *,
    dtype: str = "",
    shards: int = 1,
    **config: Any,
) -> Path:
    """A copy of the sample's base with changed weights, and changed keys of its text model's configuration.

    ``dtype`` (f16, bf16) rounds the weights; several ``shards`` come with an index.
    """
    out.mkdir()
    read = json.loads((first_base() / "config.json").read_text())
    top = {key: config.pop(key) for key in ("model_type", "quantization_config") if key in config}
    read["text_config"] |= config
    (out / "config.json").write_text(json.dumps(read | top))
    weights = load_file(first_base() / "model.safetensors")
    change(weights)
    weights = in_dtype(weights, dtype)
    if shards == 1:
        save_file(weights, out / "model.safetensors")
        return out
    placed = {name: f"model-{index % shards + 1:05d}-of-{shards:05d}.safetensors" for index, name in enumerate(weights)}
    for file in set(placed.values()):
        save_file({name: weight for name, weight in weights.items() if placed[name] == file}, out / file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return out


def in_dtype(weights: Weights, dtype: str) -> Weights:
    """``weights`` rounded to ``dtype`` (f16, bf16), or as they are."""
    if not dtype:
        return {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
    kind = DTYPES[dtype]
    return {
        name: kind.narrow(weight.reshape(-1), name).view(kind.transformers).reshape(weight.shape)
        for name, weight in weights.items()
    }


def patched(out: Path, bytes_at: Mapping[int, bytes]) -> Path:
    """The sample with other bytes."""
    data = bytearray(first_bundle().read_bytes())
    for at, new in bytes_at.items():
        data[at : at + len(new)] = new
    out.write_bytes(data)
    return out


def places_of(path: Path, role: str) -> list[tuple[TfliteModel, Any]]:
    """The model and the tensor that have ``role`` in the bundle at ``path``, in each signature."""
    return [(place.model, place.found.tensor) for place in base(path).places[role] if place.found.tensor is not None]


def scale_of(path: Path, role: str, signature: str, channel: int, factor: float) -> dict[int, bytes]:
    """The scale of a channel of ``role`` in one signature of the bundle at ``path``, times ``factor``; by its place."""
    found = [(m, t) for m, t in places_of(path, role) if (s := m.signature(signature)) and s.subgraph == t.subgraph]
    model, quantization = found[0][0], found[0][1].quantization
    at = model.region.begin + quantization.scales.start + 4 * channel
    return {at: np.float32(quantization.scale[channel] * np.float32(factor)).tobytes()}


def edited_bundle(out: Path, source: Path | None = None, **edits: Callable[[Any], None]) -> Path:
    """The sample, or ``source``, with the models of the sections that ``edits`` name changed, as the schema's trees."""
    source = source or first_bundle()
    parts = parts_of(source)
    for index, part in enumerate(parts):
        edit = edits.get(part.items.get("model_type", "").removeprefix("tf_lite_"))
        if edit is not None:
            model = load(part.data)
            for buffer in model.buffers:
                if buffer.offset > 1:
                    buffer.data = np.frombuffer(part.data, np.uint8)[buffer.offset : buffer.offset + buffer.size]
                    buffer.offset = buffer.size = 0
            edit(model)
            parts[index] = replace(part, data=pack(model))
    major, minor, patch = struct.unpack_from("<3I", source.read_bytes(), 8)
    out.write_bytes(bundle(parts, version=(major, minor, patch)))
    return out


def scalar(weights: Weights) -> None:
    """A layer scalar that is no longer 1, which no graph of the sample has."""
    weights[f"{PREFIX}layers.0.layer_scalar"] = np.array([2], np.float32)


def more(weights: Weights) -> None:
    """A tensor that plays no role."""
    weights[f"{PREFIX}layers.0.self_attn.v_norm.weight"] = np.ones(32, np.float32)


def fewer(weights: Weights) -> None:
    """Without a tensor that plays one."""
    del weights[f"{PREFIX}layers.0.self_attn.v_proj.weight"]


def broken(weights: Weights) -> None:
    """One number is none."""
    weights[f"{PREFIX}layers.0.mlp.up_proj.weight"][3, 4] = np.nan
