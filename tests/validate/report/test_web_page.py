"""The page in HTML: whole, closed to the outside, the tables of the Markdown page, and not to be broken by a name."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.report_document import REPORT
from helpers.web import Page

from mtp_extract.report.colours import COLOURS
from mtp_extract.report.columns import Table
from mtp_extract.report.drawing import draw
from mtp_extract.report.figures import DRAWINGS
from mtp_extract.report.markdown import visible
from mtp_extract.report.svg import inline
from mtp_extract.report.tables import FIGURES
from mtp_extract.report.web import web_page
from mtp_extract.validate.report.pages import page_of

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title><script>",
    "&lt;b&gt; &amp;",
    "a\x00b\x1b[31mc\x7f\u202egnp.exe",
    "שלום عالم",
    "日本語",
    "x" * 500,
    "$\\frac{1}{0}$ {brace} %s",
    "\udcff surrogate",
    "javascript:alert(1) http://example.org",
)


def hostile(name: str) -> dict[str, Any]:
    """A report in which everything that comes from outside has this name."""
    report = copy.deepcopy(REPORT)
    report.update(verdict=f"Measured: {name}.", findings=[name] * 7, notes=[name], drafter=name, source=name)
    report["base"]["name"] = name
    report["tool"]["version"] = name
    for drafter in report["drafters"]:
        drafter["name"] = drafter["format"] = name
        drafter["agreement"]["workloads"] = {name: drafter["agreement"]["workloads"].popitem()[1]}
        drafter["changes"] = {name: drafter["change"]}
    report["agreement"]["workloads"] = {name: report["agreement"]["workloads"].popitem()[1]}
    report["drafters"].append({**copy.deepcopy(report["drafters"][0]), "name": name + " 2"})
    return report


def drawn(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """The figures there are, as they stand in a page."""
    return {
        name: inline((folder / f"{name}.svg").read_text(encoding="utf-8"), name, FIGURES[name])
        for name in draw(DRAWINGS, report, folder)
    }


def paged(report: dict[str, Any], figures: dict[str, str]) -> str:
    """As it is written beside ``report.json``."""
    return web_page(page_of(report), figures)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the report that other tests use."""
    found = drawn(REPORT, tmp_path_factory.mktemp("figures"))
    assert found
    return found


@pytest.fixture(scope="module")
def text(figures: dict[str, str]) -> str:
    """Its page."""
    return paged(REPORT, figures)


@pytest.fixture(scope="module")
def hostile_figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All figures once, of a report that has every hostile name wherever a figure shows a name."""
    report = copy.deepcopy(REPORT)
    (first,) = report["drafters"]
    workload = next(iter(report["agreement"]["workloads"].values()))
    report["agreement"]["workloads"] = first["agreement"]["workloads"] = dict.fromkeys(HOSTILE, workload)
    timed = {**first["generation"]["3"], "draft_ms": 4.0}
    report["generation"] = dict.fromkeys(HOSTILE, timed)
    first["generation"] = {"3": timed}
    report["drafters"] = [{**first, "name": name} for name in HOSTILE]
    found = drawn(report, tmp_path_factory.mktemp("hostile"))
    assert set(found) == set(FIGURES)
    return found


def test_it_holds_every_table(text: str) -> None:
    page = Page(text)
    tables = list(page_of(REPORT).tables)
    assert page.within("h1") == [f"Validation of {REPORT['drafter']}"]
    assert [title for title in page.within("h2") if title not in ("Findings", "Notes")] == [t.title for t in tables]
    cells = iter(page.within("table"))
    for table in tables:
        for row in (table.columns, *table.rows):
            for cell in filter(None, map(str, row)):
                found = next(cells)
                while found.replace(" ", "") != visible(cell).replace(" ", ""):
                    found += next(cells)


def test_what_matters_first_stands_open() -> None:
    first = Table("First", ("a",), (("1",),), about="*How* `x`.", first=True)
    second = Table("Second", ("b",), (("2",),), after="So & so.")
    page = Page(web_page(replace(page_of(REPORT), tables=[second, first])))
    assert [around for around, text in page.texts if text == "1"] == [
        ("html", "body", "main", "section", "div", "div", "table", "tbody", "tr", "th")
    ]
    assert [("details" in around) for around, text in page.texts if text == "2"] == [True]
    assert ("html", "body", "main", "section", "details", "p", "em") in [around for around, _ in page.texts]
    assert "So & so." in [text for _, text in page.texts]


def check_no_markup(text: str) -> Page:
    """Nothing in ``text`` is an element, an attribute or an address that is not this package's."""
    text.encode("utf-8")
    page = Page(text)
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "img", "link", "iframe", "object", "base", "form", "a", "b"}
    for tag, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert key not in ("src", "srcset", "action", "data")
            assert key != "href" or str(value).startswith("#"), (tag, value)
            assert "url(" not in str(value) or "url(#" in str(value)
    assert all(c.isprintable() or c == "\n" for c in text)
    return page


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_from_outside_is_markup(name: str) -> None:
    shown = "".join(text for _, text in check_no_markup(paged(hostile(name), {})).texts)
    assert visible(name) in shown


def test_no_name_in_a_figure_is_markup(hostile_figures: dict[str, str]) -> None:
    page = check_no_markup(paged(REPORT, hostile_figures))
    labels = {text for around, text in page.texts if "svg" in around}
    for name in HOSTILE:
        shown = visible(name)
        assert any(shown == label or (shown[:13] in label and shown[-14:] in label) for label in labels), name


def test_it_asks_for_nothing(text: str) -> None:
    page = Page(text)
    assert {"http-equiv": "Content-Security-Policy", "content": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    )} in page.named("meta")  # fmt: skip
    assert not re.search(r"https?:|//www|@import|url\((?!#)|<script|xmlns", text)


def test_ids_are_those_of_one_page(text: str) -> None:
    page = Page(text)
    ids = [str(attributes["id"]) for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for value in filter(None, attributes.values()):
            assert set(re.findall(r"url\(#([^)]*)\)", value)) <= set(ids)
        for key in ("href", "aria-labelledby"):
            if key in attributes:
                assert str(attributes[key]).lstrip("#") in ids


def test_who_cannot_see_it_is_told(text: str) -> None:
    page = Page(text)
    assert page.named("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.named("meta")
    pictures = page.named("svg")
    assert pictures
    for figure in pictures:
        assert figure["role"] == "img"
        assert "width" not in figure
        assert figure["viewbox"]
    assert len(page.named("figcaption")) == len(page.named("figure")) == len(pictures)
    for region in page.named("div"):
        if str(region.get("class")).startswith("scroll"):
            assert region["role"] == "region"
            assert region["tabindex"] == "0"
    assert {cell["scope"] for cell in page.named("th")} == {"col", "row"}


def test_figures_take_the_pages_letters_and_colours(figures: dict[str, str]) -> None:
    for text in figures.values():
        assert "<metadata" not in text
        assert "font-family" not in text
        assert "DejaVu" not in text
        assert "font-size" in text
        left = set(re.findall(r"#[0-9a-f]{6}\b", text))
        assert not left, "a colour that the dark has no other for"
        assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(COLOURS)
        assert text.startswith("<svg viewBox=")


def test_a_font_in_one_word_or_in_several() -> None:
    """As matplotlib writes it now, and as it did up to 3.9."""
    old = "<svg><text style=\"font: 700 9px 'DejaVu Sans', sans-serif; text-anchor: start\">x</text></svg>"
    new = "<svg><text style=\"font-size: 9px; font-family: 'DejaVu Sans'; text-anchor: start\">x</text></svg>"
    assert 'style="font-weight: 700; font-size: 9px; text-anchor: start"' in inline(old, "a", "b")
    assert 'style="font-size: 9px; text-anchor: start"' in inline(new, "a", "b")


def test_what_has_no_number_has_no_mark(tmp_path: Path) -> None:
    """A drafter of which nothing was accepted has no rate at later steps, and none that was not timed a speed."""
    report = copy.deepcopy(REPORT)
    (step,) = report["agreement"]["steps"]
    nothing = {**step, "step": 2, "conditional": None, "ci95": {**step["ci95"], "conditional": [None, None]}}
    report["agreement"]["steps"] = [step, nothing]
    first = report["drafters"][0]
    first["agreement"]["steps"] = [step, nothing]
    report["drafters"].append({**copy.deepcopy(first), "name": "other"})
    for found in (found for drafter in report["drafters"] for found in drafter["generation"].values()):
        found.update(draft_ms=None, verify_ms=None, mean_accepted_length=None, mean_accepted_length_ci95=None)
    for drafter in report["drafters"]:
        drafter["arithmetic"]["speedups"]["3"] = {"predicted": None, "measured": None}
    figures = drawn(report, tmp_path)
    assert "–" in Page(paged(report, figures)).within("td")
    assert "drafters_and_methods" not in figures
    for drafter in report["drafters"]:
        for found in (drafter["agreement"], *drafter["agreement"]["workloads"].values()):
            found.update(mean_accepted_length=None, mean_accepted_length_ci95=None)
    assert "length_by_workload" not in draw(DRAWINGS, report, tmp_path)


def test_a_long_name_leaves_room_for_what_it_names(tmp_path: Path) -> None:
    """A tree by its ways down, as one that ranks chose is named."""
    report = copy.deepcopy(REPORT)
    name = "paths:" + ",".join(f"0.0.0.0.{leaf}" for leaf in range(40))
    first = report["drafters"][0]
    for part in (report, first):
        part["generation"][name] = {**part["generation"]["3"], "tree": name, "draft_ms": 4.0}
    first["arithmetic"]["speedups"][name] = first["arithmetic"]["speedups"]["3"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {"generation_by_drafts", "round_by_drafts"} <= set(draw(DRAWINGS, report, tmp_path))


def test_the_same_report_gives_the_same_page(text: str, tmp_path: Path) -> None:
    assert paged(REPORT, drawn(REPORT, tmp_path)) == text


@pytest.mark.parametrize(("ground", "least"), [("light", 3.0), ("dark", 3.0)])
def test_every_colour_is_seen_on_its_ground(ground: str, least: float) -> None:
    """3 to 1, as WCAG 2.2 asks of what is no text, and 4.5 of text; but for lines and what lies beneath."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    page = luminance(getattr(COLOURS["page"], ground))
    for name in set(COLOURS) - {"page", "line", "pale"}:
        other = luminance(getattr(COLOURS[name], ground))
        contrast = (max(page, other) + 0.05) / (min(page, other) + 0.05)
        assert contrast >= (4.5 if name in ("ink", "faint") else least), (name, contrast)
