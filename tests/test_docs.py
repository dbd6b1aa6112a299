"""README and docs: every block runs on the sample, what is shown is what is printed, every name in them exists.

``pytest tests/test_docs.py --refresh-blocks`` writes what is printed into the blocks that show it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run_here
from helpers.documents import LEFT_OUT, ROOT, Command, anchors, blocks, commands, links, unlike
from helpers.hub_fixtures import E4B as HUB
from helpers.hub_fixtures import hub, published_repository  # noqa: F401 - a fixture
from helpers.hub_server import HubServer
from helpers.model_server import model_server
from helpers.prompt_files import few_of, write_prompts
from typer.main import get_command

import mtp_extract
from mtp_extract.cli import COMMANDS, import_command
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.evaluation.prompts import read_prompts

README = ROOT / "README.md"
DOCS = ROOT / "docs"
RUN = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
"""Pages whose blocks are run here."""
READ = [*RUN, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]

BUNDLE, DRAFTER, BASE = "gemma-4-E4B-it.litertlm", "gemma-4-E4B-it-mtp-drafter", "google/gemma-4-E4B-it"

# --- what is not run, and why; what is left of it is checked as the next tables say

NOT_RUN = {
    r"mtp-tune\b": "trains for a minute at least; tests/tuning trains",
    r"mtp-validate --sample\b": "measures for two minutes; tests/validation measures",
    r"mtp-doctor .*--(base|server)\b": "runs the pair beside a server; tests/doctor does",
    r"mtp-upload (?!.*--dry-run)": "publishes; tests/hub does, to a Hub of its own",
    r"mtp-convert google/gemma-4-E4B-it-assistant\b": "an official assistant; tests/pipeline has such",
    r"mtp-(validate|convert|inspect) (eagle3-)?head\b": "an EAGLE-3 head; tests/cli/test_eagle3.py has such",
}
"""Commands of this package whose options are read and checked, and no more."""

PROGRAMS = {
    *("vllm", "llama-server", "ollama", "trtllm-serve", "litert-lm"),  # scripts/engines.py runs those that are here
    *("python", ".venv/bin/python", "bash", ".venv/bin/pytest"),  # scripts of minutes, and these tests
    *("python3", ".venv/bin/pip"),  # installations
}
"""What a line begins with that is not this package's."""

FLAGS = {
    "vllm": "--speculative-config",
    "llama-server": "-m -md -hf --spec-type --spec-draft-n-max",
    "sglang.launch_server": "--model-path --speculative-algorithm --speculative-draft-model-path "
    "--speculative-num-steps --speculative-num-draft-tokens --speculative-eagle-topk",
    "mlx_vlm": "--model --prompt --draft-model --draft-kind --draft-block-size",
    "ollama": "--experimental -f",
    "trtllm-serve": "--config",
    "litert-lm": "--prompt --speculative-decoding",
}
"""Options of engines that were run, or read in their sources: of no other is anything said."""

SHORTER = {
    "validate": ["--prompts", "few.jsonl", "--new-tokens", "4", "--draft-steps", "1"],
    "bench": ["--prompts", "few.jsonl", "--max-tokens", "4"],
}
"""Beside a base or a server: less to do, for what says nothing that is shown."""


class Desk:
    """A folder in which the names of the docs stand for the sample, and what has been run there."""

    def __init__(self, here: Path, drafter: Path) -> None:
        self.here, self.drafter = here, drafter
        self.names: dict[str, Any] = {}
        few = {kind: texts[:1] for kind, texts in few_of(read_prompts(sample_prompts()), 1).items()}
        write_prompts(here / "mine.jsonl", dict(list(few.items())[:1]))
        write_prompts(here / "few.jsonl", dict(list(few.items())[:2]))
        (here / "google").mkdir()
        for name in (BASE, "tuned-base"):
            (here / name).symlink_to(sample_base())
        shutil.copy(sample_bundle(), here / BUNDLE)

    def provide(self, text: str) -> None:
        """What ``text`` names and an earlier page would have made."""
        for name in (DRAFTER, "tuned"):
            if re.search(rf"(?<!-o )(?<![\w/-]){name}(?![\w.-])", text) and not (self.here / name).exists():
                shutil.copytree(self.drafter, self.here / name)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's, extracted under the name that the docs give it."""
    folder = tmp_path_factory.mktemp("named")
    shutil.copy(sample_bundle(), folder / BUNDLE)
    mtp_extract.extract(folder / BUNDLE, folder / DRAFTER)
    return folder / DRAFTER


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], str]]:
    """Puts a server with a drafter, and one without, where a text says http://localhost."""
    with model_server("vLLM") as server, model_server("vLLM", drafts=False) as baseline:
        yield lambda text: text.replace("http://localhost:8000", server.url).replace(
            "http://localhost:8001", baseline.url
        )


@pytest.fixture
def desk(tmp_path: Path, drafter: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Desk:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    published_repository(hub, HUB, sample_bundle())
    return Desk(tmp_path, drafter)


def called(command: Command) -> tuple[str, list[str]] | None:
    """Of a command of this package: its name, and what follows it."""
    words = [word for word in command.words if not word.startswith("MTP_EXTRACT_")]
    if words[:3] == ["python", "-m", "mtp_extract"]:
        words = ["mtp", *words[3:]]
    program = words[0].rpartition("/")[2]
    if program == "mtp" and len(words) > 1 and words[1] in COMMANDS:
        return words[1], words[2:]
    if program.startswith("mtp-"):
        return program.removeprefix("mtp-"), words[1:]
    return None


def is_run(command: Command) -> bool:
    own = called(command)
    return own is not None and not any(re.match(pattern, " ".join([f"mtp-{own[0]}", *own[1]])) for pattern in NOT_RUN)


def check(command: Command, desk: Desk) -> None:
    """A command that is not run: its options are some that there are, and what it names in the repository exists."""
    own = called(command)
    if own is not None:
        name, arguments = own
        get_command(import_command(name).app).make_context(name, list(arguments))
        return
    words = command.words
    program = next((word for word in words if word in FLAGS), None)
    if program is not None:
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"-m"}
        assert given <= set(FLAGS[program].split()), f"{command.at}: {given - set(FLAGS[program].split())}"
    if "--speculative-config" in words:
        told = json.loads(words[words.index("--speculative-config") + 1])
        assert set(told) == {"method", "model", "num_speculative_tokens"}
        words.append(told["model"])
    desk.provide(" ".join(words))
    for word in words:
        if re.match(r"[\w./-]*drafter[\w*./-]*$", word) and not word.startswith("-"):
            assert list(desk.here.glob(word)), f"{command.at}: {word}"
        path = word.removeprefix("./").split("::")[0]
        if re.match(r"(scripts|tests|docs)/", path):
            assert (ROOT / path).exists(), f"{command.at}: {path}"
        for extra in re.findall(r"\[([\w,]+)\]", word if "pip" in " ".join(words) else ""):
            assert set(extra.split(",")) <= EXTRAS, f"{command.at}: {word}"


EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))


def run(command: Command, desk: Desk, servers: Callable[[str], str]) -> list[str]:
    """What it prints, and its error if it ends in one."""
    desk.provide(command.text)
    name, arguments = called(command)  # type: ignore[misc]
    measures = name == "bench" or (name == "validate" and "--base" in arguments)
    if measures:
        assert command.shown is None, f"{command.at}: figures of a shortened run are not to be shown"
        arguments = [*map(servers, arguments), *SHORTER[name]]
    done = run_here(name, *arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    expected = any(line.startswith("error: ") for line in command.shown or ())
    assert done.returncode == 0 or expected, f"{command.at}: {command.text}\n{done.stdout}{done.stderr}"
    return [*done.stdout.splitlines(), *errors]


def pages_with(*languages: str) -> list[Any]:
    """Those that have such blocks; with the mark of PyTorch where what they run asks for it."""
    found = []
    for page in RUN:
        wanted = [block for block in blocks(page) if block.language in languages]
        needs = any(re.search(r"import torch|transformers|validate|generat|mtp-validate", b.text) for b in wanted)
        if wanted:
            found.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.torch] if needs else []))
    return found


@pytest.mark.parametrize("page", pages_with("sh", "console", "python"))
def test_blocks_run(
    page: Path, desk: Desk, servers: Callable[[str], str], request: pytest.FixtureRequest, capsys: Any
) -> None:
    printed: list[tuple[Command, list[str]]] = []
    for block in blocks(page):
        if block.language == "python":
            desk.provide(block.text)
            exec(compile(block.text, str(block), "exec"), desk.names)
        for command in commands(block):
            if is_run(command):
                printed.append((command, run(command, desk, servers)))
            else:
                check(command, desk)
    if request.config.getoption("--refresh-blocks"):
        refresh(page, printed)
        return
    if page.name == "python.md":
        check_python(desk, capsys.readouterr().out)
    for command, lines in printed:
        wrong = None if command.shown is None else unlike(command.shown, lines)
        assert wrong is None, f"{command.at}: $ {command.text}\n{wrong}\nrun with --refresh-blocks"


def check_python(desk: Desk, printed: str) -> None:
    """Roles and files were listed, a report written; drafts change no text, and the text is right."""
    assert "lm_head (" in printed
    assert "masks in all 256 rows (equal up to a shift)" in printed
    assert (desk.here / "report" / "report.json").is_file()
    alone = desk.names["generator"].generate(desk.names["question"], drafts=0, max_new_tokens=32)
    assert desk.names["result"].text == alone.text == "GTFHWECIMQYJVDZOKRXL"


def refresh(page: Path, printed: list[tuple[Command, list[str]]]) -> None:
    """Write what was printed where ``page`` shows something else; what leaves lines out is changed by hand."""
    text = page.read_text(encoding="utf-8")
    for command, lines in printed:
        if command.shown and LEFT_OUT not in command.shown and unlike(command.shown, lines):
            text = text.replace("\n".join(command.shown), "\n".join(lines))
    page.write_text(text, encoding="utf-8")


def test_every_reason_is_needed() -> None:
    """What no block has any more has no place in the tables."""
    found = [command for page in RUN for block in blocks(page) for command in commands(block)]
    lines = [" ".join([f"mtp-{own[0]}", *own[1]]) for command in found if (own := called(command))]
    assert not [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)]
    firsts = {command.words[0] for command in found if called(command) is None}
    assert firsts == PROGRAMS
    words = {word for command in found for word in command.words}
    assert not {flag for flags in FLAGS.values() for flag in flags.split()} - words


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in (link for link in links(page) if not re.match(r"https?:|mailto:", link)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_form(page: Path) -> None:
    """Lines fit; rows of a table cannot be broken, but those of the README fit, too. Every block says what it is.

    The site and a code host disagree on lists in lists: there are none.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 120 and (page == README or not line.startswith("|"))]
    assert not long
    assert not [line for line in lines if re.match(r" +([-*]|\d+\.) ", line)]
    assert {block.language for block in blocks(page)} <= {"sh", "console", "python", "text", "json", "yaml", "mermaid"}
    if page == README:
        assert len(lines) <= 100


def options() -> set[str]:
    parameters = [one for name in COMMANDS for one in get_command(import_command(name).app).params]
    return {"--help", "-h", *(flag for one in parameters for flag in (*one.opts, *one.secondary_opts))}


FOREIGN = {
    *" ".join(FLAGS.values()).split(),
    *["--metrics", "--nightly", "--refresh-blocks", "--multi_gpu", "--cpu", "--nproc-per-node", "--dist"],
    *["--hf-overrides", "--request-rate", "--goodput"],
}
"""Options of other programs that are named in the text."""


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    text = "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)))
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9_-]+)", text))
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.py"))
    assert not {one for one in named - options() - FOREIGN if f'"{one}"' not in scripts}


def test_every_command_is_shown() -> None:
    shown = [called(command) for page in RUN for block in blocks(page) for command in commands(block)]
    assert {own[0] for own in shown if own is not None} == set(COMMANDS)


def test_the_design_card_leads_to_files_and_tests() -> None:
    """Each row of the table names a file that exists, and a test that does."""
    section = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("From the design card to the code\n")[2]
    rows = [line.split("|")[1:-1] for line in section.partition("\n##")[0].splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 11
    for _, file, test in rows:
        files, tests = re.findall(r"`([^`]+)`", file), re.findall(r"`([^`]+)`", test)
        assert files and tests
        for path in files:
            assert (ROOT / path).exists() or (ROOT / "mtp_extract" / path).exists(), path
        for name in tests:
            path, _, function = name.partition("::")
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in text, name


def test_the_two_commands_are_those_that_are_run() -> None:
    first, second = [block.text for block in blocks(README) if block.language == "sh"][:2]
    assert first == (
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt . && .venv/bin/mtp-extract --sample\n"
    )
    assert second == "bash scripts/check.sh\n"
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith(f"exec {second.strip()}")


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {mtp_extract.__version__}\n" in text
