"""Re-checking a checkpoint: a single flipped bit anywhere is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.variant_files import variant

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.tensor_file import read_header
from mtp_extract.errors import CheckpointError
from mtp_extract.pipeline.check import verify
from mtp_extract.pipeline.verification import verify_against_source


@pytest.fixture
def checkpoint(extracted: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(extracted, tmp_path / "copy"))


def flip(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_a_sound_checkpoint(checkpoint: Path, sample: Path) -> None:
    own = verify(checkpoint)
    assert (own.files, own.tensors, own.against) == (4, 48 + 3 * 23, None)
    with open_bundle(sample) as bundle:
        assert verify_against_source(checkpoint, bundle).against == str(sample)


@pytest.mark.parametrize("layout", ["transformers", "litert"])
def test_one_bit_of_any_tensor(sample: Path, tmp_path: Path, layout: str) -> None:
    extract(sample, tmp_path / "out", format=layout, dtype="f32")
    weights = next((tmp_path / "out").glob("*.safetensors"))
    for index, (name, tensor) in enumerate(read_header(weights).items()):
        at, bit = tensor.offset + (7919 * index) % tensor.length, index % 8
        flip(weights, at, bit)
        with pytest.raises(CheckpointError, match=f"tensor {name} has other values"):
            verify(tmp_path / "out")
        flip(weights, at, bit)
    verify(tmp_path / "out")


def test_a_forged_record_does_not_fool_against(checkpoint: Path, sample: Path) -> None:
    """Whoever changes a weight can change the record as well; the bundle cannot be changed with it."""
    weights = checkpoint / "model.safetensors"
    name, tensor = next((n, t) for n, t in read_header(weights).items() if n.endswith("q_norm.weight"))
    flip(weights, tensor.offset, 0)
    record = json.loads((checkpoint / "extraction.json").read_text())
    from mtp_extract.checkpoint.tensor_file import sums_of

    record["tensors"][name]["xxh3"] = sums_of(weights, read_header(weights))[name]
    (checkpoint / "extraction.json").write_text(json.dumps(record))
    verify(checkpoint)
    with open_bundle(sample) as bundle, pytest.raises(CheckpointError, match=name):
        verify_against_source(checkpoint, bundle)


def test_a_header_that_calls_the_same_bytes_something_else(checkpoint: Path) -> None:
    """Transposing a shape, or calling floats integers, leaves every checksum as it was."""
    weights = checkpoint / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound.replace(b'"shape":[128,64]', b'"shape":[64,128]', 1))
    with pytest.raises(CheckpointError, match=r"is F32 \[64, 128\] in the file"):
        verify(checkpoint)
    weights.write_bytes(sound.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(CheckpointError, match="is I32"):
        verify(checkpoint)


def test_another_bundle(checkpoint: Path) -> None:
    with open_bundle(variant("jax_cap_none")) as bundle, pytest.raises(CheckpointError, match="differs"):
        verify_against_source(checkpoint, bundle)


def test_other_files(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    sound = config.read_bytes()
    config.write_bytes(sound.replace(b'"head_dim": 32', b'"head_dim": 64'))
    with pytest.raises(CheckpointError, match=r"config\.json has other content"):
        verify(checkpoint)
    config.write_bytes(sound + b" ")
    with pytest.raises(CheckpointError, match=r"config\.json has \d+ bytes"):
        verify(checkpoint)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        verify(checkpoint)
    config.write_bytes(sound)
    flip(checkpoint / "codes/codes.safetensors", -1, 3)
    with pytest.raises(CheckpointError, match="other values"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"format_version": 2, "files": {}, "tensors": 1}',
        b'{"format_version": 5}',
        b"\xff\xfe",
    ],
)
def test_a_record_that_is_none(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "extraction.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        verify(checkpoint)


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extraction\.json"):
        verify(tmp_path)


def test_a_record_that_calls_a_text_a_file_of_tensors(checkpoint: Path) -> None:
    record = json.loads((checkpoint / "extraction.json").read_text())
    record["files"]["config.json"]["tensors"] = {}
    (checkpoint / "extraction.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"config\.json: expected a file of tensors"):
        verify(checkpoint)
