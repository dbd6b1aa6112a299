"""Running a command as a user does: in a process of its own, or in this one, which has its packages loaded already."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from unittest import mock


def run(name: str, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``mtp-NAME`` with ``arguments``."""
    code = f"from mtp_extract.cli.{name} import main; main()"
    # Whatever this process imports from, so does the command.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )


def run_here(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """As :func:`run`, without another process: it sees what a test has patched, and loads nothing anew."""
    main = import_module(f"mtp_extract.cli.{name}").main
    command = [f"mtp-{name}", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with mock.patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    else:
        raise AssertionError("a command ends with its status")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())
