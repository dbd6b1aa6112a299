"""The wheel: what is in it, and that it is what is being tested."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

import mtp_extract
from mtp_extract.cli import COMMANDS
from mtp_extract.data import load_mapping, sample_base, sample_bundle

installed = pytest.mark.skipif(
    "MTP_EXTRACT_TEST_INSTALLED" not in os.environ, reason="scripts/check.sh tests the installed wheel"
)


@installed
def test_the_wheel_is_what_is_tested() -> None:
    package = Path(mtp_extract.__file__).parent
    assert "site-packages" in package.parts
    assert (package / "mappings").is_dir()
    assert (package / "py.typed").exists()


@installed
def test_metadata() -> None:
    distribution = metadata.distribution("mtp-extract")
    assert distribution.version == mtp_extract.__version__
    scripts = {e.name: e.load() for e in distribution.entry_points if e.group == "console_scripts"}
    assert set(scripts) == {"mtp", *(f"mtp-{name}" for name in COMMANDS)}
    required = {r.split(";")[0].split(">")[0].strip() for r in distribution.requires or () if "extra" not in r}
    run_time = {
        "aiohttp",
        "flatbuffers",
        "gguf",
        "huggingface-hub",
        "jinja2",
        "msgspec",
        "numpy",
        "rich",
        "typer",
        "xxhash",
    }
    assert {name.replace("_", "-") for name in required} == {*run_time, "xxhash"}


@pytest.mark.parametrize("file", ["card.md", "compared.md", "eagle3.md", "page.css", "page.html"])
def test_templates_are_there(file: str) -> None:
    assert (Path(mtp_extract.__file__).parent / "report" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["roles", "geometries", "tflite_schema", "bundles"])
def test_mappings_are_there(name: str) -> None:
    assert load_mapping(name)


def test_the_sample_is_small_and_there() -> None:
    files = [sample_bundle(), *sample_base().iterdir()]
    assert sum(f.stat().st_size for f in files) < 5_000_000
    assert {f.name for f in sample_base().iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_exported_names() -> None:
    assert mtp_extract.__all__ == sorted(mtp_extract.__all__)
    for name in mtp_extract.__all__:
        assert getattr(mtp_extract, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mtp_extract.no_such_name
