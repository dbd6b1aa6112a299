"""A format is one class and one entry: what is written here extracts the sample and is read back, proof included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import convert, to_builtins
from seam import verify

from mtp_extract import extract
from mtp_extract.architecture import roles
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.checkpoint.arranged import Arranged, Kept, keep_floats
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.documents import TEXT, read_object, require_keys
from mtp_extract.checkpoint.planned import OutputFile, json_text
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.formats import FORMATS, NAMES, Listed, format_of, read_checkpoint, reading


class ToyFormat:
    """``toy.safetensors`` under the roles' own names, and the config field by field in ``toy.json``."""

    name = "toy"
    marker = "toy.json"
    weights_file = "toy.safetensors"
    further_files: tuple[str, ...] = ()

    def keep(self, role: roles.Role, weight: Weight, dtype: str) -> Kept:
        return keep_floats(weight, dtype)

    def files(self, arranged: Arranged) -> Sequence[OutputFile]:
        config = arranged.checkpoint.config
        tensors = tuple(arranged.kept[role.name].tensor(role.name, role) for role in shapes_of(config))
        document = {"dtype": arranged.dtype, **to_builtins(config)}
        return [OutputFile(self.weights_file, tensors=tensors), OutputFile(self.marker, text=json_text(document))]

    def read(self, directory: Path) -> Checkpoint:
        document = read_object(directory / self.marker)
        config = convert(document, DrafterConfig)
        made = json.loads(json_text(to_builtins(config)))
        require_keys(directory / self.marker, document, made, {"dtype": TEXT})
        stored = reading.read_weights(directory, self.weights_file)
        shapes = {role.name: (shape, reading.FLOATS) for role, shape in shapes_of(config).items()}
        reading.check_tensors(shapes, stored)
        tensors = {role: Stored(*stored[role], role) for role in shapes}
        return Checkpoint("gemma4-mtp", config, tensors, document["dtype"])


FORMAT = ToyFormat()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, FORMAT.name, Listed(__name__, "FORMAT", ("f32", "bf16"), "a toy"))
    # Names that a plan may have are listed when its module is imported.
    monkeypatch.setattr("mtp_extract.pipeline.plan.NAMES", (*NAMES, FORMAT.name))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_class_and_one_entry_are_enough(sample: Path, tmp_path: Path, dtype: str) -> None:
    directory = tmp_path / "toy"
    result = extract(sample, directory, format="toy", dtype=dtype, codes=True)
    assert result.record["layout"] == "toy"
    assert "RoPE at all 256 positions" in result.record["proof"][0]
    assert set(result.files) == {
        "toy.safetensors",
        "toy.json",
        "codes/codes.safetensors",
        "extraction.json",
        "README.md",
    }
    assert len(verify(directory)["files"]) == 4
    assert format_of(directory) is FORMAT
    found = read_checkpoint(directory)
    extract(sample, tmp_path / "known", dtype=dtype)
    known = read_checkpoint(tmp_path / "known")
    assert replace(found.config, max_position_embeddings=known.config.max_position_embeddings) == known.config
    for role, tensor in known.tensors.items():
        np.testing.assert_array_equal(found.tensors[role].array(), tensor.array(), err_msg=role)
