"""The wheel: what is in it, and that it is what is being tested."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import mtp_extract
from mtp_extract.cli import COMMANDS
from mtp_extract.data import sample_base, sample_bundle

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")
}

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
    run_time = "flatbuffers gguf huggingface-hub jinja2 msgspec numpy rich safetensors typer xxhash"
    assert {name.replace("_", "-") for name in required} == set(run_time.split())


def test_the_sample_is_small_and_there() -> None:
    files = [sample_bundle(), *sample_base().iterdir()]
    assert sum(f.stat().st_size for f in files) < 5_000_000
    assert {f.name for f in sample_base().iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_what_imports_torch_is_not_collected_without_it() -> None:
    """A file of tests that imports it at its top is one of ``NEED_TORCH``."""
    tests = ROOT / "tests"
    text = (tests / "conftest.py").read_text(encoding="utf-8")
    listed = [tests / name for name in re.findall(r'"([^"]+)"', text.partition("NEED_TORCH = (")[2].partition(")")[0])]
    importing = re.compile("^(import|from) (torch|transformers)\\b", re.MULTILINE)
    files = [path for path in tests.rglob("test_*.py") if importing.search(path.read_text(encoding="utf-8"))]
    assert not [path for path in files if not any(path.is_relative_to(place) for place in listed)]


def test_exported_names() -> None:
    assert mtp_extract.__all__ == sorted(mtp_extract.__all__)
    for name in mtp_extract.__all__:
        assert getattr(mtp_extract, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mtp_extract.no_such_name


def quoted(key: str) -> list[str]:
    """The strings of a list in pyproject.toml; Python 3.10 has no reader of that."""
    (found,) = re.findall(rf"^{key} = \[(.*?)\]$", PROJECT, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', found)


def test_what_the_index_says_of_python_is_what_is_tested() -> None:
    tested = WORKFLOWS["check"]["jobs"]["check"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    told = [name.removeprefix(prefix) for name in quoted("classifiers") if re.fullmatch(rf"{prefix}3\.\d+", name)]
    assert told == tested
    assert f'requires-python = ">={tested[0]}"' in PROJECT
    assert re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.MULTILINE)[0] in tested


def test_a_release_is_checked_and_holds_no_token() -> None:
    release = WORKFLOWS["release"]
    assert release["permissions"] == {}
    jobs = release["jobs"]
    assert jobs["check"]["uses"] == "./.github/workflows/check.yml"
    # PyYAML reads the key "on" as true.
    assert "workflow_call" in WORKFLOWS["check"][True]
    assert set(jobs["publish"]["needs"]) == {"check", "build"}
    assert jobs["publish"]["environment"] == "pypi"
    may_write = {name: job["permissions"] for name, job in jobs.items() if job["permissions"] != {"contents": "read"}}
    assert may_write == {"publish": {"id-token": "write"}}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")


def test_the_image_gets_what_the_wheel_is_built_from() -> None:
    copied = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE))
    (readme,) = re.findall(r'^readme = "(.+)"$', PROJECT, re.MULTILINE)
    forced = re.search(r"force-include\]\n(\w+) =", PROJECT)
    assert forced is not None
    needed = {"pyproject.toml", readme, *quoted("license-files"), *quoted("packages"), forced[1]}
    used = set(re.findall(r"/src/(\S+)", DOCKERFILE))
    assert copied == needed | used == {name for name in copied if (ROOT / name).exists()}


def test_the_image_is_no_root_and_its_extra_is_there() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["mtp"]
    extras = re.findall(r"--build-arg EXTRA=(\w+)", DOCKERFILE)
    assert extras == ["validate"]
    assert all(re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE) for extra in extras)


def test_the_source_distribution_names_files_that_are_there() -> None:
    named = [name.lstrip("/") for name in quoted("include")]
    assert not [name for name in named if not (ROOT / name).exists()]
    assert {"docs", "SECURITY.md", "Dockerfile", ".dockerignore", ".github"} <= set(named)
