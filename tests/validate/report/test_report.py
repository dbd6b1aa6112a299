"""The report: what is in it, that it is there whole or not at all, and what the verdict says of which result."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import schemas
from helpers.report_document import REPORT as REPORT_DOCUMENT

from mtp_extract.errors import OutputError
from mtp_extract.evaluate.agreement import Share, StepFigures, WorkloadFigures
from mtp_extract.evaluate.measured import Change
from mtp_extract.io.place import check_place
from mtp_extract.report.tables import FIGURES, REPORT_FILES, REPORT_LISTED, measurements
from mtp_extract.validate.acceptance.generation import Divergence
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.report.pages import page_of, write_report
from mtp_extract.validate.report.verdict import findings, verdict
from mtp_extract.validate.result import Validation
from mtp_extract.validate.run import ValidationPlan, run_validation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

CHECKS = ["config", "files", "tensors", "function", "record", "transformers", "interpreter"]
TIMES = {
    "base_tokens_per_s",
    "speculative_tokens_per_s",
    "verify_ms",
    "draft_ms",
    "base_ms",
    "best_draft_steps",
    "predicted_speedup",
    "break_even_draft_steps",
    "speedups",
}
OF_SEVERAL = {"drafters_by_step"}
DRAWN = {f"{name}.{ending}" for name in set(FIGURES) - OF_SEVERAL for ending in ("png", "svg")}


def markdown_of(found: Validation) -> str:
    return page_of(as_json(found)).markdown()


@pytest.fixture(scope="module")
def written(validation: Validation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("report") / "report"
    write_report(validation, target)
    return target


def test_schema(written: Path) -> None:
    found = json.loads((written / "report.json").read_text())
    assert found["parity"]["agrees"] is True
    assert found["parity"]["in_floats"]["logits"] < found["parity"]["as_it_is"]["logits"]
    assert found["parity"]["cases"][0] == "random 0"
    assert found["parity"]["cases"][-1].startswith("text 6, token ")
    assert len(found["parity"]["cases"]) == 8
    steps = found["agreement"]["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    by_workload = [found["agreement"]["workloads"][name]["steps"] for name in ("code", "prose")]
    for step in (*steps, *by_workload[0], *by_workload[1]):
        assert step.keys() >= {"top1", "top5", "conditional", "unconditional", "n", "ci95"}
        for name in ("top1", "top5", "conditional", "unconditional"):
            # Of seven texts there is one, of a workload's four or three none.
            assert (step["ci95"][name] is not None) == (step in steps)
            low, high = step["ci95"][name] or (0, 1)
            assert 0 <= low <= step[name] <= high <= 1
    assert sum(part[0]["n"] for part in by_workload) == steps[0]["n"] == found["agreement"]["n"]
    assert len(found["controls"]) == 7
    for control in found["controls"].values():
        assert 0 <= control["steps"][0]["top1"] <= 1
        assert control["why"]
    assert set(found["generation"]) == {"1", "3"}
    for entry in found["generation"].values():
        assert entry["identical"] is True
        assert entry.keys() >= {"accepted", "drafted", "acceptance", "mean_accepted_length", *TIMES - {
            "base_ms", "best_draft_steps", "predicted_speedup", "break_even_draft_steps", "speedups"}}  # fmt: skip
    assert found["verdict"].startswith(
        "Proven: the checkpoint is the drafter of sample.litertlm (config, files, tensors, "
    )
    assert "the loop's greedy text, whatever is drafted, is the base's own" in found["verdict"]
    assert (found["proven"], found["refuted"]) == (True, False)
    assert [check["passed"] for check in found["checks"]] == [True] * len(CHECKS)
    assert found["settings"]["prompts"] == {"code": 4, "prose": 3}


def _keys(value: Any) -> Any:
    return {key: _keys(item) for key, item in value.items()} if isinstance(value, dict) else None


def test_the_report_that_other_tests_use_is_one(written: Path) -> None:
    found = json.loads((written / "report.json").read_text())
    assert set(REPORT_DOCUMENT) == set(found)
    for part in ("tool", "base"):
        assert _keys(REPORT_DOCUMENT[part]) == _keys(found[part])
    assert set(REPORT_DOCUMENT["arithmetic"]) == set(found["arithmetic"])
    assert _keys(REPORT_DOCUMENT["arithmetic"]["speedups"]["3"]) == _keys(found["arithmetic"]["speedups"]["3"])
    ours, theirs = REPORT_DOCUMENT["parity"], found["parity"]
    assert set(ours) == set(theirs)
    for name in ("in_floats", "as_it_is"):
        assert _keys(ours[name]) == _keys(theirs[name])
    ours, theirs = REPORT_DOCUMENT["agreement"], found["agreement"]
    assert set(ours) == set(theirs)
    assert [_keys(ours["steps"][0]), set(ours["workloads"]["code"])] == [
        _keys(theirs["steps"][0]),
        set(theirs["workloads"]["code"]),
    ]
    assert set(REPORT_DOCUMENT["controls"]["shuffled_kv"]) == set(found["controls"]["shuffled_kv"])
    assert set(REPORT_DOCUMENT["generation"]["3"]) == set(found["generation"]["3"])
    assert set(REPORT_DOCUMENT["drafters"][0]) == set(found["drafters"][0])
    assert found["drafters"][0]["agreement"] == found["agreement"]


def test_what_is_measured_is_told_once(written: Path) -> None:
    """The page holds every table, as made from what report.json holds."""
    found = json.loads((written / "report.json").read_text())
    page = (written / "report.md").read_text()
    tables = list(measurements(found))
    assert [table.title for table in tables if not table.detail] == [
        "What drafting is worth",
        "Acceptance by draft step",
        "Acceptance by workload",
        "Speculative decoding",
        "What a draft step costs",
        "Controls",
        "Is it the drafter of the file?",
        "Parity with Google's interpreter",
    ]
    assert {figure for table in tables for figure in table.figures} == set(FIGURES) - OF_SEVERAL
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert table.markdown() in page


def test_files(written: Path) -> None:
    names = {path.name for path in written.iterdir()}
    assert names == {"report.json", "report.md", "report.html", "pair.json", *DRAWN}
    assert names <= REPORT_FILES
    page = (written / "report.md").read_text()
    assert json.loads((written / "report.json").read_text())["verdict"] in page
    for name in DRAWN:
        assert (written / name).stat().st_size > 5_000
        assert name.endswith("svg") or f"({name})" in page
    for heading in ("Parity with", "Acceptance by", "Controls", "Speculative decoding"):
        assert heading in page
    assert all(line.count("|") >= 3 for line in page.splitlines() if line.startswith("|"))


def test_figures_say_what_was_measured(written: Path) -> None:
    drawn = {path.stem: path.read_text() for path in written.glob("*.svg")}
    for name, words in {
        "drafters_and_methods": ("the base alone", "chain of", "tokens a round"),
        "acceptance_by_step": ("draft step", "unconditional acceptance", "95 % intervals"),
        "controls_by_step": ("real drafter", "zero hidden", "draft step"),
        "length_by_workload": ("code", "prose", "all", "tokens a round"),
        "generation_by_drafts": ("base alone", "chain of 3", "tokens a second"),
        "round_by_drafts": ("base alone", "chain of 3", "time of a round (ms)"),
    }.items():
        for word in words:
            assert word in drawn[name]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_same_numbers_again(plan: ValidationPlan, validation: Validation) -> None:
    first, again = (without_times(as_json(found)) for found in (validation, run_validation(plan)))
    for report in (first, again):
        # Of a machine that did something else meanwhile.
        report["notes"] = [note for note in report["notes"] if not note.startswith("Times and speedups")]
    assert first == again


def test_a_workload_whose_texts_end_at_once(validation: Validation, tmp_path: Path) -> None:
    """The base may stop at its first token after each of its prompts; then there is nothing to draft from."""
    shares = dataclasses.fields(StepFigures)
    silent = WorkloadFigures(0, 0, (StepFigures(*[Share(0, 0, None) for _ in shares]),), math.nan, None)
    (drafter,) = validation.drafters
    workloads = {**drafter.workloads, "silent": silent}
    drafter = dataclasses.replace(
        drafter, workloads=workloads, changes={**drafter.changes, "silent": Change(math.nan, None, 0)}
    )
    found = dataclasses.replace(validation, drafters=(drafter,))
    write_report(found, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    schemas.validator("report")(report)
    assert report["agreement"]["workloads"]["silent"]["steps"][0]["top1"] is None


def test_no_number_that_json_has_not(validation: Validation) -> None:
    (drafter,) = validation.drafters
    broken = dataclasses.replace(drafter.agreement, mean_accepted_length=math.nan)
    found = dataclasses.replace(validation, drafters=(dataclasses.replace(drafter, agreement=broken),))
    text = json.dumps(as_json(found), allow_nan=False)
    assert json.loads(text)["agreement"]["mean_accepted_length"] is None


def test_parts_that_were_not_asked_for(plan: ValidationPlan, validation: Validation) -> None:
    only_source = run_validation(dataclasses.replace(plan, base=None))
    assert "not proven: how well it drafts for a base (it was run beside none)" in verdict(only_source)
    report = as_json(only_source)
    assert report["agreement"] is report["controls"] is report["generation"] is None
    assert "Acceptance by" not in markdown_of(only_source)
    no_source = dataclasses.replace(validation, parity=None, source=None, checks=())
    assert verdict(no_source).startswith("Measured: ")
    assert not no_source.proven
    assert "not proven: that this is the function of a .litertlm file (it was compared with none)" in verdict(no_source)
    assert "Parity" not in markdown_of(no_source)


@pytest.mark.parametrize("name", CHECKS)
def test_any_check_refutes(validation: Validation, name: str) -> None:
    checks = {check.name: check for check in validation.checks}
    assert list(checks) == CHECKS
    wrong = dataclasses.replace(checks[name], passed=False, evidence="so and so")
    found = dataclasses.replace(validation, checks=(*({**checks, name: wrong}).values(),))
    assert found.refuted
    assert not found.proven
    assert verdict(found).startswith(f"Refuted: {name}: so and so; measured: ")
    assert f"{name}: so and so" in findings(found)
    left = dataclasses.replace(wrong, passed=None)
    open_ = dataclasses.replace(validation, checks=(*({**checks, name: left}).values(),))
    assert open_.proven == (name in ("record", "transformers", "interpreter"))
    assert not open_.refuted


@pytest.mark.parametrize(
    ("tie", "word"), [(True, "two tokens of the base nearly tie"), (False, "Refuted: the loop's greedy text")]
)
def test_verdict_on_other_text(validation: Validation, tie: bool, word: str) -> None:
    (drafter,) = validation.drafters
    first, *rest = drafter.generation.lengths
    parted = dataclasses.replace(first, identical_prompts=first.prompts - 1, divergences=(Divergence(0, 3, 0.01, tie),))
    generation = dataclasses.replace(drafter.generation, lengths=(parted, *rest))
    found = dataclasses.replace(validation, drafters=(dataclasses.replace(drafter, generation=generation),))
    assert found.refuted == (not tie)
    assert word in verdict(found)
    assert "leaves the base's at token 4, 0.01 logits apart" in markdown_of(found)


def test_verdict_on_what_was_too_short(validation: Validation) -> None:
    """Texts that end before a round drafts, or before one has all its targets."""
    (drafter,) = validation.drafters
    short = dataclasses.replace(drafter.agreement, mean_accepted_length=math.nan)
    lengths = tuple(dataclasses.replace(result, rounds=0) for result in drafter.generation.lengths)
    generation = dataclasses.replace(drafter.generation, lengths=lengths)
    drafter = dataclasses.replace(drafter, agreement=short, generation=generation)
    said = verdict(dataclasses.replace(validation, drafters=(drafter,)))
    assert "nan" not in said
    assert "greedy text, whatever is drafted" not in said
    _, _, missing = said.partition("not proven: ")
    assert "that drafts leave the base's greedy text as it is (no round drafted any)" in missing


def test_too_few_texts_decide_nothing(validation: Validation) -> None:
    """Four texts: no interval anywhere, no verdict that would need one, and what is needed is said."""
    (first,) = validation.drafters

    def of_few(figures: WorkloadFigures) -> WorkloadFigures:
        steps = tuple(
            StepFigures(
                *(dataclasses.replace(getattr(step, f.name), interval=None) for f in dataclasses.fields(StepFigures))
            )
            for step in figures.steps
        )
        return dataclasses.replace(figures, texts=4, steps=steps, mean_accepted_interval=None)

    other = dataclasses.replace(
        first, facts=dataclasses.replace(first.facts, name="other"), change=Change(-0.3, None, 4)
    )
    found = dataclasses.replace(
        validation,
        trivial=tuple(dataclasses.replace(r, difference=-0.5, interval=None, texts=4) for r in validation.trivial),
        controls=tuple(dataclasses.replace(r, interval=None, standing="undecided") for r in validation.controls),
        drafters=(dataclasses.replace(first, agreement=of_few(first.agreement)), other),
    )
    assert not found.refuted
    said = verdict(found)
    told = "not decided: 4 texts, at least 5 are needed"
    for part in ("positions", "other -0.30", "(most frequent token;", "what the controls say is"):
        assert f"{part} ({told})" in said or f"{part} {told}" in said, part
    assert "refuted" not in said.lower()
    assert "worse" not in " ".join(as_json(found)["findings"])


def test_a_step_takes_its_share_of_the_rounds_that_drafted_it() -> None:
    """Rounds that end a text draft less: 33 rounds of 100 steps, where the longest have four."""
    report = copy.deepcopy(REPORT_DOCUMENT)
    report["drafters"][0]["generation"]["3"].update(draft_ms=12.0, drafts=4, drafted=100, rounds=33)
    (costs,) = (table for table in measurements(report) if table.title == "What a draft step costs")
    assert dict(zip(costs.columns, costs.rows[0], strict=True))["draft ms"] == "3.96"


def test_names_cannot_break_the_page(validation: Validation) -> None:
    page = markdown_of(dataclasses.replace(validation, directory="a|b\n# c\x1b[31m"))
    assert page.splitlines()[0] == r"# Validation of a\|b\\n# c\\x1b\[31m"


def test_there_whole_or_not_at_all(validation: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> list[str]:
        raise RuntimeError("no figure")

    monkeypatch.setattr("mtp_extract.report.web.draw", fails)
    with pytest.raises(RuntimeError, match="no figure"):
        write_report(validation, tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_replaces_only_reports(validation: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_extract.report.web.draw", lambda *arguments: [])
    target = tmp_path / "report"
    write_report(validation, target)
    # Reports of earlier releases had other figures.
    (target / "generation_by_drafts.png").write_text("")
    with pytest.raises(OutputError, match="Replace it") as caught:
        write_report(validation, target)
    assert caught.value.remedies == ("overwrite", "out")
    write_report(validation, target, overwrite=True)
    assert {path.name for path in target.iterdir()} == {"report.json", "report.md", "report.html", "pair.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    (target / "model.safetensors").write_text("weights")
    with pytest.raises(OutputError, match=r"does not list.*: model\.safetensors\.") as caught:
        write_report(validation, target, overwrite=True)
    assert caught.value.remedies == ("out",)
    assert (target / "model.safetensors").read_text() == "weights"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(OutputError, match="is none that mtp-extract wrote"):
        check_place(tmp_path / "other", overwrite=True, listed=REPORT_LISTED)
    with pytest.raises(OutputError, match="not a directory"):
        check_place(tmp_path / "other" / "thesis.txt", overwrite=True, listed=REPORT_LISTED)
