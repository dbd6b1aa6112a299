"""What the Space does without its page: names, limits, the process that reads, and folders that go."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.bounds import HANG
from helpers.first_pair import first_bundle
from helpers.hub_server import HubServer

from mtp_extract.errors import MtpExtractError, SourceError
from mtp_extract.pipeline.check import verify

SPACE = Path(__file__).resolve().parents[2] / "space"
REPO = "org/gemma-litert-lm"


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SPACE)
        yield import_module("job")
        del sys.modules["job"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (f"  {REPO}\n", f"hf://{REPO}"),
        (f"{REPO}/a/b.litertlm", f"hf://{REPO}/a/b.litertlm"),
        (f"hf://{REPO}@v1", f"hf://{REPO}@v1"),
        (f"https://huggingface.co/{REPO}/blob/main/b.litertlm", f"hf://{REPO}@main/b.litertlm"),
        (f"huggingface.co/{REPO}", f"hf://{REPO}"),
    ],
)
def test_what_names_a_bundle(job: ModuleType, text: str, address: str) -> None:
    assert job.address_of(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "gemma.litertlm", "/etc/passwd", "../x/y", "~/a/b", "file:///etc/passwd", "models/a.litertlm"),
        *("https://example.com/a.litertlm", "http://169.254.169.254/latest"),
    ],
)
def test_nothing_else_is_opened(job: ModuleType, text: str) -> None:
    with pytest.raises(SourceError, match=r"^Expected "):
        job.address_of(text)


def test_a_path_that_reads_as_an_id_is_an_id(job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path(REPO).write_bytes(b"a file of the machine that serves the page")
    assert job.address_of(REPO) == f"hf://{REPO}"


@pytest.mark.parametrize("drafter", [{"size": 11, "parameters": 1}, {"size": 1, "parameters": 3}])
def test_by_bytes_or_by_numbers_it_may_be_too_large(job: ModuleType, drafter: dict[str, int]) -> None:
    job.check_size({"size": 10, "parameters": 2}, 10)
    with pytest.raises(job.OverLimitError, match=r"found one of 1[12] B\. Extract it on a machine of yours"):
        job.check_size(drafter, 10)


def test_a_job_is_done_elsewhere(
    job: ModuleType, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody's token, though this machine has one."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    hub.add(REPO, "gemma.litertlm", first_bundle().read_bytes())
    asked: dict[str, Any] = {"source": f"hf://{REPO}", "token": None}
    told: list[tuple[int, int]] = []
    more = {"folder": str(tmp_path / "out"), "format": "gguf"}
    made = job.run("extract", asked | more, HANG, lambda done, total: told.append((done, total)))
    written = Path(made["directory"])
    assert verify(written).record["files"].keys() == {"README.md", *(path.name for path in written.glob("*.gguf"))}
    assert any(0 < done <= total for done, total in told)
    assert "every operator was read" in made["proof"][0]
    assert made["rounded"]  # the scales, to FP16
    others = {"folder": str(tmp_path / "exact"), "format": "litert"}
    exact = job.run("extract", asked | others, HANG, lambda done, total: None)
    assert not exact["rounded"]
    assert {request.authorization for request in hub.requests} == {None}
    monkeypatch.setattr(job, "LARGEST", 1000)
    with pytest.raises(MtpExtractError, match="Expected a drafter of up to 1e-06 GB"):
        job.run("extract", asked | more, HANG, print)


def test_its_time_is_up(job: ModuleType) -> None:
    with pytest.raises(job.OverLimitError, match="Expected to be done in 0 seconds, and was not"):
        job.run("look", {"source": f"hf://{REPO}", "token": None}, 0, print)


def test_what_a_bundle_holds_is_no_markup(job: ModuleType) -> None:
    section = {"index": 0, "model_type": None, "type": "![x](http://a/b)|<b>", "size": 1}
    found = {"name": "hf://o/r/a_b.litertlm", "size": 10, "known_bundle": None, "drafter": None, "sections": [section]}
    said = job.bundle_in_words(found | {"no_drafter": "<script>"})
    assert "<" not in said.replace("&lt;", "")
    assert "![" not in said
    assert "| 0 |" in said


def test_folders_go(job: ModuleType) -> None:
    folders = job.Folders(kept=3600)
    first = folders.new("a")
    other = folders.new("b")
    (first / "file").touch()
    second = folders.new("a")
    assert (first.exists(), second.exists(), other.exists()) == (False, True, True)
    # The clock of one that was replaced leaves its successor alone, and takes what a job has written there since.
    first.mkdir()
    folders.remove("a", first)
    assert (folders.of("a"), first.exists(), second.exists()) == (second, False, True)
    folders.remove("a")
    folders.remove("b")
    assert (folders.of("a"), second.exists(), other.exists()) == (None, False, False)


def test_the_clock_removes_what_nobody_did(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[Any] = []

    class Clock:
        def __init__(self, after: float, do: Any, arguments: tuple[Any, ...]) -> None:
            clocks.append((after, do, arguments))

        def start(self) -> None:
            return

    monkeypatch.setattr("threading.Timer", Clock)
    folder = job.Folders().new("a")
    ((after, do, arguments),) = clocks
    assert after == job.KEPT
    do(*arguments)
    assert not folder.exists()


def test_its_gradio_is_one() -> None:
    """The version that a Space installs and the one that was tested."""
    (stated,) = re.findall(r"^sdk_version: (\S+)$", (SPACE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    requirements = (SPACE / "requirements.txt").read_text(encoding="utf-8")
    assert re.findall(r"^gradio\[oauth\]==(\S+)$", requirements, re.MULTILINE) == [stated]


def test_what_it_says_of_itself_is_so(job: ModuleType) -> None:
    readme = (SPACE / "README.md").read_text(encoding="utf-8")
    assert f"{job.KEPT // 60} minutes after" in readme
    assert f"{job.LARGEST / 1e9:g} GB, and five minutes a job; one job at a time, up to {job.IN_LINE} in line" in readme
    assert job.LONGEST_JOB == 5 * 60
