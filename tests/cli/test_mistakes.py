"""Every mistake of ``mistakes.json``: one line that says what is wrong and what to do, a status, and nothing left.

So does Ctrl-C at every step of an extraction. No signal is sent after a time: the handler is called at a chosen step,
where a signal could have come. Python runs a handler in the main thread alone; where that is in a finalizer, what the
handler raises is dropped.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shlex
import shutil
import signal
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import numpy as np
import pytest
from helpers.bases import base_with
from helpers.commands import run_here
from helpers.hub_fixtures import hub as bare_hub  # noqa: F401 - a fixture
from helpers.hub_server import HubServer
from helpers.make_bundle import Part, bundle, pack, set_buffer
from helpers.make_drafter import plain_model
from helpers.model_server import KEY, model_server

from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint import files, safetensors_file
from mtp_extract.data import sample_bundle
from mtp_extract.io import place as place_module
from mtp_extract.io import threads
from mtp_extract.pipeline import extraction

SERVER = "http://localhost:8000"
HUB = "https://huggingface.co"
NEED_TORCH = ("mtp-validate drafter --base", "mtp-validate gemma", "mtp-tune", "mtp-doctor drafter")


@dataclass(frozen=True)
class Mistake:
    what: str  # was done wrong
    line: str  # the command, in ``folder``
    says: str  # what it prints behind "error: "; "…" stands for what is another with another file
    given: str = ""  # a fixture, or one of BESIDE_HUB, for what is so around the command
    status: int = 1  # its exit status; 2 is wrong usage


@pytest.fixture(scope="module")
def folder(sample: Path, base: Path, extracted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands are called in."""
    place = tmp_path_factory.mktemp("mistakes")
    for name, path in (("gemma.litertlm", sample), ("other.litertlm", sample_bundle()), ("base", base)):
        (place / name).symlink_to(path)
    for name in ("drafter", "changed"):
        shutil.copytree(extracted, place / name)
    with (place / "changed" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    shutil.copytree(extracted, place / "floats")
    shutil.rmtree(place / "floats" / "codes")
    (place / "floats" / "extraction.json").unlink()
    (place / "notes").mkdir()
    data = sample.read_bytes()
    with open_bundle(sample) as opened:
        embedder = next(data[s.begin : s.end] for s in opened.sections if s.model_type == "embedder")
        drafter = opened.sections[-1]
    loud = plain_model()
    norm = next(t for t in loud.subgraphs[0].tensors if list(t.shape) == [8] and t.buffer)
    set_buffer(loud, norm, np.array([1e5] * 8, "<f4").tobytes())
    files: dict[str, bytes | str] = {
        "notes/thesis.txt": "years",
        "cut.litertlm": data[: len(data) // 2],
        "hole.litertlm": data[: drafter.begin].ljust(len(data), b"\0"),
        "damaged.litertlm": b"LITERTLM\1" + bytes(99),
        "embedder.tflite": embedder,
        "loud.tflite": pack(loud),
        "without.litertlm": bundle([Part(3, embedder, {"model_type": "tf_lite_embedder"})]),
        "model.safetensors": (10).to_bytes(8, "little") + b'{"a":     ',
        "model.gguf": b"GGUF\3\0\0\0" + bytes(64),
        "page.litertlm": "<!doctype html><title>Sign in</title>",
        "pointer.litertlm": "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "empty.litertlm": "",
        "empty.txt": "",
        "three.txt": "one\ntwo\nthree\n",
        "wrong.jsonl": '{"question": "a"}\n',
        "prompts.parquet": b"PAR1",
    }
    for name, content in files.items():
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with zipfile.ZipFile(place / "gemma.task", "w") as archive:
        archive.writestr("TF_LITE_PREFILL_DECODE", b"TFL3")
    mixed = base_with(place / "mixed", hidden_size=128)
    for path in base.glob("tokenizer*"):
        shutil.copy(path, mixed)
    return place


@pytest.fixture
def server() -> Iterator[tuple[str, str]]:
    with model_server("vLLM") as running:
        yield running.url, SERVER


@pytest.fixture
def locked_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """One that wants a key."""
    monkeypatch.setenv("OTHER_KEY", "sk-another")
    with model_server("vLLM") as running:
        running.key = KEY
        yield running.url, SERVER


@pytest.fixture
def page() -> Iterator[tuple[str, str]]:
    """A server of something else."""
    with model_server("unknown") as running:
        for path in ("/v1/models", "/gemma.litertlm"):
            running.overrides[path] = lambda handler: handler.answer(404, b"<html>Not Found</html>")
        yield running.url, SERVER


@pytest.fixture
def hub(bare_hub: HubServer, sample: Path) -> tuple[str, str]:  # noqa: F811 - the fixture
    for repository in ("org/one", "org/gated", "org/private"):
        bare_hub.add(repository, "gemma.litertlm", sample.read_bytes())
    for name in ("gemma-4-E2B-it.litertlm", "gemma-4-E2B-it-gpu.litertlm"):
        bare_hub.add("org/two", name, b"LITERTLM")
    bare_hub.add("org/none", "model.safetensors", b"x")
    bare_hub.repos["org/gated"].gated = bare_hub.repos["org/private"].private = True
    return bare_hub.url(), HUB


BESIDE_HUB: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no_token": lambda patch: patch.delenv("HF_TOKEN"),
    "wrong_token": lambda patch: patch.setenv("HF_TOKEN", "hf_another"),
    "offline": lambda patch: patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
    "no_network": lambda patch: patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1"),
}
"""What is so beside a Hub."""


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_all", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A shell that started the tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(files, "write_all", lambda *where: os.kill(os.getpid(), signal.SIGINT))
    yield
    signal.signal(signal.SIGINT, before)


CASES = [
    pytest.param(Mistake(**entry), id=entry["line"], marks=[pytest.mark.torch] * entry["line"].startswith(NEED_TORCH))
    for entry in chain.from_iterable(json.loads(Path(__file__).with_name("mistakes.json").read_text("utf-8")).values())
]


@pytest.mark.parametrize("mistake", CASES)
def test_what_a_mistake_says(
    mistake: Mistake, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    # No address that is not of a fixture is to be asked.
    fixture = "hub" if mistake.given in BESIDE_HUB else mistake.given
    url, shown = (request.getfixturevalue(fixture) if fixture else None) or ("", "")
    if mistake.given in BESIDE_HUB:
        BESIDE_HUB[mistake.given](monkeypatch)
    before = sorted((path, path.lstat().st_size) for path in folder.rglob("*"))
    program, *arguments = shlex.split(mistake.line.replace(shown or SERVER, url or SERVER))
    try:
        done = run_here(program[4:] or "main", *arguments)
    finally:
        gc.enable()
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = (done.stderr.replace(url, shown) if url else done.stderr).splitlines()
    # Wrong usage is said by typer, after how it is called.
    begins = "Error: " if mistake.status == 2 else "error: "
    (said,) = [line.removeprefix(begins) for line in lines if line.startswith(begins)]
    assert re.fullmatch(".+".join(map(re.escape, mistake.says.split("…"))), said), said
    assert done.returncode == mistake.status
    assert lines[-1].startswith(begins)
    assert sorted((path, path.lstat().st_size) for path in folder.rglob("*")) == before


def raises() -> None:
    """The handler as Python calls it between two instructions of the main thread."""
    threads.interrupt(signal.SIGINT, None)


def is_lost() -> None:
    """The handler as Python calls it in the callback of a weak reference, which drops what is raised."""
    held = set[str]()
    watched = weakref.ref(held, lambda _: raises())
    del held
    assert watched() is None


PLACES: dict[str, tuple[object, str]] = {
    "before anything is written": (files, "create_file"),
    "while it is written": (files, "write_all"),
    "before it is read back": (files, "_compute_sums"),
    "while it is read back": (safetensors_file, "open_regular"),
    "before it is proven": (extraction, "prove_checkpoint"),
    "before it takes its name": (place_module, "_sync"),
    "while it takes its name": (os, "rename"),
}
TOO_LATE = {"before it takes its name", "while it takes its name"}
"""Nobody looks any more whether a signal was lost: the result is whole, and is kept."""


@pytest.mark.parametrize(
    ("come", "where"),
    [(raises, where) for where in PLACES] + [(is_lost, where) for where in PLACES if where not in TOO_LATE],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_is_said_to_be_interrupted(
    come: Callable[[], None], where: str, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = PLACES[where]
    real = getattr(module, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        come()
        # What an interruption leaves undone is not written either.
        return None if name == "write_all" else real(*arguments, **named)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            done = run_here("extract", sample, "-o", tmp_path / "new")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")
    assert done.stderr.splitlines()[-1:] == ["error: interrupted; nothing was kept."]
    assert list(tmp_path.iterdir()) == []
