"""The colours of figures and pages, on paper and in the dark.

Those of figures are after Okabe and Ito, told apart by readers of every colour vision: as dark on a light ground and as
light on a dark one as it takes to see them.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """On a light ground and on a dark one, as ``#rrggbb``."""

    light: str
    dark: str


COLOURS: dict[str, Colour] = {
    "page": Colour("#ffffff", "#14171a"),
    "ink": Colour("#000000", "#e6e8ea"),
    "faint": Colour("#555555", "#a3abb3"),
    "line": Colour("#e3e3e3", "#33393f"),
    "blue": Colour("#0072b2", "#5aaeea"),
    "pale": Colour("#9cc9e6", "#2f5876"),
    "vermilion": Colour("#d55e00", "#f08a45"),
    "green": Colour("#009e73", "#3cc49a"),
    "orange": Colour("#c48800", "#edb63f"),
    "sky": Colour("#3596d0", "#8ccdf3"),
    "purple": Colour("#cc79a7", "#dd9dc2"),
    "brown": Colour("#8c6d1f", "#c2a14d"),
}
"""Name → colour."""


def light(name: str) -> str:
    """The colour of this name, as figures are drawn in it."""
    return COLOURS[name].light
