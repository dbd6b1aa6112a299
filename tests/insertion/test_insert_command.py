"""``mtp-insert`` as a user meets it, and what becomes of it when it is stopped."""

from __future__ import annotations

import filecmp
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mtp_extract.cli.insert import main

CODE = "from mtp_extract.cli.insert import main; main()"
NEW = "new.litertlm"


def start(*arguments: str | Path, code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """The command in this process: status, what it printed, and its errors."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.setattr(sys, "argv", ["mtp-insert", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
    return int(stopped.value.code or 0), out.getvalue(), error.getvalue()


def test_what_is_done_is_said_before_it_is_written(sample: Path, noisy: Path, tmp_path: Path) -> None:
    status, dry, error = run(noisy, sample, "--dry-run")
    assert (status, error) == (0, "")
    assert "lm_head                       INT4     requantized" in dry
    assert "final_norm                    FLOAT32  floats       0" in dry
    assert dry.endswith("\nNothing was written.\n")
    assert list(tmp_path.iterdir()) == []
    status, out, error = run(noisy, sample, "-o", tmp_path / NEW)
    assert (status, error) == (0, "")
    assert out.startswith(dry.removesuffix("Nothing was written.\n"))
    assert "its drafter was read back and compared" in out
    assert "every number of every tensor" in out
    assert [p.name for p in tmp_path.iterdir()] == [NEW]


def test_as_json(sample: Path, exact: Path, tmp_path: Path) -> None:
    status, out, _ = run(exact, sample, "-o", tmp_path / NEW, "--json")
    document = json.loads(out)
    assert status == 0
    assert document["size"] == (tmp_path / NEW).stat().st_size
    assert document["roles"]["lm_head"]["stored"] == "INT4"
    assert document["roles"]["final_norm"] == {
        "what": "kept",
        "stored": "FLOAT32",
        "relative_rms_error": 0.0,
    }
    assert document["proof"]["positions"]
    assert json.loads(run(exact, sample, "--dry-run", "--json")[1])["out"] is None


def test_a_disk_without_space(sample: Path, exact: Path, tmp_path: Path) -> None:
    size = sample.stat().st_size // 2
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); {CODE}"
    process = start(exact, sample, "-o", tmp_path / NEW, code=limited)
    _, error = process.communicate()
    assert process.returncode == 1
    assert "cannot be written" in error
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != size


SLOW = (
    # A suite in the background of a shell, or under nohup, has signals ignored, and its children too.
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    "import time, mtp_extract.io.assembled as w; write = w.write_all\n"
    "def slow(*a):\n    write(*a); print('written', flush=True); time.sleep(60)\n"
    f"w.write_all = slow; {CODE}"
)
"""The command, which stops for a minute when a part of the file is there."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_killed_in_the_middle(number: signal.Signals, sample: Path, exact: Path, tmp_path: Path) -> None:
    before = sample.read_bytes()
    process = start(exact, sample, "-o", tmp_path / NEW, code=SLOW)
    assert process.stdout is not None
    while "written" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, error = process.communicate()
    left = [p.name for p in tmp_path.iterdir()]
    if number == signal.SIGKILL:
        (name,) = left
        assert name == f".{NEW}.partial"
    else:
        assert left == []
        assert error == "error: interrupted; nothing was kept.\n"
        assert process.returncode == 128 + number
    assert sample.read_bytes() == before
    # What was left behind is in nobody's way, and goes.
    assert run(exact, sample, "-o", tmp_path / NEW)[0] == 0
    assert [p.name for p in tmp_path.iterdir()] == [NEW]
    assert filecmp.cmp(sample, tmp_path / NEW, shallow=False)


def test_packed_weights_of_an_older_file(sample: Path, exact: Path, tmp_path: Path) -> None:
    """A cache beside the new file is pointed out, and the file has not the second that is in its name."""
    now = int(time.time())
    names = [f"{NEW}_{second}_123.mtp_drafter.xnnpack_cache" for second in range(now - 2, now + 600)]
    for name in names:
        (tmp_path / name).touch()
    status, out, _ = run(exact, sample, "-o", tmp_path / NEW)
    assert status == 0
    assert "Note: Delete " in out
    assert "the runtime packed them from an older file" in out
    assert int((tmp_path / NEW).stat().st_mtime) == now + 600


def test_a_file_that_replaces_another_is_younger(sample: Path, exact: Path, tmp_path: Path) -> None:
    old = tmp_path / NEW
    old.write_bytes(sample.read_bytes())
    ahead = int(time.time()) + 5
    os.utime(old, (ahead, ahead))
    assert run(exact, sample, "-o", old, "--overwrite")[0] == 0
    assert int(old.stat().st_mtime) != ahead
