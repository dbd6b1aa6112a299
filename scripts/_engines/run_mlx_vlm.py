"""The drafter in mlx-vlm, beside its base: ``python run_mlx_vlm.py BASE DRAFTER PROMPT TOKENS [BLOCK]``.

Prints one line of JSON. Runs in whatever interpreter has mlx-vlm; needs nothing of mtp-extract.
"""

# Not installed where the types are checked.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
from mlx_vlm.speculative.drafters import load_drafter

BLOCK = 4
"""The token at hand and 3 drafts."""


def write_readable_base(base: Path, copy: Path) -> Path:
    """Write the base as mlx-vlm 0.7.10 reads one: head dims by name, an index, and a vision tower."""
    shutil.copytree(base, copy)
    config = json.loads((base / "config.json").read_text())
    text = config["text_config"]
    for layer in text.get("per_layer_config", {}).values():
        text["global_head_dim"] = layer.get("head_dim", text["head_dim"])
    if config.get("vision_config") is None:
        config["vision_config"] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def check(base: str, directory: str, prompt: str, tokens: int, block: int = BLOCK) -> dict[str, Any]:
    """Greedy text with and without the drafter, and how many of its drafts were accepted."""
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as folder:
        model, processor = mlx_vlm.load(str(write_readable_base(Path(base), Path(folder) / "base")), strict=False)
    # An MTP drafter or an EAGLE-3 head, as its config says.
    drafter, kind = load_drafter(directory)
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
    plain = mlx_vlm.generate(model, processor, prompt, **options)
    options |= {"draft_model": drafter, "draft_kind": kind, "draft_block_size": block}
    assisted = mlx_vlm.generate(model, processor, prompt, **options)
    return {
        "version": mlx_vlm.__version__,
        "identical": plain.text == assisted.text,
        "drafted": drafter.speculative_total_drafted,
        "accepted": round(drafter.speculative_total_accepted),
        "text": assisted.text,
    }


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))))
