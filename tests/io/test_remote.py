"""Byte ranges from a Hub on this machine: what is fetched, who gets the token, and how errors end."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from helpers.hub_fixtures import Patient, read_all, text_of
from helpers.hub_server import SIGNATURE, TOKEN, HubServer
from helpers.reporters import Recorder
from huggingface_hub.utils._http import default_client_factory

from mtp_extract.bundle import open_source
from mtp_extract.errors import SourceError, TruncatedError
from mtp_extract.io.http_library import import_http_library
from mtp_extract.io.remote import RemoteSource
from mtp_extract.io.source import LocalSource

REPO = "litert-community/gemma-4-E4B-it-litert-lm"
FILE = "gemma-4-E4B-it.litertlm"
URL = f"hf://{REPO}/{FILE}"
DATA = random.Random(4).randbytes(3 << 20)
PLAIN = "/files/a.litertlm"
KIB = 1 << 10


@pytest.fixture
def bundle(hub: HubServer) -> HubServer:
    """A Hub with the file in a repository, and at a URL outside all repositories, as a plain server has it."""
    hub.plain[PLAIN] = hub.add(REPO, FILE, DATA)
    return hub


def read_error(url: str) -> str:
    with pytest.raises(SourceError) as caught, open_source(url) as source:
        source.prefetch(1 << 20, 1 << 20)
        source.read(0, 2 << 20)
    for secret in (TOKEN, SIGNATURE):
        assert secret not in text_of(caught.value)
    return str(caught.value)


# --- what is read


def test_reads_what_is_there(bundle: HubServer, patience: Patient) -> None:
    """Each block is fetched once."""
    with open_source(URL) as source:
        assert isinstance(source, RemoteSource)
        for offset in range(0, 300 * KIB, 1000):
            assert source.read(offset, 16) == DATA[offset : offset + 16]
        ranges = [request.range for request in bundle.requests if request.server == "storage"]
        assert len(ranges) == len(set(ranges)) == 5
        assert bundle.sent["storage"] == 5 * 64 * KIB
        assert source.size == len(DATA)
        for offset, length in [(0, 0), (0, 1), (65_530, 20), (len(DATA) - 3, 3), (100_000, 1_500_000), (7, 2 << 20)]:
            assert source.read(offset, length) == DATA[offset : offset + length]
        with pytest.raises(TruncatedError):
            source.read(len(DATA) - 2, 3)
    assert patience.waits == []


def test_what_was_prefetched_costs_nothing_more(bundle: HubServer, patience: Patient) -> None:
    reporter = Recorder()
    with open_source(URL, reporter=reporter) as source:
        source.prefetch(1_000_001, 1_200_000)
        before = len(bundle.requests)
        for offset in range(1_000_001, 2_200_001 - 999, 997):
            assert source.read(offset, 999) == DATA[offset : offset + 999]
        assert source.read(1_000_001, 1_200_000) == DATA[1_000_001:2_200_001]
        source.prefetch(1_500_000, 10)
        assert reporter.parts == sorted(reporter.parts)
        assert reporter.parts[-1] == ("fetching", 1_200_000, 1_200_000)
        assert len(bundle.requests) == before
        source.prefetch(900_000, 200_000)
        # The blocks before the first one that is here.
        assert bundle.requests[-1].range == f"bytes={13 * 64 * KIB}-{15 * 64 * KIB - 1}"
    assert bundle.sent["storage"] == (1 + 19 + 2) * 64 * KIB


@pytest.mark.parametrize("text", ["ID", "ID@main/FILE", "hf://ID", "URL/ID/tree/main"])
def test_every_way_to_name_it(bundle: HubServer, patience: Patient, text: str) -> None:
    with open_source(text.replace("ID", REPO).replace("FILE", FILE).replace("URL", bundle.url())) as source:
        assert source.name in (URL, f"hf://{REPO}@main/{FILE}")
        assert source.read(1000, 20) == DATA[1000:1020]
        digest = hashlib.sha256(DATA).hexdigest()
        address = {"repository": REPO, "path": FILE, "revision": "main"}
        assert source.provenance == address | {"commit": "c" * 40, "etag": digest}


def test_several_are_listed(bundle: HubServer) -> None:
    bundle.add(REPO, "sub/other.litertlm", DATA)
    assert f"expected one .litertlm, found {URL}, hf://{REPO}/sub/other.litertlm. Name a" in read_error(REPO)
    with open_source(f"{bundle.url()}/{REPO}/tree/main/sub") as source:
        assert source.name == f"hf://{REPO}@main/sub/other.litertlm"


def test_what_is_here_and_what_is_not(bundle: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "models/a.litertlm: cannot be opened: No such file" in read_error("models/a.litertlm")
    Path(REPO).parent.mkdir()
    Path(REPO).write_bytes(b"here")
    with open_source(REPO) as source:
        assert source.read(0, 4) == b"here"
    assert bundle.requests == []
    assert read_error("org/gone").startswith("hf://org/gone: there is no such repository")


def test_a_file_outside_lfs(hub: HubServer, patience: Patient) -> None:
    hub.add("org/small", "empty.tflite", b"")
    assert "the file is empty" in read_error("hf://org/small/empty.tflite")
    content = hub.add("org/small", "a.tflite", DATA[:100_000], lfs=False)
    with open_source("hf://org/small/a.tflite") as source:
        assert source.read(0, source.size) == DATA[:100_000]
        assert source.provenance["etag"] == content.git


def test_a_plain_url(bundle: HubServer, patience: Patient) -> None:
    url = f"{bundle.url().replace('//', '//user:password@')}{PLAIN}?key={SIGNATURE}"
    with open_source(url) as source:
        assert source.name == bundle.url() + PLAIN
        assert source.provenance == {"url": source.name, "etag": f'"{bundle.plain[PLAIN].sha256}"'}
        assert source.read(1 << 20, 999) == DATA[1 << 20 : (1 << 20) + 999]
    assert TOKEN not in str([request.authorization for request in bundle.requests])
    assert read_all(bundle.url() + PLAIN) == DATA


def test_the_token_stays_with_the_hub(bundle: HubServer, patience: Patient) -> None:
    assert read_all(URL) == DATA
    assert {request.authorization for request in bundle.requests if request.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {request.authorization for request in bundle.requests if request.server == "storage"} == {None}
    bundle.requests.clear()
    open_source(REPO, token=False).close()
    assert {request.authorization for request in bundle.requests} == {None}


# --- faults that go away


# The first request to "resolve" asks for the file's commit, the next ones for ranges.
@pytest.mark.parametrize(("where", "skip"), [("resolve", 0), ("resolve", 1), ("storage", 0)])
@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_goes_away_is_asked_again(
    bundle: HubServer, patience: Patient, where: str, skip: int, status: int
) -> None:
    bundle.fault(where, status=status, times=3, skip=skip, headers={"Retry-After": "3600"})
    assert read_all(URL) == DATA
    assert patience.waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(("where", "skip"), [("storage", 0), ("storage", 1), ("plain", 1)])
@pytest.mark.parametrize("status", [200, 416])
def test_a_range_that_is_denied_for_a_while_is_asked_for_again(
    bundle: HubServer, patience: Patient, where: str, status: int, skip: int
) -> None:
    """A cache may have lost the file, or send all of it; a plain server has sent ranges before."""
    bundle.fault(where, status=status, headers={"Content-Range": "bytes */0"}, skip=skip)
    assert read_all(bundle.url() + PLAIN if where == "plain" else URL) == DATA
    assert patience.waits == [0.5]


def test_a_lost_connection_is_resumed_where_it_broke(bundle: HubServer, patience: Patient) -> None:
    bundle.fault("storage", cut=1_000_000, skip=1)
    bundle.fault("storage", cut=0, skip=1)
    bundle.fault("storage", drop=True, skip=1)
    assert read_all(URL) == DATA
    ranges = [request.range for request in bundle.requests if request.server == "storage"]
    begins = [int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges if text]
    # An incomplete block is fetched again.
    assert begins == [0, 65_536, *[16 * 65_536] * 3]
    assert bundle.sent["storage"] == len(DATA) + 1_065_536 - 16 * 65_536


def test_a_connection_that_breaks_again_and_again_gets_there_if_it_brings_enough(
    bundle: HubServer, patience: Patient
) -> None:
    data = random.Random(5).randbytes(16 << 20)
    bundle.add(REPO, "large.litertlm", data)
    bundle.fault("storage", cut=(1 << 20) + 9, skip=1, times=14)
    assert read_all(f"hf://{REPO}/large.litertlm") == data


def test_an_expired_signature_is_renewed(bundle: HubServer, patience: Patient) -> None:
    bundle.fault("storage", status=403, skip=1)
    assert read_all(URL) == DATA
    of_hub = [request for request in bundle.requests if request.server == "hub"]
    assert [request.method for request in of_hub] == ["HEAD", "GET", "GET", "GET"]
    assert all("/resolve/" + "c" * 40 in request.path for request in of_hub[1:])


@pytest.mark.parametrize(
    ("where", "fault", "text", "waits"),
    [
        ("resolve", {"status": 503}, "is not available (503) (attempt 5, the last). Try again later", 4),
        ("storage", {"status": 416, "skip": 1}, "says that the file ends before byte 1048576 (416)", 6),
        ("storage", {"status": 200}, "found another answer (200)", 6),
        ("resolve", {"status": 429, "skip": 1}, "limits the rate of requests (429)", 6),
        ("storage", {"status": 503}, "is not available (503)", 6),
        ("storage", {"status": 403}, "the server refuses access (403)", 6),
        ("storage", {"cut": 10, "skip": 1}, "connection was lost", 6),
    ],
)
def test_what_stays_ends_in_one_line(
    bundle: HubServer, patience: Patient, where: str, fault: dict[str, Any], text: str, waits: int
) -> None:
    bundle.fault(where, **fault, times=99)
    assert text in read_error(URL)
    assert len(patience.waits) == waits


def test_more_than_was_announced(bundle: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP library may not check the length of a response."""
    keep = RemoteSource._keep
    monkeypatch.setattr(RemoteSource, "_keep", lambda self, pieces, begin, _, show: keep(self, pieces, begin, 10, show))
    assert "more bytes than it announced" in read_error(URL)


def test_slow_but_steady_is_no_trickle(bundle: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer takes longer than a window, and enough bytes arrive in each."""
    monkeypatch.setattr("mtp_extract.io.remote._LEAST", 2)
    patience.per_look = 31.0
    assert read_all(URL) == DATA
    assert patience.waits == []


def test_a_branch_that_moves_does_not_move_the_reader(bundle: HubServer, patience: Patient) -> None:
    with open_source(URL) as source:
        bundle.repos[REPO].older["c" * 40] = dict(bundle.repos[REPO].files)
        bundle.add(REPO, FILE, DATA[::-1])
        bundle.repos[REPO].commit = "d" * 40
        assert source.read(1 << 20, 100) == DATA[1 << 20 : (1 << 20) + 100]
        assert source.provenance["commit"] == "c" * 40


@pytest.mark.parametrize(("status", "text"), [(401, "refuses access"), (403, "refuses access"), (404, "no such file")])
def test_what_a_plain_server_refuses(bundle: HubServer, patience: Patient, status: int, text: str) -> None:
    bundle.fault("plain", status=status)
    assert text in read_error(bundle.url() + PLAIN)


def test_a_copy_in_the_hubs_cache_is_used(
    bundle: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is offline, and by its path or commit."""
    with open_source(URL) as source:
        online = source.provenance
    path = huggingface_hub.hf_hub_download(REPO, FILE)
    sent = bundle.sent["storage"]
    with open_source(URL) as source:
        assert isinstance(source, LocalSource)
        assert (source.name, source.provenance, source.read(5, 5)) == (URL, online, DATA[5:10])
    assert bundle.sent["storage"] == sent
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(bundle.requests)
    for name in (URL, REPO, f"hf://{REPO}@main/{FILE}", f"hf://{REPO}@{'c' * 40}/{FILE}", path):
        with open_source(name) as source:
            assert source.read(0, 100) == DATA[:100]
            assert source.name == {path: f"hf://{REPO}@{'c' * 40}/{FILE}", REPO: URL}.get(name, name)
            assert {**source.provenance, "revision": "main"} == online
    for name in (f"hf://{REPO}/other.litertlm", "org/gone", f"{REPO}@v2", bundle.url() + "/a.litertlm"):
        assert "offline mode is on (HF_HUB_OFFLINE)" in read_error(name)
    assert len(bundle.requests) == asked


def test_a_client_of_the_applications_own(bundle: HubServer, patience: Patient) -> None:
    """Its class need not be called Client, nor come from huggingface_hub's HTTP library."""

    class Own:
        def __init__(self) -> None:
            self._client: Any = import_http_library().Client()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

    huggingface_hub.set_client_factory(Own)  # type: ignore[arg-type]
    try:
        assert read_all(URL) == DATA
        assert "no such file" in read_error(f"hf://{REPO}/other.litertlm")
        assert "cannot be reached" in read_error("http://127.0.0.1:1/a")
    finally:
        huggingface_hub.set_client_factory(default_client_factory)


def test_no_room_for_what_is_fetched(
    bundle: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as context:
        context.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        assert "Set TMPDIR" in read_error(URL)
    with monkeypatch.context() as context:
        context.setattr("tempfile.TemporaryFile", lambda prefix: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
        assert "No space left on device. Set TMPDIR" in read_error(URL)
