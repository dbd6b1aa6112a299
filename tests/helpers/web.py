"""A page of HTML as a browser would take it apart."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

HOSTILE: list[str] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "hostile_names.json").read_text(encoding="utf-8")
)
"""Names that nobody vouches for: markup of HTML and of Markdown, and what is not to be seen."""

_VOID = {"meta", "link", "br", "hr", "wbr", "img", "input"}


class Page(HTMLParser):
    """What a page holds; an element that is not closed, or closed twice, is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []  # tag, attributes
        self.texts: list[tuple[tuple[str, ...], str]] = []  # tags around it, text
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> within {self._open}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((tuple(self._open), data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def within(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if tag in around]
