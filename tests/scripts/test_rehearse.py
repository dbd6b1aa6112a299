"""``scripts/rehearse.py``: its pair is what transformers and the bundle's readers expect, and its figures are true.

``scripts/on_gpu.py`` on a CPU, at a small shape: everything but the tuning and the marked tests.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import on_gpu
import pytest
import rehearse
import torch
from _rehearsal import base, bundle, commands
from _rehearsal.measure import Measured, Running
from _rehearsal.shapes import SHAPES, Shape
from rehearse import compute_allowance, list_problems
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.drafter.load import load_any_drafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.insertion.base import find_base
from mtp_extract.speculate.loop import SpeculativeGenerator

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("rehearsal")
    base.write_base(TINY, found / "base")
    bundle.write_bundle(TINY, found / "bundle.litertlm")
    commands.write_prompts(found)
    return found


@pytest.mark.parametrize(
    "shape", [SHAPES["e2b"], SHAPES["e4b"], SHAPES["e2b"].with_layers(15)], ids=("e2b", "e4b", "15")
)
def test_a_base_has_the_tensors_of_transformers_own(shape: Shape) -> None:
    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(Gemma4Config(**base.build_config(shape)))
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert found == {weight.name: weight.shape for weight in shape.tensors()}


def test_a_bundle_has_what_published_ones_have(root: Path, tmp_path: Path) -> None:
    with open_bundle(root / "bundle.litertlm") as opened:
        found = find_base(opened)
        kinds = [section.model_type for section in opened.sections]
        subgraphs = len(opened.read_model(opened.sections[kinds.index("prefill_decode")]).subgraphs)
    assert len(kinds) == 13 and len(set(kinds)) == 11
    assert subgraphs > 120
    names = {weight.name for weight in TINY.tensors()}
    assert len(found.places) == len(names) + 1  # and a head, which is the embeddings'
    assert len(found.places["embed_tokens_per_layer"]) == TINY.layers
    assert len(found.places["layers.0.q_proj"]) == 4  # prefill_8, prefill_16, decode, verify


def test_base_and_drafter_are_a_pair(root: Path, tmp_path: Path) -> None:
    extract(root / "bundle.litertlm", tmp_path / "out")
    drafter = load_any_drafter(tmp_path / "out")
    loaded = load_base(str(root / "base"), "cpu")
    assert loaded.dtype == "bfloat16"
    made = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    written = made.generate("Why is it dark at night?", max_new_tokens=6, drafts=2, chat_template=True)
    assert len(written.tokens) == 6


def test_a_tokenizer_of_any_size(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    base.write_tokenizer(70_000, tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.get_vocab_size() == 70_000
    text = "Why is it dark at night? é\n"
    assert made.decode(made.encode(text, add_special_tokens=False).ids) == text


def test_fewer_layers_are_whole_periods() -> None:
    cut = SHAPES["e4b"].with_layers(12)
    assert (cut.owners, cut.types[-1], cut.cache_of(11), cut.cache_of(10)) == (6, "full_attention", 5, 4)
    for layers in (6, 13, 48):
        with pytest.raises(ValueError, match=f"expected a multiple of 6 from 12 to 42, found {layers}"):
            SHAPES["e4b"].with_layers(layers)


def test_what_a_process_takes(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    code = (
        "import sys, time; data = bytearray(b'1') * 60_000_000\n"
        f"open({file!r}, 'wb').write(data[:5_000_000]); open({file!r}, 'rb').read()\n"
        "while time.process_time() < 0.3: pass\n"
        "print('done'); sys.exit(3)"
    )
    found = Running([sys.executable, "-c", code], tmp_path / "log", {}).finished()
    assert (found.status, found.output) == (3, "done\n")
    assert 0.2 < found.cpu_s < 2
    assert 60e6 < found.private < found.host < 150e6
    assert 5e6 < found.written < 6e6 < 10e6 > found.read > 5e6


def test_what_is_over_its_budget_or_ends_otherwise_fails(tmp_path: Path) -> None:
    found = Measured(0, 1.0, 2.0, 300, 200, 0, 10, 10, "said")
    command = commands.Command("extract gguf", (), "^said$")
    table = tmp_path / "budgets.json"
    terms = {"cpu_s": {"fixed": 1, "base": 0.5}, "host": {"fixed": 100, "bundle": 2}}
    table.write_text(json.dumps({"any": {"device": {"base": 1}}, "commands": {"extract": terms}}))
    most = compute_allowance(command.kind, 2_000_000_000, 100, table)
    assert most == {"device": 2e9, "cpu_s": 2.0, "host": 300.0}
    assert list_problems(command, found, most) == []
    assert list_problems(command, replace(found, status=1), most) == ["exit status 1: said"]
    assert list_problems(replace(command, says="other"), found, most) == ["nothing like 'other' is printed: said"]
    assert list_problems(command, replace(found, cpu_s=2.1, host=301), most) == [
        "cpu_s 2.1 s of at most 2.0 s",
        "host 0 MB of at most 0 MB",
    ]


def test_every_command_has_a_budget(tmp_path: Path) -> None:
    kinds = {command.kind for command in commands.list_commands(tmp_path, TINY, "cpu")} | {"serve"}
    assert all({"cpu_s", "host", "device", "read", "written"} == set(compute_allowance(kind, 1, 1)) for kind in kinds)


def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["extract transformers", "insert-base", "inspect-base", "inspect-another"]
    assert rehearse.main(["--shape", "tiny", "--work", str(tmp_path), "--only", *only]) == 0
    printed = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == ["extract transformers", "insert-base", "inspect-base", "inspect-another"]
    assert [figure["exit"] for figure in figures.values()] == [0, 0, 0, 1]
    assert printed.count("| ok |") == 4
    bundle_size = (tmp_path / "bundle.litertlm").stat().st_size
    assert figures["insert-base"]["written"] > bundle_size
    # The same again, with a command that ends otherwise.
    monkeypatch.setattr(
        rehearse, "list_commands", lambda *given: [commands.Command("inspect", (tmp_path / "none",), "")]
    )
    assert rehearse.main(["--shape", "tiny", "--work", str(tmp_path)]) == 1
    assert "exit status 1: error:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds another shape than e2b"):
        rehearse.main(["--shape", "e2b", "--work", str(tmp_path)])


# --- scripts/on_gpu.py


def tables(page: str) -> dict[str, list[list[str]]]:
    """Title → rows, without the header's."""
    found = {}
    for part in page.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        found[title] = rows[2:]
    return found


def test_the_page_of_figures_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "CHAINS", (0, 3))
    monkeypatch.setattr(on_gpu, "TREES", {"2x2x1": on_gpu.TREES["2x2x1"]})
    monkeypatch.setattr(on_gpu, "CONTEXTS", (128,))
    page, only = tmp_path / "gpu.md", ("drafts", "contexts")
    assert on_gpu.main(["--shape", "tiny", "--device", "cpu", "--out", str(page), "--only", *only]) == 0
    found = tables(page.read_text())
    assert list(found) == ["Drafts a round", "Contexts, 4 drafts"]
    assert [row[0] for row in found["Drafts a round"]] == ["0", "3", "2x2x1"]
    alone, chain, _ = found["Drafts a round"]
    assert alone[5] == "1.00"  # the base alone takes as long as itself
    assert float(chain[1]) > 0 and float(chain[4]) > 0
    assert abs(float(chain[1]) + float(chain[2]) - float(chain[3])) < 0.02
    assert [row[0] for row in found["Contexts, 4 drafts"]] == ["128"]


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    page = on_gpu.Page(tmp_path / "gpu.md", -math.inf)
    page.table("Drafts", ("drafts",), on_gpu.run_marked_tests(page))
    assert "There was no time for more." in page.out.read_text()
    assert "not what they yield" in on_gpu.format_heading(SHAPES["tiny"], on_gpu.torch.device("cpu"))


def test_what_the_base_wrote_is_kept_for_the_next_tuning(tmp_path: Path) -> None:
    """Of what a tuning keeps: its log and its state would be resumed."""
    for name in ("texts.jsonl", "log.jsonl", "state.pt"):
        (tmp_path / name).touch()
    rehearse.clear_outputs(commands.Command("tune norms", ("--work", tmp_path), ""))
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]
