"""A bundle of 4 GB behind a Hub: only the drafter is fetched, and the result is the local one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.bounds import HANG
from helpers.hub_fixtures import Patient
from helpers.hub_server import TOKEN, Content, HubServer

import mtp_extract
from mtp_extract.checkpoint.check import verify_against
from mtp_extract.data import sample_bundle
from mtp_extract.errors import CheckpointError
from mtp_extract.io.remote import RemoteSource, open_remote
from mtp_extract.io.source import LocalSource
from mtp_extract.litertlm.container import read_bundle

REPO, FILE = "org/large", "large.litertlm"
URL = f"hf://{REPO}/{FILE}"
BASE = 3_614_392_320
DRAFTER = 45_137_920
MIB = 1 << 20

_PEAK = """
import re, sys
import huggingface_hub.constants as constants
constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
from mtp_extract.bundle import open_source
from mtp_extract.litertlm.container import read_bundle
import hashlib
with open_source(sys.argv[1]) as source:
    section = next(s for s in read_bundle(source).sections if s.model_type == "mtp_drafter")
    source.prefetch(section.begin, section.size)
    digest = hashlib.sha256()
    for at in range(section.begin, section.end, 1 << 20):
        digest.update(source.read(at, min(1 << 20, section.end - at)))
# Not getrusage: its peak begins with what the parent held when it forked.
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)
print(digest.hexdigest(), source.fetched, peak)
"""


def grown(path: Path, begin: int, size: int) -> str:
    """The sample with its drafter section moved to ``begin`` and padded to ``size``, in a sparse file.

    The header is the sample's with two numbers changed: where the last section begins and ends. Returns the
    SHA-256 of the new section.
    """
    data = sample_bundle().read_bytes()
    with LocalSource(sample_bundle()) as source:
        section = next(s for s in read_bundle(source).sections if s.model_type == "mtp_drafter")
    header = bytearray(data[:16384])
    for old, new in ((section.begin, begin), (section.end, begin + size)):
        number = old.to_bytes(8, "little")
        assert header.count(number) == 1
        at = header.index(number)
        header[at : at + 8] = new.to_bytes(8, "little")
    drafter = data[section.begin : section.end]
    with open(path, "wb") as file:
        file.write(header + data[16384 : section.begin])
        file.seek(begin)
        file.write(drafter)
        file.truncate(begin + size)
    return hashlib.sha256(drafter + bytes(size - len(drafter))).hexdigest()


@pytest.fixture
def large(hub: HubServer, tmp_path: Path) -> tuple[HubServer, Path, str]:
    path = tmp_path / FILE
    section = grown(path, BASE, DRAFTER)
    # Hashing 4 GB of zeros would show nothing: any name does for the blob.
    hub.add(REPO, FILE, Content(path, "a" * 64))
    return hub, path, section


def test_only_the_drafter_is_fetched(large: tuple[HubServer, Path, str], patience: Patient, tmp_path: Path) -> None:
    hub, path, section = large
    assert path.stat().st_size > 3.6e9
    with open_remote(URL, policy=patience.policy) as source:
        assert isinstance(source, RemoteSource)
        remote = mtp_extract.extract(source, tmp_path / "remote")
        assert source.fetched < DRAFTER + MIB
    assert hub.sent["storage"] < DRAFTER + MIB
    local = mtp_extract.extract(path, tmp_path / "local")
    names = {file.name for file in local.directory.iterdir()}
    assert names == {file.name for file in remote.directory.iterdir()}
    for name in names - {"extraction.json", "README.md"}:
        assert (local.directory / name).read_bytes() == (remote.directory / name).read_bytes(), name
    here, there = (json.loads((result.directory / "extraction.json").read_text()) for result in (local, remote))
    assert there["source"]["provenance"] == {
        "repository": REPO,
        "path": FILE,
        "revision": "main",
        "commit": "c" * 40,
        "etag": "a" * 64,
        "sha256": "a" * 64,
    }
    assert there["source"]["section"]["sha256"] == section
    # Where it was read from is the one thing that may differ, and the card, which states it.
    for record in (here, there):
        record["source"].pop("provenance")
        record["files"].pop("README.md")
    assert here == there


def test_a_checkpoint_is_checked_against_a_remote_bundle(
    large: tuple[HubServer, Path, str], patience: Patient, tmp_path: Path
) -> None:
    hub, path, _ = large
    result = mtp_extract.extract(path, tmp_path / "local")
    with mtp_extract.open(open_remote(URL, policy=patience.policy)) as opened:
        assert verify_against(result.directory, opened).tensors == len(result.record["tensors"])
    with path.open("r+b") as file:
        file.seek(result.record["tensors"]["post_projection.weight"]["source"]["offset"])
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    hub.repos[REPO].commit = "d" * 40
    with (
        mtp_extract.open(open_remote(URL, policy=patience.policy)) as opened,
        pytest.raises(CheckpointError, match=r"post_projection\.weight"),
    ):
        verify_against(result.directory, opened)


def test_memory_stays_bounded(large: tuple[HubServer, Path, str], tmp_path: Path) -> None:
    hub, _, section = large
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url(),
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, URL], env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    digest, fetched, peak = done.stdout.split()
    assert digest == section
    assert int(fetched) < DRAFTER + MIB
    assert int(peak) * 1024 < 250_000_000
    assert TOKEN not in done.stdout + done.stderr
