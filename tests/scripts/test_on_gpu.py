"""``scripts/on_gpu.py`` on a CPU, at a small shape: everything but the tuning and the marked tests."""

from __future__ import annotations

import math
from pathlib import Path

import on_gpu
import pytest
from _rehearsal.shapes import SHAPES


def tables(page: str) -> dict[str, list[list[str]]]:
    """Title → rows, without the header's."""
    found = {}
    for part in page.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        found[title] = rows[2:]
    return found


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "CHAINS", (0, 3))
    monkeypatch.setattr(on_gpu, "TREES", {"2x2x1": on_gpu.TREES["2x2x1"]})
    monkeypatch.setattr(on_gpu, "CONTEXTS", (128,))
    page, only = tmp_path / "gpu.md", ("drafts", "contexts")
    assert on_gpu.main(["--shape", "tiny", "--device", "cpu", "--out", str(page), "--only", *only]) == 0
    found = tables(page.read_text())
    assert list(found) == ["Drafts a round", "Contexts, 4 drafts"]
    assert [row[0] for row in found["Drafts a round"]] == ["0", "3", "2x2x1"]
    alone, chain, _ = found["Drafts a round"]
    assert alone[5] == "1.00"  # the base alone takes as long as itself
    assert float(chain[1]) > 0 and float(chain[4]) > 0
    assert abs(float(chain[1]) + float(chain[2]) - float(chain[3])) < 0.02
    assert [row[0] for row in found["Contexts, 4 drafts"]] == ["128"]


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    page = on_gpu.Page(tmp_path / "gpu.md", -math.inf)
    page.table("Drafts", ("drafts",), on_gpu.marked_tests(page))
    assert "There was no time for more." in page.out.read_text()
    assert "not what they yield" in on_gpu.heading(SHAPES["tiny"], on_gpu.torch.device("cpu"))
