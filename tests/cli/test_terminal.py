"""What the commands print: lines and tables that fit, progress that leaves nothing behind."""

from __future__ import annotations

import io
import re
import sys

import pytest

from mtp_extract.cli import terminal
from mtp_extract.cli.terminal import TerminalReporter
from mtp_extract.progress import BYTES

HEAD = ("role", "what was found", "n", "why this is so and not otherwise", "name")
ROWS = [
    ["layers.0.gate_proj", "as integers", 7, "the weight of op 8 FULLY_CONNECTED, whose input is the norm", "a.b/c"],
    ["layers.10.gate_proj", "as floats", 1234, "read off the graph", "mtp_drafter/decoder/layer_3/attention/query"],
    ["x", "", 1, "", ""],
]


@pytest.mark.parametrize("columns", [150, 100, 60])
def test_a_table_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.say_table(ROWS, HEAD)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    words = set(" ".join(lines).replace(":", " ").split())
    unbroken = {word for row in (HEAD[1:], *ROWS) for cell in row for word in str(cell).split() if len(word) <= 28}
    assert unbroken <= words | {line.strip() for line in lines}


def test_where_columns_do_not_fit_each_row_is_a_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [["drafter", "0.125 (0.1 to 0.2)", "word" * 9], ["baseline", "", "none"]]
    terminal.say_table(rows, ["side", "tokens per round", "why"])
    assert capsys.readouterr().out.splitlines() == [
        "  drafter",
        "    tokens per round: 0.125 (0.1 to 0.2)",
        "    why: " + "word" * 9,
        "  baseline",
        "    why: none",
    ]


def test_a_file_gets_one_line_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.say_table(ROWS, HEAD)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(ROWS)
    place = lines[2].index("1234") + 4
    assert [line[place - 1] for line in lines] == ["n", "7", "4", "1"]


def test_a_line_goes_on_between_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "  found " + "by-looking at-all " * 9 + "of it"
    monkeypatch.setenv("COLUMNS", "60")
    terminal.say(text)
    terminal.write_json({"text": text})
    *lines, begin, middle, end = capsys.readouterr().out.splitlines()
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert max(map(len, lines)) <= 60
    assert [line[:4] for line in lines[1:]] == ["    "] * (len(lines) - 1)
    assert (begin, end) == ("{", "}") and text in middle


def on_screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """stderr, 60 characters wide; pytest puts its own in place when a test begins."""
    for name, value in (("COLUMNS", "60"), ("TERM", "xterm"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_progress_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    long = "text 3 of 8, " + "loss 1.2 " * 30
    with TerminalReporter() as reporter:
        reporter.report_progress("first", 3, 8)
        reporter.report_progress(long, 4, 8)
    drawn = screen.getvalue()
    assert "first" in drawn and "text 3 of 8" in drawn and "━" in drawn
    # A line that is wider than the screen would be erased in part: it is cut, at the width of the screen.
    rows = [row for row in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", drawn) if row]
    assert max(map(len, rows)) <= 60
    assert drawn.rstrip("\x1b[?25h").endswith("\x1b[2K")


def test_bytes_of_what_is_worth_showing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with TerminalReporter() as reporter:
        reporter.report_progress("reading", 1, 1000, BYTES)
        assert screen.getvalue() == ""
        reporter.report_progress("reading", 200_000_000, 1_000_000_000, BYTES)
    assert "200.0 MB of 1.00 GB" in screen.getvalue()


def test_a_result_is_printed_when_the_bar_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with TerminalReporter(print_result=lambda result: screen.write(f"result {result}")) as reporter:
        reporter.report_progress("drafting", 1, 8)
        reporter.report_result(3)
    drawn, printed, after = screen.getvalue().partition("result 3")
    assert "drafting" in drawn and printed and after == ""


def test_nothing_is_shown_where_json_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = on_screen(monkeypatch)
    with TerminalReporter(quiet=True) as reporter:
        reporter.say("asking")
        reporter.report_progress("asking", 1, 2, "window")
    assert (screen.getvalue(), capsys.readouterr().out) == ("", "")


def test_the_time_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pace of this part of the work, whatever the one before it took."""
    now = 0.0
    screen = on_screen(monkeypatch)
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    with TerminalReporter() as reporter:
        for part, seconds in (("text", 600.0), ("drafts", 60.0)):
            for done in range(4):
                now += seconds
                reporter.report_progress(part, done, 10, "batch")
    drawn = screen.getvalue()
    assert "drafts: batch 3 of 10" in drawn
    assert drawn.rindex("07:00") > drawn.rindex("text: batch")


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalReporter() as reporter:
        reporter.report_progress("reading", 1 << 29, 1 << 30, BYTES)
        for done in range(1, 101):
            reporter.report_progress(f"text {done}", done, 100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"text {done} …" for done in range(5, 101, 5)]
