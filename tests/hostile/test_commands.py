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


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda path: path.write_bytes(bundle([], version=(9, 9, 9))), r"version 9\.9\.9"),
        (_not_finite, "not finite"),
        (_named, r"x1b\[2J.*no scale"),
    ],
)
def test_one_message_for_each_class(tmp_path: Path, build: Callable[[Path], object], match: str) -> None:
    """Status 1, one printable line that begins with ``error:``, and nothing else."""
    build(tmp_path / "source")
    (tmp_path / "out").mkdir()
    done = command(EXTRACT, tmp_path / "source", "-o", tmp_path / "out" / "x")
    assert (done.returncode, done.stdout, done.stderr.count("error:")) == (1, "", 1), done.stderr
    assert re.match(f"error: .*{match}", done.stderr), done.stderr
    assert done.stderr.strip().isprintable()
    assert not any((tmp_path / "out").iterdir())


def test_inspect_says_the_same(tmp_path: Path) -> None:
    """A damaged drafter is described as far as it goes, and is an error all the same."""
    _named(tmp_path / "source")
    done = command(INSPECT, tmp_path / "source", "--tensors", "--graph")
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1
    assert "\x1b" not in done.stdout + done.stderr
    done = command(INSPECT, "a" * 5000)
    assert (done.returncode, done.stderr.count("error:")) == (1, 1)


def test_an_overwrite_that_fails_keeps_the_old(tmp_path: Path) -> None:
    """Whether the new one cannot be read or cannot be written."""
    assert command(EXTRACT, "--sample", "-o", tmp_path / "x").returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    (tmp_path / "bad").write_bytes(b"LITERTLM")
    assert command(EXTRACT, tmp_path / "bad", "-o", tmp_path / "x", "--overwrite").returncode == 1
    done = command(
        EXTRACT,
        "--sample",
        "-o",
        tmp_path / "x",
        "--overwrite",
        limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
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
    assert (done.returncode, done.stderr) == (1, "error: a file or standard output: No space left on device.\n")
    reader, writer = os.pipe()
    os.close(reader)
    assert "Traceback" not in command(INSPECT, sample, "--tensors", stdout=writer).stderr


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}']
)
def test_hostile_json(extracted: Path, tmp_path: Path, sample: Path, content: bytes) -> None:
    folder = Path(shutil.copytree(extracted, tmp_path / "copy"))
    (folder / "config.json").write_bytes(content)
    with open_bundle(sample) as opened, pytest.raises(CheckpointError, match=r"config\.json"):
        verify_against(folder, opened)
    (folder / "extraction.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"extraction\.json: (not valid JSON|nested more deeply)"):
        verify(folder)
