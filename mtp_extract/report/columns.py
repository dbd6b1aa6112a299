"""Tables whose columns are data: a title, and what is said under it of a row. Numbers as text, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_extract.report import markdown
from mtp_extract.report.words import explained

Row = Mapping[str, Any]
Cell = Callable[[Row], "str | int"]
Column = tuple[str, Cell]

DASH = "–"


@dataclass(frozen=True)
class Table:
    """One table of a report."""

    title: str
    columns: tuple[str, ...]
    """Their titles; percentages say so here."""
    rows: tuple[tuple[str | int, ...], ...]
    what: str = ""
    """What it shows, in a line of plain text."""
    about: str = ""
    """How it was measured, in Markdown; for readers who were not there."""
    after: str = ""
    """What the numbers come to, in plain text."""
    figures: tuple[str, ...] = ()
    """Names of the report's figures that show the same."""
    detail: bool = False
    """Only for who looks closer."""
    first: bool = False
    """What a reader wants first."""

    @classmethod
    def of(cls, title: str, columns: Sequence[Column], rows: Iterable[Row], **more: Any) -> Table:
        """The table of these columns over ``rows``; ``more`` are the other fields."""
        cells = tuple(tuple(cell(row) for _, cell in columns) for row in rows)
        return cls(title, tuple(name for name, _ in columns), cells, **more)

    @property
    def words(self) -> list[tuple[str, str]]:
        """Those of its columns that want a line, and the line."""
        return explained(self.columns)

    def markdown(self, level: int = 2) -> str:
        """As a section with a heading of ``level``; a detail is folded away."""
        cells = markdown.table(
            [markdown.plain(column) for column in self.columns],
            ([markdown.plain(cell) for cell in row] for row in self.rows),
        )
        if self.detail:
            return f"<details><summary>{markdown.plain(self.title)}</summary>\n\n{cells}\n\n</details>"
        parts = (
            f"{'#' * level} {markdown.plain(self.title)}",
            markdown.paragraph(self.what),
            cells,
            markdown.paragraph(self.after),
            markdown.prose("; ".join(f"*{word}*: {meaning}" for word, meaning in self.words)),
            markdown.prose(self.about),
        )
        return "\n\n".join(part for part in parts if part)


def named(rows: Mapping[str, Row]) -> list[Row]:
    """Rows by name as rows that have it, as ``name``."""
    return [{**row, "name": name} for name, row in rows.items()]


def number(
    value: float | None,
    form: str,
    interval: Sequence[float] | None = None,
    *,
    between: str = "–",
    unit: str = "",
    none: str = DASH,
) -> str:
    """A number with its interval, ``2.98 (2.90–3.10)``, and its ``unit``; ``none`` where there is none."""
    if value is None or math.isnan(value):
        return none
    return f"{value:{form}}" + (f" ({interval[0]:{form}}{between}{interval[1]:{form}})" if interval else "") + unit


def share(value: float | None, interval: Sequence[float] | None) -> str:
    """A fraction in percent with its interval, without the sign: ``81.5 (80.4–82.6)``."""
    return DASH if value is None else number(100 * value, ".1f", interval and [100 * end for end in interval])


def change(mean: float | None, interval: Sequence[float] | None) -> str:
    """A difference in mean accepted length with its interval, ``+0.30 (+0.21 to +0.39)``."""
    return number(mean, "+.2f", interval, between=" to ")


# Cells. A path names keys, or places in a list, with dots between: "steps.0.top1".


def at(row: Any, path: str) -> Any:
    """What ``row`` holds there; None for an empty path."""
    if not path:
        return None
    for key in path.split("."):
        row = row[int(key) if isinstance(row, Sequence) else key]
    return row


def item(path: str) -> Cell:
    """The text or whole number there."""
    return lambda row: at(row, path)


def decimal(path: str, form: str, interval: str = "", *, unit: str = "", none: str = DASH) -> Cell:
    """A number with its interval."""
    return lambda row: number(at(row, path), form, at(row, interval), unit=unit, none=none)


def percent(path: str, interval: str = "") -> Cell:
    """A fraction in percent with its interval."""
    return lambda row: share(at(row, path), at(row, interval))
