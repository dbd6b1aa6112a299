"""The JSON schemas of docs/."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema

__all__ = ["schema", "validator"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def schema(name: str) -> dict[str, Any]:
    """``docs/NAME.schema.json``."""
    parsed: dict[str, Any] = json.loads((_DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    return parsed


@cache
def validator(name: str) -> Callable[[Any], Any]:
    """Raises ``fastjsonschema.JsonSchemaValueException`` for what is not according to the schema; fields in another
    order than its are an ``AssertionError``.
    """
    matches: Callable[[Any], Any] = fastjsonschema.compile(schema(name))

    def check(document: Any) -> None:
        matches(document)
        _check_order(document, schema(name), schema(name)["definitions"])

    return check


def _check_order(value: Any, expected: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Whether the fields of every object in ``value``, which matches ``expected``, stand in the order of the schema."""
    for kind in (*expected.get("oneOf", ()), *expected.get("anyOf", ())):
        _check_order(value, kind, definitions)
    if "$ref" in expected:
        expected = definitions[expected["$ref"].rpartition("/")[2]]
        required, known = set(expected["required"]), expected["properties"].keys()
        if not isinstance(value, dict) or not required <= value.keys() <= known:
            return  # another of those that it may be
    if isinstance(value, list) and "items" in expected:
        for item in value:
            _check_order(item, expected["items"], definitions)
    if isinstance(value, dict) and "properties" in expected:
        assert list(value) == [field for field in expected["properties"] if field in value]
        for field, item in value.items():
            _check_order(item, expected["properties"][field], definitions)
    elif isinstance(value, dict) and isinstance(expected.get("additionalProperties"), dict):
        for item in value.values():
            _check_order(item, expected["additionalProperties"], definitions)
