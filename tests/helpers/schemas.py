"""The JSON schemas of docs/, and what docs/records.md says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema

__all__ = ["documented", "fields", "schema", "validator"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def schema(name: str) -> dict[str, Any]:
    """``docs/NAME.schema.json``."""
    parsed: dict[str, Any] = json.loads((_DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    return parsed


@cache
def validator(name: str) -> Callable[[Any], Any]:
    """Raises ``fastjsonschema.JsonSchemaValueException`` for what is not according to the schema."""
    check: Callable[[Any], Any] = fastjsonschema.compile(schema(name))
    return check


def fields(name: str) -> dict[str, list[str]]:
    """Object of the schema → its fields, in order; the whole document under ``name``."""
    objects = {name: schema(name), **schema(name)["definitions"]}
    return {title: list(definition["properties"]) for title, definition in objects.items()}


def documented(name: str) -> dict[str, list[str]]:
    """The same, from the tables of docs/records.md."""
    text = (_DOCS / "records.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^# {name}\.json\n(.*?)(?=^# |\Z)", text, re.DOTALL | re.MULTILINE)
    sections = re.split(r"^## ", part, flags=re.MULTILINE)[1:]
    return {s.split("\n", 1)[0]: re.findall(r"^\| `([\w/]+)` \| \S", s, re.MULTILINE) for s in sections}
