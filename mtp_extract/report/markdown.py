"""Escapes untrusted text for Markdown: names from files, user input, server replies."""

from __future__ import annotations

import json
import re

from mtp_extract.errors import escape

# An underscore inside a word, as in q_proj, is not markup; a hash at the end closes a heading.
_MARKUP = re.compile(r"[`*|\\\[\]~$]|#(?=\s*$)|(?<![^\W_])_|_(?![^\W_])")
_OPENING = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[#>+=-]))")


def escape_invisible(text: object) -> str:
    """Return ``text`` on one line, with invisible characters spelled out; markup is not escaped."""
    # Word by word, as `escape` shortens what is too long for a name.
    return " ".join(escape(word) for word in str(text).split(" "))


def escape_markdown(text: object) -> str:
    """Return ``text`` escaped so that nothing in it is markup, or ends a table cell or a line."""
    # Entities, since a backslash does not escape inside an HTML block.
    text_alone = re.sub(r"&(?=[#\w])", "&amp;", escape_invisible(text)).replace("<", "&lt;")
    return _MARKUP.sub(r"\\\g<0>", text_alone)


def escape_paragraph(text: object) -> str:
    """Return ``text`` escaped for a line of its own, so that it does not begin a heading, quotation or list either."""
    return _OPENING.sub(r"\1\\", escape_markdown(text).strip())


def format_code(value: object) -> str:
    """Return ``value`` as inline code that cannot end early, nor end a table cell or a line; a dash if it is empty."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = escape(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "–"
