"""A whole validation and its report: what is in it, there whole or not at all, and what the verdict says of which."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from hashlib import sha256
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.random_assistants import GEOMETRIES, random_assistant
from helpers.random_heads import head_config, random_head, write_head
from helpers.record_document import TUNING
from helpers.reporters import Recorder
from helpers.schemas import validator
from msgspec import structs
from safetensors.torch import load_file, save_file

from mtp_extract import validate
from mtp_extract.errors import CheckpointError, MtpExtractError, OutputError, PairError
from mtp_extract.evaluation.agreement import Change
from mtp_extract.io.typed import Figure
from mtp_extract.report.files import REPORT_FILES
from mtp_extract.report.page import convert_to_json, render_html
from mtp_extract.speculate.target import Base
from mtp_extract.validation import worth as worth_module
from mtp_extract.validation.page import build_page, build_tables, write_validation
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import Validation, conclude
from mtp_extract.validation.run import run_validation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

CHECKS = ["config", "files", "tensors", "function", "record", "transformers", "interpreter"]
TIMES = {
    *("tokens_per_s", "forward_ms", "verify_ms", "draft_ms", "best"),
    *("predicted_speedup", "measured_speedup", "verdict", "pair", "when"),
}
TREES = ("3x2", "2x1x1")


def change_validation(result: Validation, **parts: Any) -> Validation:
    """With these parts, and the verdict that they lead to."""
    return conclude(structs.replace(result, **parts))


@pytest.fixture(scope="module")
def written(validation: Validation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("report") / "report"
    write_validation(validation, target)
    return target


def test_what_it_holds(written: Path) -> None:
    result = json.loads((written / "report.json").read_text())
    validator("report")(result)
    (drafter,) = result["drafters"]
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
    assert len(result["controls"]) == 7 and set(drafter["worth"]) == {"1", "3"}
    assert all(worth["same_text"] == result["base"]["timed"] == 2 for worth in drafter["worth"].values())
    assert result["verdict"].startswith("Verified: the checkpoint is the drafter of sample.litertlm (config, files, ")
    assert "; same text 2 of 2 (greedy, in float32; whatever is drafted). " in result["verdict"]
    assert [check["passed"] for check in result["checks"]] == [True] * len(CHECKS)
    assert result["settings"]["prompts"] == {"code": 4, "prose": 3}


def test_its_files(written: Path, plan: ValidationPlan) -> None:
    assert {path.name for path in written.iterdir()} == REPORT_FILES
    for path in written.iterdir():
        for place in (plan.directory, plan.base):
            assert str(place) not in path.read_text(), "where things lie here is nobody else's"


def test_a_report_says_when_how_and_with_what_it_was_measured(
    written: Path, validation: Validation, plan: ValidationPlan
) -> None:
    assert plan.prompts is not None and validation.run is not None
    run = json.loads((written / "report.json").read_text())["run"]
    assert (run["command"], run["prompts_sha256"]) == (None, sha256(plan.prompts.read_bytes()).hexdigest())
    assert run["versions"] == {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "ai-edge-litert", "numpy")},
    }
    assert datetime.fromisoformat(run["when"]).utcoffset() == timedelta(0)
    result = structs.replace(validation, run=structs.replace(validation.run, command="mtp-validate <b>"))
    foot = render_html(build_page(result)).partition("<footer>")[2]
    for words in (run["when"], "mtp-validate &lt;b&gt;", run["prompts_sha256"], f"torch {version('torch')}"):
        assert words in foot


def stop_at_call(at: int) -> Callable[..., Any]:
    """Ctrl-C when the drafts of a few texts are generated so many times."""
    calls = count(1)
    generate = worth_module.Timed.of

    def generate_or_stop(*arguments: Any, **more: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return generate(*arguments, **more)

    return generate_or_stop


@pytest.mark.parametrize(("at", "measured"), [(1, []), (2, []), (3, ["1"])])
def test_what_was_measured_until_it_ends_is_told(
    plan: ValidationPlan, validation: Validation, monkeypatch: pytest.MonkeyPatch, at: int, measured: list[str]
) -> None:
    """The base alone, a chain of one, a chain of three: a call each."""
    reporter = Recorder()
    monkeypatch.setattr(worth_module.Timed, "of", stop_at_call(at))
    with pytest.raises(KeyboardInterrupt):
        run_validation(plan, reporter)
    (result,) = reporter.results
    assert [check.passed for check in result.checks] == [True] * len(result.checks)
    assert result.notes[-1] == "It ended early: what is missing was not measured."
    if at == 1:
        assert (result.drafters, result.controls) == ([], []), "controls are shown beside the drafter"
        render_html(build_page(result))
        return
    (drafter,), (whole,) = result.drafters, validation.drafters
    assert convert_to_json(drafter.agreement) == convert_to_json(whole.agreement)
    assert [*drafter.worth] == measured
    words = (
        "Measured: tokens per round "
        if measured
        else "Not measured: how well it drafts for a base (it ended before that)"
    )
    assert words in result.verdict
    titles = [table.title for table in build_tables(result)]
    assert ("What drafting is worth" in titles) is bool(measured)
    assert "Acceptance by draft step" in titles
    render_html(build_page(result))


def test_same_numbers_again(plan: ValidationPlan, validation: Validation) -> None:
    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(item) for key, item in value.items() if key not in TIMES}
        return [without_times(item) for item in value] if isinstance(value, list) else value

    first, again = (without_times(convert_to_json(result)) for result in (validation, run_validation(plan)))
    assert first == again


def test_a_workload_whose_texts_end_at_once(validation: Validation, tmp_path: Path) -> None:
    """The base may stop at its first token after each of its prompts; then there is nothing to draft from."""
    (drafter,) = validation.drafters
    none = Figure(None, 0)
    steps = [structs.replace(one, top1=none, top5=none, conditional=none) for one in drafter.agreement.steps]
    silent = structs.replace(drafter.agreement, texts=0, n=0, teacher_forced=none, steps=steps)
    changes = {**drafter.changes, "silent": Change(float("nan"), None, 0)}
    workloads = {**drafter.workloads, "silent": silent}
    result = change_validation(validation, drafters=[structs.replace(drafter, workloads=workloads, changes=changes)])
    write_validation(result, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["drafters"][0]["changes"]["silent"]["mean"] is None


def test_parts_that_were_not_asked_for(plan: ValidationPlan, validation: Validation) -> None:
    only_source = run_validation(dataclasses.replace(plan, base=None, prompts=None))
    assert only_source.verdict.endswith(" Not measured: how well it drafts for a base (it was run beside none).")
    assert [table.title for table in build_tables(only_source)] == ["Is it the drafter of the file?"]
    no_source = change_validation(validation, source=None, checks=[])
    assert no_source.verdict.startswith(
        "Not verified: that this is the function of a .litertlm file (it was compared with none). Measured: "
    )
    assert not no_source.verified


@pytest.mark.parametrize("name", CHECKS)
def test_any_check_refutes(validation: Validation, name: str) -> None:
    checks = {check.name: check for check in validation.checks}
    assert list(checks) == CHECKS
    wrong = dataclasses.replace(checks[name], passed=False, evidence="so and so")
    result = change_validation(validation, checks=list({**checks, name: wrong}.values()))
    assert result.refuted
    assert not result.verified
    assert result.verdict.startswith(f"Refuted: {name}: so and so. Measured: ")
    left = change_validation(
        validation, checks=list({**checks, name: dataclasses.replace(wrong, passed=None)}.values())
    )
    assert left.verified == (name in ("record", "transformers", "interpreter"))
    assert not left.refuted


def test_too_few_texts_decide_nothing(validation: Validation) -> None:
    """Four texts: no interval anywhere, no verdict that would need one, and what is needed is said."""
    (first,) = validation.drafters
    none = Figure(0.5, 9)
    of_four = structs.replace(first.agreement, texts=4, steps=[structs.replace(first.agreement.steps[0], top1=none)])
    other = structs.replace(first, name="other", change=Change(-0.3, None, 4))
    controls = [structs.replace(r, difference=none, standing="undecided") for r in validation.controls]
    result = change_validation(
        validation, controls=controls, drafters=[structs.replace(first, agreement=of_four), other]
    )
    assert not result.refuted
    undecided = "not decided: 4 texts, at least 5 are needed"
    for part in ("positions", "other -0.30", "What the controls say is"):
        assert f"{part} ({undecided})" in result.verdict or f"{part} {undecided}" in result.verdict, part
    assert "refuted" not in result.verdict.lower()


def test_a_report_replaces_a_report_when_asked_and_nothing_else(validation: Validation, tmp_path: Path) -> None:
    target = tmp_path / "report"
    write_validation(validation, target)
    with pytest.raises(OutputError, match="Replace it"):
        write_validation(validation, target)
    write_validation(validation, target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]

    (target / "model.safetensors").write_text("weights")
    with pytest.raises(OutputError, match=r"does not list.*: model\.safetensors\."):
        write_validation(validation, target, overwrite=True)
    assert (target / "model.safetensors").read_text() == "weights"


def test_the_pair(written: Path, validation: Validation) -> None:
    """Its sizes are those of the sample: four layers of the base compute keys, one of them full."""
    result = json.loads((written / "pair.json").read_text())
    assert result == convert_to_json(validation.pair)
    assert result["target"]["hidden_size"] == result["draft"]["hidden_size"] == 64
    assert result["bridge"]["shape"] == ["T", 64] and result["draft"]["assistant_role"] == "mtp_drafter"
    buffers = result["buffers"]
    assert buffers["draft_kv_cache"]["bytes"] == 0
    assert buffers["target_logits"] == {"shape": [4, 512], "bytes": 4 * 4 * 512}
    assert buffers["candidate_tokens"]["shape"] == [3] and buffers["accepted_tokens"]["shape"] == [4]
    assert result["verify"]["T"] == 4
    worth = validation.drafters[0].worth
    assert list(result["metrics"]) == list(worth) and validation.base is not None
    for name, metrics in result["metrics"].items():
        assert metrics == {
            "backbone_only_tok_per_sec": validation.base.tokens_per_s,
            "speculative_tok_per_sec": worth[name].tokens_per_s,
            "draft_tokens_per_batch": int(name),
            "accepted_tokens/drafted_tokens": worth[name].accepted / worth[name].drafted,
            "target_verify_ms": worth[name].verify_ms,
            "assistant_draft_ms": worth[name].draft_ms,
        }


@pytest.fixture(scope="module")
def beside(plan: ValidationPlan, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Validation:
    """The sample that its record calls tuned, with trees, beside the same with a fault."""
    folder = tmp_path_factory.mktemp("beside")
    tuned, faulty = (Path(shutil.copytree(checkpoint, folder / name)) for name in ("tuned", "faulty"))
    record = json.loads((tuned / "extraction.json").read_text())
    (tuned / "extraction.json").write_text(json.dumps({**record, "tuning": TUNING}))
    (faulty / "extraction.json").unlink()
    weights = load_file(faulty / "model.safetensors")
    weights["model.layers.3.self_attn.q_norm.weight"] *= -1
    weights["model.layers.0.layer_scalar"] *= 0.2
    save_file(weights, faulty / "model.safetensors", {"format": "pt"})
    shape = {"draft_steps": (3,), "trees": TREES, "timed": 1}
    return run_validation(dataclasses.replace(plan, directory=tuned, beside=faulty, source=None, **shape))


def test_a_worse_drafter_is_below(beside: Validation) -> None:
    """On the same texts, which are the base's own with both."""
    first, worse = beside.drafters
    assert [(d.name, d.tuned) for d in beside.drafters] == [("tuned", "qat"), ("faulty", None)]
    assert any(note.startswith("tuned was tuned. On prompts that a drafter was tuned on") for note in beside.notes)
    assert [change.mean for change in (first.change, *first.changes.values())] == [0.0] * 3
    after, before = worse.agreement.teacher_forced.value, first.agreement.teacher_forced.value
    assert after is not None and before is not None
    assert worse.change.mean == pytest.approx(after - before)
    assert worse.change.interval is not None and worse.change.interval.high < 0
    assert "Beside it, in teacher-forced tokens per round on the same texts: faulty -" in beside.verdict
    worths = [{name: one.same_text for name, one in drafter.worth.items()} for drafter in beside.drafters]
    assert worths == [dict.fromkeys(("3", *TREES), 1)] * 2


def test_the_report_of_two(beside: Validation, tmp_path: Path) -> None:
    write_validation(beside, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    validator("report")(report)
    assert report["settings"]["trees"] == list(TREES)
    shown = {table.title: table for table in build_tables(beside)}
    assert shown["Acceptance by draft step"].columns[-2:] == ["accepted %", "faulty: accepted %"]
    assert shown["Acceptance by workload"].columns[-2:] == ["faulty: teacher-forced tokens per round", "to the first"]
    assert all(len(row) == len(table.columns) for table in shown.values() for row in table.rows)
    rows = [f"{name}: {what}" for name in ("tuned", "faulty") for what in ("chain of 3", "tree 3x2", "tree 2x1x1")]
    assert [row[0] for row in shown["What drafting is worth"].rows] == rows


def test_a_head_may_stand_first_or_second(plan: ValidationPlan, checkpoint: Path, tmp_path: Path) -> None:
    """And does the same there: a random EAGLE-3 head for the sample's base, of 300 of its 512 tokens."""
    config = head_config(backbone_hidden_size=64, hidden_size=64, vocab_size=512, draft_vocab_size=300)
    head = write_head(tmp_path / "head", random_head(config))
    shape = {"source": None, "draft_steps": (2,), "trees": ("3x2",), "timed": 1}
    one = run_validation(dataclasses.replace(plan, directory=head, beside=checkpoint, **shape))
    other = run_validation(dataclasses.replace(plan, directory=checkpoint, beside=head, **shape))
    assert not one.controls and not one.refuted
    assert any("the controls are those of an MTP drafter" in note for note in one.notes)
    for ours, theirs in zip(one.drafters, reversed(other.drafters), strict=True):
        worths = [list(whose.worth.values()) for whose in (ours, theirs)]
        assert [row.accepted for row in worths[0]] == [row.accepted for row in worths[1]]
        assert all(row.same_text == 1 for row in worths[0])
    eagle, mtp = (d.worth["3x2"].tokens_per_round.value for d in one.drafters)
    assert eagle is not None and mtp is not None and mtp > eagle + 0.5


def test_text_that_a_tree_spoils_is_seen(plan: ValidationPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault of the loop: the cache keeps the first drafts of a tree, whichever way was accepted."""
    keep = Base.keep
    monkeypatch.setattr(Base, "keep", lambda self, cache, fed, way: keep(self, cache, fed, range(len(way))))
    wrong = run_validation(dataclasses.replace(plan, source=None, draft_steps=(2,), trees=("4x4x2",), timed=5))
    worth = wrong.drafters[0].worth
    assert worth["2"].same_text == 5, "a chain is not touched by it"
    assert worth["4x4x2"].same_text < 5
    assert not wrong.refuted, "no drafter can change text"
    assert "; tree 4x4x2, the worst)" in wrong.verdict
    assert any("else the loop is at fault" in line for line in wrong.notes)


def test_what_does_not_fit_is_said_before_anything_is_measured(
    plan: ValidationPlan, checkpoint: Path, tmp_path: Path
) -> None:
    other, reporter = tmp_path / "other", Recorder()
    random_assistant(GEOMETRIES["dense"]).save_pretrained(other)
    wanted = dataclasses.replace(plan, source=None, beside=other)
    with pytest.raises(PairError, match="other: expected a base with a vocabulary of 60, found 512"):
        run_validation(wanted, reporter)
    with pytest.raises(PairError, match=r"expected at most the base's \d+ tokens, found"):
        run_validation(dataclasses.replace(wanted, beside=None, new_tokens=1 << 20), reporter)
    assert reporter.lines == [f"loading the base {plan.base}"] * 2
    for absent in ({"beside": Path("/absent")}, {"directory": Path("/absent")}, {"directory": Path(str(plan.base))}):
        with pytest.raises(CheckpointError, match=r"/absent: expected a checkpoint's directory|expected model_type"):
            run_validation(dataclasses.replace(wanted, **absent), reporter)
    assert len(reporter.lines) == 2, "nothing is loaded for a directory that is none"


def test_a_tree_wider_than_the_vocabulary(plan: ValidationPlan) -> None:
    with pytest.raises(MtpExtractError, match="at most 512 drafts for one position") as caught:
        run_validation(dataclasses.replace(plan, trees=("1x513",)))
    assert caught.value.remedies == ("trees",)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"draft_steps": ()}, "draft steps, found none"),
        ({"draft_steps": (65,)}, "draft_steps of at most 64, found 65"),
        ({"new_tokens": 2}, "new_tokens of at least 3, found 2"),
        ({"trees": ("2x2", "3")}, "a tree such as 4x2x1, found a number alone"),
        ({"samples": 4097}, "samples of at most 4096, found 4097"),
        ({"base": None, "source": "x", "prompts": Path("x"), "trees": ("2x1",)}, "to measure trees and prompts with"),
        ({"base": None, "source": "x", "beside": Path("x")}, "to measure another drafter with, found none"),
    ],
)
def test_what_cannot_be_measured(arguments: dict[str, Any], what: str) -> None:
    """Refused before the base, which is not there, is looked for."""
    with pytest.raises(MtpExtractError, match=what):
        validate(ValidationPlan(Path("absent"), **{"base": "absent", **arguments}))
