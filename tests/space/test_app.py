"""The Space's page without Gradio: names, limits, what is written, and what it says of itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock, Mock

import pytest
from helpers.first_pair import first_bundle
from helpers.hub_server import TOKEN, HubServer
from helpers.reporters import Recorder
from seam import verify

from mtp_extract.errors import MtpExtractError, SourceError

SPACE = Path(__file__).resolve().parents[2] / "space"
REPO = "org/gemma-litert-lm"


@pytest.fixture(scope="module")
def app() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SPACE)
        for name in ("gradio", "gradio.utils"):
            patch.setitem(sys.modules, name, MagicMock())
        yield import_module("app")
        del sys.modules["app"]


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
def test_what_names_a_bundle(app: ModuleType, text: str, address: str) -> None:
    assert app.find_hub_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "gemma.litertlm", "/etc/passwd", "../x/y", "~/a/b", "file:///etc/passwd", "models/a.litertlm"),
        *("https://example.com/a.litertlm", "http://169.254.169.254/latest"),
    ],
)
def test_nothing_else_is_opened(app: ModuleType, text: str) -> None:
    with pytest.raises(SourceError, match=r"^Expected "):
        app.find_hub_address(text)


def test_a_path_that_reads_as_an_id_is_an_id(app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path(REPO).write_bytes(b"a file of the machine that serves the page")
    assert app.find_hub_address(REPO) == f"hf://{REPO}"


@pytest.fixture
def hub_here(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A Hub with a bundle, and a machine that has a token."""
    hub.add(REPO, "gemma.litertlm", first_bundle().read_bytes())
    monkeypatch.setenv("HF_TOKEN", "hf_of_whoever_runs_the_page")
    return hub


def test_a_drafter_is_written_with_nobody_s_token(app: ModuleType, hub_here: HubServer, tmp_path: Path) -> None:
    reporter = Recorder()
    folder = tmp_path / "mtp-space-1"
    made = app.extract_to_folder(f"hf://{REPO}", "llama.cpp", folder, None, reporter)
    assert verify(made.directory)["layout"] == "gguf"
    assert any(0 < done <= total for _, done, total in reporter.parts)
    said = app.describe_result(made, 2.0)
    assert "the gguf format" in said and "Verified before rounding" in said
    assert {request.authorization for request in hub_here.requests} == {None}
    app.remove(str(made.directory))
    assert not folder.exists()


# huggingface_hub's own way to send bytes.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_what_was_made_is_published(app: ModuleType, hub_here: HubServer) -> None:
    token = Mock(token=TOKEN)
    kept, *_ = app.extract(REPO, "vllm", None, token, None, MagicMock())
    assert "matches by hash" in app.publish(" org/drafter ", True, kept, token)
    assert "model.safetensors" in hub_here.repos["org/drafter"].files
    assert "you are not" in app.publish("org/drafter", True, kept, None)
    app.remove(kept)
    assert "The files are gone" in app.publish("org/drafter", True, kept, token)


def test_limits(app: ModuleType, hub_here: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        monkeypatch.context() as patch,
        pytest.raises(MtpExtractError, match="Expected a drafter of up to 1e-06 GB"),
    ):
        patch.setattr(app, "LARGEST", 1000)
        app.extract_to_folder(f"hf://{REPO}", "vllm", tmp_path, None, Recorder())
    monkeypatch.setattr(app, "LONGEST", -1)
    kept, said, *_ = app.extract(REPO, "vllm", None, None, None, MagicMock())
    assert kept is None and "Expected to be done in -1 seconds" in said
    assert "no such repository" in app.look("org/none", None, MagicMock())[2]


def test_what_a_bundle_holds_is_no_markup(app: ModuleType) -> None:
    section = {"index": 0, "model_type": None, "type": "![x](http://a/b)|<b>", "size": 1}
    found = {"name": "hf://o/r/a_b.litertlm", "size": 10, "known_bundle": None, "drafter": None, "sections": [section]}
    said = app.describe_bundle(found | {"no_drafter": "<script>"})
    assert "<" not in said.replace("&lt;", "")
    assert "![" not in said
    assert "| 0 |" in said
    assert "<script>" not in app.format_refusal(MtpExtractError("<script>"))


def test_its_gradio_is_one() -> None:
    """The version that a Space installs and the one that was tested."""
    (stated,) = re.findall(r"^sdk_version: (\S+)$", (SPACE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    requirements = (SPACE / "requirements.txt").read_text(encoding="utf-8")
    assert re.findall(r"^gradio\[oauth\]==(\S+)$", requirements, re.MULTILINE) == [stated]


def test_what_it_says_of_itself_is_so(app: ModuleType) -> None:
    readme = (SPACE / "README.md").read_text(encoding="utf-8")
    assert f"{app.KEPT // 60} minutes after" in readme
    assert f"{app.LARGEST / 1e9:g} GB, and five minutes a job; one job at a time, up to {app.IN_LINE} in line" in readme
    assert app.LONGEST == 5 * 60
