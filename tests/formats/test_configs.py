"""Configurations are the same to the byte as when engines were seen to load them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from helpers.variant_files import variant

from mtp_extract import extract

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text())
"""By variant and format: the first 16 digits of the SHA-256 of config.json, in the format's own type."""


@pytest.mark.parametrize(("name", "format_"), [(name, one) for name, formats in CONFIGS.items() for one in formats])
def test_a_configuration_is_what_it_was(name: str, format_: str, tmp_path: Path) -> None:
    extract(variant(name), tmp_path / "out", format=format_)
    assert hashlib.sha256((tmp_path / "out" / "config.json").read_bytes()).hexdigest()[:16] == CONFIGS[name][format_]
