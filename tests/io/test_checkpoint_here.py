"""Checkpoints named by an id of the Hub: which repository is one, what is fetched, and its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from helpers.commands import run_here
from helpers.first_pair import first_bundle
from helpers.hub_fixtures import Patient, text_of
from helpers.hub_server import TOKEN, HubServer
from seam import verify

import mtp_extract
from mtp_extract.data import sample_prompts
from mtp_extract.errors import CheckpointError, SourceError
from mtp_extract.hub.upload import plan_upload
from mtp_extract.io.address import name_checkpoint
from mtp_extract.io.opening import fetch_checkpoint
from mtp_extract.pipeline.check import list_directory_files

REPO = "org/gemma-mtp"


@pytest.fixture
def published(hub: HubServer, extracted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The extracted drafter on the Hub, with an empty current directory."""
    for name in list_directory_files(extracted):
        hub.add(REPO, name, (extracted / name).read_bytes(), lfs=name.endswith(".safetensors"))
    hub.add(REPO, ".gitattributes", b"*.safetensors filter=lfs\n", lfs=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


@pytest.mark.parametrize("text", ["hf://ID@main", "URL/ID/tree/main"])
def test_a_repository_is_a_directory(
    published: HubServer, text: str, extracted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(fetch_checkpoint(text.replace("ID", REPO).replace("URL", published.url())))
    assert list(list_directory_files(place)) == list(list_directory_files(extracted))
    assert verify(place) == verify(extracted)
    assert name_checkpoint(place) == "gemma-mtp"
    # An address in a Path has lost a slash.
    assert fetch_checkpoint(Path(f"hf://{REPO}")) == str(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch_checkpoint(REPO) == str(place)


def test_it_is_converted_as_the_directory_is(published: HubServer, extracted: Path, tmp_path: Path) -> None:
    converted = mtp_extract.convert(REPO, format="gguf")
    assert converted.directory == Path("gemma-mtp-gguf")
    mtp_extract.convert(extracted, tmp_path / "gguf", format="gguf")
    (from_hub,) = converted.directory.glob("*.gguf")
    (from_directory,) = (tmp_path / "gguf").glob("*.gguf")
    assert (from_hub.name, from_hub.read_bytes()) == (from_directory.name, from_directory.read_bytes())


def test_inspecting_tells_a_checkpoint_from_a_bundle(published: HubServer) -> None:
    def inspect() -> Any:
        return json.loads(run_here("inspect", REPO, "--json").stdout)

    assert inspect()["extraction"]["layout"] == "transformers"
    published.add(REPO, "gemma.litertlm", first_bundle().read_bytes())
    assert inspect()["kind"] == "litertlm"
    assert fetch_checkpoint(REPO, or_bundle=True) == REPO


def test_a_folder_of_a_repository(published: HubServer, extracted: Path) -> None:
    for name in list_directory_files(extracted):
        published.add("org/several", f"bf16/{name}", (extracted / name).read_bytes())
    published.add("org/several", "a.gguf", b"")
    place = Path(fetch_checkpoint("org/several/bf16/"))
    assert verify(place)
    assert name_checkpoint(place) == "bf16"
    assert fetch_checkpoint("org/several/bf16") == str(place)
    assert not [request for request in published.requests if "a.gguf" in request.path]
    # A folder is not found by the beginning of its name.
    for name in ("bf", "a.gguf"):
        with pytest.raises(SourceError, match=rf"{name}: expected a folder with a config\.json, found no files"):
            fetch_checkpoint(f"org/several/{name}")


def test_what_is_not_fetched(published: HubServer) -> None:
    with pytest.raises(SourceError, match=r"expected at most 0\.0 GB .*, found 0\.0 GB"):
        fetch_checkpoint(REPO, largest=1000)
    with pytest.raises(SourceError, match=r"^hf://org/gone: .*no such repository"):
        fetch_checkpoint("org/gone")
    assert not [request for request in published.requests if "/resolve/" in request.path]
    asked = len(published.requests)
    assert fetch_checkpoint("gone") == "gone"
    Path("org/gemma-mtp").mkdir(parents=True)
    assert fetch_checkpoint(REPO) == REPO
    assert len(published.requests) == asked


ADAPTER = {
    "adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}).encode(),
    "adapter_model.safetensors": bytes(8),
    "README.md": b"# An adapter",
}
"""The files that PEFT writes and uploads."""


@pytest.mark.parametrize("on_hub", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        "inspect BUNDLE --against ADAPTER",
        "inspect ADAPTER",
        "insert ADAPTER BUNDLE --dry-run",
        "insert DIR BUNDLE --dry-run --base ADAPTER",
        "convert ADAPTER --for gguf",
        "validate DIR --base ADAPTER",
        "tune DIR --base ADAPTER --prompts PROMPTS",
        "doctor DIR --base ADAPTER --prompts PROMPTS",
    ],
)
def test_an_adapter_is_to_be_merged_into_its_base(
    published: HubServer, extracted: Path, tmp_path: Path, command: str, on_hub: bool
) -> None:
    (tmp_path / "adapter").mkdir()
    for name, content in ADAPTER.items():
        published.add("org/adapter", name, content)
        (tmp_path / "adapter" / name).write_bytes(content)
    places = {
        "ADAPTER": "org/adapter" if on_hub else str(tmp_path / "adapter"),
        "BUNDLE": str(first_bundle()),
        "DIR": str(extracted),
        "PROMPTS": str(sample_prompts()),
    }
    done = run_here(*(places.get(word, word) for word in command.split()))
    expected = "adapter: a LoRA adapter (adapter_config.json); merge it into its base first"
    assert (done.returncode, expected in " ".join(done.stderr.split())) == (1, True), done.stderr
    assert not [request for request in published.requests if "adapter/resolve/" in request.path], "nothing is fetched"


def test_another_site_has_none() -> None:
    """The message does not show the login in the address."""
    text = "https://me:secret@example.org/x"
    for source in (text, Path(text)):
        with pytest.raises(SourceError, match=r"^https://example\.org/x: expected a directory or an id"):
            fetch_checkpoint(source)
    assert fetch_checkpoint(text, or_bundle=True) == text


def test_only_links_of_the_cache_are_followed(published: HubServer, extracted: Path) -> None:
    """Any other link is refused in place of a file that the record lists, even one to the same content."""
    place = Path(fetch_checkpoint(REPO))
    assert verify(place)
    (place / "config.json").unlink()
    (place / "config.json").symlink_to(extracted / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is missing, or a link"):
        plan_upload(place)


# The requests that fetch a directory, in this order; before version 2 huggingface_hub lists files by the first.
DIRECTORY_REQUESTS = ["info", *([] if huggingface_hub.__version__.startswith("1.") else ["tree"]), "resolve", "storage"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "The Hub says: Enable access to gated repositories in the settings of … to view this one."),
        (429, "the server limits the rate of requests (429) (attempt 5, the last). Try again later."),
        (503, "the server is not available (503) (attempt 5, the last). Try again later."),
    ],
)
@pytest.mark.parametrize("where", DIRECTORY_REQUESTS)
def test_a_directory_that_cannot_be_fetched_says_why(
    published: HubServer, patience: Patient, where: str, status: int, message: str
) -> None:
    """The message does not claim that offline mode is on."""
    words = f"Enable access to gated repositories in the settings of {TOKEN} to view this one."
    published.fault(where, status=status, headers={"X-Error-Message": words}, times=10_000)
    with pytest.raises(SourceError) as caught:
        fetch_checkpoint(REPO)
    assert str(caught.value).startswith(f"hf://{REPO}: ")
    assert str(caught.value).endswith(message)
    assert TOKEN not in text_of(caught.value)


@pytest.mark.parametrize("where", DIRECTORY_REQUESTS)
def test_a_directory_is_fetched_once_the_hub_answers(
    published: HubServer, patience: Patient, extracted: Path, where: str
) -> None:
    published.fault(where, status=503, times=2)
    assert verify(Path(fetch_checkpoint(REPO))) == verify(extracted)


def test_a_directory_that_is_not_in_the_cache_is_not_had_offline(
    published: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context, pytest.raises(SourceError, match="the server cannot be reached"):
        context.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
        fetch_checkpoint(REPO)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"offline mode is on \(HF_HUB_OFFLINE\)"):
        fetch_checkpoint(REPO)


def test_storage_that_fails_in_its_own_library_is_told_as_such(
    published: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hf_xet raises RuntimeError for it."""
    failure = RuntimeError(f"CAS error: 503 for https://cas.test/x?sig={TOKEN}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=failure))
    with pytest.raises(SourceError, match=r"the storage failed: CAS error: 503 for https://cas\.test/x \(attempt 5"):
        fetch_checkpoint(REPO)
