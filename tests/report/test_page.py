"""The page: whole, closed to the outside, not to be broken by a name, and fit for a phone."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.record_document import REPORT
from helpers.web import HOSTILE
from helpers.web import Page as WebPage

from mtp_extract.report.markdown import escape_invisible
from mtp_extract.report.page import Page, ReportTable, render_html
from mtp_extract.validation.page import build_page
from mtp_extract.validation.result import Validation

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (390, 768, 1280)


def make_page(chain: Mapping[str, Any] = {}, **changes: Any) -> Page:
    """Return the page of a report with ``changes``, and changes of its only chain."""
    report = copy.deepcopy(REPORT)
    report["drafters"][0]["worth"]["3"].update(chain)
    return build_page(msgspec.convert({**report, **changes}, Validation))


def read_headlines(page: Page) -> dict[str, tuple[str, str]]:
    return {head.name: (head.value, head.of) for head in page.headlines}


def test_the_four_figures() -> None:
    page = make_page()
    assert read_headlines(page) == {
        "Verdict": ("Verified", "1 of 1 checks against sample.litertlm passed"),
        "Tokens per round": ("2.98", "chain of 3; 95 %: 2.90–3.10"),
        "Speedup": ("2.00×", "chain of 3; 5 texts, one at a time, on cpu; no interval"),
        "Same text": ("5 of 5", "greedy, in float32; whatever is drafted"),
    }
    assert [head.standing for head in page.headlines] == ["good", "", "", "good"]
    cells = WebPage(render_html(page)).within("dl")
    assert cells == [cell for head in page.headlines for cell in (head.name, head.value, head.of, head.means)]


def test_missing_figures_have_a_reason() -> None:
    alone = make_page(drafters=[], controls=[], base=None)
    assert [*read_headlines(alone).values()][1:] == [("", "it was run beside no base")] * 3
    assert WebPage(render_html(alone)).within("dl").count("not measured") == 3


UNASKED = {"name": "files", "what": "", "passed": None, "evidence": ""}
FAILED = {**REPORT["checks"][0], "passed": False}


@pytest.mark.parametrize(
    ("changes", "figure", "value", "of"),
    [
        ({"chain": {"same_text": 4}}, "Same text", "4 of 5", "greedy, in float32; chain of 3, the worst"),
        ({"verified": False, "checks": []}, "Verdict", "Not verified", "compared with no file"),
        (
            {"verified": False, "checks": [UNASKED]},
            *("Verdict", "Not verified", "0 of 1 checks against sample.litertlm passed, not checked: files"),
        ),
        (
            {"verified": False, "refuted": True, "checks": [FAILED]},
            *("Verdict", "Refuted", "0 of 1 checks against sample.litertlm passed, refuted: config"),
        ),
    ],
)
def test_headlines_follow_the_report(changes: dict[str, Any], figure: str, value: str, of: str) -> None:
    page = make_page(**changes)
    assert read_headlines(page)[figure] == (value, of)
    assert {head.name: head.standing for head in page.headlines}[figure] == ("bad" if value == "Refuted" else "")


def test_it_holds_every_table() -> None:
    page = make_page(notes=["something"])
    web = WebPage(render_html(page))
    assert web.within("h2") == [table.title for table in sorted(page.tables, key=lambda t: t.folded)] + ["Notes"]
    cells = iter(web.within("table"))
    for table in sorted(page.tables, key=lambda t: t.folded):
        assert table.what
        assert all(len(row) == len(table.columns) for row in table.rows)
        for row in (table.columns, *table.rows):
            for cell in filter(None, map(str, row)):
                text = next(cells)
                while text.replace(" ", "") != escape_invisible(cell).replace(" ", ""):
                    text += next(cells)
    drawn = ["What drafting is worth", "Acceptance by draft step", "Acceptance by workload", "Controls"]
    assert [image["alt"] for image in web.named("img")] == drawn


def rename_all(value: Any, name: str) -> Any:
    """Return ``value`` with ``name`` in place of all text that comes from outside."""
    if isinstance(value, dict):
        kept = ("standing",)
        return {key: item if key in kept else rename_all(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [rename_all(item, name) for item in value]
    return name if isinstance(value, str) else value


@pytest.mark.parametrize("name", [*HOSTILE[:6], *HOSTILE[-8:]])
def test_nothing_from_outside_is_markup(name: str) -> None:
    """Every element, attribute and address in the page is this package's."""
    report = rename_all(REPORT, name)
    (drafter,) = report["drafters"]
    for key in ("workloads", "changes", "worth"):
        drafter[key] = {name: drafter[key].popitem()[1]}
    report["drafters"].append({**drafter, "name": f"{name} 2"})
    text = render_html(build_page(msgspec.convert({**report, "notes": [name]}, Validation)))
    text.encode("utf-8")
    page = WebPage(text)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "base", "form", "a", "b"}
    for tag, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert key not in ("href", "srcset", "action", "data")
            assert key != "src" or (tag == "img" and str(value).startswith("data:image/svg+xml;base64,"))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert escape_invisible(name) in "".join(shown for _, shown in page.texts)


def test_without_matplotlib_a_note_replaces_the_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_extract.report.page.find_spec", lambda name: None)
    assert "Nothing is drawn: matplotlib is missing" in render_html(make_page())


def test_it_loads_nothing_and_is_the_same_again() -> None:
    text = render_html(make_page())
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert not re.findall(r"https?://", re.sub(r"base64,[^\"]*", "", text))
    assert text == render_html(make_page())


def measure_overflow(pages: Mapping[str, str], folder: Path) -> dict[str, list[int]]:
    """Return by how much each page is wider than its place at :data:`WIDTHS`, except scrolling tables."""
    frames = "".join(
        f'<iframe data-name="{name}" width="{width}" height="900" style="border:0" srcdoc="{escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in WIDTHS
    )
    script = """addEventListener("load", () => {
      const beyond = page => Math.max(...[page.documentElement, ...page.querySelectorAll("dl,section,summary")]
        .map(part => part.scrollWidth - part.clientWidth));
      document.body.dataset.found = JSON.stringify(
        [...document.querySelectorAll("iframe")].map(frame => [frame.dataset.name, beyond(frame.contentDocument)]));
      document.querySelectorAll("iframe").forEach(frame => frame.remove());
    })"""
    (folder / "frames.html").write_text(f"<!doctype html><body>{frames}<script>{script}</script>", encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    done = subprocess.run(
        [str(CHROMIUM), *options.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom", "frames.html"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    overflows: dict[str, list[int]] = {}
    attribute = re.search(r'data-found="([^"]*)"', done.stdout)
    assert attribute, done.stderr
    for name, beyond in json.loads(attribute[1].replace("&quot;", '"')):
        overflows.setdefault(name, []).append(beyond)
    return overflows


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_nothing_is_cut_off_at_any_width(tmp_path: Path) -> None:
    many = tuple(f"column {n}" for n in range(14))
    wide = ReportTable("Wide", many, [("x" * 80, *["12.34 (11.11–13.13)"] * 13)], what="Many columns.")
    pages = {"sample": make_page(), "wide": replace(make_page(drafter="x" * 300), tables=[wide])}
    opened = {name: render_html(page).replace("<details", "<details open") for name, page in pages.items()}
    assert measure_overflow(opened, tmp_path) == dict.fromkeys(pages, [0] * len(WIDTHS))
