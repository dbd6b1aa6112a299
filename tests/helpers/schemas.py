"""The JSON schemas of the records, as a reader of the files would use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import fastjsonschema

from mtp_extract.schemas import build_schema


@cache
def validator(name: str) -> Callable[[Any], Any]:
    """Raises ``fastjsonschema.JsonSchemaValueException`` for what is not according to the schema."""
    matches: Callable[[Any], Any] = fastjsonschema.compile(_draft7(build_schema(name)))
    return matches


def _draft7(value: Any) -> Any:
    """``value`` as draft 7 has it, which calls the items of a tuple otherwise."""
    if isinstance(value, list):
        return [_draft7(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "prefixItems" in value:
        value = {**value, "items": value["prefixItems"]}
    return {key: _draft7(item) for key, item in value.items() if key != "prefixItems"}
