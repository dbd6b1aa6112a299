"""The JSON files that are written are what docs/records.md and the schemas say, no field more or less."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from helpers.report_document import REPORT
from helpers.schemas import documented, fields, schema, validator
from helpers.variant_files import REFUSED, VARIANTS, variant

from mtp_extract import extract
from mtp_extract.pipeline.check import files_in


@pytest.mark.parametrize("name", ["extraction", "report", "pair", "bench"])
def test_the_document_lists_the_fields_of_the_schema(name: str) -> None:
    # What a tool is, both say; it is told once.
    told = {"tool": documented("extraction")["tool"], **documented(name)}
    assert told == fields(name)


@pytest.mark.parametrize("name", ["extraction", "report", "pair", "bench"])
def test_the_schema_lets_nothing_through_that_it_does_not_name(name: str) -> None:
    for title, definition in {name: schema(name), **schema(name)["definitions"]}.items():
        assert definition["additionalProperties"] is False, title
        nested = [field for field, value in definition["properties"].items() if "properties" in value]
        assert not nested, "an object has a name of its own"


def test_the_version_is_the_codes() -> None:
    from mtp_extract.checkpoint.record import FORMAT_VERSION

    assert schema("extraction")["properties"]["format_version"] == {"const": FORMAT_VERSION}


def test_the_sample(extracted: Path) -> None:
    record = json.loads((extracted / "extraction.json").read_text(encoding="utf-8"))
    validator("extraction")(record)
    assert record["files"].keys() == {*files_in(extracted)} - {"extraction.json"}


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - REFUSED))
def test_every_variant_in_the_litert_format(name: str, tmp_path: Path) -> None:
    """Static activations, blocks, folded norms, quantized caches: each field in each of its forms."""
    validator("extraction")(extract(variant(name), tmp_path / "out", format="litert").record)


def test_the_report_that_tests_use() -> None:
    validator("report")(REPORT)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format_version",), 1),
        (("proof",), 1),
        (("proof", "tolerance"), "1e-5"),
        (("source", "section", "sha256"), "abc"),
        (("tensors", "pre_projection.weight", "source", "place"), "elsewhere"),
        (("tensors", "pre_projection.weight", "more"), 1),
        (("geometry", "num_layers"), 4.5),
    ],
)
def test_what_is_wrong_is_seen(extracted: Path, path: tuple[str, ...], value: Any) -> None:
    record = json.loads((extracted / "extraction.json").read_text(encoding="utf-8"))
    broken = copy.deepcopy(record)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validator("extraction")(broken)
