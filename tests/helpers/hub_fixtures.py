"""Fixtures of the tests that talk to :mod:`hub_server`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants
import pytest

from helpers.hub_server import SIGNATURE, TOKEN, HubServer
from helpers.make_bundle import like_published, without_drafter
from mtp_extract.io.opening import open_source


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A loopback Hub that huggingface_hub takes for the real one, with a token and an empty cache."""
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # What huggingface_hub keeps in its home must not come from here, nor go there.
    monkeypatch.setattr(huggingface_hub.constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses"), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with closing(HubServer()) as server:
        template = server.url() + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url())
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[None]:
    """No test may leave the token or a signature in a log, in the output, or in a file."""
    with caplog.at_level(logging.DEBUG):
        yield
    captured = capfd.readouterr()
    texts = [record.getMessage() for record in caplog.get_records("call")] + [captured.out, captured.err]
    for secret in (TOKEN, SIGNATURE):
        assert not [text for text in texts if secret in text]
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_size < 1 << 24:
                assert secret.encode() not in path.read_bytes(), path


@dataclass
class Patient:
    """A clock for the retries that waits for nobody and writes down how long it would have waited."""

    waits: list[float] = field(default_factory=list)
    now: float = 0.0
    per_look: float = 0.0
    """Seconds that pass between two looks at the clock."""

    def monotonic(self) -> float:
        self.now += self.per_look
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patient:
    patient = Patient()
    monkeypatch.setattr("mtp_extract.io.remote.time", patient)
    return patient


E4B = "litert-community/gemma-4-E4B-it-litert-lm"


def published_repository(hub: HubServer, repository: str, bundle: Path) -> None:
    """Put into ``hub`` the files of one of Google's repositories, as they are named; their contents are ``bundle``'s.

    The files for the GPU and the web hold no drafter, nor does the NPU's; the headers are as those of real files.
    """
    stem = repository.rpartition("/")[2].removesuffix("-litert-lm")
    hub.add(repository, f"{stem}.litertlm", like_published(bundle))
    for suffix, model_type in (
        ("-gpu", "tf_lite_artisan_text_decoder"),
        ("-web", "tf_lite_artisan_text_decoder"),
        ("_qualcomm_sm8750", "tf_lite_prefill_decode"),
    ):
        hub.add(repository, f"{stem}{suffix}.litertlm", without_drafter(bundle, model_type))
    hub.add(repository, ".gitattributes", b"*.litertlm filter=lfs\n", lfs=False)
    hub.add(repository, "README.md", b"# " + stem.encode(), lfs=False)


def read_all(url: str) -> bytes:
    with open_source(url) as source:
        source.prefetch(0, source.size)
        return source.read(0, source.size)


def text_of(error: BaseException) -> str:
    """Everything a traceback would show of an error, its causes included."""
    return "".join(traceback.format_exception(error))
