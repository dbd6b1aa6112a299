"""Writing: the safetensors format, conversions, determinism, atomicity, modes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import variant
from safetensors import safe_open
from safetensors.numpy import load_file

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.files import CONTAINERS, OutputFile, plan_array, write_file
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.checkpoint.stored import TensorPlace
from mtp_extract.errors import CheckpointError, OutputError
from mtp_extract.formats import MTP_FORMATS, load_format
from mtp_extract.pipeline.check import list_directory_files
from mtp_extract.pipeline.extraction import build_checkpoint

PAIR = (plan_array("a", np.zeros(4, np.float32)), plan_array("b", np.ones(4, np.float32)))


def test_golden_file(tmp_path: Path) -> None:
    tensors = (plan_array("a", np.array([1.0, -2.0], np.float32)),)
    write_file(tmp_path, OutputFile("f.safetensors", tensors, metadata={"format": "pt"}))
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + bytes.fromhex("0000803f000000c0")
    assert (tmp_path / "f.safetensors").read_bytes() == expected


def test_the_safetensors_package_reads_what_was_written(tmp_path: Path) -> None:
    arrays = {
        "x.weight": np.random.default_rng(0).random((3, 5), np.float32),
        "n": np.arange(7, dtype=np.int64),
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.float32(3).reshape(()),
    }
    path, metadata = tmp_path / "model.safetensors", {"format": "pt", "b": "ü", "a": "1"}
    planned = tuple(plan_array(name, array) for name, array in arrays.items())
    written = write_file(tmp_path, OutputFile(path.name, planned, metadata=metadata))
    loaded, data, stored = load_file(path), path.read_bytes(), read_safetensors(path)[0]
    assert set(loaded) == set(stored) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].shape == array.shape
        assert data[stored[name].offset : stored[name].offset + stored[name].length] == array.tobytes()
    with safe_open(path, "np") as opened:
        assert opened.metadata() == metadata
    assert written == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: data.replace(b"[16,32]", b"[12,28]")]
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "f.safetensors"
    write_file(tmp_path, OutputFile(path.name, PAIR, metadata={}))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="damaged"):
        read_safetensors(path)


def test_a_header_that_exchanges_two_tensors_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same type and shape, so that the sums of the written bytes do not show it."""
    real = CONTAINERS[".safetensors"]

    def exchange_names(places: Mapping[str, TensorPlace], metadata: Mapping[str, str]) -> bytes:
        return real.make_header({"a": places["b"], "b": places["a"]}, metadata)

    monkeypatch.setitem(CONTAINERS, ".safetensors", replace(real, make_header=exchange_names))
    with pytest.raises(OutputError, match="reads back differently"):
        write_file(tmp_path, OutputFile("f.safetensors", PAIR, metadata={}))


def test_what_reads_back_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def failing_disk(fd: int, data: bytes, offset: int) -> int:
        damaged = bytearray(data)
        if offset > 1000:
            damaged[0] ^= 1
        return real(fd, damaged, offset)

    monkeypatch.setattr("mtp_extract.io.files.os.pwrite", failing_disk)
    with pytest.raises(OutputError, match="reads back differently"):
        extract(variant("torch_int2"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format_", MTP_FORMATS)
def test_the_same_input_gives_the_same_bytes(sample: Path, tmp_path: Path, format_: str) -> None:
    first, second = tmp_path / "a", tmp_path / "elsewhere" / "b"
    for out in (first, second):
        extract(sample, out, format=format_, codes=True)
    assert list(list_directory_files(first)) == list(list_directory_files(second))
    for name in list_directory_files(first):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_modes_follow_the_umask(sample: Path, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        extract(sample, tmp_path / "made")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made").iterdir()} == {0o640}


@pytest.mark.parametrize("role", ["layers.0.q_proj", "final_norm"])
def test_a_weight_that_is_missing_is_not_made_up(sample: Path, role: str) -> None:
    with open_bundle(sample) as opened:
        checkpoint = build_checkpoint(opened.read_drafter())
    rest = {key: tensor for key, tensor in checkpoint.tensors.items() if key != role}
    with pytest.raises(CheckpointError, match=f"{role}: expected a weight"):
        load_format("transformers").plan(replace(checkpoint, tensors=rest), "f32")
