"""``extraction.json`` is what its types and their schema say, no field more or less, when written and when read."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from helpers.record_document import REPORT
from helpers.schemas import validator

from mtp_extract import extract
from mtp_extract.data import sample_bundle
from mtp_extract.errors import CheckpointError
from mtp_extract.pipeline import writing
from mtp_extract.pipeline.check import RECORD, files_in, read_record


def test_the_record_of_the_sample_is_what_its_schema_says(extracted: Path) -> None:
    record = json.loads((extracted / "extraction.json").read_text(encoding="utf-8"))
    validator("extraction")(record)
    assert record["files"].keys() == {*files_in(extracted)} - {"extraction.json"}


def test_the_report_that_tests_use() -> None:
    validator("report")(REPORT)


def changed(directory: Path, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The record in ``directory`` with ``value`` at ``path``."""
    record: dict[str, Any] = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


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
    """By the schema, and by who reads it, who names the field. JSON has numbers beyond the largest float."""
    record = changed(extracted, path, value)
    with nullcontext() if path == ("activations",) else pytest.raises(fastjsonschema.JsonSchemaValueException):
        validator("extraction")(record)
    (tmp_path / RECORD).write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        read_record(tmp_path)
    said = str(caught.value)
    assert str(tmp_path / RECORD) in said and said.isprintable()
    assert all(key in said for key in path if key not in record["files"])


def test_what_is_missing_is_named_and_what_has_no_field_is_passed_over(extracted: Path, tmp_path: Path) -> None:
    """The schema, which is of what is written, refuses both."""
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
    """A directory that no other command takes is no result."""
    monkeypatch.setattr(writing, "__version__", 1)
    with pytest.raises(
        CheckpointError, match=r"extraction\.json: not what this release of mtp-extract writes: .*tool\.version"
    ):
        extract(sample_bundle(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
