"""A card is for people: what they change in it is sent, what they say is on it, and nothing is decided by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.report_document import REPORT
from typer.testing import CliRunner

from mtp_extract.bundle import open_bundle
from mtp_extract.cli import upload as upload_command
from mtp_extract.errors import CheckpointError, HubError
from mtp_extract.hub.upload import plan_upload
from mtp_extract.insertion.drafter import planned_insertion
from mtp_extract.pipeline.check import verify
from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.identity import verify_against
from mtp_extract.report.card import UNSAID, CardWords

WORDS = CardWords("apache-2.0", base_model="org/base")


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
    with next(file for file in files if file.path_in_repo == "README.md").as_file() as card:
        return card.read().decode(), notes


def test_it_decides_nothing(edited: Path, sample: Path, tmp_path: Path) -> None:
    verify(edited)
    with open_bundle(sample) as opened:
        verify_against(edited, opened)
    with planned_insertion(edited, sample):
        pass
    convert(edited, tmp_path / "out", format="litert")
    assert "license: mit" in sent(edited)[0]
    (edited / "README.md").unlink()
    verify(edited)


def test_what_was_changed_is_sent_as_it_is(edited: Path) -> None:
    (edited / "report.json").write_text(json.dumps(REPORT))
    card, notes = sent(edited)
    assert card == (edited / "README.md").read_text()
    assert notes == ("README.md was changed since mtp-extract wrote it, and is sent as it is.",)


def test_words_are_not_put_on_a_card_that_was_changed(edited: Path) -> None:
    with pytest.raises(HubError, match=r"README\.md: expected the card that mtp-extract wrote"):
        sent(edited, WORDS)
    # As the message says: without it, the card is made anew.
    (edited / "README.md").unlink()
    assert 'base_model: ["org/base"]' in sent(edited, WORDS)[0]


def test_what_is_given_is_on_the_card_that_is_sent(extracted: Path) -> None:
    before = (extracted / "README.md").read_text()
    card, notes = sent(extracted, WORDS)
    assert 'license: "apache-2.0"\nbase_model: ["org/base"]\nbase_model_relation: "adapter"' in card
    assert "states its licence: `apache-2.0`." in card and "(`other`)" not in card
    assert notes == ()
    # Neither the directory nor its record says it.
    assert (extracted / "README.md").read_text() == before
    assert sent(extracted)[0] == before


@pytest.mark.parametrize("option", [("--license", "My Own"), ("--base-model", "base")])
def test_what_is_no_such_thing_is_wrong_usage(extracted: Path, option: tuple[str, str]) -> None:
    made = CliRunner().invoke(upload_command.app, [str(extracted), "org/name", "--dry-run", *option])
    assert made.exit_code == 2
    assert option[0] in made.output


def test_a_tuning_that_lacks_what_the_card_states(edited: Path, tmp_path: Path) -> None:
    record = json.loads((edited / "extraction.json").read_text())
    length = {"mean_accepted_length": 1.0}
    tuning = {"mode": "norms", "base": "b", "overall": {"before": length, "after": length}}
    (edited / "extraction.json").write_text(json.dumps({**record, "tuning": tuning}))
    with pytest.raises(CheckpointError, match=r"extraction\.json.*tuning\.overall"):
        convert(edited, tmp_path / "out", format="litert")
    assert not (tmp_path / "out").exists()
