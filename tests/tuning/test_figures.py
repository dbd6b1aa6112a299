"""What is told of a tuning is what stepping through its held-out texts finds, token for token."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.random_pairs import base_alone
from helpers.stepping import teacher_forced_by_stepping
from safetensors.numpy import load_file, save_file

from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.run import run_tuning

from .conftest import Plans

DRAFTS = 3


@dataclass(frozen=True)
class Stepped:
    """Of one text: how many drafts stand after each of its tokens that leaves room for all of them."""

    accepted: list[int]

    @property
    def teacher_forced(self) -> float:
        return 1 + sum(self.accepted) / len(self.accepted)

    @property
    def rounds(self) -> list[int]:
        """Drafts that stand in each round of a loop that begins with the first of these tokens."""
        path, place = [], 0
        while place < len(self.accepted):
            path.append(self.accepted[place])
            place += 1 + path[-1]
        return path


def stepped(base: Base, directory: Path, texts: list[Text]) -> list[Stepped]:
    agreement = teacher_forced_by_stepping(base, load_drafter(directory), texts, DRAFTS)
    stands = (agreement.drafts == agreement.targets).cumprod(dim=1).sum(dim=1)
    whole = (agreement.targets >= 0).all(dim=1)
    return [Stepped(stands[whole & (agreement.text == number)].tolist()) for number in range(len(texts))]


def test_the_figures_are_those_of_stepping_through_the_texts(
    plan: Plans, extracted: Path, base: Path, tmp_path: Path
) -> None:
    worse = tmp_path / "worse"
    worse.mkdir()
    weights = load_file(extracted / "model.safetensors")
    # So that a few steps find a better one.
    weights["model.norm.weight"][::2] *= 0.3
    save_file(weights, worse / "model.safetensors", {"format": "pt"})
    shutil.copy(extracted / "config.json", worse)
    asked = plan(tmp_path / "tuned", directory=worse, learning_rate=0.05, steps=4)

    outcome = run_tuning(asked)

    texts = [text for _, text in outcome.corpus.held_out]
    model = load_base(str(base), "cpu").model
    assert [base_alone(model, text.prompt, asked.new_tokens) for text in texts] == [text.continuation for text in texts]
    before, after = (stepped(Base(model), place, texts) for place in (worse, tmp_path / "tuned"))
    assert before != after
    own, overall = slice(outcome.corpus.own), outcome.record["overall"]
    for when, measured in (("before", before[own]), ("after", after[own])):
        anchors, stands = (sum(of(text.accepted) for text in measured) for of in (len, sum))
        rounds, accepted = (sum(of(text.rounds) for text in measured) for of in (len, sum))
        assert (overall["anchors"], overall[when]["rounds"]) == (anchors, rounds)
        assert overall[when]["teacher_forced"] == pytest.approx(1 + stands / anchors, abs=1e-4)
        assert overall[when]["tokens_per_round"] == pytest.approx(1 + accepted / rounds, abs=1e-4)
    change = overall["after"]["teacher_forced"] - overall["before"]["teacher_forced"]
    assert overall["change"]["mean"] == pytest.approx(change, abs=3e-4)
    ratio = overall["before"]["rounds"] / overall["after"]["rounds"]
    assert overall["rounds"]["ratio"] == pytest.approx(ratio, abs=1e-4)
    lost = sorted(new.teacher_forced - old.teacher_forced for old, new in zip(before, after, strict=True))
    recorded = [text["after"] - text["before"] for text in outcome.record["worst"]]
    assert recorded == pytest.approx(lost[: len(recorded)], abs=2e-4)
