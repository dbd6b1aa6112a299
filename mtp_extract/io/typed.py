"""Records as types: the JSON files that are written, their schemas and their page in the docs have one definition.

An object of such a file is a :class:`RecordName`: its fields are the object's, in order, their types have the bounds, a
comment ``#:`` says what a field means, and the docstring what the object is. A field that may be left out is ``UNSET``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

T = TypeVar("T", bound=Struct)

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Bounds = Annotated[list[float], Meta(min_length=2, max_length=2)]
# A number may be NaN until it is written, as null: these bounds are the schema's alone.
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


def read(value: Any, kind: type[T]) -> T:
    """``value``, which JSON gave, as a ``kind``; what has no field is passed over.

    Raises:
        ValueError: it is none; the message names the field.
    """
    try:
        return convert(value, kind)
    except ValidationError as error:
        what, _, field = str(error).partition(" - at `$")
        raise ValueError(f"{field.rstrip('`').lstrip('.') or 'the whole'}: {what}") from error
