"""A report as one page of HTML that needs nothing else: no network, no script, pictures inside.

It shows the same tables as the Markdown page; ``page.html`` beside this file is what it looks like. What stands in them
comes from files, servers and users, so every word is escaped, and the page forbids itself to load anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from pathlib import Path

from mtp_extract.report.colours import COLOURS
from mtp_extract.report.columns import Table
from mtp_extract.report.drawing import draw
from mtp_extract.report.markdown import visible
from mtp_extract.report.page import Page
from mtp_extract.report.svg import inline
from mtp_extract.report.templates import Templates

_LONG = 60
"""Characters of a cell that is a sentence, and wants room."""
_ROOMS = {"narrow": 48, "medium": 76, "wide": 130}
"""How many characters across a phone has room for, half a page, and a page."""

_NUMBER = re.compile(r"[−+-]?[\d.,]*\d(?:e[+-]?\d+)?[×%]?(?:/\d+)?|–")
_WITH_INTERVAL = re.compile(rf"({_NUMBER.pattern}) (\(.*\)[×%]?)")
_UNDRAWN = "Nothing is drawn: matplotlib is missing, which the extra validate brings."


def write_pages(page: Page, folder: Path, name: str) -> list[str]:
    """Write ``name.json``, its pages and pictures into ``folder``; no pictures where matplotlib is missing.

    Returns:
        the names of all files in ``folder``: of these no others than :func:`~mtp_extract.report.page.pages_of` says.
    """
    (folder / f"{name}.json").write_text(json.dumps(page.report, indent=2) + "\n", encoding="utf-8")
    drawn: list[str] = []
    if find_spec("matplotlib") is not None:
        drawn = draw(page.drawings, page.report, folder)
    elif page.drawings:
        page = replace(page, report={**page.report, "notes": [*page.report["notes"], _UNDRAWN]})
    (folder / f"{name}.md").write_text(page.markdown(drawn), encoding="utf-8")
    svg = {n: inline((folder / f"{n}.svg").read_text(encoding="utf-8"), n, page.captions[n]) for n in drawn}
    (folder / f"{name}.html").write_text(web_page(page, svg), encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())


def web_page(page: Page, drawn: Mapping[str, str] = {}) -> str:
    """``page`` in HTML. ``drawn`` are its pictures: name → SVG, as :func:`~mtp_extract.report.svg.inline` gives it."""
    return _PAGES.render(
        "page.html",
        page=page,
        report=page.report,
        parts=re.split(r"(?<=;) ", page.report["verdict"]),
        tables=sorted(page.tables, key=lambda table: not table.first),
        drawn=drawn,
        colours=COLOURS,
    )


def _text(text: object) -> str:
    """``text`` as it is, for a page: what is not to be seen is spelled out, and nothing in it is markup."""
    return escape(visible(text))


def _name(text: object) -> str:
    """The same of what may be a long name: it breaks at its parts first."""
    return re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", _text(text))


def _marked(text: str) -> str:
    """``text`` in Markdown of this package: code and emphasis."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked)


def _cell(value: str | int, column: str) -> str:
    """A cell with its column's title, which stands beside it where there is no room for a table."""
    text, label = str(value), f'data-label="{_text(column)}"'
    if found := _WITH_INTERVAL.fullmatch(text):
        return f'<td class="number" {label}>{_text(found[1])} <small>{_text(found[2])}</small></td>'
    if _NUMBER.fullmatch(text):
        return f'<td class="number" {label}>{_text(text)}</td>'
    return f'<td class="{"long" if max(len(text), 2 * len(column)) > _LONG else "short"}" {label}>{_name(text)}</td>'


def _room(table: Table) -> str:
    """The class of a table by the room that it wants: that of each column's widest cell, intervals below numbers."""
    titles = [max(map(len, title.split()), default=0) for title in table.columns]
    width = sum(max(1 + title, *map(_width, cells)) for title, *cells in zip(titles, *table.rows, strict=True))
    return next((room for room, most in _ROOMS.items() if width <= most), "list")


def _width(cell: str | int) -> int:
    text = str(cell)
    found = _WITH_INTERVAL.fullmatch(text)
    return 1 + (max(map(len, found.groups())) if found else min(len(text), _LONG // 3))


_PAGES = Templates(_text, cell=_cell, marked=_marked, name=_name, room=_room, svg=str)
