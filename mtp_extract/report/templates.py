"""The templates beside this file, filled in: no value from outside is markup in what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def render_template(
    name: str, escape: Callable[[object], str], filters: Mapping[str, Callable[[str], str]], **values: Any
) -> str:
    """The template called ``name`` with ``values``.

    Args:
        escape: makes what it is given text of the document's language, and is put to every value.
        filters: by name in the template: make markup of a text themselves, and escape what is in it.
    """
    # Imported here: only what writes a document pays for it.
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
