"""A base into the sample: nothing changes that need not, and what is put in is there in every signature."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import bases
from helpers.bases import PREFIX, Weights, base_with, patched, places_of, scale_of
from helpers.commands import run_here
from helpers.reporters import Recorder

from mtp_extract.bundle import open_bundle
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.errors import CheckpointError, MtpExtractError, OutputError, PairError, UnsupportedError
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.comparison import EQUAL, HALF_STEP, NEAREST, BaseComparison, compare_base
from mtp_extract.insertion.encoding import AS_FLOATS, KEPT, REQUANTIZED
from mtp_extract.insertion.run import planned_insertion
from mtp_extract.insertion.slots import match_roles
from mtp_extract.io.assembled import write_copy

LAYER = f"{PREFIX}layers.0."
ONES = np.ones(32, np.float32).tobytes()


def put(base: Path, bundle: Path, out: Path) -> None:
    reporter = Recorder()
    with planned_insertion(base, bundle, reporter=reporter) as plan:
        assert reporter.parts == sorted(reporter.parts) and reporter.parts[-1][1] == reporter.parts[-1][2] > 0
        plan.write(out)


def compared(bundle: Path, base: Path) -> BaseComparison:
    with open_bundle(bundle) as opened:
        return compare_base(opened, base)


def tuned(weights: Weights) -> None:
    """All that is not 1, a little different."""
    random = np.random.default_rng(0)
    for name, weight in weights.items():
        if weight.size > 1:
            weights[name] = (weight * (1 + 0.1 * random.standard_normal(weight.shape))).astype(np.float32)


def test_the_base_that_is_there_changes_nothing(sample: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.litertlm"
    for weights, bundle in ((base, sample), (sample_base(), sample_bundle())):
        with planned_insertion(weights, bundle) as plan:
            assert {each.how for own in plan.encodings.values() for each in own} == {KEPT}
            plan.write(out, overwrite=True)
        assert out.read_bytes() == bundle.read_bytes()
    with planned_insertion(base_with(tmp_path / "base", dtype="f16"), sample) as plan:
        norms = [each.how for role, own in plan.encodings.items() if role.endswith("norm") for each in own]
        assert set(norms) == {KEPT}


def test_a_tuned_base_is_there_in_every_signature(sample: Path, tmp_path: Path) -> None:
    base, out = base_with(tmp_path / "base", tuned, shards=2), tmp_path / "new.litertlm"
    with planned_insertion(base, sample) as plan:
        assert {each[0].how for role, each in plan.encodings.items() if role.endswith("norm")} == {AS_FLOATS}
        assert {each[0].how for role, each in plan.encodings.items() if role.endswith("proj")} == {REQUANTIZED}
        assert max(decision.error for each in plan.encodings.values() for decision in each) < 0.01
        result = plan.write(out)
    assert any("drafter" in note for note in result.notes)
    with open_bundle(out) as opened:
        written = list(match_roles(find_base(opened).places, read_base(base).weights))
        regions = {place.model.region.begin: place.model.region for each in written for place in each.places}
    found = compared(out, base)
    assert found.problem is None
    # The scales that were there lose less of some rows, of which they cut off a number.
    assert found.counts == {EQUAL: 48, HALF_STEP: 30, NEAREST: 24}
    # Signatures agree, so that each role is stored in one way.
    assert {len(each.slots) for each in written} == {1}
    old, new = sample.read_bytes(), out.read_bytes()
    assert len(old) == len(new)
    inside = np.zeros(len(old), bool)
    for region in regions.values():
        inside[region.begin : region.begin + region.size] = True
    changed = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
    assert changed.any() and not changed[~inside].any()


def test_signatures_that_had_other_scales_get_the_same(sample: Path, tmp_path: Path) -> None:
    """Two decisions are planned of the role, and what was written is one constant."""
    other = scale_of(sample, "layers.1.down_proj", "decode", 5, 1.5)
    bundle, out = patched(tmp_path / "scale.litertlm", other), tmp_path / "new.litertlm"
    base = base_with(tmp_path / "base", tuned)
    with planned_insertion(base, bundle) as plan:
        assert [d.how for d in plan.encodings["layers.1.down_proj"]] == [REQUANTIZED, REQUANTIZED]
        plan.write(out)
    assert compared(out, base).problem is None


def test_what_reads_back_differently_is_not_kept(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale of one signature is another in the new file, as a faulty disk or program leaves it."""
    base = base_with(tmp_path / "base", tuned)

    def spoiled(path: Path, *given: Any) -> None:
        write_copy(path, *given)
        with open(path, "r+b") as file:
            for at, scale in scale_of(path, "layers.1.down_proj", "verify", 0, 1.5).items():
                os.pwrite(file.fileno(), scale, at)

    monkeypatch.setattr("mtp_extract.insertion.plan.write_copy", spoiled)
    with pytest.raises(OutputError, match=r"layers\.1\.down_proj reads back differently"):
        put(base, sample, tmp_path / "new.litertlm")
    assert not list(tmp_path.glob("*.litertlm"))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (bases.scalar, UnsupportedError, r"layers\.0\.layer_scalar: the graph multiplies by nothing"),
        (bases.more, CheckpointError, "1 tensors play no role"),
        (bases.fewer, PairError, r"layers\.0\.v_proj: the checkpoint has no such tensor"),
        (bases.broken, CheckpointError, r"layers\.0\.up_proj: holds values that are not finite"),
    ],
)
def test_what_has_no_place_is_refused(
    sample: Path, tmp_path: Path, change: Callable[[Weights], None], error: type[MtpExtractError], words: str
) -> None:
    with pytest.raises(error, match=words):
        put(base_with(tmp_path / "base", change), sample, tmp_path / "new.litertlm")
    assert not list(tmp_path.glob("*.litertlm"))


def _share(sample: Path, out: Path) -> Path:
    """As converters do with equal constants: one buffer for layer 0's K norm and the V norm's ones."""
    own = places_of(sample, "layers.0.k_norm")

    def share(model: Any) -> None:
        for _, tensor in own:
            graph = model.subgraphs[tensor.subgraph]
            data = {i: model.buffers[i].data for i in {other.buffer for other in graph.tensors}}
            ones = next(i for i, stored in data.items() if stored is not None and bytes(stored) == ONES)
            graph.tensors[tensor.index].buffer = ones

    return bases.edited_section(out, "prefill_decode", share)


def test_what_is_shared_with_something_else_is_refused(sample: Path, tmp_path: Path) -> None:
    bundle, new = _share(sample, tmp_path / "shared.litertlm"), tmp_path / "new.litertlm"
    with pytest.raises(UnsupportedError, match=r"layers\.0\.k_norm: .* which plays no role, in the same bytes"):
        put(base_with(tmp_path / "base", tuned), bundle, new)


def test_the_commands(sample: Path, base: Path, tmp_path: Path) -> None:
    done = run_here("inspect", sample, "--against", base, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["verdicts"] == {"equal": 48, "within half a step": 54} and len(report["roles"]) == 102
    new, other = tmp_path / "new.litertlm", base_with(tmp_path / "base", tuned)
    done = run_here("inspect", sample, "--against", other)
    assert done.returncode == 1 and "102 roles: " in done.stdout
    assert "are not the weights of" in done.stderr
    done = run_here("insert", other, sample, "-o", new)
    assert done.returncode == 0 and "requantized" in done.stdout and f"Wrote {new}" in done.stdout
    done = run_here("inspect", new, "--against", other)
    assert done.returncode == 0 and "102 roles: 48 equal, 30 within half a step, 24 nearest code" in done.stdout
    done = run_here("inspect", sample, "--against", sample)
    assert done.returncode == 1 and "found none" in done.stderr
