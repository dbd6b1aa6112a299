"""Locate data files: the mappings, and the sample bundle with the base model that it was trained with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["load_mapping", "sample_base", "sample_bundle", "sample_prompts"]

_HERE = Path(__file__).resolve().parent


@cache
def load_mapping(name: str) -> dict[str, Any]:
    """Load ``mappings/NAME.json`` from the installed package or from the top level of a source checkout."""
    installed = _HERE.parent / "mappings"
    folder = installed if installed.is_dir() else _HERE.parent.parent / "mappings"
    with open(folder / f"{name}.json", encoding="utf-8") as file:
        mapping: dict[str, Any] = json.load(file)
    return mapping


def sample_bundle() -> Path:
    """Return the path of the sample bundle, a small ``.litertlm`` with a trained drafter, made with Google's tools."""
    return _HERE / "sample.litertlm"


def sample_base() -> Path:
    """Return the path of the base model of the sample's drafter, a transformers checkpoint."""
    return _HERE / "base"


def sample_prompts() -> Path:
    """Return the path of prompts for the sample's base: held-out texts of the kind that it was trained on. The base is
    too small for chat prompts.
    """
    return sample_base() / "prompts.jsonl"
