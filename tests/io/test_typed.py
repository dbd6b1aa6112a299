"""Records are filled from attributes by name, and read with the name of what is wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from msgspec import UNSET, UnsetType, ValidationError, field

from mtp_extract.io.typed import Bounds, Count, Record, fill, read


class Inner(Record):
    count: Count
    interval: Bounds | None = field(name="ci95")


class Outer(Record, kw_only=True):
    name: str
    late: int | UnsetType = UNSET
    inners: dict[str, Inner]


FOUND = SimpleNamespace(name="x", late=3, inners={"a": SimpleNamespace(count=2, interval=(0.5, math.inf), more=1)})


def test_fields_are_filled_in_order_under_the_names_of_the_file() -> None:
    filled = fill(Outer, FOUND)
    assert filled == {"name": "x", "late": 3, "inners": {"a": {"count": 2, "ci95": [0.5, math.inf]}}}
    assert list(filled) == ["name", "late", "inners"]
    assert fill(Outer, FOUND, late=UNSET, inners={"b": {"count": 0, "ci95": None}}) == {
        "name": "x",
        "inners": {"b": {"count": 0, "ci95": None}},
    }


def test_what_does_not_fit_is_not_filled_in() -> None:
    with pytest.raises(ValidationError, match="name"):
        fill(Outer, FOUND, name=1)
    with pytest.raises(AttributeError, match="inners"):
        fill(Outer, SimpleNamespace(name="x", late=1))


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
        read({"name": "x", "inners": {"a": inner}}, Outer)
    assert str(caught.value) == said
    with pytest.raises(ValueError, match="the whole: Expected"):
        read([], Outer)
    assert read({"name": "x", "inners": {}, "more": 1}, Outer).inners == {}
