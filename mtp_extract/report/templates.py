"""Renders the templates beside this file; no value from outside becomes markup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def render_template(
    name: str, escape: Callable[[object], str], filters: Mapping[str, Callable[[str], str]], **values: Any
) -> str:
    """Render the template ``name`` with ``values``.

    Args:
        escape: escapes a value for the document's language; applied to every value.
        filters: functions by name that return markup, and escape their text themselves.
    """
    # Imported here, as few commands write a document.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape(value)),  # noqa: S704
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for key, render in filters.items():
        templates.filters[key] = lambda value, render=render: Markup(render(str(value)))  # noqa: S704
    return templates.get_template(name).render(values)
