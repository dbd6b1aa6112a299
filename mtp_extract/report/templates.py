"""Cards and pages from templates: whatever a template prints is escaped, unless a filter of its language made it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_extract.errors import escape as visible

if TYPE_CHECKING:
    from jinja2 import Environment


class Templates:
    """The templates of one markup language: files beside this one, run in Jinja's sandbox.

    Args:
        escape: a value → the same in the language, with no markup in it. Jinja's own escaping knows HTML alone.
        filters: name → a function whose result is markup already. Its arguments may be untrusted.
    """

    def __init__(self, escape: Callable[[object], str], **filters: Callable[..., str]) -> None:
        self._escape, self._filters = escape, filters

    def render(self, name: str, **values: object) -> str:
        """The template ``name``, filled in.

        Raises:
            LookupError: it prints or tests what a value does not have.
        """
        from jinja2 import UndefinedError

        try:
            return self._environment.get_template(name).render(values)
        except UndefinedError as error:
            raise LookupError(visible(error)) from error

    @cached_property
    def _environment(self) -> Environment:
        # Imported here: only what writes a card or a page pays for it.
        from jinja2 import FileSystemLoader, StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from markupsafe import Markup

        def marked(made: Callable[..., str]) -> Callable[..., Markup]:
            return lambda *arguments: Markup(made(*arguments))  # noqa: S704 - what a filter is for

        escape = marked(self._escape)
        environment = ImmutableSandboxedEnvironment(
            loader=FileSystemLoader(Path(__file__).parent),
            undefined=StrictUndefined,
            # What a macro or a block makes is markup.
            autoescape=True,
            finalize=lambda value: value if isinstance(value, Markup) else escape(value),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,
        )
        environment.filters |= {name: marked(made) for name, made in self._filters.items()}
        return environment
