"""Builds the JSON schema of every record that is written, from its type and the comments of its fields.

``mtp schema report`` prints one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from mtp_extract.io.typed import Excerpt

RecordName = Literal["extraction", "report", "bench", "doctor"]
"""The files ``extraction.json`` and ``report.json``, and what ``mtp-bench --json`` and ``mtp-doctor --json`` print."""

_FIELD = r"^((?: +#:? .*\n)*) +(\w+): .*?(?:  #:? (.*))?$"
"""A field in a type's source: the comments above it, its name, and the comment behind it."""


def build_schema(name: str) -> dict[str, Any]:
    """Build the schema of the record ``name``, a :data:`RecordName`; fields that it does not list are never written.

    Raises:
        KeyError: there is no such record.
    """
    record = _find_type(name)
    _, parts = msgspec.json.schema_components([record], ref_template="#/definitions/{name}")
    for kind in _walk_types(record, set()):
        part = parts[kind.__name__]
        part["additionalProperties"] = issubclass(kind, Excerpt)
        for field, meaning in _read_comments(kind).items():
            part["properties"][field] = {"description": meaning, **part["properties"][field]}
    return {**parts.pop(record.__name__), "definitions": parts}


def _find_type(name: str) -> type:
    from mtp_extract.checkpoint.record import Extraction
    from mtp_extract.doctor.result import Diagnosis
    from mtp_extract.serving.result import Benchmark

    if name == "report":
        from mtp_extract.validation.result import Validation  # which needs PyTorch

        return Validation
    return {"extraction": Extraction, "bench": Benchmark, "doctor": Diagnosis}[name]


def _walk_types(kind: Any, visited: set[Any]) -> Iterator[type]:
    """Yield every type with fields that occurs in ``kind``, itself included."""
    if kind in visited:
        return
    visited.add(kind)
    if hasattr(kind, "__struct_fields__") or is_dataclass(kind):
        yield kind
        for inner in get_type_hints(kind).values():
            yield from _walk_types(inner, visited)
    for inner in get_args(kind):
        yield from _walk_types(inner, visited)


def _read_comments(kind: type) -> dict[str, str]:
    """Return each field's JSON name with the comment behind the field, or the lines above it."""
    names = {name: name for name in get_type_hints(kind)}
    if issubclass(kind, msgspec.Struct):
        names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        source = inspect.getsource(base) if base.__module__.startswith("mtp_extract") else ""
        for above, name, behind in re.findall(_FIELD, source, re.MULTILINE):
            text = behind or " ".join(re.findall("#:? (.*)", above))
            if name in names and text:
                meanings[names[name]] = text
    return meanings
