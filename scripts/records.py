"""Makes the JSON schemas of ``docs/`` and the tables of ``docs/records.md`` from the types of the records::

    python scripts/records.py

Tables stand between two marks with their name; what is around them is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from mtp_extract.bench import fields as bench_fields
from mtp_extract.checkpoint import record_fields
from mtp_extract.doctor import fields as doctor_fields
from mtp_extract.io.typed import Record
from mtp_extract.validate.report import fields

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RECORDS: dict[str, tuple[type[Record], ...]] = {
    "extraction": (
        record_fields.Extraction,
        record_fields.Geometry,
        record_fields.Head,
    ),
    "report": (fields.Report,),
    "pair": (fields.Pair,),
    "bench": (bench_fields.Bench,),
    "doctor": (doctor_fields.Doctor,),
}
"""By name of the file: the type of the whole, and those of objects inside that no field's type names."""


def made() -> dict[Path, str]:
    """By path: what the schemas and the document are to hold.

    Raises:
        KeyError: a field has no comment.
        ValueError: the document lacks a mark.
    """
    document = DOCS / "records.md"
    text = document.read_text(encoding="utf-8")
    files = {}
    for name, kinds in RECORDS.items():
        objects = _objects(kinds)
        files[DOCS / f"{name}.schema.json"] = _schema(name, objects)
        text = _between(text, name, _tables(objects))
    return {**files, document: text}


def _between(text: str, name: str, tables: str) -> str:
    """``text`` with ``tables`` between the marks of ``name``."""
    before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
    _, end, after = rest.partition(f"<!-- end {name} -->\n")
    if not end:
        raise ValueError(f"expected marks around the tables of {name}, found none.")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def _objects(kinds: tuple[type[Record], ...]) -> dict[str, dict[str, Any]]:
    """By name of its type, in the order in which they refer to each other: the JSON schema of each object."""
    types = vars(inspect.getmodule(kinds[0]))
    _, objects = msgspec.json.schema_components(kinds, ref_template="#/definitions/{name}")
    for name, schema in objects.items():
        del schema["title"]
        meanings = _meanings(types[name])
        for field, about in schema["properties"].items():
            about.pop("default", None)
            about["description"] = meanings[field]
        schema["additionalProperties"] = False
    return objects


def _meanings(kind: type[Record]) -> dict[str, str]:
    """By field, as JSON calls it: the comment behind it, or above."""
    (defined,) = ast.parse(lines := textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(defined, ast.ClassDef)
    source, said = lines.splitlines(), {}
    for node in defined.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, mark, text = source[node.lineno - 1].partition("  #: ")
            above = node.lineno - 1
            while not mark and source[above - 1].lstrip().startswith("#:"):
                above -= 1
            said[node.target.id] = text or " ".join(line.strip(" #:") for line in source[above : node.lineno - 1])
    inherited = {} if kind.__base__ in (None, Record) else _meanings(kind.__base__)
    names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    return {**inherited, **{names[name]: text for name, text in said.items() if text}}


def _schema(name: str, objects: dict[str, dict[str, Any]]) -> str:
    """The schema of a file: a line for each field."""
    whole, *others = objects
    head = {"$schema": "http://json-schema.org/draft-07/schema#", **objects[whole], "title": f"{name}.json"}
    definitions = _lined({other: _lined(_parts(objects[other])) for other in others})
    return _lined({**_parts(head), "definitions": definitions}) + "\n"


def _parts(schema: dict[str, Any]) -> dict[str, str]:
    return {
        key: _lined({field: _json(about) for field, about in value.items()}) if key == "properties" else _json(value)
        for key, value in schema.items()
    }


def _lined(parts: dict[str, str]) -> str:
    """A JSON object of ``parts``, which are JSON, each on lines of its own."""
    return "{\n" + textwrap.indent(",\n".join(f"{_json(key)}: {text}" for key, text in parts.items()), "  ") + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tables(objects: dict[str, dict[str, Any]]) -> str:
    """A table for each object: its fields, in order, and what they mean."""
    parts = []
    for name, schema in objects.items():
        rows = "".join(f"| `{field}` | {about['description']} |\n" for field, about in schema["properties"].items())
        about = f"{schema['description']}\n\n" if "description" in schema else ""
        parts.append(f"## {name}\n\n{about}| field | meaning |\n| --- | --- |\n{rows}")
    return "\n".join(parts)


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
