"""A card is for people: what they change in it stays, what they say is on it, and nothing is decided by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.report_document import REPORT
from typer.testing import CliRunner

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.cli import convert as convert_command
from mtp_extract.cli import extract as extract_command
from mtp_extract.errors import CheckpointError
from mtp_extract.hub.upload import plan_upload
from mtp_extract.insert.drafter import planned_insertion
from mtp_extract.pipeline.check import verify
from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.verification import verify_against_source
from mtp_extract.report.card import UNSAID, CardWords, merged

WORDS = CardWords("apache-2.0", base_model="org/base", title="A | drafter")


@pytest.fixture
def edited(extracted: Path, tmp_path: Path) -> Path:
    """With the licence put in by hand, as the card itself asks."""
    directory = Path(shutil.copytree(extracted, tmp_path / "d"))
    card = (directory / "README.md").read_text()
    assert 'license: "other"' in card
    (directory / "README.md").write_text(card.replace('license: "other"', "license: mit") + "\nThanks.\n")
    return directory


def sent(directory: Path, words: CardWords = UNSAID) -> tuple[str, tuple[str, ...]]:
    files, notes = plan_upload(directory, words)
    card = next(file for file in files if file.path == "README.md").content
    return (card if isinstance(card, bytes) else card.read_bytes()).decode(), notes


def test_it_decides_nothing(edited: Path, sample: Path, tmp_path: Path) -> None:
    verify(edited)
    with open_bundle(sample) as opened:
        verify_against_source(edited, opened)
    with planned_insertion(edited, sample):
        pass
    result = convert(edited, tmp_path / "out", format="litert")
    assert any("changed by hand; the new one is written anew" in note for note in result.notes)
    assert "license: mit" in sent(edited)[0]
    (edited / "README.md").unlink()
    verify(edited)


def test_what_was_changed_stays_when_it_is_sent_with_figures(edited: Path) -> None:
    (edited / "report.json").write_text(json.dumps(REPORT))
    card, notes = sent(edited)
    assert "license: mit" in card and card.endswith("Thanks.\n")
    assert REPORT["verdict"] in card and "No figures were recorded" not in card
    assert notes == ("README.md was changed by hand, and keeps those changes.",)


def test_what_stands_on_changed_lines_is_left_out_and_said(edited: Path) -> None:
    card, notes = sent(edited, WORDS)
    assert "license: mit" in card and "apache-2.0" not in card.partition("---\n\n")[0]
    assert "stay as they were changed" in notes[0]
    assert "# A \\| drafter" in card


def test_replacing_says_so(edited: Path, sample: Path) -> None:
    result = extract(sample, edited, overwrite=True)
    assert any("its card had been changed by hand, and was replaced" in note for note in result.notes)
    assert not any("by hand" in note for note in extract(sample, edited, overwrite=True).notes)


def test_what_is_given_is_on_the_card_and_goes_with_it(sample: Path, tmp_path: Path) -> None:
    options = ["--license", "apache-2.0", "--base-model", "org/base", "--title", "A | drafter"]
    made = CliRunner().invoke(extract_command.app, [str(sample), "-o", str(tmp_path / "d"), *options])
    assert made.exit_code == 0, made.output
    made = CliRunner().invoke(
        convert_command.app, [str(tmp_path / "d"), "-o", str(tmp_path / "e"), "--format", "gguf", "--license", "mit"]
    )
    assert made.exit_code == 0, made.output
    for name, license_ in (("d", "apache-2.0"), ("e", "mit")):
        card = (tmp_path / name / "README.md").read_text()
        assert f'license: "{license_}"\nbase_model:\n- "org/base"\nbase_model_relation: "adapter"' in card
        assert "# A \\| drafter\n" in card
        assert f"states its licence: `{license_}`." in card and "(`other`)" not in card
        assert json.loads((tmp_path / name / "extraction.json").read_text())["card"]["license"] == license_
        with open_bundle(sample) as opened:
            verify_against_source(tmp_path / name, opened)


@pytest.mark.parametrize(
    "option", [("--license", "My Own"), ("--base-model", "base"), ("--title", "two\nlines"), ("--title", " ")]
)
def test_what_is_no_such_thing_is_wrong_usage(sample: Path, tmp_path: Path, option: tuple[str, str]) -> None:
    made = CliRunner().invoke(extract_command.app, [str(sample), "-o", str(tmp_path / "d"), *option])
    assert made.exit_code == 2
    assert option[0] in made.output
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("card", [3, {"more": 1}, {"license": 3}, {"license": "A B"}])
def test_a_record_that_says_something_else_of_it(edited: Path, tmp_path: Path, card: object) -> None:
    record = json.loads((edited / "extraction.json").read_text())
    (edited / "extraction.json").write_text(json.dumps({**record, "card": card}))
    with pytest.raises(CheckpointError, match="card"):
        convert(edited, tmp_path / "out", format="litert")
    with pytest.raises(CheckpointError, match="card"):
        sent(edited, WORDS)


def test_a_tuning_that_lacks_what_the_card_states(edited: Path, tmp_path: Path) -> None:
    record = json.loads((edited / "extraction.json").read_text())
    length = {"mean_accepted_length": 1.0}
    tuning = {"mode": "norms", "base": "b", "overall": {"before": length, "after": length}}
    (edited / "extraction.json").write_text(json.dumps({**record, "tuning": tuning}))
    with pytest.raises(CheckpointError, match=r"extraction\.json.*tuning\.overall"):
        convert(edited, tmp_path / "out", format="litert")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mine", "new", "expected", "left"),
    [
        ("abcd", "abcd", "abcd", 0),
        ("abcd", "aXcd", "aXcd", 0),
        ("abcY", "aXcd", "aXcY", 0),
        ("aYcd", "aXcd", "aYcd", 1),
        ("abcdY", "Xabcd", "XabcdY", 0),
        ("Yabcd", "abcdX", "YabcdX", 0),
        ("abcd", "abd", "abd", 0),
        ("bcd", "abcXd", "bcXd", 0),
        ("", "abXcd", "", 1),
        ("abYcd", "abXcd", "abXYcd", 0),
    ],
)
def test_changes_are_merged_line_by_line(mine: str, new: str, expected: str, left: int) -> None:
    lines = ("".join(f"{letter}\n" for letter in text) for text in ("abcd", mine, new))
    assert merged(*lines) == ("".join(f"{letter}\n" for letter in expected), left)
