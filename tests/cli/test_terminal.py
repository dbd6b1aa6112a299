"""What the commands print: lines and tables that fit, progress that leaves nothing behind."""

from __future__ import annotations

import pytest

from mtp_extract.cli import terminal

HEAD = ("role", "what was found", "n", "why this is so and not otherwise", "name")
ROWS = [
    ["layers.0.gate_proj", "as integers", 7, "the weight of op 8 FULLY_CONNECTED, whose input is the norm", "a.b/c"],
    ["layers.10.gate_proj", "as floats", 1234, "read off the graph", "mtp_drafter/decoder/layer_3/attention/query"],
    ["x", "", 1, "", ""],
]


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None) -> list[str]:
    """The table on a terminal of so many columns; None for a file."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    terminal.table(ROWS, HEAD)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [150, 100, 90, 60, 50])
def test_a_table_fits_and_breaks_no_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    lines = printed(capsys, monkeypatch, columns)
    words = {word for row in (HEAD, *ROWS) for cell in row for word in str(cell).split()}
    # A word that is longer than the line stays whole.
    widest = max(columns, *(2 + len(word) for word in words))
    assert max(map(len, lines)) <= (columns if columns >= 100 else max(widest, 2 + 19 + 2 + 43))
    assert {word for line in lines for word in line.split()} == words


def test_a_file_gets_one_line_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(capsys, monkeypatch, None)
    assert len(lines) == 1 + len(ROWS)
    place = lines[2].index("1234") + 4
    assert [line[place - 1] for line in lines] == ["n", "7", "4", "1"]


def test_columns_that_have_no_room_follow_beside_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys, monkeypatch, 70)
    assert [line.split()[0] for line in lines if line[2:3].strip()].count("role") == 2
    assert max(map(len, lines)) <= 70


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
