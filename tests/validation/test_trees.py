"""Trees in a validation: with every drafter on the same texts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.random_heads import head_config, random_head, write_head
from helpers.schemas import validator
from typer.testing import CliRunner

from mtp_extract.cli import validate
from mtp_extract.errors import PairError
from mtp_extract.evaluate.reads import Reads, reads_of_a_step
from mtp_extract.formats import format_of
from mtp_extract.speculate.target import Base
from mtp_extract.validation.page import write_validation
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import Validation
from mtp_extract.validation.run import run_validation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

RUNNER = CliRunner()
TREES = ("3x2", "2x1x1")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head for the sample's base, of 300 of its 512 tokens."""
    config = head_config(backbone_hidden_size=64, hidden_size=64, vocab_size=512, draft_vocab_size=300)
    return write_head(tmp_path_factory.mktemp("heads") / "head", random_head(config))


@pytest.fixture(scope="module")
def found(plan: ValidationPlan, head: Path) -> Validation:
    return run_validation(
        dataclasses.replace(plan, source=None, beside=(head,), draft_steps=(2,), trees=TREES, timed=1)
    )


def test_every_drafter_drafts_every_tree(found: Validation, tmp_path: Path) -> None:
    """An MTP drafter and an EAGLE-3 head; the text is the base's own with both, whatever they draft."""
    write_validation(found, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    validator("report")(report)
    assert report["settings"]["trees"] == list(TREES)
    assert report["verdict"].endswith(".")
    for drafter in report["drafters"]:
        worth = drafter["generation"]["worth"]
        assert list(worth) == ["2", *TREES]
        for row in worth.values():
            assert row["same_text"] == row["prompts"]
            assert row["predicted_speedup"] > 0
            assert row["measured_speedup"] > 0
        assert (worth["3x2"]["drafts"], worth["3x2"]["depth"]) == (9, 2)
    mtp, eagle = (drafter["generation"]["worth"]["3x2"] for drafter in report["drafters"])
    assert mtp["expected_tokens_per_round"] > eagle["expected_tokens_per_round"] + 0.5


def test_the_head_may_stand_first(plan: ValidationPlan, checkpoint: Path, head: Path, found: Validation) -> None:
    """And does what it did beside the other."""
    turned = run_validation(
        dataclasses.replace(
            plan, directory=head, beside=(checkpoint,), source=None, draft_steps=(2,), trees=("3x2",), timed=1
        )
    )
    for drafter, same in zip(turned.drafters, reversed(found.drafters), strict=True):
        assert drafter.facts == same.facts
        ours, theirs = ([row.accepted for row in whose.generation.worth.values()] for whose in (drafter, same))
        assert ours == theirs[:-1]
    assert turned.refuted, "a random head is no better than a bigram"


def test_text_that_a_tree_spoils_is_seen(plan: ValidationPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault of the loop: the cache keeps the first drafts of a tree, whichever way was accepted."""
    keep = Base.keep
    monkeypatch.setattr(Base, "keep", lambda self, cache, fed, way: keep(self, cache, fed, range(len(way))))
    wrong = run_validation(dataclasses.replace(plan, source=None, draft_steps=(2,), trees=("4x4x2",), timed=5))
    worth = wrong.drafters[0].generation.worth
    assert worth["2"].same_text == worth["2"].prompts, "a chain is not touched by it"
    assert worth["4x4x2"].same_text < worth["4x4x2"].prompts
    assert not wrong.refuted, "no drafter can change text"
    assert "with a tree 4x4x2, the worst" in wrong.verdict
    assert any("tree 4x4x2" in line and "else the loop is at fault" in line for line in wrong.findings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base", "x", "--tree", "0x2"), "expected a tree such as 4x2x1, found 0x2"),
        (("--base", "x", "--tree", "auto:8"), "expected a tree such as 4x2x1, found auto:8"),
        (("--base", "x", "--tree", "4x2", "--tree", "40x40"), "at most 1024 drafts, found 40x40"),
        (("--base", "x", "--tree", "x".join("1" * 65)), "at most 64 steps, found 65"),
        (("--source", "x", "--tree", "4x2"), "--base MODEL"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    result = RUNNER.invoke(validate.app, ["d", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_tree_may_be_no_wider_than_the_vocabulary(plan: ValidationPlan) -> None:
    said = list[str]()
    with pytest.raises(PairError, match=r"at most 512 drafts for one place, .* found 600 in tree of 600") as caught:
        run_validation(dataclasses.replace(plan, source=None, trees=("600",), say=said.append))
    assert caught.value.remedies == ("trees",)
    assert said == [f"loading the base {plan.base}"], "before anything is measured"


def test_what_a_head_reads(head: Path) -> None:
    """What fuses the base's states once a round, the rest in every step; of its map and its tokens next to nothing."""
    width, inner, queries, keys, rows = 64, 40, 64, 16, 300
    body = 2 * width * (queries + 2 * keys) + queries * width + 3 * width * inner + 4 * width
    once = width * 3 * width
    layout = format_of(head)
    reads = reads_of_a_step(layout.name, layout.read(head))
    sizes = [4 * numbers for numbers in (body, rows * width, once)]
    assert reads == Reads(*sizes, sum(sizes) + 8 * rows)
    assert reads.total == sizes[0] + sizes[1]
