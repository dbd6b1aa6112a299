"""A report as one page of HTML that needs nothing else: no network, no script, figures inside.

It shows the same tables as the Markdown page; ``page.html`` beside this file is what it looks like. What stands in them
comes from files, servers and users, so every word is escaped, and the page forbids itself to load anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from mtp_extract.report.colours import COLOURS
from mtp_extract.report.columns import Table
from mtp_extract.report.markdown import visible
from mtp_extract.report.tables import FIGURES
from mtp_extract.report.templates import Templates

_LONG = 60
"""Characters of a cell that is a sentence, and wants room."""

_NUMBER = re.compile(r"[−+-]?[\d.,]*\d(?:e[+-]?\d+)?[×%]?(?:/\d+)?|–")
_WITH_INTERVAL = re.compile(rf"({_NUMBER.pattern}) (\(.*\)[×%]?)")


def web_page(
    title: str,
    report: Mapping[str, Any],
    tables: Iterable[Table],
    drawn: Mapping[str, str] = {},
    captions: Mapping[str, str] = FIGURES,
) -> str:
    """A report in HTML: verdict and findings first, then ``tables`` with their figures.

    Args:
        title: its heading.
        report: ``verdict``, ``findings``, ``notes`` and ``tool``; ``proven`` and ``refuted`` where there are such.
        tables: those that matter first come first and stand open, the others are folded.
        captions: of every figure there may be.
        drawn: figures there are, name → SVG, as :func:`~mtp_extract.report.svg.inline` gives it.
    """
    return _PAGES.render(
        "page.html",
        title=title,
        report=report,
        standing=next((name for name in ("refuted", "proven") if report.get(name)), "measured"),
        parts=re.split(r"(?<=;) ", report["verdict"]),
        tables=sorted(tables, key=lambda table: not table.first),
        drawn=drawn,
        captions=captions,
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


def _cell(value: str | int) -> str:
    text = str(value)
    if found := _WITH_INTERVAL.fullmatch(text):
        return f'<td class="number">{_text(found[1])} <small>{_text(found[2])}</small></td>'
    if _NUMBER.fullmatch(text):
        return f'<td class="number">{_text(text)}</td>'
    return f'<td class="{"long" if len(text) > _LONG else "short"}">{_name(text)}</td>'


_PAGES = Templates(_text, cell=_cell, marked=_marked, name=_name, svg=str)
