"""How every page begins: four large figures, each with what it is of and what it means; and that it fits a phone."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest
from helpers.report_document import REPORT
from helpers.web import Page as WebPage

from mtp_extract.report.columns import Table
from mtp_extract.report.page import NOT_MEASURED, Page
from mtp_extract.report.web import web_page
from mtp_extract.report.words import WORDS, explained
from mtp_extract.validate.report.pages import page_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def shown(**changes: Any) -> Page:
    """The page of a report with these changes; of its drafter those that are called ``generation`` and so on."""
    report = copy.deepcopy(REPORT)
    drafter = report["drafters"][0]
    for name in ("generation", "arithmetic"):
        for part in changes.pop(name, {}).items():
            (drafter[name]["3"] if name == "generation" else drafter[name]).__setitem__(*part)
    return page_of({**report, **changes})


def told(page: Page) -> dict[str, tuple[str, str]]:
    return {head.name: (head.value, head.of) for head in page.headlines}


def test_the_four_figures() -> None:
    page = shown()
    assert told(page) == {
        "Verdict": ("Proven", "1 of 1 checks against sample.litertlm passed"),
        "Tokens a round": ("2.98", "chain of 3; 95 %: 2.90–3.10"),
        "Speedup": ("2.00×", "chain of 3; 5 texts, one at a time, on cpu; no interval"),
        "Same text": ("7 of 7", "greedy, in float32; whatever is drafted"),
    }
    assert [head.standing for head in page.headlines] == ["good", "", "", "good"]
    web = WebPage(web_page(page))
    cells = [text for around, text in web.texts if "dl" in around and "header" in around]
    assert cells == [cell for head in page.headlines for cell in head[:4]]
    for name, (value, of) in told(page).items():
        assert f"| {name} | **{value}** | {of} |" in page.markdown()


def test_what_was_not_measured_says_so() -> None:
    alone = shown(drafters=None, agreement=None, controls=None, generation={}, arithmetic={}, base=None)
    assert told(alone) == {
        "Verdict": ("Proven", "1 of 1 checks against sample.litertlm passed"),
        **dict.fromkeys(("Tokens a round", "Speedup", "Same text"), (NOT_MEASURED, "it was run beside no base")),
    }
    nothing = {"mean_accepted_length": None, "mean_accepted_length_ci95": None, "rounds": 0}
    untimed = {"speedups": {"3": {"predicted": None, "measured": None}}}
    short = told(shown(generation=nothing, arithmetic=untimed))
    assert short["Tokens a round"] == (NOT_MEASURED, "no text left anything to draft")
    assert short["Speedup"] == (NOT_MEASURED, "no text was timed")
    assert short["Same text"] == (NOT_MEASURED, "no round drafted anything")
    assert told(shown(generation={"mean_accepted_length_ci95": None}))["Tokens a round"][1] == "chain of 3; no interval"


def test_times_that_cannot_be_right_are_no_speedup() -> None:
    """A round that drafts and verifies in less than the time of one token of the base: something else ran."""
    slow, fast = (shown(generation={"verify_ms": ms, "draft_ms": 1.0}) for ms in (29.0, 28.0))
    assert told(slow)["Speedup"][0] == "2.00×"
    assert told(fast)["Speedup"] == (NOT_MEASURED, "something else used the machine meanwhile")


@pytest.mark.parametrize(
    ("changes", "value", "of"),
    [
        ({"proven": False, "checks": None}, "Not proven", "compared with no file"),
        (
            {"proven": False, "checks": [{"name": "files", "what": "", "passed": None, "evidence": ""}]},
            "Not proven",
            "0 of 1 checks against sample.litertlm passed, not checked: files",
        ),
        (
            {"proven": False, "refuted": True, "checks": [{**REPORT["checks"][0], "passed": False}]},
            "Refuted",
            "0 of 1 checks against sample.litertlm passed, refuted: config",
        ),
        ({"refuted": True}, "Refuted", "by what it drafts; 1 of 1 checks against sample.litertlm passed"),
    ],
)
def test_no_verdict_is_stronger_than_its_checks(changes: Mapping[str, Any], value: str, of: str) -> None:
    page = shown(**changes)
    assert told(page)["Verdict"] == (value, of)
    assert page.headlines[0].standing == ("bad" if value == "Refuted" else "")


def test_text_that_parts_is_counted_where_most_does() -> None:
    tie = {"prompt": 0, "token": 3, "margin": 0.01, "tie": True}
    for divergence, standing in ((tie, ""), ({**tie, "tie": False}, "bad")):
        page = shown(generation={"identical_prompts": 6, "divergences": [divergence]})
        assert told(page)["Same text"] == ("6 of 7", "greedy, in float32; chain of 3, the worst")
        assert page.headlines[3].standing == standing


def test_every_heading_and_word_has_its_line() -> None:
    page = shown(notes=["something"], findings=["one"])
    assert all(table.what and "\n" not in table.what for table in page.tables)
    web = WebPage(web_page(page))
    headings, lines = web.within("h2"), [a for a in web.named("span") if a.get("class") == "what"]
    assert len(headings) == len(lines) == len(page.tables) + 1
    assert all(head.means and head.of for head in page.headlines)
    assert explained(["top-1 %, step 1", "step 2 %", "draft step", "steps", "name"]) == [
        (word, WORDS[word]) for word in ("top-1", "step", "draft step")
    ]
    assert not set("*`\n") & set("".join(WORDS.values()))


WIDTHS = (390, 768, 1280)


def measured(pages: Mapping[str, str], folder: Path) -> dict[str, list[int]]:
    """Of each page, by how much something is wider than its room, but for tables that scroll, at :data:`WIDTHS`."""
    frames = "".join(
        f'<iframe data-name="{name}" width="{width}" height="900" style="border:0" srcdoc="{escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in WIDTHS
    )
    script = """addEventListener("load", () => {
      const beyond = page => Math.max(...[page.documentElement, ...page.querySelectorAll("dl,section,summary,.list")]
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
    found: dict[str, list[int]] = {}
    attribute = re.search(r'data-found="([^"]*)"', done.stdout)
    assert attribute, done.stderr
    for name, beyond in json.loads(attribute[1].replace("&quot;", '"')):
        found.setdefault(name, []).append(beyond)
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_nothing_is_cut_off_at_any_width(tmp_path: Path) -> None:
    many = tuple(f"column {n}" for n in range(14))
    wide = Table("Wide", many, (("x" * 80, *["12.34 (11.11–13.13)"] * 13),), what="Many columns.", first=True)
    long = shown(drafter="x" * 300)
    pages = {"sample": shown(), "wide": Page(**{**vars(long), "tables": [wide]})}
    opened = {name: web_page(page).replace("<details", "<details open") for name, page in pages.items()}
    found = measured(opened, tmp_path)
    assert found == dict.fromkeys(pages, [0] * len(WIDTHS))
