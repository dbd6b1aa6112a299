"""A single flipped bit of a checkpoint is found by its record and by its bundle; and a record fits its types and the
schema when it is written and when it is read."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from helpers.record_document import REPORT, forge
from helpers.schemas import validator
from helpers.variant_files import variant
from seam import verify, verify_against

from mtp_extract import convert, extract
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.files import CONTAINERS
from mtp_extract.data import sample_bundle
from mtp_extract.errors import CheckpointError
from mtp_extract.formats import MTP_FORMATS
from mtp_extract.pipeline import writing
from mtp_extract.pipeline.check import RECORD, list_directory_files, read_record


@pytest.fixture
def checkpoint(extracted: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(extracted, tmp_path / "copy"))


def flip(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_a_file_that_is_not_as_recorded(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_bytes(config.read_bytes().replace(b'"head_dim": 32', b'"head_dim": 64'))
    with pytest.raises(CheckpointError, match=r"config\.json has other content"):
        verify(checkpoint)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"expected config\.json"):
        verify(checkpoint)


def test_a_config_that_describes_another_drafter_than_the_record(checkpoint: Path) -> None:
    """A key from which nothing is computed may be changed; the record has a copy of the geometry."""
    config = checkpoint / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"initializer_range": 0.02', '"initializer_range": 0.03'))
    assert verify(checkpoint)
    config.write_text(text.replace('"final_logit_softcapping": 30.0', '"final_logit_softcapping": 25.0'))
    with pytest.raises(CheckpointError, match=r"another drafter than its extraction\.json: final_logit_softcap is 25"):
        verify(checkpoint)


@pytest.mark.parametrize("name", MTP_FORMATS)
def test_one_bit_of_any_tensor(name: str, sample: Path, tmp_path: Path) -> None:
    """The record shows it; and the bundle shows it if the record was forged or is missing."""
    extract(sample, tmp_path / "out", format=name, codes=True)
    paths = [path for ending in ("*.safetensors", "*.gguf") for path in (tmp_path / "out").rglob(ending)]
    with open_bundle(sample) as bundle:
        verify_against(tmp_path / "out", bundle)
        for path in paths:
            for index, (tensor, stored) in enumerate(list(CONTAINERS[path.suffix].read_tensors(path).items())[::7]):
                if "activation_scale" in tensor:
                    continue
                at, bit = stored.offset + (7919 * index) % stored.length, index % 8
                flip(path, at, bit)
                with pytest.raises(CheckpointError, match=f"{path.name} has other content"):
                    verify(tmp_path / "out")
                forge(tmp_path / "out")
                with pytest.raises(CheckpointError):
                    verify_against(tmp_path / "out", bundle)
                    pytest.fail(f"{tensor}, byte {at - stored.offset}, bit {bit}")
                flip(path, at, bit)
        (tmp_path / "out/extraction.json").unlink()
        assert verify_against(tmp_path / "out", bundle)[-1].passed is None
        flip(paths[0], -40, 2)
        with pytest.raises(CheckpointError):
            verify_against(tmp_path / "out", bundle)


@pytest.mark.parametrize("name", ["torch_unit_plain_norm", "jax_published_noscalar"])
def test_a_drafter_without_layer_scalars_is_converted(name: str, tmp_path: Path) -> None:
    """The litert layout then has none, and the graph computes as with 1."""
    extract(variant(name), tmp_path / "litert", format="litert")
    with open_bundle(variant(name)) as bundle:
        convert(tmp_path / "litert", tmp_path / "out", format="transformers", dtype="f32")
        verify_against(tmp_path / "out", bundle)
    extract(variant(name), tmp_path / "direct", format="transformers", dtype="f32")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "direct/model.safetensors").read_bytes()


def test_the_record_of_the_sample_is_what_its_schema_says(extracted: Path) -> None:
    record = json.loads((extracted / "extraction.json").read_text(encoding="utf-8"))
    validator("extraction")(record)
    assert record["files"].keys() == {*list_directory_files(extracted)} - {"extraction.json"}


def test_the_report_that_tests_use() -> None:
    validator("report")(REPORT)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format_version",), 4),
        (("proof",), {"positions": 256}),
        (("source", "section", "sha256"), "abc"),
        (("source", "size"), True),
        (("files", "config.json"), []),
        (("source", "section", "begin"), -1),
        (("rule",), "q3_k"),
        (("rounded",), {"BF16": 48}),
        (("geometry",), 4.5),
        (("known_as",), ["\x1b[2J"]),
        (("shared",), [[]]),
        (("shared",), [["lm_head"]]),
        (("dtype",), "\x1b[2J"),
        (("activations",), {"lm_head": [{"type": "int8", "scale": 10**400, "zero_point": 0}, None]}),
    ],
)
def test_a_field_of_another_type_is_named(extracted: Path, tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    """The schema refuses it, and the reader names the field; only the reader knows numbers beyond the largest float."""
    record = json.loads((extracted / RECORD).read_text(encoding="utf-8"))
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with nullcontext() if path == ("activations",) else pytest.raises(fastjsonschema.JsonSchemaValueException):
        validator("extraction")(record)
    (tmp_path / RECORD).write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        read_record(tmp_path)
    text = str(caught.value)
    assert str(tmp_path / RECORD) in text and text.isprintable()
    assert all(key in text for key in path if key not in record["files"])


def test_what_is_missing_is_named_and_what_has_no_field_is_passed_over(extracted: Path, tmp_path: Path) -> None:
    """The schema describes what is written, and refuses both."""
    record = json.loads((extracted / RECORD).read_text(encoding="utf-8"))
    for field in sorted({*record} - {"format_version"}):
        (tmp_path / RECORD).write_text(json.dumps({key: record[key] for key in record if key != field}))
        with pytest.raises(CheckpointError, match=field):
            read_record(tmp_path)
    record["tool"]["more"] = 1
    (tmp_path / RECORD).write_text(json.dumps({**record, "more": {}}), encoding="utf-8")
    assert read_record(tmp_path) == {**record, "more": {}}
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validator("extraction")(record)


def test_a_record_that_its_reader_refuses_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "__version__", 1)
    with pytest.raises(
        CheckpointError, match=r"extraction\.json: not what this release of mtp-extract writes: .*tool\.version"
    ):
        extract(sample_bundle(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
