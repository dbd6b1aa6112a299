"""Markdown of text that nobody vouches for: names from files, what users typed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from mtp_extract.errors import escape

__all__ = ["code", "plain", "table", "visible"]


def visible(text: object) -> str:
    """``text`` on one line, what is not to be seen in it spelled out; what markup it is in is another matter."""
    # Word by word, as a long text is not a long name.
    return " ".join(escape(word) for word in str(text).split(" "))


def plain(text: object) -> str:
    """``text`` such that nothing in it ends a table cell or a line."""
    return visible(text).replace("|", "\\|")


def code(value: object) -> str:
    """``value`` as inline code that cannot end itself, a table cell or a line; a dash for nothing."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = escape(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "–"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))
