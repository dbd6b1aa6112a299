"""``mtp-insert`` as a user sees it. Interruptions: ``tests/test_places.py``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from helpers.commands import run_here

from mtp_extract.data import sample_base

run = partial(run_here, "insert")
NEW = "new.litertlm"


def test_what_is_done_is_said_before_it_is_written(sample: Path, noisy: Path, tmp_path: Path) -> None:
    dry_run = run(noisy, sample, "--dry-run")
    assert (dry_run.returncode, dry_run.stderr) == (0, "")
    assert "lm_head                       INT4     requantized" in dry_run.stdout
    assert "final_norm                    FLOAT32  floats       0" in dry_run.stdout
    assert dry_run.stdout.endswith("\nNothing was written.\n")
    assert list(tmp_path.iterdir()) == []
    process = run(noisy, sample, "-o", tmp_path / NEW)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(dry_run.stdout.removesuffix("Nothing was written.\n"))
    assert "its drafter was read back and compared" in process.stdout
    assert "every number of every tensor" in process.stdout
    assert [p.name for p in tmp_path.iterdir()] == [NEW]


def test_as_json(sample: Path, exact: Path, tmp_path: Path) -> None:
    document = json.loads(run(exact, sample, "-o", tmp_path / NEW, "--json").stdout)
    assert document["size"] == (tmp_path / NEW).stat().st_size
    assert document["roles"]["lm_head"]["stored"] == "INT4"
    assert document["roles"]["final_norm"] == {"what": "kept", "stored": "FLOAT32", "relative_rms_error": 0.0}
    assert document["proof"]["positions"]
    assert json.loads(run(exact, sample, "--dry-run", "--json").stdout)["out"] is None


def test_packed_weights_of_an_older_file(sample: Path, exact: Path, tmp_path: Path) -> None:
    """A note names a cache beside the new file."""
    (tmp_path / f"{NEW}_1700000000_123.mtp_drafter.xnnpack_cache").touch()
    out = run(exact, sample, "-o", tmp_path / NEW).stdout
    assert f"Note: Delete {NEW}_1700000000_123" in out and "the runtime packed them from an older file" in out


def test_a_base_is_not_loaded_for_a_graph_without_static_activations(sample: Path, exact: Path, tmp_path: Path) -> None:
    """But the argument is checked."""
    process = run(exact, sample, "--base", tmp_path, "--dry-run")
    assert "no static activations: nothing was calibrated" in process.stdout
    for checkpoint in (exact, sample_base()):
        refused = run(checkpoint, sample, "--base", "nowhere", "--dry-run")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert (
            "nowhere: expected a directory or an id of the Hugging Face Hub, found neither. Check the path."
            in refused.stderr
        )


def test_swapped_arguments_are_told_so(sample: Path, exact: Path, tmp_path: Path) -> None:
    swapped = run(sample, exact, "-o", tmp_path / NEW)
    assert (swapped.returncode, swapped.stdout) == (1, "")
    assert "The first argument is a bundle, the second a checkpoint: swap them." in " ".join(swapped.stderr.split())
    twice = run(exact, exact, "-o", tmp_path / NEW)
    assert "found a checkpoint. Give a .litertlm in its place." in " ".join(twice.stderr.split())
    assert list(tmp_path.iterdir()) == []
