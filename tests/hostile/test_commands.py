"""The commands under attack: one message on stderr, the right exit status, and nothing that looks finished.

A process costs a fifth of a second, so there is one case for each class of trouble; the many are in the other files.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.bounds import HANG, cpu_limit
from helpers.commands import run_here
from helpers.make_bundle import DRAFTER, Part, bundle, pack, set_buffer
from helpers.make_drafter import plain_model
from seam import CheckpointError, open_bundle, verify, verify_against

EXTRACT = "from mtp_extract.cli.extract import main; main()"
INSPECT = "from mtp_extract.cli.inspect import main; main()"
# The package under test, wherever the command is run.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path)}
# Says when writing has begun, and then goes on with no chunk until its input ends: after the signal was sent.
SLOW = """
import os, signal
# In the background of a shell, or under nohup, these are ignored, and by children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from mtp_extract.checkpoint import files
write = files.write_all
def slow(fd, data, offset):
    write(fd, data, offset)
    print("writing", flush=True)
    os.read(0, 1)
files.write_all = slow
"""


def command(
    program: str, *arguments: object, limit: Callable[[], None] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run ``program``; a descriptor for its ``stdout`` is closed then."""
    try:
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG,
            preexec_fn=cpu_limit(60, limit),
            env=ENVIRONMENT,
            check=False,
        )
    finally:
        if stdout != subprocess.PIPE:
            os.close(stdout)


def assert_refused(done: subprocess.CompletedProcess[str], match: str, folder: Path) -> None:
    """Status 1, one printable line that begins with ``error:``, nothing else, and an empty ``folder``."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error:") == 1
    assert done.stderr.startswith("error: ")
    assert re.search(match, done.stderr), done.stderr
    assert done.stderr.strip().isprintable()
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not any(folder.iterdir())


def _no_q_norm(path: Path) -> None:
    model = plain_model()
    operators = model.subgraphs[0].operators
    norm = next(
        i for i, op in enumerate(operators) if list(model.subgraphs[0].tensors[op.outputs[0]].shape)[-2:] == [2, 4]
    )
    del operators[norm + 2]
    path.write_bytes(pack(model))


def _not_finite(path: Path) -> None:
    """Found out only while it is being written."""
    model = plain_model()
    tensors = model.subgraphs[0].tensors
    norm = next(t for t in tensors if list(t.shape) == [8] and t.buffer)
    set_buffer(model, norm, np.array([np.inf] * 8, "<f4").tobytes())
    path.write_bytes(pack(model))


def _named(path: Path) -> None:
    model = plain_model()
    for tensor in model.subgraphs[0].tensors:
        tensor.name, tensor.quantization = b"\x1b[2J\n\xff", None
    path.write_bytes(bundle([Part(3, pack(model), {**DRAFTER, "\x1b[31m": "\n"})]))


CLASSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "UnsupportedError": (lambda path: path.write_bytes(bundle([], version=(9, 9, 9))), r"version 9\.9\.9"),
    "a lost operator": (_no_q_norm, "RSQRT"),
    "FormatError while writing": (_not_finite, "not finite"),
    "names": (_named, r"x1b\[2J.*no scale"),
}


@pytest.mark.parametrize("case", CLASSES)
def test_one_message_for_each_class(tmp_path: Path, case: str) -> None:
    build, match = CLASSES[case]
    build(tmp_path / "source")
    (tmp_path / "out").mkdir()
    assert_refused(command(EXTRACT, tmp_path / "source", "-o", tmp_path / "out" / "x"), match, tmp_path / "out")


def test_inspect_says_the_same(tmp_path: Path) -> None:
    """A damaged drafter is described as far as it goes, and is an error all the same."""
    _named(tmp_path / "source")
    done = command(INSPECT, tmp_path / "source", "--tensors", "--graph")
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1
    assert "\x1b" not in done.stdout + done.stderr
    done = command(INSPECT, "a" * 5000)
    assert (done.returncode, done.stderr.count("error:")) == (1, 1)


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_places_that_cannot_be_written() -> None:
    for place in ("/proc/x", "/dev/null", "/dev/null/x", "/" + "x" * 300):
        done = run_here("extract", "--sample", "-o", place)
        assert (done.returncode, done.stderr.count("error:"), done.stdout) == (1, 1, ""), place
        assert "Traceback" not in done.stderr


def test_an_overwrite_that_fails_keeps_the_old(tmp_path: Path) -> None:
    """Whether the new one cannot be read or cannot be written."""
    assert command(EXTRACT, "--sample", "-o", tmp_path / "x").returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    (tmp_path / "bad").write_bytes(b"LITERTLM")
    assert command(EXTRACT, tmp_path / "bad", "-o", tmp_path / "x", "--overwrite").returncode == 1
    done = command(EXTRACT, "--sample", "-o", tmp_path / "x", "--overwrite", limit=_small_files)
    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"x", "bad"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_while_writing(tmp_path: Path, number: signal.Signals) -> None:
    """What a killed run leaves is hidden, is no checkpoint, and goes with the next run in the same place."""
    with subprocess.Popen(
        [sys.executable, "-c", SLOW + EXTRACT, "--sample", "-o", str(tmp_path / "x")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=HANG)
    interrupted = 128 + number, "error: interrupted; nothing was kept.\n"
    assert (process.returncode, errors) == ((-number, "") if number == signal.SIGKILL else interrupted)
    for left in tmp_path.iterdir():
        assert (left.name, number) == (".x.partial", signal.SIGKILL)
        assert not (left / "extraction.json").exists()
        assert command(INSPECT, left).returncode == 1
    assert command(EXTRACT, "--sample", "-o", tmp_path / "x").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_reader_that_goes_away_and_a_full_terminal(sample: Path) -> None:
    done = command(INSPECT, sample, stdout=os.open("/dev/full", os.O_WRONLY))
    assert (done.returncode, done.stderr) == (1, "error: the result cannot be printed: No space left on device.\n")
    reader, writer = os.pipe()
    os.close(reader)
    assert "Traceback" not in command(INSPECT, sample, "--tensors", stdout=writer).stderr


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000])
def test_hostile_json(extracted: Path, tmp_path: Path, sample: Path, content: bytes) -> None:
    folder = Path(shutil.copytree(extracted, tmp_path / "copy"))
    (folder / "config.json").write_bytes(content)
    with open_bundle(sample) as opened, pytest.raises(CheckpointError, match=r"config\.json"):
        verify_against(folder, opened)
    (folder / "extraction.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        verify(folder)
