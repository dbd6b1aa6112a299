"""What ``extraction.json`` holds, for tests that extract nothing; and a record made to agree with what lies there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def forge(directory: Path) -> None:
    """Make the record list what lies there, as it is: whoever changes a file can change the sums."""
    path = directory / "extraction.json"
    record = json.loads(path.read_text())
    for file in (one for one in sorted(directory.rglob("*")) if one.is_file() and one != path):
        data = file.read_bytes()
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        record["files"][file.relative_to(directory).as_posix()] = entry
    path.write_text(json.dumps(record))


def tuning(name: str) -> dict[str, Any]:
    """What a card reads of a tuning; every text in it is ``name``."""
    return {
        "mode": "norms",
        "base": name,
        "interrupted": True,
        "refused": [name],
        "overall": {"texts": 7, "rounds": {"ratio": 1.1, "interval": [1.0, 1.2]}},
    }


def ordered_head(name: str) -> dict[str, Any]:
    """What a card reads of an ordered head that was made, of which no mode is told; every text in it is ``name``."""
    shared = {key: value for key, value in tuning(name).items() if key not in ("mode", "interrupted")}
    return shared | dict.fromkeys(("top_k", "centroids", "rows_read", "rows_dense"), 1000)


RECORD: dict[str, Any] = {
    "format_version": 5,
    "tool": {"name": "mtp-extract", "version": "1.2.3"},
    "source": {
        "name": "gemma-4-E4B-it.litertlm",
        "size": 3659530240,
        "kind": "litertlm",
        "version": "1.7.0",
        "provenance": {
            "repository": "litert-community/gemma-4-E4B-it-litert-lm",
            "path": "gemma-4-E4B-it.litertlm",
            "revision": "main",
            "commit": "c" * 40,
        },
        "section": {
            "index": 11,
            "begin": 3614392320,
            "end": 3659530240,
            "sha256": "5" * 64,
            "found_by": "model_type",
            "signature": "serving_default",
        },
    },
    "converted_from": [],
    "known_as": "Gemma 4 E4B",
    "layout": "transformers",
    "dtype": "bf16",
    "rounded": ["BF16"],
    "rule": None,
    "geometry": {
        "backbone_hidden_size": 2560,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "vocab_size": 262144,
        "num_layers": 1,
        "num_heads": 4,
        "head_dims": [256],
        "num_kv_heads": [1],
        "layer_types": ["sliding_attention"],
        "sliding_window": 512,
        "rope": {"sliding_attention": {"theta": 10000.0, "partial_rotary_factor": 1.0}},
        "final_logit_softcap": None,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "files": {},
    "shared": [],
    "activations": {},
    "proof": None,
}


TUNING = {**tuning("a base"), "mode": "qat"}
"""A tuning."""
