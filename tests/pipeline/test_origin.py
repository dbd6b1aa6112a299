"""The origin of a drafter as commands state it: a known shape is no origin, and only a computed SHA-256 counts."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from helpers.commands import run_here
from helpers.hub_fixtures import hub  # noqa: F401 - a fixture
from helpers.hub_server import Content, HubServer
from helpers.variant_files import variant

import mtp_extract
from mtp_extract.architecture import config
from mtp_extract.litertlm import published
from mtp_extract.pipeline.inspection import inspect

SHAPE, BASE, REPO, FILE = "Gemma 4 E4B", "google/gemma-4-E4B-it", "org/mobile", "gemma.litertlm"


def output(name: str, *arguments: object, status: int = 0) -> str:
    """Run a command and return what it prints, on one line."""
    done = run_here(name, *map(str, arguments))
    assert done.returncode == status, done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch, sample: Path, tmp_path: Path) -> Path:
    """The sample, with its shape listed as that of E4B."""
    with mtp_extract.open(sample) as opened:
        shape = opened.read_drafter().config.as_json()
    listed = {"name": SHAPE, "base_model": BASE, "max_position_embeddings": 1024}
    names = ("backbone_hidden_size", "hidden_size", "head_dims", "num_kv_heads", "vocab_size", "sliding_window")
    table = copy.deepcopy(config.load_mapping("geometries"))
    table["geometries"].insert(0, listed | {name: shape[name] for name in names})
    monkeypatch.setattr(config, "load_mapping", lambda name: table)
    path = tmp_path / FILE
    path.write_bytes(sample.read_bytes())
    return path


def publish(monkeypatch: pytest.MonkeyPatch, **entry: Any) -> None:
    """List a file as a published one."""
    table = copy.deepcopy(published.load_mapping("bundles"))
    table["bundles"].append({**table["bundles"][2], "repository": REPO, "file": FILE, "note": "of May", **entry})
    monkeypatch.setattr(published, "load_mapping", lambda name: table)


def test_a_known_shape_names_no_base(shaped: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    shown = output("extract", shaped, "-o", out)
    assert f"MTP drafter of {FILE} (section 6, found by model_type), of {SHAPE}'s shape" in shown
    assert BASE not in shown
    card = (out / "README.md").read_text()
    assert BASE not in card and "Which base that is, is not said" in card and "vllm serve BASE_MODEL" in card
    shown = output("inspect", shaped)
    assert f"holds an MTP drafter of {SHAPE}'s shape; its base is not said" in shown
    with mtp_extract.open(shaped) as opened:
        assert inspect(opened).report["drafter"]["base_model"] is None


def test_a_published_file_on_the_hub_names_its_base(
    shaped: Path,
    hub: HubServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    data = shaped.read_bytes()
    publish(monkeypatch, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    hub.add(REPO, FILE, data)
    assert f"holds the drafter for {BASE}" in output("inspect", f"{REPO}/{FILE}")
    shown = output("extract", f"{REPO}/{FILE}", "-o", tmp_path / "drafter")
    assert f"MTP drafter of {FILE} (section 6, found by model_type), for {BASE}" in shown
    source = json.loads((tmp_path / "drafter" / "extraction.json").read_text())["source"]
    assert set(source["provenance"]) == {"repository", "path", "revision", "commit", "etag"}
    assert f"vllm serve {BASE}" in (tmp_path / "drafter" / "README.md").read_text()


def test_against_a_local_file_its_sum_is_compared(
    shaped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = shaped.read_bytes()
    mtp_extract.extract(shaped, tmp_path / "drafter")
    assert "SHA-256" not in output("inspect", tmp_path / "drafter", "--against", shaped)
    publish(monkeypatch, sha256="0" * 64, size=len(data))
    computed = hashlib.sha256(data).hexdigest()
    shown = output("inspect", tmp_path / "drafter", "--against", shaped)
    assert f"the bundle has the size of {REPO}/{FILE} (of May) and another SHA-256, {computed}: it was changed" in shown
    publish(monkeypatch, sha256=computed, size=len(data))
    shown = output("inspect", tmp_path / "drafter", "--against", shaped)
    assert f"the bundle is {REPO}/{FILE} (of May), by its SHA-256, for {BASE}" in shown


def test_a_copy_in_the_cache_that_is_not_what_the_hub_states_is_refused(
    sample: Path,
    hub: HubServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    data = sample.read_bytes()
    hub.add(REPO, FILE, data)
    copy_here = Path(huggingface_hub.hf_hub_download(REPO, FILE))
    mtp_extract.extract(f"{REPO}/{FILE}", tmp_path / "drafter")
    stated = Content.of(data).sha256
    assert f"SHA-256 is what the Hub states: {stated}" in output("inspect", tmp_path / "drafter", "--against", REPO)
    with copy_here.open("r+b") as file:
        # In the tokenizer, which no drafter needs.
        file.seek(50_000)
        file.write(b"\0\0")
    shown = output("inspect", tmp_path / "drafter", "--against", REPO, status=1)
    assert f"hf://{REPO}/{FILE}: expected the SHA-256 {stated}, as the Hub states it, found" in shown


def test_a_graph_without_layer_scalars_is_said_to_have_none() -> None:
    note = "no layer scalars in its graph, as in Google's files of April 2026: each is 1"
    assert note in output("inspect", variant("jax_published_noscalar"))
    assert note not in output("inspect", variant("jax_published"))
