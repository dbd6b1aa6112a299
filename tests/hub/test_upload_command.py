"""``mtp-upload`` as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.bounds import HANG
from helpers.hub_server import TOKEN, HubServer


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


def test_a_dry_run_then_the_upload(hub: HubServer, extracted: Path, tmp_path: Path) -> None:
    planned = run(hub, tmp_path, str(extracted), "org/drafter", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "org/drafter" not in hub.repos
    done = run(hub, tmp_path, str(extracted), "org/drafter")
    assert done.returncode == 0, done.stderr
    before, after = (re.findall(r"^  (\S+) +.*…$", shown.stdout, re.MULTILINE) for shown in (planned, done))
    assert before == after
    assert {"README.md", "codes/codes.safetensors", "extraction.json", "model.safetensors"} < set(before)
    assert f"matches by hash (commit {hub.repos['org/drafter'].commit})" in done.stdout
    again = run(hub, tmp_path, str(extracted), "org/drafter")
    assert again.returncode == 0, again.stderr
    assert "nothing was sent" in again.stdout
    assert again.stdout.splitlines()[-1] == f"{hub.url()}/org/drafter"
