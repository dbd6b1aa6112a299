"""A skeleton holds no weight, and is read, or refused, like the file that it was made from."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_here
from helpers.surgery import sound
from helpers.variant_files import VARIANTS, variant

from mtp_extract.bundle import open_bundle
from mtp_extract.data import sample_bundle
from mtp_extract.errors import FormatError, MtpExtractError
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.pipeline.skeleton import write_skeleton

LEAST = 48
"""Bytes of a weight that are searched for."""


def verdict_of(file: Path) -> tuple[list[tuple[str, str]], str]:
    """Return how every value is read, and the error without the file's name."""
    done = run_here("inspect", file, "--graph", "--json")
    trace = [(line["kind"], line["read_as"]) for line in json.loads(done.stdout)["trace"]]
    return trace, done.stderr.replace(str(file), "FILE")


def model_in(skeleton: Path) -> bytes:
    with zipfile.ZipFile(skeleton) as archive:
        return archive.read(archive.namelist()[0])


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_skeleton_gives_the_verdict_of_its_file(tmp_path: Path, name: str) -> None:
    skeleton = write_skeleton(variant(name), tmp_path / "skeleton.zip")

    assert skeleton.size == skeleton.path.stat().st_size < 60_000
    trace, error = verdict_of(variant(name))
    skeleton_trace, skeleton_error = verdict_of(skeleton.path)
    assert skeleton_trace == trace
    # Whether a grid is coarse depends on numbers that are computed from weights.
    assert skeleton_error == error or "holds multiples of" in skeleton_error


def test_no_weight_is_left_in_it(tmp_path: Path) -> None:
    skeleton = write_skeleton(sample_bundle(), tmp_path / "skeleton.zip")
    content = model_in(skeleton.path)

    with open_bundle(sample_bundle()) as opened:
        drafter = opened.read_drafter()
        roles = [role for role in drafter.structure.roles if role.tensor is not None]
        kept = [role.role for role in roles if drafter.model.locate(role.tensor).read()[:LEAST] in content]
        scales = [t.quantization.scales.bytes() for role in roles if (t := role.tensor).quantization is not None]
    with open_bundle(skeleton.path, skeleton=True) as opened:
        bare = opened.read_drafter()
        numbers = {
            role.role: np.unique(read_floats(bare.model, role.tensor)).tolist()
            for role in bare.structure.roles
            if role.tensor is not None
        }

    assert skeleton.weights == len({role.key for role in roles}) and kept == []
    assert scales and not [data for data in scales if len(data) > 4 and data in content]
    assert {name: unique for name, unique in numbers.items() if unique not in ([0], [1])} == {}


def test_of_a_graph_that_cannot_be_read_what_may_be_a_weight_is_left_out(tmp_path: Path) -> None:
    graph, file = sound("jax"), tmp_path / "odd.tflite"
    graph.insert(graph.layer(0).scores, lambda x: graph.call("TANH", x))
    file.write_bytes(graph.data())
    weights = {role: graph.model.buffers[graph.main.tensors[at].buffer].data for role, at in graph.roles.items()}

    skeleton = write_skeleton(file, tmp_path / "skeleton.zip")

    content = model_in(skeleton.path)
    large = {role: bytes(data) for role, data in weights.items() if data is not None and len(data) >= LEAST}
    assert len(large) > 20
    varied = {role: data for role, data in large.items() if data != data[:4] * (len(data) // 4)}
    assert [role for role, data in varied.items() if data[:LEAST] in content] == []
    assert skeleton.doubtful > 20
    assert verdict_of(skeleton.path) == verdict_of(file)


@pytest.mark.parametrize("unpacked", [False, True])
def test_other_commands_refuse_it_by_what_it_is(tmp_path: Path, unpacked: bool) -> None:
    skeleton = write_skeleton(sample_bundle(), tmp_path / "skeleton.zip").path
    if unpacked:
        (tmp_path / "skeleton.tflite").write_bytes(model_in(skeleton))
        skeleton = tmp_path / "skeleton.tflite"

    done = run_here("extract", skeleton, "-o", tmp_path / "out")

    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"error: {skeleton}: is a skeleton without weights")
    assert run_here("inspect", skeleton).stdout.startswith(f"{skeleton}: skeleton")


def test_nothing_is_overwritten_and_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    skeleton = write_skeleton(sample_bundle(), tmp_path / "skeleton.zip").path
    content = skeleton.read_bytes()

    with pytest.raises(MtpExtractError, match="exists"):
        write_skeleton(sample_bundle(), skeleton)
    assert skeleton.read_bytes() == content
    assert write_skeleton(sample_bundle(), tmp_path / "again.zip").path.read_bytes() == content
    # Behind the local header, whose name identifies a skeleton.
    for at in range(60, len(content) - 100, len(content) // 9):
        skeleton.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with pytest.raises(FormatError, match=r"skeleton\.zip"):
            open_bundle(skeleton, skeleton=True)
    with zipfile.ZipFile(skeleton, "w") as archive:
        archive.writestr("drafter.tflite", b"no skeleton")
    assert "an archive. Unpack it" in run_here("inspect", skeleton).stderr
