"""The examples of docs/examples run as they stand, on the sample, and what they print is so."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from helpers.hub_fixtures import hub  # noqa: F401 - a fixture
from helpers.hub_server import HubServer
from helpers.prompt_files import few_of, write_prompts
from safetensors.numpy import load_file, save_file

import mtp_extract
from mtp_extract.data import sample_bundle, sample_prompts
from mtp_extract.evaluation.prompts import Prompt, load_shipped_prompts, read_prompts

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
NOTEBOOK = EXAMPLES / "drafter.ipynb"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """An example with these arguments, in an empty folder; what it prints."""
    monkeypatch.chdir(tmp_path)

    def run_one(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_one


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A few of the sample's prompts: as many of every side as a training needs."""
    from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, choose_side

    chosen, least = list[Prompt](), {TRAINED: 4, WATCHED: 4, HELD_OUT: 5}
    for side, most in least.items():
        chosen += [prompt for prompt in read_prompts(sample_prompts()) if choose_side(prompt.source) == side][:most]
    assert len(chosen) == sum(least.values())
    return write_prompts(tmp_path / "few.jsonl", few_of(chosen, 1))


def test_the_table_names_every_example_and_says_what_it_says_itself() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[`([\w.]+)`\]\(\1\) \|", table, re.MULTILINE)
    assert {*named, "README.md"} == {path.name for path in EXAMPLES.iterdir()}
    for name in SCRIPTS:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        # It says in one line what it does, and how it is called.
        assert re.match(rf'"""[^\n]+\.\n\npython docs/examples/{name}\.py [^\n]+\n"""\n', text), name


def test_of_a_bundle_on_the_hub_the_drafter_alone_is_fetched(run: Run, hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    data = sample_bundle().read_bytes()
    hub.add("org/bundle", "sample.litertlm", data)
    local = run("extract_by_ranges", "--out", "local")
    printed = run("extract_by_ranges", "org/bundle", "--out", "remote")
    # What is said before the files, of which card and record name where the bundle is from.
    assert printed.split("/, proven")[0].replace("remote", "local") == local.split("/, proven")[0]
    sizes = [int(size.replace(",", "")) for size in re.findall(r"^section .*, ([\d,]+) bytes$", local, re.MULTILINE)]
    (drafter,) = re.findall(r"the drafter: section (\d+)", local)
    assert sizes[int(drafter)] <= hub.sent["storage"] < sizes[int(drafter)] + (3 << 16) < len(data)
    name = "model.safetensors"
    assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "remote" / name).read_bytes()


@pytest.mark.torch
def test_both_loops_write_the_text_of_the_base_in_fewer_passes(run: Run) -> None:
    printed = run("draft_in_transformers", "--new-tokens", "16")
    (alone, text), (drafted, same) = re.findall(r"^\w[^,]*, (\d+) passes of the base: (.+)$", printed, re.MULTILINE)
    assert text == same and len(text) > len("''") and int(drafted) < int(alone)
    printed = run("count_rounds", "--new-tokens", "16")
    rows = re.findall(r"^(\d) drafts: (\d+) tokens in (\d+) rounds, (\d+) of (\d+) .* accepted, (.*)$", printed, re.M)
    assert [row[0] for row in rows] == list("01248")
    assert {row[-1] for row in rows} == {"the same text"}
    assert f"the text: {text}\n" in printed
    # The prompt's own pass gives the first token, every round one more than it accepts.
    assert all(int(tokens) == 1 + int(rounds) + int(accepted) for _, tokens, rounds, accepted, _, _ in rows)
    assert int(rows[3][2]) < int(rows[0][2]) == int(alone) - 1


@pytest.mark.torch
def test_a_validation_is_read_from_its_report(
    run: Run, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_extract.report.page.find_spec", lambda name: None)
    printed = run("validate_pair", "--prompts", str(few), "--new-tokens", "8")
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["verified"] and "\nVerified: the checkpoint is the drafter of sample.litertlm" in printed
    steps = re.findall(r"^draft (\d) stands in ([\d.]+)% of (\d+) places \(95 %: ([\w.]+)", printed, re.MULTILINE)
    assert [(int(step), int(n)) for step, _, n, _ in steps] == [
        (step["step"], step["conditional"]["n"]) for step in report["drafters"][0]["agreement"]["steps"]
    ]
    first = report["drafters"][0]["agreement"]["steps"][0]
    assert 0 < first["top1"]["value"] == first["conditional"]["value"] <= first["top5"]["value"]
    assert float(steps[0][1]) == pytest.approx(100 * first["top1"]["value"], abs=0.06)


def test_a_gguf_holds_the_integers_of_the_bundle_and_needs_no_torch(tmp_path: Path) -> None:
    """In a process where none of the extra ``validate`` can be imported."""
    hidden = "sys.modules |= dict.fromkeys(('torch', 'transformers', 'accelerate', 'matplotlib'))"
    script = EXAMPLES / "convert_to_gguf.py"
    code = f"import runpy, sys; {hidden}; sys.argv = ['']; runpy.run_path({str(script)!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout
    (file,) = (tmp_path / "drafter-gguf").glob("*.gguf")
    assert f"{file.stat().st_size:,} bytes in drafter-gguf/{file.name}" in printed
    # What RoPE divides its frequencies by is llama.cpp's table, no weight of a drafter.
    tensors = [tensor for tensor in GGUFReader(file).tensors if not tensor.name.startswith("rope_freqs")]
    stored = Counter(tensor.tensor_type.name for tensor in tensors)
    names = {"F32": "F32", "Q4_0": "INT4", "Q8_0": "INT8"}
    (line,) = re.findall(r"^stored as (.*)$", printed, re.MULTILINE)
    told = {kind: int(count) for kind, count in re.findall(r"(\w+): (\d+) tensors", line)}
    assert told == {names[kind]: count for kind, count in stored.items()} and told["INT4"] and told["INT8"]


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """The sample with other norms in its drafter, which a training has much to gain from."""
    made = mtp_extract.extract(sample_bundle(), tmp_path / "spoilt", dtype="f32").directory
    (made / "extraction.json").unlink()  # it is no longer what was extracted
    tensors = load_file(made / "model.safetensors")
    random = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensors[name] = tensor * random.uniform(-0.5, 2.5, tensor.shape).astype(np.float32)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    mtp_extract.insert(made, sample_bundle(), tmp_path / "spoilt.litertlm")
    return tmp_path / "spoilt.litertlm"


@pytest.mark.torch
def test_what_was_tuned_is_in_the_new_bundle(
    run: Run, few: Path, spoilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_extract.tuning import corpus

    shipped = load_shipped_prompts(1)
    monkeypatch.setattr(corpus, "load_shipped_prompts", lambda each=None: shipped)
    quickly = ("--steps", "4", "--learning-rate", "0.03", "--new-tokens", "8")
    printed = run("tune_and_insert", str(spoilt), "--prompts", str(few), *quickly)
    before, tuned = (load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "drafter-tuned"))
    changed = sum(not np.array_equal(before[name], tuned[name]) for name in before)
    assert changed
    assert f"extracted again: {changed} of {len(before)} tensors are others than before, all as tuned: True" in printed


@pytest.mark.torch
def test_the_notebook_stores_no_outputs_installs_first_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    install, *cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert not any(cell["outputs"] or cell["execution_count"] is not None for cell in (install, *cells))
    assert "".join(install["source"]).startswith("%pip install")
    monkeypatch.chdir(tmp_path)
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}: {cell['id']}", "exec"), names)
    assert "the same text: True" in capsys.readouterr().out
    assert names["passes"].count(1) < names["passes"].count(0)
    (figure,) = shown
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    # Of the drafts of a round, none is accepted more often than the one before it.
    assert heights == sorted(heights, reverse=True) and len(heights) == 4 and 0 < heights[0] <= 1
    plt.close(figure)
