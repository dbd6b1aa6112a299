"""What the tool says of a tuning is what somebody finds who shares no code with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.evaluator import bootstrap, evaluate
from safetensors.numpy import load_file, save_file

from mtp_extract.tuning.run import run_tuning

from .conftest import Plans


def test_figures_agree_with_an_independent_evaluator(plan: Plans, extracted: Path, base: Path, tmp_path: Path) -> None:
    """Teacher-forced tokens per round, rounds and tokens of every text, before and after."""
    worse = tmp_path / "worse"
    worse.mkdir()
    weights = load_file(extracted / "model.safetensors")
    # So that a few steps find a better one.
    weights["model.norm.weight"][::2] *= 0.3
    save_file(weights, worse / "model.safetensors", {"format": "pt"})
    shutil.copy(extracted / "config.json", worse)
    tuning_plan = plan(tmp_path / "tuned", directory=worse, learning_rate=0.05, steps=4)

    outcome = run_tuning(tuning_plan)

    texts = [text for _, text in outcome.corpus.held_out]
    prompts = [text.prompt for text in texts]
    before, after = (evaluate(base, place, prompts, tuning_plan.new_tokens) for place in (worse, tmp_path / "tuned"))
    assert [text.continuation for text in before] == [text.continuation for text in texts]
    assert [text.accepted for text in before] != [text.accepted for text in after]
    own = slice(outcome.corpus.own_count)
    overall = outcome.record["overall"]
    for when, measured in (("before", before[own]), ("after", after[own])):
        anchors, rounds = sum(len(text.accepted) for text in measured), sum(text.rounds for text in measured)
        assert (overall["anchors"], overall[when]["rounds"]) == (anchors, rounds)
        length = 1 + sum(sum(text.accepted) for text in measured) / anchors
        assert overall[when]["teacher_forced"] == pytest.approx(length, abs=1e-4)
        assert overall[when]["tokens_per_round"] == pytest.approx(
            sum(text.tokens for text in measured) / rounds, abs=1e-4
        )
    changes = bootstrap(before[own], after[own])
    for name, figure, told_of in (("teacher_forced", "change", "mean"), ("rounds", "rounds", "ratio")):
        value, low, high = changes[name]
        assert overall[figure][told_of] == pytest.approx(value, abs=1e-4)
        # Of six texts the tool trusts less than a bootstrap does.
        assert overall[figure]["interval"][0] <= low <= high <= overall[figure]["interval"][1]
    lost = sorted(new.teacher_forced - old.teacher_forced for old, new in zip(before, after, strict=True))
    recorded = [text["after"] - text["before"] for text in outcome.record["worst"]]
    assert recorded == pytest.approx(lost[: len(recorded)], abs=2e-4)
