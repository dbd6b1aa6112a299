"""``scripts/tune_memory.py`` runs at a tiny shape; what a real one takes is for a machine with the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tune_memory.py"


def test_every_phase_is_measured(tmp_path: Path) -> None:
    arguments = ["--work", str(tmp_path), "--shape", "tiny", "--modes", "qat"]
    ran = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        ["qat", "loading"],
        ["qat", "writing text"],
        ["qat", "measuring"],
        ["qat", "training"],
    ]
    assert all(float(size.removesuffix(" GB")) < 2 for row in rows for size in row[2:4])
    assert (tmp_path / "tuned-qat" / "extraction.json").is_file()
