"""``mtp-upload`` as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.bounds import HANG
from helpers.first_pair import first_bundle
from helpers.hub_server import TOKEN, HubServer

import mtp_extract


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    mtp_extract.extract(first_bundle(), tmp_path / "drafter")
    return tmp_path / "drafter"


def run(hub: HubServer, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from mtp_extract.cli.upload import main; sys.argv[0] = 'mtp-upload'; main()"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url(),
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_dry_run_then_the_upload(hub: HubServer, directory: Path, tmp_path: Path) -> None:
    planned = run(hub, tmp_path, str(directory), "org/drafter", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "org/drafter" not in hub.repos
    done = run(hub, tmp_path, str(directory), "org/drafter")
    assert done.returncode == 0, done.stderr
    before, after = (re.findall(r"^  (\S+) +.*…$", shown.stdout, re.MULTILINE) for shown in (planned, done))
    assert before == after == sorted(path.name for path in directory.iterdir())
    assert f"matches by hash (commit {hub.repos['org/drafter'].commit})" in done.stdout
    again = run(hub, tmp_path, str(directory), "org/drafter")
    assert again.returncode == 0, again.stderr
    assert "nothing was sent" in again.stdout
    assert again.stdout.splitlines()[-1] == f"{hub.url()}/org/drafter"
