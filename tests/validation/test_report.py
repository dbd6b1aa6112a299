"""The report: what is in it, that it is there whole or not at all, and what the verdict says of which result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.schemas import validator
from msgspec import structs

from mtp_extract.errors import OutputError
from mtp_extract.evaluate.measured import Change
from mtp_extract.io.place import check_place
from mtp_extract.io.typed import Figure
from mtp_extract.report.files import REPORT_FILES, REPORT_LISTED
from mtp_extract.report.page import as_html, as_json, plain_json
from mtp_extract.validation.acceptance.worth import Divergence, Worth
from mtp_extract.validation.page import page_of, tables, write_validation
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import Validation
from mtp_extract.validation.run import run_validation
from mtp_extract.validation.verdict import concluded

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

CHECKS = ["config", "files", "tensors", "function", "record", "transformers", "interpreter"]
TIMES = {
    *("base_tokens_per_s", "tokens_per_s", "verify_ms", "draft_ms", "base_ms", "best", "break_even"),
    *("predicted_speedup", "measured_speedup", "verdict", "pair"),
}


def changed(found: Validation, **parts: Any) -> Validation:
    """With these parts, and the verdict that they lead to."""
    return concluded(structs.replace(found, **parts))


def with_worth(found: Validation, **parts: Any) -> Validation:
    """With these figures of the first chain of its drafter."""
    drafter = found.drafters[0]
    name, first = next(iter(drafter.generation.worth.items()))
    worth: dict[str, Worth] = {**drafter.generation.worth, name: structs.replace(first, **parts)}
    generation = structs.replace(drafter.generation, worth=worth)
    return changed(found, drafters=[structs.replace(drafter, generation=generation), *found.drafters[1:]])


@pytest.fixture(scope="module")
def written(validation: Validation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("report") / "report"
    write_validation(validation, target)
    return target


def test_what_it_holds(written: Path) -> None:
    found = json.loads((written / "report.json").read_text())
    validator("report")(found)
    (drafter,) = found["drafters"]
    steps = drafter["agreement"]["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    by_workload = [drafter["workloads"][name]["steps"] for name in ("code", "prose")]
    for step in (*steps, *by_workload[0], *by_workload[1]):
        for name in ("top1", "top5", "conditional"):
            # Of seven texts there is an interval, of a workload's four or three none.
            assert (step[name]["ci95"] is not None) == (step in steps)
            low, high = step[name]["ci95"] or (0, 1)
            assert 0 <= low <= step[name]["value"] <= high <= 1
    assert sum(part[0]["top1"]["n"] for part in by_workload) == steps[0]["top1"]["n"] == drafter["agreement"]["n"]
    assert len(found["controls"]) == 7
    assert set(drafter["generation"]["worth"]) == {"1", "3"}
    assert all(worth["same_text"] == worth["prompts"] == 2 for worth in drafter["generation"]["worth"].values())
    assert found["verdict"].startswith("Verified: the checkpoint is the drafter of sample.litertlm (config, files, ")
    assert "tokens per round with a chain of " in found["verdict"]
    assert "the loop's text is the base's own for 2 of 2 prompts in float32, whatever is drafted" in found["verdict"]
    assert (found["verified"], found["refuted"]) == (True, False)
    assert [check["passed"] for check in found["checks"]] == [True] * len(CHECKS)
    assert found["settings"]["prompts"] == {"code": 4, "prose": 3}


def test_its_files(written: Path, plan: ValidationPlan) -> None:
    assert {path.name for path in written.iterdir()} == REPORT_FILES
    for path in written.iterdir():
        for place in (plan.directory, plan.base):
            assert str(place) not in path.read_text(), "where things lie here is nobody else's"


def test_one_name_has_one_figure(validation: Validation) -> None:
    """Tokens per round are measured in the loop; any other figure of that kind says what it is."""
    shown = tables(validation)
    columns = {column for table in shown for column in table.columns if "per round" in column}
    assert columns == {"tokens per round", "teacher-forced tokens per round"}
    assert "mean accepted length" not in as_html(page_of(validation))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_same_numbers_again(plan: ValidationPlan, validation: Validation) -> None:
    first, again = (without_times(plain_json(found)) for found in (validation, run_validation(plan)))
    for report in (first, again):
        # Of a machine that did something else meanwhile.
        report["notes"] = [note for note in report["notes"] if not note.startswith("Times and speedups")]
    assert first == again


def test_a_workload_whose_texts_end_at_once(validation: Validation, tmp_path: Path) -> None:
    """The base may stop at its first token after each of its prompts; then there is nothing to draft from."""
    (drafter,) = validation.drafters
    none = Figure(None, 0)
    silent = structs.replace(drafter.agreement, texts=0, n=0, teacher_forced=none, steps=[])
    changes = {**drafter.changes, "silent": Change(float("nan"), None, 0)}
    workloads = {**drafter.workloads, "silent": silent}
    found = changed(validation, drafters=[structs.replace(drafter, workloads=workloads, changes=changes)])
    write_validation(found, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["drafters"][0]["changes"]["silent"]["mean"] is None


def test_parts_that_were_not_asked_for(plan: ValidationPlan, validation: Validation) -> None:
    only_source = run_validation(dataclasses.replace(plan, base=None))
    assert "not verified: how well it drafts for a base (it was run beside none)" in only_source.verdict
    assert [table.title for table in tables(only_source)] == [
        "Is it the drafter of the file?",
        "Setting",
    ]
    no_source = changed(validation, parity=None, source=None, checks=[])
    assert no_source.verdict.startswith("Measured: ")
    assert not no_source.verified
    assert "not verified: that this is the function of a .litertlm file (it was compared with none)" in (
        no_source.verdict
    )


@pytest.mark.parametrize("name", CHECKS)
def test_any_check_refutes(validation: Validation, name: str) -> None:
    checks = {check.name: check for check in validation.checks}
    assert list(checks) == CHECKS
    wrong = dataclasses.replace(checks[name], passed=False, evidence="so and so")
    found = changed(validation, checks=list({**checks, name: wrong}.values()))
    assert found.refuted
    assert not found.verified
    assert found.verdict.startswith(f"Refuted: {name}: so and so; measured: ")
    assert f"{name}: so and so" in found.findings
    left = changed(validation, checks=list({**checks, name: dataclasses.replace(wrong, passed=None)}.values()))
    assert left.verified == (name in ("record", "transformers", "interpreter"))
    assert not left.refuted


def test_text_that_parts_is_no_drafters_fault(validation: Validation) -> None:
    """No drafter can change verified text: it is said, and whose fault it is, and the drafter is not refuted."""
    found = with_worth(validation, same_text=1, divergences=[Divergence(0, 3, 0.01)])
    assert not found.refuted
    assert "the loop's text is the base's own for 1 of 2 prompts in float32, with a chain of 1, the worst" in (
        found.verdict
    )
    assert any("leaves the base's at token 4, 0.01 logits apart; no drafter can" in line for line in found.findings)


def test_verdict_on_what_was_too_short(validation: Validation) -> None:
    """Texts that end before a round drafts, or before one has all its targets."""
    nothing = {"rounds": 0, "drafted": 0, "accepted": 0, "tokens_per_round": Figure(None, 0)}
    found = validation
    (drafter,) = found.drafters
    worth = {name: structs.replace(worth, **nothing) for name, worth in drafter.generation.worth.items()}
    generation = structs.replace(drafter.generation, worth=worth)
    short = structs.replace(drafter.agreement, teacher_forced=Figure(None, 0))
    found = changed(found, drafters=[structs.replace(drafter, agreement=short, generation=generation)])
    assert "nan" not in as_json(found).decode()
    assert "the loop's text" not in found.verdict
    _, _, missing = found.verdict.partition("not verified: ")
    assert "that drafts leave the base's greedy text as it is (no round drafted any)" in missing


def test_too_few_texts_decide_nothing(validation: Validation) -> None:
    """Four texts: no interval anywhere, no verdict that would need one, and what is needed is said."""
    (first,) = validation.drafters

    def undecided(figure: Figure | None, value: float = -0.2) -> Figure | None:
        return figure and structs.replace(figure, value=value, ci95=None)

    steps = [structs.replace(step, top1=undecided(step.top1, 0.5)) for step in first.agreement.steps]
    of_four = structs.replace(first.agreement, texts=4, steps=steps)
    other = structs.replace(first, facts=structs.replace(first.facts, name="other"), change=Change(-0.3, None, 4))
    found = changed(
        validation,
        trivial=[structs.replace(r, difference=undecided(r.difference), texts=4) for r in validation.trivial],
        controls=[
            structs.replace(r, difference=undecided(r.difference), standing="undecided") for r in validation.controls
        ],
        drafters=[structs.replace(first, agreement=of_four), other],
    )
    assert not found.refuted
    told = "not decided: 4 texts, at least 5 are needed"
    for part in ("positions", "other -0.30", "(most frequent token;", "what the controls say is"):
        assert f"{part} ({told})" in found.verdict or f"{part} {told}" in found.verdict, part
    assert "refuted" not in found.verdict.lower()
    assert "worse" not in " ".join(found.findings)


def test_there_whole_or_not_at_all(validation: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr("mtp_extract.report.page.as_html", fails)
    with pytest.raises(RuntimeError, match="no page"):
        write_validation(validation, tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_replaces_only_reports(validation: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_extract.validation.page.find_spec", lambda name: None)
    target = tmp_path / "report"
    write_validation(validation, target)
    assert "Nothing is drawn: matplotlib is missing" in (target / "report.html").read_text()
    with pytest.raises(OutputError, match="Replace it") as caught:
        write_validation(validation, target)
    assert caught.value.remedies == ("overwrite", "out")
    write_validation(validation, target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    (target / "model.safetensors").write_text("weights")
    with pytest.raises(OutputError, match=r"does not list.*: model\.safetensors\.") as caught:
        write_validation(validation, target, overwrite=True)
    assert caught.value.remedies == ("out",)
    assert (target / "model.safetensors").read_text() == "weights"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(OutputError, match="is none that mtp-extract wrote"):
        check_place(tmp_path / "other", overwrite=True, listed=REPORT_LISTED)


def test_the_pair(written: Path, validation: Validation) -> None:
    """Its sizes are those of the sample: four layers of the base compute keys, one of them full."""
    found = json.loads((written / "pair.json").read_text())
    assert found == plain_json(validation.pair)
    assert (found["target"]["hidden_size"], found["draft"]["hidden_size"]) == (64, 64)
    assert found["bridge"]["shape"] == ["T", 64]
    assert found["draft"]["assistant_role"] == "mtp_drafter"
    buffers = found["buffers"]
    assert buffers["draft_kv_cache"]["bytes"] == 0
    assert buffers["target_logits"] == {"shape": [4, 512], "bytes": 4 * 4 * 512}
    assert buffers["candidate_tokens"]["shape"] == [3] and buffers["accepted_tokens"]["shape"] == [4]
    assert found["verify"]["T"] == 4
    worth = validation.drafters[0].generation.worth
    assert list(found["metrics"]) == list(worth)
    for name, metrics in found["metrics"].items():
        assert metrics == {
            "backbone_only_tok_per_sec": worth[name].base_tokens_per_s,
            "speculative_tok_per_sec": worth[name].tokens_per_s,
            "draft_tokens_per_batch": int(name),
            "accepted_tokens/drafted_tokens": worth[name].accepted / worth[name].drafted,
            "target_verify_ms": worth[name].verify_ms,
            "assistant_draft_ms": worth[name].draft_ms,
        }
