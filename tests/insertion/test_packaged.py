"""The pair in the package: its base is the one that its bundle holds, and goes back as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from mtp_extract.bundle import open_bundle
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.insertion.base import planned_base_insertion
from mtp_extract.insertion.comparison import compare_base


def equal(bundle: Path, base: Path) -> bool:
    with open_bundle(bundle) as opened:
        return compare_base(opened, base).problem is None


def test_its_own_base_changes_no_byte(tmp_path: Path) -> None:
    again = tmp_path / "again.litertlm"
    with planned_base_insertion(sample_base(), sample_bundle()) as plan:
        plan.write(again)
    assert again.read_bytes() == sample_bundle().read_bytes()


def test_a_weight_with_a_factor_in_it_is_put_back_with_it(tmp_path: Path) -> None:
    """``per_layer_model_projection`` has 1/√width in its scales: a changed one gets it, too."""
    base = Path(shutil.copytree(sample_base(), tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    name = "model.language_model.per_layer_model_projection.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][::-1])
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "new.litertlm"
    with planned_base_insertion(base, sample_bundle()) as plan:
        plan.write(out)
    assert equal(out, base)
    assert not equal(out, sample_base())
