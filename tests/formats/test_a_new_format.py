"""A format is one class and one entry: what is written here extracts the sample and is read back, proof included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from mtp_extract import extract
from mtp_extract.architecture import roles
from mtp_extract.architecture.config import DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.architecture.roles import roles_of, shapes_of
from mtp_extract.checkpoint.arranged import Arranged, Kept, arrange, keep_floats
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.files import read_header, write_file
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.keys import TEXT, require_keys
from mtp_extract.checkpoint.planned import OutputFile, plan_array
from mtp_extract.checkpoint.stored import stored_weight
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.formats import FORMATS, Listed, format_named, format_of, read_checkpoint, reading
from mtp_extract.pipeline.check import verify


class ToyFormat:
    """``toy.safetensors`` under the roles' own names, and the config field by field in ``toy.json``."""

    name = "toy"
    marker = "toy.json"
    weights_file = "toy.safetensors"
    further_files: tuple[str, ...] = ()

    def recognizes(self, directory: Path) -> bool:
        return (directory / self.marker).is_file()

    def keep(self, role: roles.Role, weight: Weight, dtype: str) -> Kept:
        return keep_floats(weight, dtype)

    def files(self, arranged: Arranged) -> Sequence[OutputFile]:
        checkpoint, dtype = arranged.checkpoint, arranged.dtype
        shapes = shapes_of(checkpoint.config)
        tensors = tuple(arranged.kept[role.name].tensor(role.name, role) for role in shapes)
        return [
            OutputFile(self.weights_file, tensors=tensors),
            OutputFile(self.marker, text=json.dumps({"dtype": dtype, **asdict(checkpoint.config)})),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        document = read_object(directory / self.marker)
        fields = {key: value for key, value in document.items() if key != "dtype"}
        layers = (LayerConfig(**{**layer, "rope": RopeConfig(**layer["rope"])}) for layer in fields.pop("layers"))
        config = DrafterConfig(layers=tuple(layers), **fields)
        require_keys(directory / self.marker, document, asdict(config), {"dtype": TEXT})
        return config

    def read(self, directory: Path) -> Checkpoint:
        config = self.read_config(directory)
        stored = reading.read_shards(directory, self.weights_file)
        tensors = {
            role.name: stored_weight(*stored[role.name]) if role.name in stored else filled(shape)
            for role, shape in shapes_of(config).items()
        }
        return Checkpoint("gemma4-mtp", config, tensors, read_object(directory / self.marker)["dtype"])


FORMAT = ToyFormat()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, FORMAT.name, Listed(__name__, "FORMAT", ("f32", "bf16"), "a toy"))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_class_and_one_entry_are_enough(sample: Path, tmp_path: Path, dtype: str) -> None:
    directory = tmp_path / "toy"
    result = extract(sample, directory, format="toy", dtype=dtype, codes=True)
    assert result.record["layout"] == "toy"
    assert result.record["proof"]["positions"] == 256
    assert set(result.files) == {
        "toy.safetensors",
        "toy.json",
        "codes/codes.safetensors",
        "extraction.json",
        "README.md",
    }
    assert verify(directory).files == 3
    assert format_of(directory) is FORMAT
    found = read_checkpoint(directory)
    extract(sample, tmp_path / "known", dtype=dtype)
    known = read_checkpoint(tmp_path / "known")
    assert replace(found.config, max_position_embeddings=known.config.max_position_embeddings) == known.config
    for role, tensor in known.tensors.items():
        np.testing.assert_array_equal(found.tensors[role].array(), tensor.array(), err_msg=role)


@pytest.mark.torch
@pytest.mark.usefixtures("registered")
def test_the_reference_drafter_loads_it(sample: Path, tmp_path: Path) -> None:
    from mtp_extract.drafter.load import load_drafter

    extract(sample, tmp_path / "toy", format="toy")
    assert load_drafter(tmp_path / "toy").config == FORMAT.read_config(tmp_path / "toy")


@pytest.mark.usefixtures("registered")
def test_the_default_type_is_the_formats_own(sample: Path, tmp_path: Path) -> None:
    assert extract(sample, tmp_path / "toy", format="toy").record["dtype"] == "f32"


def test_without_the_entry_there_is_no_such_format(sample: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 'toy': expected transformers, litert"):
        extract(sample, tmp_path / "toy", format="toy")
    assert not (tmp_path / "toy").exists()


def test_tensor_names_come_from_the_role_table(
    monkeypatch: pytest.MonkeyPatch, extracted: Path, tmp_path: Path
) -> None:
    """Those of the ordered head too, which no LiteRT file has: renamed in the table, they are renamed in the file."""
    known = read_checkpoint(extracted)
    config = replace(known.config, ordered_head=OrderedHeadConfig(num_centroids=8, top_k=2))
    table = roles.role_table()

    def renamed(architecture: str = "gemma4-mtp") -> tuple[roles.Role, ...]:
        return tuple(
            replace(role, names=MappingProxyType({format_: f"here.{name}" for format_, name in role.names.items()}))
            for role in table
        )

    ordering = tmp_path / "ordering.safetensors"
    write_file(tmp_path, OutputFile(ordering.name, (plan_array("order", np.arange(config.vocab_size)),)))

    def planned() -> list[str]:
        tensors: dict[str, Weight] = {role.name: filled(shape) for role, shape in shapes_of(config).items()}
        tensors["ordered_head.token_ordering"] = stored_weight(ordering, read_header(ordering)["order"])
        weights, *_ = arrange(format_named("transformers"), replace(known, config=config, tensors=tensors), "f32").files
        return [tensor.name for tensor in weights.tensors]

    names = planned()
    assert names == [role.names["transformers"] for role in roles_of(config.num_layers, ordered_head=True)]
    assert set(names) - set(read_header(extracted / "model.safetensors")) == {
        "masked_embedding.centroids.weight",
        "masked_embedding.token_ordering",
    }
    monkeypatch.setattr(roles, "role_table", renamed)
    assert planned() == [f"here.{name}" for name in names]
