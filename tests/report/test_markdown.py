"""Text that nobody vouches for in Markdown: as a renderer shows it, it is that text, and nothing of it is markup."""

from __future__ import annotations

import pytest
from helpers.record_document import RECORD, ordered_head, tuning
from helpers.web import HOSTILE, Page
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_extract.report.card import Verdict, render_model_card
from mtp_extract.report.markdown import escape_invisible, escape_markdown, escape_paragraph

from .test_page import rename_all

markdown_it = pytest.importorskip("markdown_it")
RENDER = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render


def render(markdown: str, tag: str) -> tuple[list[str], set[str]]:
    """Return the texts in the elements of this tag as a renderer shows them, and all tags."""
    page = Page(RENDER(markdown))
    texts: dict[tuple[str, ...], str] = {}
    for around, text in page.texts:
        if tag in around:
            texts[around] = texts.get(around, "") + text
    return [text.strip("\n") for text in texts.values()], {name for name, _ in page.elements}


def check_escaped(text: str) -> None:
    expected = escape_invisible(text).strip()
    assert render(f"# {escape_markdown(text)}", "h1") == ([expected] if expected else [], {"h1"})
    assert render(escape_paragraph(text), "p") == ([expected] if expected else [], {"p"} if expected else set())
    assert render(f"- {escape_paragraph(text)}", "li") == ([expected] if expected else [], {"ul", "li"})
    cells, tags = render(f"| a | b |\n| --- | --- |\n| {escape_markdown(text)} | c |", "td")
    assert "".join(cells).removesuffix("c").strip() == expected
    assert tags == {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_as_text(text: str) -> None:
    check_escaped(text)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text("<>&;#[]()!`*_~|\\$-+=.1 ab\n:/\"'", max_size=24))
def test_any_text_is_shown_as_text(text: str) -> None:
    # Spaces in a row, and at the ends, are one or none in every page.
    check_escaped(" ".join(text.split()))


@pytest.mark.parametrize("name", HOSTILE[:12])
def test_a_card_of_such_names(name: str) -> None:
    step = {"layout": "x", "dtype": "x", "rounded": ["x"], "rule": "x"}
    steps = {"tuning": tuning("x"), "ordered_head": ordered_head("x"), "converted_from": [step]}
    sound = {**RECORD, **steps, "geometry": {"base": "x"}, "proof": ["x"], "rule": "x", "layout": "litert"}
    source = {**rename_all(sound["source"], name), "provenance": {"url": name, name: name, "repository": name}}
    tags = []
    for record, word in ((sound, "x"), ({**rename_all(sound, name), "source": source, "layout": "litert"}, name)):
        text = render_model_card(record, [word], Verdict(True, word)).split("---\n", 2)[2]
        tags.append({tag for tag, _ in Page(RENDER(text)).elements})
    assert tags[1] <= tags[0]
