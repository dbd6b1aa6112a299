"""A bundle of 4 GB on a Hub: only the drafter is fetched, and the result equals that of the local file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers.bounds import HANG
from helpers.first_pair import first_base, first_bundle
from helpers.hub_fixtures import Patient
from helpers.hub_server import TOKEN, Content, HubServer
from helpers.make_bundle import DRAFTER as MODEL_TYPE
from helpers.make_bundle import Part, bundle, drafter_of, load, pack, parts_of
from seam import verify_against

import mtp_extract
from mtp_extract.bundle import open_source
from mtp_extract.errors import NoDrafterError
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.io.remote import RemoteSource
from mtp_extract.pipeline.inspection import inspect

REPO, FILE = "org/large", "large.litertlm"
URL = f"hf://{REPO}/{FILE}"
BASE = 3_614_392_320
DRAFTER = 45_137_920
MIB = 1 << 20
BLOCK = 1 << 16

_PEAK = """
import re, sys
import huggingface_hub.constants as constants
constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
from mtp_extract.bundle import open_source
from mtp_extract.litertlm.container import read_bundle_header
import hashlib
with open_source(sys.argv[1]) as source:
    section = next(s for s in read_bundle_header(source).sections if s.model_type == "mtp_drafter")
    source.prefetch(section.begin, section.size)
    digest = hashlib.sha256()
    for at in range(section.begin, section.end, 1 << 20):
        digest.update(source.read(at, min(1 << 20, section.end - at)))
# Not getrusage: its peak begins with what the parent held when it forked.
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)
print(digest.hexdigest(), peak)
"""


def grow_sample(path: Path, begin: int, size: int) -> str:
    """Write the sample with its last section, the drafter, moved to ``begin`` and padded to ``size``, as a sparse file.

    Returns the SHA-256 of the new section.
    """
    *others, drafter = parts_of(first_bundle())
    with mtp_extract.open(first_bundle()) as opened:
        ranges = [(section.begin, section.end) for section in opened.sections[:-1]]
    with path.open("wb") as file:
        file.write(bundle([*others, replace(drafter, data=b"")], ranges=[*ranges, (begin, begin + size)]))
        file.seek(begin)
        file.write(drafter.data)
        file.truncate(begin + size)
    return hashlib.sha256(drafter.data.ljust(size, b"\0")).hexdigest()


@pytest.fixture
def large(hub: HubServer, tmp_path: Path) -> tuple[HubServer, Path, str]:
    path = tmp_path / FILE
    section = grow_sample(path, BASE, DRAFTER)
    hub.add(REPO, FILE, Content.of_file(path, "a" * 64))
    return hub, path, section


def test_only_the_drafter_is_fetched(large: tuple[HubServer, Path, str], patience: Patient, tmp_path: Path) -> None:
    hub, path, section = large
    assert path.stat().st_size > 3.6e9
    with open_source(URL) as source:
        assert isinstance(source, RemoteSource)
        remote = mtp_extract.extract(source, tmp_path / "remote")
    assert hub.sent["storage"] <= DRAFTER + 3 * BLOCK
    local = mtp_extract.extract(path, tmp_path / "local")
    names = {file.name for file in local.directory.iterdir()}
    assert names == {file.name for file in remote.directory.iterdir()}
    for name in names - {"extraction.json", "README.md"}:
        assert (local.directory / name).read_bytes() == (remote.directory / name).read_bytes(), name
    here, there = (json.loads((result.directory / "extraction.json").read_text()) for result in (local, remote))
    address = {"repository": REPO, "path": FILE, "revision": "main"}
    assert there["source"]["provenance"] == address | {"commit": "c" * 40, "etag": "a" * 64}
    assert there["source"]["section"]["sha256"] == section
    # Only the provenance may differ, and the card, which states it.
    for record in (here, there):
        record["source"].pop("provenance")
        record["files"].pop("README.md")
    assert here == there
    with mtp_extract.open(URL) as opened:
        assert all(check.passed for check in verify_against(local.directory, opened))


def store_inline(count: int) -> tuple[bytes, int]:
    """Return the sample's drafter with ``count`` buffers of 1 MiB more in its flatbuffer, and its structure's size."""
    model = load(drafter_of(first_bundle()))
    structure = len(pack(model))
    for _ in range(count):
        buffer = schema.BufferT(data=np.zeros(MIB, np.uint8))
        model.buffers.append(buffer)
    # A block around the length of each, and two where it crosses from one into the next.
    return pack(model), structure + count * 2 * BLOCK


def append_weights(count: int) -> tuple[bytes, int]:
    """Return the sample's drafter with its weights ``count`` MiB apart after the flatbuffer, and the size of that."""
    model = load(drafter_of(first_bundle()))
    moved = [buffer for buffer in model.buffers if buffer.data is not None and len(buffer.data) >= 1 << 12]
    stored = [bytes(buffer.data) for buffer in moved]
    for buffer, data in zip(moved, stored, strict=True):
        buffer.data, buffer.offset, buffer.size = None, 1 << 40, len(data)
    structure = len(pack(model))
    begins = [-(-structure // BLOCK) * BLOCK + at * count * MIB // len(moved) for at in range(len(moved))]
    for buffer, begin in zip(moved, begins, strict=True):
        buffer.offset = begin
    result = bytearray(begins[-1] + len(stored[-1]))
    result[:structure] = pack(model)
    for begin, data in zip(begins, stored, strict=True):
        result[begin : begin + len(data)] = data
    return bytes(result), structure


@pytest.mark.parametrize("build", [store_inline, append_weights])
def test_looking_fetches_structure_and_extracting_fetches_once(
    hub: HubServer, tmp_path: Path, build: Callable[[int], tuple[bytes, int]]
) -> None:
    model, structure = build(12)
    path = tmp_path / FILE
    path.write_bytes(bundle([Part(1, bytes(9)), Part(3, model, MODEL_TYPE)]))
    hub.add(REPO, path.name, path.read_bytes())
    with mtp_extract.open(path) as here, mtp_extract.open(URL) as there:
        local, remote = (inspect(opened, tensors=True).report for opened in (here, there))
        assert {**local, "name": 0, "provenance": 0} == {**remote, "name": 0, "provenance": 0}
        assert remote["drafter"]["size"] == len(model) > 11 * MIB
        # The header, and what the walk looks into after the flatbuffer; --graph, which executes, reads the weights too.
        assert hub.sent["storage"] <= structure + 2 * BLOCK
    hub.requests.clear()
    before = hub.sent["storage"]
    result = mtp_extract.extract(URL, tmp_path / "remote")
    assert hub.sent["storage"] - before <= len(model) + 3 * BLOCK
    assert len([request for request in hub.requests if request.range and request.server == "storage"]) <= 2
    weights = mtp_extract.extract(path, tmp_path / "local").directory / "model.safetensors"
    assert (result.directory / weights.name).read_bytes() == weights.read_bytes()


def test_what_holds_no_drafter_is_not_fetched(hub: HubServer) -> None:
    hub.add(REPO, "model.gguf", b"GGUF" + bytes(4 * MIB))
    with pytest.raises(NoDrafterError, match="found a GGUF file"):
        mtp_extract.extract(f"hf://{REPO}/model.gguf")
    assert hub.sent["storage"] == BLOCK


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
    digest, peak = done.stdout.split()
    assert digest == section
    assert hub.sent["storage"] <= DRAFTER + 3 * BLOCK
    assert int(peak) * 1024 < 250_000_000
    assert TOKEN not in done.stdout + done.stderr


def test_what_was_not_fetched_is_copied_too(hub: HubServer, sample: Path, tmp_path: Path) -> None:
    """An insertion into a bundle of the Hub fetches everything that is copied."""
    hub.add(REPO, FILE, sample.read_bytes())
    extraction = mtp_extract.extract(sample, tmp_path / "drafter", codes=True)
    mtp_extract.insert(extraction.directory, URL, tmp_path / "drafter.litertlm")
    assert (tmp_path / "drafter.litertlm").read_bytes() == sample.read_bytes()
    with plan_insertion(first_base(), URL) as plan:
        plan.write(tmp_path / "base.litertlm")
    assert (tmp_path / "base.litertlm").read_bytes() == sample.read_bytes()
