"""Types of the JSON files that are written: one definition for the files, their schemas and their page in the docs.

An object in such a file is a :class:`Record` with the same fields in the same order. Their types state the bounds, a
comment ``#:`` the meaning of a field, the docstring that of the object. A field that may be absent is ``UNSET``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

T = TypeVar("T", bound=Struct)

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Bounds = Annotated[list[float], Meta(min_length=2, max_length=2)]
# NaN is written as null, so msgspec must not check these bounds: they appear in the schema only.
NotNegative = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]


class Record(Struct):
    """An object of a JSON file."""


class Excerpt(Record):
    """An object of which only what commands read is listed here; `mtp-tune --json` prints it all."""


class Tool(Record):
    """What wrote the file."""

    name: str  #: `mtp-extract`
    version: str  #: its version


class Figure(Record, frozen=True):  # type: ignore[misc]  # msgspec lets a frozen type extend one that is not
    """A share or a mean over positions or rounds, with its interval over texts."""

    value: float | None  #: null where there is nothing that it could be of
    n: Count  #: of so many positions or rounds
    ci95: Bounds | None = None  #: 95 % over texts; null with too few, and then nothing is decided


def parse_record(value: Any, kind: type[T]) -> T:
    """Return ``value``, parsed from JSON, as a ``kind``; keys without a field are ignored.

    Raises:
        ValueError: ``value`` is no ``kind``; the message names the field.
    """
    try:
        return convert(value, kind)
    except ValidationError as error:
        reason, _, field = str(error).partition(" - at `$")
        raise ValueError(f"{field.rstrip('`').lstrip('.') or 'the whole'}: {reason}") from error
