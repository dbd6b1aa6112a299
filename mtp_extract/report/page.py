"""Renders a report as one self-contained HTML page: no network, no script, pictures inside.

``page.html`` beside this file is the template. Names come from untrusted files, servers and users: every value is
escaped, invisible characters are spelled out, and the page's policy forbids loading anything.
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
    """A large figure at the top of a page."""

    name: str
    value: str  # the figure; empty if it was not measured
    of: str  # what it was measured on, with its interval; or why it was not measured
    means: str  # explains ``name`` in a line
    standing: Literal["", "good", "bad"] = ""


@dataclass(frozen=True)
class ReportTable:
    """A table of a report, for the page and the terminal."""

    title: str
    columns: Sequence[str]  # titles, with the unit
    rows: Sequence[Sequence[str | int]]
    what: str = ""  # summary of the table in a line
    about: str = ""  # explains the columns and the measurement
    picture: Callable[[], str] | None = None  # returns the data URL of a chart, of :mod:`mtp_extract.report.figures`
    folded: bool = False  # hidden until the reader opens it

    @property
    def room(self) -> str:
        """CSS class for the width that the rows need."""
        longest = max((len(str(cell)) for row in self.rows for cell in row), default=0)
        columns = len(self.columns)
        if columns < 3 or (columns < 6 and longest < 30):
            return "narrow"
        return "medium" if columns < 7 else "wide"


@dataclass(frozen=True)
class Page:
    """The content of a page."""

    title: str
    about: str  # what was measured, in a line
    verdict: str
    tables: Sequence[ReportTable]
    headlines: Sequence[Headline] = ()
    notes: Sequence[str] = ()
    measured: str = ""  # when and how, a line at the bottom


def encode_json(record: object) -> bytes:
    """Encode ``record`` as an indented JSON file, with null for NaN."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def convert_to_json(record: object) -> Any:
    """Convert ``record`` to dicts, lists, strings, numbers and None, as in its JSON."""
    return msgspec.json.decode(encode_json(record))


def render_html(page: Page) -> str:
    """Render ``page`` as HTML; without matplotlib, a note replaces the charts."""
    tables = sorted(page.tables, key=lambda table: table.folded)
    drawn = find_spec("matplotlib") is not None
    values: dict[str, Any] = {"page": page, "tables": tables, "drawn": drawn, "version": __version__}
    return render_template("page.html", lambda value: escape(escape_invisible(value)), {"cell": _render_cell}, **values)


def _render_cell(text: str) -> str:
    """Render a cell: a number's interval is small, and a name may break after ``_``, ``/`` and ``.``."""
    if parts := re.fullmatch(rf"({_NUMBER})(?: (\(.*\)[×%]?))?", text):
        interval = f" <small>{escape(parts[2])}</small>" if parts[2] else ""
        return f'<span class="number">{escape(parts[1])}</span>{interval}'
    return re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", escape(escape_invisible(text)))
