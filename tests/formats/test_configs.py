"""Configurations are what they were when engines were seen to load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.variant_files import variant

from mtp_extract import extract

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text())
"""By variant: ``config.json`` in transformers' format, and by packed format what it has beyond that."""

GENERATION = {"is_assistant": True, "num_assistant_tokens": 6, "num_assistant_tokens_schedule": "constant"}


def merged(document: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``document`` with ``more`` in it, object by object."""
    inner = {key: merged(document[key], value) for key, value in more.items() if isinstance(document.get(key), dict)}
    return {**document, **more, **inner}


@pytest.mark.parametrize(("name", "format_"), [(name, kind) for name, formats in CONFIGS.items() for kind in formats])
def test_a_configuration_is_what_it_was(name: str, format_: str, tmp_path: Path) -> None:
    extract(variant(name), tmp_path / "out", format=format_)

    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*config.json")}
    assert written["config"] == merged(CONFIGS[name]["transformers"], CONFIGS[name][format_])
    assert written["generation_config"] == GENERATION
