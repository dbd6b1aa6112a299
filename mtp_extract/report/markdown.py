"""Markdown of text that nobody vouches for: names from files, what users typed, what servers say of themselves."""

from __future__ import annotations

import json
import re

from mtp_extract.errors import escape

# An underscore inside a word, as in q_proj, is no markup; a hash at the end closes a heading.
_MARKUP = re.compile(r"[`*|\\\[\]~$]|#(?=\s*$)|(?<![^\W_])_|_(?![^\W_])")
_OPENING = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[#>+=-]))")


def escape_invisible(text: object) -> str:
    """``text`` on one line, what is not to be seen in it spelled out; what markup it is in is another matter."""
    # Word by word, as a long text is not a long name.
    return " ".join(escape(word) for word in str(text).split(" "))


def plain(text: object) -> str:
    """``text`` such that nothing in it is markup, or ends a table cell or a line."""
    # As entities: what a backslash stands before is taken for HTML all the same inside of HTML.
    text_alone = re.sub(r"&(?=[#\w])", "&amp;", escape_invisible(text)).replace("<", "&lt;")
    return _MARKUP.sub(r"\\\g<0>", text_alone)


def escape_paragraph(text: object) -> str:
    """The same for a line of its own, which is no heading, quotation or item of a list either."""
    return _OPENING.sub(r"\1\\", plain(text).strip())


def format_code(value: object) -> str:
    """``value`` as inline code that cannot end itself, a table cell or a line; a dash for nothing."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = escape(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "–"
