"""Repositories with several bundles, such as Google's: the one with a drafter is found by the headers and named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
from helpers.commands import run_here
from helpers.hub_fixtures import E4B, published_repository
from helpers.hub_server import Content, HubServer
from helpers.make_bundle import like_published, without_drafter

import mtp_extract
from mtp_extract.errors import NoDrafterError, SourceError

WITH, GPU = f"hf://{E4B}/gemma-4-E4B-it.litertlm", f"hf://{E4B}/gemma-4-E4B-it-gpu.litertlm"
KIB = 1 << 10


@pytest.fixture
def google(hub: HubServer, sample: Path) -> HubServer:
    """A Hub with Google's repository of E4B: its file names and headers, with the contents of the sample."""
    published_repository(hub, E4B, sample)
    return hub


def test_the_one_with_a_drafter_is_taken_and_named(google: HubServer, tmp_path: Path, sample: Path) -> None:
    result = mtp_extract.extract(E4B, tmp_path / "drafter")
    assert result.record["source"]["name"] == "gemma-4-E4B-it.litertlm"
    assert any(note.startswith(f"{WITH} is the bundle of that repository") and GPU in note for note in result.notes)
    (tmp_path / "here.litertlm").write_bytes(like_published(sample))
    local = mtp_extract.extract(tmp_path / "here.litertlm", tmp_path / "local")
    assert local.notes == tuple(note for note in result.notes if WITH not in note)
    weights = "model.safetensors"
    assert (result.directory / weights).read_bytes() == (local.directory / weights).read_bytes()


def test_at_most_1_mb_is_read_beside_the_drafter(google: HubServer, sample: Path, tmp_path: Path) -> None:
    """One block is read of each file without a drafter, however large it is."""
    large = tmp_path / "large.litertlm"
    large.write_bytes(without_drafter(sample, "artisan_text_decoder"))
    with large.open("r+b") as file:
        file.truncate(1 << 31)
    google.add(E4B, "gemma-4-E4B-it-npu.litertlm", Content.of_file(large, "e" * 64))
    with mtp_extract.open(E4B) as opened:
        assert len(opened.passed_over) == 4
        assert google.sent["storage"] <= (len(opened.passed_over) + 1) * 64 * KIB
        drafter = next(section.size for section in opened.sections if section.model_type == "mtp_drafter")
        mtp_extract.extract(opened, tmp_path / "drafter")
    assert google.sent["storage"] - drafter <= 1_000_000


def test_where_none_has_a_drafter_each_is_listed_by_what_it_holds(google: HubServer, tmp_path: Path) -> None:
    del google.repos[E4B].files["gemma-4-E4B-it.litertlm"]
    google.add(E4B, "damaged.litertlm", b"LITERTLM" + bytes(100))
    with pytest.raises(NoDrafterError) as caught:
        mtp_extract.extract(E4B, tmp_path / "drafter")
    message = str(caught.value)
    assert message.startswith(f"{E4B}: expected one bundle with an MTP drafter, found none among 4: ")
    assert f"{GPU} (artisan_text_decoder)" in message
    assert f"hf://{E4B}/damaged.litertlm (.litertlm version 0.0.0" in message
    assert message.endswith(". Name one of these addresses.")
    # As the message says.
    with pytest.raises(NoDrafterError, match=r"no section holds an MTP drafter.*Files for GPU and web have none"):
        mtp_extract.extract(GPU, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_where_several_have_one_the_user_names_which(google: HubServer, sample: Path, tmp_path: Path) -> None:
    google.add(E4B, "april/gemma-4-E4B-it.litertlm", like_published(sample, april=True))
    with pytest.raises(NoDrafterError, match=r"found 2 among 5: .*april/gemma-4-E4B-it\.litertlm \(embedder, mtp_dra"):
        mtp_extract.open(E4B)
    for address in (f"{E4B}/april/gemma-4-E4B-it.litertlm", f"{E4B}/april/", WITH):
        assert mtp_extract.extract(address, tmp_path / "drafter", overwrite=True).record["proof"]


def test_what_cannot_be_reached_is_not_passed_over(google: HubServer) -> None:
    google.fault("resolve", status=404)
    with pytest.raises(SourceError, match="there is no such file"):
        mtp_extract.open(E4B)


def test_a_repository_of_hundreds_is_not_searched(google: HubServer, sample: Path) -> None:
    content = google.add("org/many", "0.litertlm", without_drafter(sample, "artisan_text_decoder"))
    for index in range(1, 65):
        google.add("org/many", f"{index}.litertlm", content)
    with pytest.raises(SourceError, match="expected at most 64 bundles, found 65"):
        mtp_extract.open("org/many")
    assert not google.sent["storage"]


def test_offline_the_cache_is_searched(google: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache has two bundles of the repository."""
    for name in ("gemma-4-E4B-it.litertlm", "gemma-4-E4B-it-gpu.litertlm"):
        huggingface_hub.hf_hub_download(E4B, name)
    asked = len(google.requests)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with mtp_extract.open(E4B) as opened:
        assert (opened.source.name, opened.passed_over) == (WITH, (GPU,))
    assert json.loads(run_here("inspect", E4B, "--json").stdout)["name"] == WITH
    with pytest.raises(SourceError, match="offline mode is on"):
        mtp_extract.open("org/gone")
    assert len(google.requests) == asked


def test_every_command_takes_the_repository(google: HubServer, tmp_path: Path) -> None:
    drafter, new = tmp_path / "drafter", tmp_path / "new.litertlm"
    assert WITH in run_command("extract", E4B, "-o", drafter, "--codes")
    assert WITH in run_command("inspect", E4B)
    assert "tensors: all 48 are derived from the file's" in run_command("inspect", drafter, "--against", E4B)
    assert WITH in run_command("insert", drafter, E4B, "-o", new)
    assert new.read_bytes() == google.repos[E4B].files["gemma-4-E4B-it.litertlm"][0].data
    assert WITH in run_command("insert", E4B, E4B, "--dry-run")


def test_its_base_is_compared_with_one_on_the_hub(google: HubServer, base: Path) -> None:
    for file in base.iterdir():
        google.add("google/gemma-4-E4B-it", file.name, file.read_bytes())
    shown = run_command("inspect", E4B, "--against", "google/gemma-4-E4B-it")
    assert "within half a step" in shown and "different" not in shown
    done = run_here("inspect", E4B, "--against", "google/gone")
    assert (done.returncode, "no such repository" in done.stderr) == (1, True)


@pytest.mark.torch
def test_a_drafter_is_validated_against_the_repository(google: HubServer, tmp_path: Path) -> None:
    extraction = mtp_extract.extract(E4B, tmp_path / "drafter")
    assert "refuted" not in run_command("validate", extraction.directory, "--source", E4B).lower()


def run_command(name: str, *arguments: object) -> str:
    """Run a command that succeeds, and return its output with lines joined."""
    done = run_here(name, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return re.sub(r"\n +", " ", done.stdout)
