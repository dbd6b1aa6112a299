"""A skeleton holds no weight, and is read, or refused, as the file that it was made of."""

from __future__ import annotations

import io
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
"""Bytes of a weight that are looked for."""


def verdict_of(file: Path) -> tuple[list[tuple[str, str]], str]:
    """What every value is read as, and the error without the file's name."""
    done = run_here("inspect", file, "--graph", "--json")
    trace = [(line["kind"], line["read_as"]) for line in json.loads(done.stdout)["trace"]]
    return trace, done.stderr.replace(str(file), "FILE")


def model_in(skeleton: Path) -> bytes:
    with zipfile.ZipFile(skeleton) as archive:
        return archive.read(archive.namelist()[0])


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_skeleton_gives_the_verdict_of_its_file(tmp_path: Path, name: str) -> None:
    made = write_skeleton(variant(name), tmp_path / "skeleton.zip")

    assert made.size == made.path.stat().st_size < 60_000
    trace, error = verdict_of(variant(name))
    own_trace, own_error = verdict_of(made.path)
    assert own_trace == trace
    # Whether a grid is coarse is asked of numbers that the weights make.
    assert own_error == error or "holds multiples of" in own_error


def test_no_weight_is_left_in_it(tmp_path: Path) -> None:
    made = write_skeleton(sample_bundle(), tmp_path / "skeleton.zip")
    content = model_in(made.path)

    with open_bundle(sample_bundle()) as opened:
        drafter = opened.drafter()
        roles = [role for role in drafter.walk.roles if role.tensor is not None]
        kept = [role.role for role in roles if drafter.model.locate(role.tensor).read()[:LEAST] in content]
        scales = [t.quantization.scales.bytes() for role in roles if (t := role.tensor).quantization is not None]
    with open_bundle(made.path, skeleton=True) as opened:
        bare = opened.drafter()
        numbers = {
            role.role: np.unique(read_floats(bare.model, role.tensor))
            for role in bare.walk.roles
            if role.tensor is not None
        }

    assert made.weights == len({role.key for role in roles}) and kept == []
    assert scales and not [one for one in scales if len(one) > 4 and one in content]
    assert {name: found.tolist() for name, found in numbers.items() if found.tolist() not in ([0], [1])} == {}


def test_of_a_graph_that_cannot_be_read_what_may_be_a_weight_is_left_out(tmp_path: Path) -> None:
    graph, file = sound("jax"), tmp_path / "odd.tflite"
    graph.insert(graph.layer(0).scores, lambda x: graph.call("TANH", x))
    file.write_bytes(graph.data())
    weights = {role: graph.model.buffers[graph.main.tensors[at].buffer].data for role, at in graph.roles.items()}

    made = write_skeleton(file, tmp_path / "skeleton.zip")

    content = model_in(made.path)
    large = {role: bytes(data) for role, data in weights.items() if data is not None and len(data) >= LEAST}
    assert len(large) > 20
    assert [
        role for role, data in large.items() if data[:LEAST] in content and data != data[:4] * (len(data) // 4)
    ] == []
    assert made.doubtful > 20
    assert verdict_of(made.path) == verdict_of(file)


@pytest.mark.parametrize("unpacked", [False, True])
def test_other_commands_refuse_it_by_what_it_is(tmp_path: Path, unpacked: bool) -> None:
    made = write_skeleton(sample_bundle(), tmp_path / "skeleton.zip").path
    if unpacked:
        (tmp_path / "skeleton.tflite").write_bytes(model_in(made))
        made = tmp_path / "skeleton.tflite"

    done = run_here("extract", made, "-o", tmp_path / "made")

    assert done.returncode == 1 and not (tmp_path / "made").exists()
    assert done.stderr.startswith(f"error: {made}: is a skeleton without weights")
    assert run_here("inspect", made).stdout.startswith(f"{made}: skeleton")


def test_nothing_is_overwritten_and_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    made = write_skeleton(sample_bundle(), tmp_path / "skeleton.zip").path
    content = made.read_bytes()

    with pytest.raises(MtpExtractError, match="exists"):
        write_skeleton(sample_bundle(), made)
    assert made.read_bytes() == content
    assert write_skeleton(sample_bundle(), tmp_path / "again.zip").path.read_bytes() == content
    # Behind the header, whose name decides what it is.
    for at in range(60, len(content) - 100, len(content) // 9):
        made.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with pytest.raises(FormatError, match=r"skeleton\.zip"):
            open_bundle(made, skeleton=True)
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("drafter.tflite", b"no skeleton")
    made.write_bytes(other.getvalue())
    assert "an archive. Unpack it" in run_here("inspect", made).stderr
