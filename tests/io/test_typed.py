"""Errors of records name the field."""

from __future__ import annotations

import pytest
from msgspec import field

from mtp_extract.io.typed import Bounds, Count, Record, parse_record


class Inner(Record):
    count: Count
    interval: Bounds | None = field(name="ci95")


class Outer(Record):
    inners: dict[str, Inner]


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"count": -1, "ci95": None}, "inners[...].count: Expected `int` >= 0"),
        ({"count": True, "ci95": None}, "inners[...].count: Expected `int`, got `bool`"),
        ({"count": 1}, "inners[...]: Object missing required field `ci95`"),
        ({"count": 1, "ci95": [0.5]}, "inners[...].ci95: Expected `array` of length >= 2"),
        (None, "inners[...]: Expected `object`, got `null`"),
    ],
)
def test_what_is_wrong_is_named(inner: object, said: str) -> None:
    with pytest.raises(ValueError, match="inners") as caught:
        parse_record({"inners": {"a": inner}}, Outer)
    assert str(caught.value) == said
    with pytest.raises(ValueError, match="the whole: Expected"):
        parse_record([], Outer)
    assert parse_record({"inners": {}, "more": 1}, Outer).inners == {}
