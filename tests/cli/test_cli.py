"""The commands as a user meets them."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run, run_here
from helpers.variant_files import variant
from seam import read_prompts
from typer import Typer
from typer.testing import CliRunner

import mtp_extract
from mtp_extract import __version__
from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import MTP
from mtp_extract.architecture.eagle3 import EAGLE3, EAGLE3_HEAD
from mtp_extract.cli import COMMANDS, convert, extract, import_command, inspect, main
from mtp_extract.errors import UnsupportedError
from mtp_extract.formats import MTP_FORMATS, choose_format

RUNNER = CliRunner()


def test_sample_is_one_command(tmp_path: Path) -> None:
    result = run("extract", "--sample", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) <= 5
    written = " ".join(sorted(path.name for path in (tmp_path / "sample-mtp-drafter").iterdir()))
    assert written == "README.md config.json extraction.json generation_config.json model.safetensors"


def test_the_sample_is_a_path_for_every_command(tmp_path: Path) -> None:
    bundle, base, prompts = (run("sample", *name).stdout.strip() for name in ([], ["base"], ["prompts"]))
    assert [Path(path).exists() for path in (bundle, base, prompts)] == [True] * 3
    for line in (["inspect", bundle, "--against", base], ["insert", base, bundle, "--dry-run"]):
        done = run(*line, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), line
    assert len(read_prompts(Path(prompts))) > 50


def test_json(sample: Path, tmp_path: Path) -> None:
    result = RUNNER.invoke(extract.app, [str(sample), "-o", str(tmp_path / "out"), "--json", "--for", "litert"])
    document = json.loads(result.stdout)
    assert document["directory"] == str(tmp_path / "out")
    assert document["extraction"] == json.loads((tmp_path / "out" / "extraction.json").read_text())
    assert document["files"]["mtp_drafter.safetensors"] == (tmp_path / "out" / "mtp_drafter.safetensors").stat().st_size


def test_all_commands_by_one_name(sample: Path) -> None:
    program = [sys.executable, "-m", "mtp_extract"]
    shown = subprocess.run([*program, "inspect", sample, "--json"], capture_output=True, text=True, check=False)
    assert (shown.returncode, json.loads(shown.stdout)["name"]) == (0, str(sample))
    refused = subprocess.run([*program, "inspect", "--jsn"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--json" in refused.stderr
    assert "Usage: python -m mtp_extract inspect" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "Commands:"),
        (["--version"], 0, f"mtp-extract {__version__}\n"),
        (["--verbose"], 2, "No such option.*--verbose"),
    ],
)
def test_the_one_name_by_itself(arguments: list[str], status: int, said: str) -> None:
    result = RUNNER.invoke(main.app, arguments)
    assert result.exit_code == status
    assert re.search(said, result.output)


@pytest.mark.parametrize(
    ("app", "words", "completed"),
    [
        (main.app, "mtp in", ["inspect", "insert"]),
        (main.app, "mtp inspect --ag", ["--against"]),
        (main.app, "mtp extract a --for g", ["gguf", "gemma"]),
        (main.app, "mtp ", [*COMMANDS]),
        (inspect.app, "mtp-inspect --ag", ["--against"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(app: Typer, words: str, completed: list[str]) -> None:
    program = words.partition(" ")[0]
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    environment = {variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert RUNNER.invoke(app, [], prog_name=program, env=environment).output.split() == completed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_the_version(name: str) -> None:
    result = RUNNER.invoke(import_command(name).app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mtp-extract {__version__}\n")


def test_on_windows_a_command_ends_in_one_line() -> None:
    code = "import os, pathlib; os.name = 'nt'; import mtp_extract.cli"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "error: mtp-extract runs on Linux and macOS. On Windows, run it in WSL.\n"


def test_inspect(sample: Path) -> None:
    text = RUNNER.invoke(inspect.app, [str(sample), "--graph"]).stdout
    for expected in ("layers.3.q_norm", "weight of op 8 FULLY_CONNECTED", "a number between the roles", "Proof: "):
        assert expected in text
    document = json.loads(RUNNER.invoke(inspect.app, [str(sample), "--graph", "--tensors", "--json"]).stdout)
    drafter = document["drafter"]
    assert len(document["sections"]) == 7 and all(role["why"] for role in drafter["roles"])
    assert len(drafter["roles"]) == drafter["roles_found"] == 48
    assert len(drafter["set_aside"]) == drafter["set_aside_count"]
    assert len(drafter["model"]["tensors"]) == drafter["model"]["tensors_in_all"]


def test_inspect_shows_sections_even_when_the_drafter_is_refused() -> None:
    result = run("inspect", variant("jax_hadamard"))
    assert result.returncode == 1
    assert "jax_hadamard.tflite" in result.stdout
    assert result.stderr.startswith("error: ") and "Hadamard" in result.stderr


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_debug_shows_the_traceback_of_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, shown: bool
) -> None:
    monkeypatch.setenv("MTP_EXTRACT_DEBUG", value)
    result = run("inspect", tmp_path / "absent")
    assert result.returncode == 1
    assert ("Traceback" in result.stderr) == shown
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_the_library_names_no_option() -> None:
    """Messages say what helps in words; the command adds its option for it."""
    package = Path(mtp_extract.__file__).parent
    named = [
        f"{path.relative_to(package)}:{node.lineno}: {found.group()}"
        for path in sorted(package.rglob("*.py"))
        if path.parent.name != "cli"
        for raised in ast.walk(ast.parse(path.read_text()))
        if isinstance(raised, ast.Raise)
        for node in ast.walk(raised)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for found in [re.search(r"(?<!\S)--?[a-z][a-z-]*\b", node.value)]
        if found and "`mtp-" not in node.value  # of another command there is no other way to say it
    ]
    assert named == []


def test_help_loads_nothing_heavy() -> None:
    """Of every command, by both of its names, and of all together."""
    code = (
        "import sys\n"
        "from mtp_extract.cli import COMMANDS, main, import_command\n"
        "def called(program, *arguments):\n"
        "    sys.argv = [program, *arguments]\n"
        "    try: (main if program == 'mtp' else import_command(program[4:])).main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "called('mtp', '-h')\n"
        "assert not [n for n in COMMANDS if f'mtp_extract.cli.{n}' in sys.modules]\n"
        "for name in COMMANDS:\n"
        "    called('mtp-' + name, '--help')\n"
        "    called('mtp', name, '-h')\n"
        "heavy = {'numpy', 'torch', 'transformers', 'huggingface_hub', 'fsspec', 'ai_edge_litert', 'matplotlib'}\n"
        "assert not {*heavy, 'rich'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shown = re.split(r"^Usage: ", result.stdout, flags=re.MULTILINE)[1:]
    assert [text.split()[0] for text in shown] == ["mtp", *(n for name in COMMANDS for n in (f"mtp-{name}", "mtp"))]
    for text in shown:
        name = text.partition(" [OPTIONS]")[0].removeprefix("mtp ").removeprefix("mtp-")
        said = text.partition("Examples:\n")[2].splitlines()
        examples = [line for line in said if line.startswith(("    mtp-", "    mtp "))]
        assert len(examples) == 2 and all(name in line for line in examples)
        assert max(map(len, text.splitlines())) <= 85


# --- mtp-convert, and mtp-inspect of what it wrote


def test_a_directory_in_another_format(extracted: Path, sample: Path, tmp_path: Path) -> None:
    result = run("convert", extracted, "--for", "compressed-tensors", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "from its transformers format" in result.stdout and "23 weights as integers" in result.stdout
    assert "extraction.json says that it was verified when it was extracted: the checkpoint" in result.stdout
    assert "Verified" not in result.stdout, "no bundle was at hand"
    shown = run("inspect", f"{extracted.name}-compressed-tensors", "--against", sample, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "every bit" in shown.stdout
    assert "compressed-tensors format: 48 weights (25 F32, 13 INT4, 10 INT8)" in shown.stdout


def test_floats_are_rounded_with_codes_beside_them_or_without(sample: Path, tmp_path: Path) -> None:
    """Engines load the floats; what the codes give back is not rounded."""
    record = mtp_extract.extract(sample, tmp_path / "floats", format="gguf", dtype="bf16", codes=True).record
    assert record["rounded"] == ["BF16"]
    written = RUNNER.invoke(convert.app, [str(tmp_path / "floats"), "--for", "litert", "-o", str(tmp_path / "exact")])
    assert written.exit_code == 0
    assert "rounded earlier" not in written.stdout and "before rounding" not in written.stdout
    for place in ("floats", "exact"):
        shown = RUNNER.invoke(inspect.app, [str(tmp_path / place), "--against", str(sample)])
        assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize("name", [name for name, listed in MTP_FORMATS.items() if not listed.read_as])
def test_what_any_directory_holds(extracted: Path, tmp_path: Path, name: str) -> None:
    """With its record it is checked, without it is shown all the same."""
    out = tmp_path / "out"
    assert RUNNER.invoke(convert.app, [str(extracted), "--for", name, "-o", str(out)]).exit_code == 0
    with_record = json.loads(RUNNER.invoke(inspect.app, [str(out), "--json", "--tensors"]).stdout)
    for own in ("extraction.json", "README.md"):
        (out / own).unlink()
    without = json.loads(RUNNER.invoke(inspect.app, [str(out), "--json", "--tensors"]).stdout)
    assert without["extraction"] is None and without["holds"] == with_record["holds"]
    assert without["holds"]["format"] == name
    assert without["holds"]["geometry"] == with_record["extraction"]["geometry"]
    assert len(without["holds"]["tensors"]) == without["holds"]["weights"] == 48
    shown = RUNNER.invoke(inspect.app, [str(out), "--tensors"])
    assert "Not compared with a bundle" in shown.stdout
    assert "layers.3.layer_scalar" in shown.stdout


@pytest.mark.parametrize(("name", "told"), [("vllm", False), ("litert", True)])
def test_only_a_loss_that_extracting_spares_is_told(sample: Path, tmp_path: Path, name: str, told: bool) -> None:
    """BF16 of BF16 is what extracting writes; F32 of BF16 is not."""
    mtp_extract.extract(sample, tmp_path / "bf16")
    result = RUNNER.invoke(convert.app, [str(tmp_path / "bf16"), "--for", name, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert ("rounded earlier (BF16)" in result.stdout) is told


def test_a_gguf_by_itself(extracted: Path, tmp_path: Path) -> None:
    RUNNER.invoke(convert.app, [str(extracted), "--for", "gguf", "-o", str(tmp_path / "out")])
    alone = shutil.copy(tmp_path / "out" / "mtp-sample-Q4_0.gguf", tmp_path / "some.gguf")
    shown = RUNNER.invoke(inspect.app, [str(alone)])
    assert "gguf format: 48 weights (25 F32, 13 INT4, 10 INT8)" in shown.stdout
    # One that lies beside a record is what the record speaks of.
    shown = RUNNER.invoke(inspect.app, [str(tmp_path / "out" / "mtp-sample-Q4_0.gguf")])
    assert "1 file as recorded in extraction.json" in shown.stdout


@pytest.mark.parametrize(
    ("name", "written", "next_"),
    [
        ("llama.cpp", "gguf", "Next: llama-server -m target.gguf -md "),
        ("mlx-vlm", "mlx", "Next: python -m mlx_vlm generate --model BASE_MODEL --prompt "),
        ("vLLM", "transformers", "Next: vllm serve BASE_MODEL --speculative-config "),
        ("transformers", "transformers", "; output = model.generate(**inputs, assistant_model=drafter, "),
        ("ollama", "transformers", "README.md shows how engines load it."),
        ("compressed-tensors-sglang", "compressed-tensors-sglang", "README.md shows how engines load it."),
    ],
)
def test_a_format_or_the_best_for_an_engine(
    extracted: Path, tmp_path: Path, name: str, written: str, next_: str
) -> None:
    result = RUNNER.invoke(convert.app, [str(extracted), "--for", name, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert json.loads((tmp_path / "out" / "extraction.json").read_text())["layout"] == written
    assert next_ in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["plain", 'it\'s a "név"', "deep/" * 30 + "x y"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "transformers"])
def test_what_is_to_be_done_next_can_be_pasted(extracted: Path, tmp_path: Path, engine: str, name: str) -> None:
    """It is one line in the narrowest terminal, and a shell, or Python, reads in it the directory that was written."""
    out = str(tmp_path / name)
    result = RUNNER.invoke(convert.app, [str(extracted), "--for", engine, "-o", out], env={"COLUMNS": "40"})
    _, _, command = result.stdout.splitlines()[-1].partition("Next: ")
    if engine == "transformers":
        calls = [node for node in ast.walk(ast.parse(command)) if isinstance(node, ast.Call)]
        named = [ast.literal_eval(call.args[0]) for call in calls if call.args]
    elif engine == "vllm":
        named = [json.loads(word)["model"] for word in shlex.split(command) if word.startswith("{")]
    else:
        named = [word.removesuffix("/mtp-*.gguf") for word in shlex.split(command)]
    assert out in named


@pytest.mark.parametrize("words", [["--out=~/o ut"], ["-o", "~/o ut"]])
def test_a_path_from_home_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Not in a folder named ``~``, which nobody wants, and which ``rm -r ~`` does not remove."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert run_here("extract", "--sample", *words).returncode == 0
    assert (home / "o ut" / "config.json").exists()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(("kind", "lists"), [(MTP, ("head_dims", "num_kv_heads", "layer_types")), (EAGLE3_HEAD, ())])
def test_one_head_is_no_heads(kind: Architecture, lists: tuple[str, ...]) -> None:
    """As the K and V of E2B have."""
    geometry = defaultdict[str, Any](lambda: 1, {name: ["1"] for name in (*lists, "base_layers")})
    assert kind.describe(geometry)[0].endswith(", 1 KV head")


def test_evidence_is_shown_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a bundle with static activations, whose last sentence says what they mean."""
    checks = [{"name": "function", "evidence": "proven; " * 40 + "the end"}]
    inspect._say_checks({"against": "a.litertlm", "checks": checks, "against_published": None})
    assert capsys.readouterr().out.endswith("proven; the end\n")


def test_an_engine_chooses_a_layout_for_a_head() -> None:
    assert choose_format("vllm", EAGLE3) == "speculators"
    assert choose_format("sglang", EAGLE3) == "eagle3"
    with pytest.raises(UnsupportedError, match=r"llama.cpp loads no drafter of the architecture eagle3"):
        choose_format("llama.cpp", EAGLE3)
