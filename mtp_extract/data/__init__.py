"""Data files: the mappings, and the sample with the base model it was trained with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["load_mapping", "sample_base", "sample_bundle", "sample_prompts"]

_HERE = Path(__file__).resolve().parent


@cache
def load_mapping(name: str) -> dict[str, Any]:
    """``mappings/NAME.json``, from the installed package or, in a source checkout, from the top level."""
    installed = _HERE.parent / "mappings"
    folder = installed if installed.is_dir() else _HERE.parent.parent / "mappings"
    with open(folder / f"{name}.json", encoding="utf-8") as file:
        mapping: dict[str, Any] = json.load(file)
    return mapping


def sample_bundle() -> Path:
    """The sample: a small ``.litertlm`` made with Google's tools, with a trained drafter in it."""
    return _HERE / "sample.litertlm"


def sample_base() -> Path:
    """The transformers checkpoint of the base model that the sample's drafter was trained for."""
    return _HERE / "base"


def sample_prompts() -> Path:
    """Prompts of the kind that base was trained on, of texts it has not seen; for chat prompts it is too small."""
    return sample_base() / "prompts.jsonl"
