"""A report as one page of HTML that needs nothing else: no network, no script, pictures inside.

``page.html`` beside this file is what it looks like. Names come from files, servers and users: every word is escaped,
what is not to be seen in it is spelled out, and the page forbids itself to load anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from mtp_extract._version import __version__
from mtp_extract.report.markdown import escape_invisible
from mtp_extract.report.templates import render_template

_NUMBER = r"[−+-]?[\d.,]*\d(?:e[+-]?\d+)?[×%]?(?:/\d+)?"


@dataclass(frozen=True)
class Headline:
    """A large figure at the head of a page."""

    name: str
    value: str  # the figure; empty where it was not measured
    of: str  # what it was measured over, with its interval; or why it was not
    means: str  # what ``name`` means, in a line
    standing: Literal["", "good", "bad"] = ""


@dataclass(frozen=True)
class ReportTable:
    """One table of a report, as the page and the terminal show it."""

    title: str
    columns: Sequence[str]  # their titles; percentages say so here
    rows: Sequence[Sequence[str | int]]
    what: str = ""  # what it shows, in a line
    about: str = ""  # what its columns mean, and how it was measured; for readers who were not there
    picture: Callable[[], str] | None = None  # draws it: the address of an SVG, by :mod:`mtp_extract.report.figures`
    folded: bool = False  # only for who looks closer

    @property
    def room(self) -> str:
        """Its class by the room that it wants: how wide its place must be for its rows to be rows."""
        longest, columns = max((len(str(cell)) for row in self.rows for cell in row), default=0), len(self.columns)
        if columns < 3 or (columns < 6 and longest < 30):
            return "narrow"
        return "medium" if columns < 7 else "wide"


@dataclass(frozen=True)
class Page:
    """A report as a reader sees it."""

    title: str
    about: str  # what was measured beside what, in a line
    verdict: str
    tables: Sequence[ReportTable]
    headlines: Sequence[Headline] = ()
    notes: Sequence[str] = ()
    measured: str = ""  # when and how, in a line at the foot


def as_json(record: object) -> bytes:
    """``record`` as a file holds it: indented, with null for a number that does not exist."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def plain_json(record: object) -> Any:
    """``record`` of JSON's own types."""
    return msgspec.json.decode(as_json(record))


def as_html(page: Page) -> str:
    """The page; without pictures where matplotlib is missing, which a note says."""
    tables, drawn = sorted(page.tables, key=lambda table: table.folded), find_spec("matplotlib") is not None
    values: dict[str, Any] = {"page": page, "tables": tables, "drawn": drawn, "version": __version__}
    return render_template("page.html", lambda value: escape(escape_invisible(value)), {"cell": _render_cell}, **values)


def _render_cell(text: str) -> str:
    """A cell's content: the interval of a number below it, a long name broken at its parts first."""
    if parts := re.fullmatch(rf"({_NUMBER})(?: (\(.*\)[×%]?))?", text):
        interval = f" <small>{escape(parts[2])}</small>" if parts[2] else ""
        return f'<span class="number">{escape(parts[1])}</span>{interval}'
    return re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", escape(escape_invisible(text)))
