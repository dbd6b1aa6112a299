"""Sources as users write them: ids of the Hub, URLs from a browser, files of its cache, and what is neither."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
from helpers.hub_server import HubServer

from mtp_extract.bundle import open_source
from mtp_extract.errors import SourceError

REPO, FILE, DATA = "org/gemma-litert-lm", "gemma.litertlm", bytes(range(256)) * 1000


@pytest.fixture
def one(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A repository with one bundle, and an empty folder to stand in."""
    hub.add(REPO, FILE, DATA)
    hub.add(REPO, "README.md", b"a card", lfs=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


@pytest.mark.parametrize("text", ["ID", "ID@main/FILE", "hf://ID", "URL/ID/tree/main"])
def test_every_way_to_name_it(one: HubServer, text: str) -> None:
    with open_source(text.replace("ID", REPO).replace("FILE", FILE).replace("URL", one.url())) as source:
        assert source.name in (f"hf://{REPO}/{FILE}", f"hf://{REPO}@main/{FILE}")
        assert source.read(1000, 20) == DATA[1000:1020]
        assert (source.provenance["repository"], source.provenance["path"]) == (REPO, FILE)


def test_no_token_where_none_is_to_be_used(one: HubServer) -> None:
    with open_source(REPO, token=False) as source:
        assert source.name == f"hf://{REPO}/{FILE}"
    assert {request.authorization for request in one.requests} == {None}
    one.repos[REPO].private = True
    with pytest.raises(SourceError, match="no such repository"):
        open_source(REPO, token=False)


def test_several_are_listed(one: HubServer) -> None:
    one.add(REPO, "sub/other.litertlm", DATA)
    with pytest.raises(
        SourceError, match=rf"expected one \.litertlm, found hf://{REPO}/{FILE}, hf://{REPO}/sub/other\."
    ):
        open_source(REPO)
    with open_source(f"{one.url()}/{REPO}/tree/main/sub") as source:
        assert source.name == f"hf://{REPO}@main/sub/other.litertlm"


def test_neither_file_nor_id(one: HubServer) -> None:
    with pytest.raises(SourceError, match=r"^hf://org/gone: .*no such repository"):
        open_source("org/gone")
    asked = len(one.requests)
    with pytest.raises(SourceError, match=r"^models/a\.litertlm: cannot be opened: No such file"):
        open_source("models/a.litertlm")
    assert len(one.requests) == asked


def test_a_file_here_comes_first(one: HubServer) -> None:
    Path(REPO).parent.mkdir()
    Path(REPO).write_bytes(b"here")
    with open_source(REPO) as source:
        assert source.read(0, 4) == b"here"
    assert one.requests == []


def test_offline_the_cache_answers(one: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub.hf_hub_download(REPO, FILE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with open_source(f"{REPO}/{FILE}") as source:
        assert (source.name, source.read(7, 3)) == (f"hf://{REPO}/{FILE}", DATA[7:10])
        kept = source.provenance
    assert (kept["commit"], kept["revision"], len(kept["sha256"])) == ("c" * 40, "main", 64)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        open_source(REPO)
    # Its own path in the cache is the same file of the same repository.
    path = huggingface_hub.try_to_load_from_cache(REPO, FILE)
    with open_source(path) as source:
        assert source.name == f"hf://{REPO}@{'c' * 40}/{FILE}"
        assert source.provenance == {**kept, "revision": "c" * 40}
