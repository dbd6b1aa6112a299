"""Faults planted into an extracted directory: each makes it another drafter, or no drafter at all."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers.make_bundle import on_model
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.files import read_header
from mtp_extract.checkpoint.stored import StoredTensor

WEIGHTS = "model.safetensors"


def tensor(directory: Path, name: str) -> tuple[np.ndarray, StoredTensor]:
    """The stored bytes of a tensor as integers of its width, and its place."""
    stored = read_header(directory / WEIGHTS)[name]
    data = (directory / WEIGHTS).read_bytes()[stored.offset : stored.offset + stored.length]
    return np.frombuffer(bytearray(data), np.uint32 if stored.dtype == "F32" else np.uint16), stored


def _write(directory: Path, stored: StoredTensor, data: bytes) -> None:
    assert len(data) == stored.length
    with open(directory / WEIGHTS, "r+b") as file:
        file.seek(stored.offset)
        file.write(data)


def _floats(directory: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Rewrite a tensor by its numbers."""
    raw, stored = tensor(directory, name)
    dtype = next(d for d in DTYPES.values() if d.safetensors == stored.dtype)
    values = np.array(dtype.widen(raw.tobytes())).reshape(stored.shape)
    made = np.ascontiguousarray(change(values), np.float32).reshape(-1)
    if stored.dtype == "BF16" and not np.isfinite(made).all():
        _write(directory, stored, (made.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    elif stored.dtype == "F16":
        _write(directory, stored, made.astype("<f2").tobytes())
    else:
        _write(directory, stored, dtype.narrow(made, name).tobytes())


def fill(directory: Path, name: str, value: float) -> None:
    """Make every number of a tensor ``value``."""
    _floats(directory, name, lambda values: np.full_like(values, value))


def _bit(directory: Path, name: str) -> None:
    raw, stored = tensor(directory, name)
    raw[len(raw) // 2] ^= 1
    _write(directory, stored, raw.tobytes())


def _filled(value: float) -> Callable[[Path, str], None]:
    def change(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[-1] = value
        return values

    return lambda directory, name: _floats(directory, name, change)


TENSOR_FAULTS: dict[str, Callable[[Path, str], None]] = {
    "one bit": _bit,
    "scaled by 0.4 %": lambda directory, name: _floats(directory, name, lambda v: v * np.float32(1.004)),
    "infinite": _filled(np.inf),
    "not a number": _filled(np.nan),
    "zeroed": lambda directory, name: _floats(directory, name, np.zeros_like),
    "reversed": lambda directory, name: _floats(directory, name, lambda v: v.reshape(-1)[::-1].reshape(v.shape)),
    "turned over": lambda directory, name: _floats(directory, name, lambda v: -v),
}
"""What one tensor may suffer."""


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; those of ``text_config`` are told by their being there."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        place = config["text_config"] if key in config["text_config"] else config
        place[key] = value
    path.write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class ConfigFault:
    """A change to the config, and the word that must be in the report."""

    changes: dict[str, Any]
    named: str


_ROPE = {
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "full_attention": {"rope_theta": 1000000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def _rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, kind: {**_ROPE[kind], **changes}}}


_SHAPES = "the checkpoint does not match its config"
"""What is said of a number by which tensors would have other shapes, before a graph is asked."""

CONFIG_FAULTS = {
    "no cap": ConfigFault({"final_logit_softcapping": None}, "final_logit_softcap is 30.0, not None"),
    "another cap": ConfigFault({"final_logit_softcapping": 30.5}, "final_logit_softcap is 30.0, not 30.5"),
    "eps": ConfigFault({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-06, not 1e-05"),
    "eps, barely": ConfigFault({"rms_norm_eps": 1.01e-6}, "rms_norm_eps"),
    "window + 1": ConfigFault({"sliding_window": 17}, "sliding_window is 16, not 17"),
    "window - 1": ConfigFault({"sliding_window": 15}, "sliding_window is 16, not 15"),
    "theta": ConfigFault(_rope("full_attention", rope_theta=10000.0), "layers.3.rope.theta is 1000000.0"),
    "theta of sliding": ConfigFault(_rope("sliding_attention", rope_theta=10001.0), "layers.0.rope.theta is 10000.0"),
    "share": ConfigFault(_rope("full_attention", partial_rotary_factor=0.5), "partial_rotary_factor"),
    "default rope": ConfigFault(
        _rope("full_attention", rope_type="default"), "full_attention.partial_rotary_factor 0.25"
    ),
    "factor": ConfigFault(_rope("full_attention", factor=8.0), "rope.factor"),
    "heads": ConfigFault({"num_attention_heads": 8, "head_dim": 16, "global_head_dim": 32}, _SHAPES),
    "kv heads": ConfigFault({"num_key_value_heads": 1}, "layers.0.num_kv_heads is 2, not 1"),
    "kv heads of full": ConfigFault({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, "num_kv_heads"),
    "layer types": ConfigFault(
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        _SHAPES,
    ),
    "all full": ConfigFault({"layer_types": ["full_attention"] * 4}, _SHAPES),
    "activation": ConfigFault({"hidden_activation": "gelu"}, "hidden_activation"),
    "untied": ConfigFault({"tie_word_embeddings": False}, "tie_word_embeddings"),
    "bidirectional": ConfigFault({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "wide": ConfigFault({"use_double_wide_mlp": True}, "use_double_wide_mlp"),
    "own caches": ConfigFault({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    "hidden size": ConfigFault({"hidden_size": 32}, _SHAPES),
    "backbone": ConfigFault({"backbone_hidden_size": 32}, _SHAPES),
    "vocabulary": ConfigFault({"vocab_size": 511}, _SHAPES),
    "feed-forward": ConfigFault({"intermediate_size": 64}, _SHAPES),
    "head dim": ConfigFault({"head_dim": 64, "global_head_dim": 32}, _SHAPES),
    "ordered head": ConfigFault({"use_ordered_embeddings": True, "num_centroids": 64}, _SHAPES),
}
"""Every number that a graph fixes, changed. For the sample and what has its shape."""


def _header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / WEIGHTS
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@on_model
def _swap(header: dict[str, Any], one: str, other: str) -> None:
    header[one], header[other] = header[other], header[one]


@on_model
def _renamed(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


def _set(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


_GATE, _UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
_NORM = "model.layers.2.input_layernorm.weight"

FILE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped in the header": (lambda d: _header(d, _swap(_GATE, _UP)), "layers.1.gate_proj"),
    "norms swapped": (
        lambda d: _header(d, _swap(_NORM, _NORM.replace("input_", "pre_feedforward_"))),
        "layers.2.pre_attention_norm",
    ),
    "layers swapped": (lambda d: _header(d, _swap(_NORM, _NORM.replace("2", "0"))), "layers.0.pre_attention_norm"),
    "another shape": (lambda d: _header(d, _set(_GATE, shape=[64, 128])), _GATE),
    "another type": (lambda d: _header(d, _set(_GATE, dtype="I32")), "I32"),
    "complex": (lambda d: _header(d, _set(_GATE, dtype="C64")), "damaged"),
    "overlapping": (lambda d: _header(d, lambda h: h[_GATE].update(data_offsets=h[_UP]["data_offsets"])), "damaged"),
    "misnamed": (lambda d: _header(d, _renamed(_NORM, "model.layers.2.norm.weight")), _NORM),
    "header of lists": (lambda d: _header(d, lambda h: h.update({_GATE: []})), "damaged"),
    "truncated": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-9]), "damaged"),
    "longer": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes() + b"\0"), "damaged"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "expected model.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "expected config.json"),
    "no generation config": (lambda d: (d / "generation_config.json").unlink(), "generation_config.json is missing"),
    "another file": (lambda d: (d / "model-00001.safetensors").write_bytes(b""), "belongs neither"),
    "record of nothing": (lambda d: (d / "extraction.json").write_text("{}"), "extraction.json"),
}
"""What the files may suffer, and a word of what must be said."""


def forge(directory: Path) -> None:
    """Make the record agree with what lies here now."""
    path = directory / "extraction.json"
    record = json.loads(path.read_text())
    for name in record["files"]:
        data = (directory / name).read_bytes()
        record["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(record))
