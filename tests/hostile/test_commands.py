"""Faults of ours, of the disk and of the terminal end a command with one message, the right exit status and no result.

The messages for mistakes of a user are in ``cli/mistakes.json``.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.bounds import HANG, cpu_limit
from helpers.make_bundle import DRAFTER, Part, bundle, pack
from helpers.make_drafter import plain_model
from seam import CheckpointError, open_bundle, verify, verify_against

EXTRACT = "from mtp_extract.cli.extract import main; main()"
INSPECT = "from mtp_extract.cli.inspect import main; main()"
# The package under test, wherever the command is run.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path)}
# Prints when writing has begun, and waits there until the test has sent its signal.
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


REPLACED = """
import mtp_extract.pipeline.inspection
from mtp_extract.cli.terminal import say
from mtp_extract.errors import FormatError
def broken(*arguments, **named):
    {code}
mtp_extract.pipeline.inspection.inspect = broken
"""
"""Replaces inspecting a bundle by ``code``."""


def command(program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a process of its own, whose CPU time is bounded."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT, "preexec_fn": cpu_limit(60)}
    called = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(called, **{**streams, **options}, text=True, timeout=HANG, check=False)


def test_a_damaged_drafter_is_described_and_is_an_error_all_the_same(tmp_path: Path) -> None:
    model = plain_model()
    for tensor in model.subgraphs[0].tensors:
        tensor.name, tensor.quantization = b"\x1b[2J\n\xff", None
    (tmp_path / "source").write_bytes(bundle([Part(3, pack(model), {**DRAFTER, "\x1b[31m": "\n"})]))

    shown = command(INSPECT, tmp_path / "source", "--tensors", "--graph")
    refused = command(EXTRACT, tmp_path / "source", "-o", tmp_path / "out")

    assert (shown.returncode, shown.stderr.count("error:")) == (1, 1)
    assert "\x1b" not in shown.stdout + shown.stderr
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.fullmatch(r"error: .*x1b\[2J.*no scale.*\n", refused.stderr) and refused.stderr.strip().isprintable()
    assert not (tmp_path / "out").exists()


def test_an_overwrite_for_which_the_disk_has_no_room_keeps_the_old(tmp_path: Path) -> None:
    again = (EXTRACT, "--sample", "-o", tmp_path / "x", "--overwrite")
    assert command(*again).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}

    def limit() -> None:
        cpu_limit(60)()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = command(*again, preexec_fn=limit)

    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_while_writing_leaves_nothing_that_looks_finished(tmp_path: Path, number: signal.Signals) -> None:
    """A killed run leaves a hidden folder that is no checkpoint, and the next run in the same place removes it."""
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


FAULTS = {
    "a fault": (
        "raise ValueError('math\\ndomain error')",
        r"error: ValueError: math\ndomain error. This is a fault of",
    ),
    "a file's": ("raise OSError(30, 'Read-only file system', 'x')", "error: x: Read-only file system."),
    "too deep": ("f = lambda: f(); f()", "error: RecursionError: maximum recursion depth exceeded"),
    "too large": ("raise MemoryError", "error: out of memory. If you trust the file"),
    "too long": ("raise FormatError('y' * 1000000)", "error: yyy"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_whatever_goes_wrong_is_one_line(case: str, sample: Path) -> None:
    """The line asks for a report if the fault is ours, and a traceback is printed only on request."""
    code, message = FAULTS[case]
    for debug in (False, True):
        environment = {**ENVIRONMENT, "MTP_EXTRACT_DEBUG": str(int(debug))}

        done = command(REPLACED.format(code=code) + INSPECT, sample, env=environment)

        assert (done.returncode, done.stdout) == (1, "")
        assert ("Traceback" in done.stderr) == debug
        *_, last = done.stderr.splitlines()
        assert last.startswith(message)
        assert len(last) < 5000
        assert debug or done.stderr.count("\n") == 1
        assert ("MTP_EXTRACT_DEBUG=1" in last) == (case in ("a fault", "too deep"))


def test_a_full_disk_is_named_before_the_error_that_is_still_in_a_buffer(sample: Path) -> None:
    code = "say('half a result'); raise FormatError('the cause')"
    with Path("/dev/full").open("w") as full:
        done = command(REPLACED.format(code=code) + INSPECT, sample, stdout=full)
    # The user has to see to the disk first.
    assert (done.returncode, done.stderr) == (1, "error: a file or standard output: No space left on device.\n")


def test_a_reader_that_goes_away_is_no_error(sample: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(INSPECT, sample, "--tensors", stdout=writer)
    finally:
        os.close(writer)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_is_done_without(sample: Path, closed: str) -> None:
    number = {"stdout": 1, "stderr": 2}[closed]
    done = command(INSPECT, sample, preexec_fn=lambda: os.close(number))
    assert (done.returncode, done.stderr) == (0, "")
    assert ("signature mtp_drafter" in done.stdout) == (closed == "stderr")


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}']
)
def test_json_that_is_none_is_refused_by_its_file(
    extracted: Path, tmp_path: Path, sample: Path, content: bytes
) -> None:
    folder = Path(shutil.copytree(extracted, tmp_path / "copy"))
    (folder / "config.json").write_bytes(content)
    with open_bundle(sample) as opened, pytest.raises(CheckpointError, match=r"config\.json"):
        verify_against(folder, opened)
    (folder / "extraction.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"extraction\.json: (not valid JSON|nested more deeply)"):
        verify(folder)
