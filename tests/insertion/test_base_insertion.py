"""A base into the sample: nothing changes that need not, and what is put in is there in every signature."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers import bases
from helpers.bases import PREFIX, Weights, base_with, patched, places_of, scale_of
from helpers.commands import run_here
from helpers.make_bundle import added, code_of, kind, set_buffer

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
    read = list[tuple[int, int]]()
    with planned_insertion(base, bundle, progress=lambda *bytes_read: read.append(bytes_read)) as plan:
        assert read == sorted(read) and read[-1][0] == read[-1][1] > 0
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


def _share(sample: Path, out: Path, other: str | None) -> Path:
    """As converters do with equal constants: one buffer for layer 0's K norm and another role, or the V norm's ones."""
    own = places_of(sample, "layers.0.k_norm")
    theirs = places_of(sample, other) if other else own

    def share(model: Any) -> None:
        for (_, mine), (_, given) in zip(own, theirs, strict=True):
            graph = model.subgraphs[mine.subgraph]
            held = graph.tensors[given.index].buffer
            if other is None:
                data = {i: model.buffers[i].data for i in {tensor.buffer for tensor in graph.tensors}}
                held = next(i for i, own in data.items() if own is not None and bytes(own) == ONES)
            graph.tensors[mine.index].buffer = held

    return bases.edited_section(out, "prefill_decode", share)


def test_what_is_shared_with_something_else_is_refused(sample: Path, tmp_path: Path) -> None:
    bundle, new = _share(sample, tmp_path / "shared.litertlm", None), tmp_path / "new.litertlm"
    with pytest.raises(UnsupportedError, match=r"layers\.0\.k_norm: .* which plays no role, in the same bytes"):
        put(base_with(tmp_path / "base", tuned), bundle, new)


def test_roles_that_share_a_constant_must_agree(sample: Path, tmp_path: Path) -> None:
    bundle, new = _share(sample, tmp_path / "shared.litertlm", "layers.0.q_norm"), tmp_path / "new.litertlm"
    with pytest.raises(UnsupportedError, match=r"the file stores layers\.0\.[kq]_norm in the same bytes, and the two"):
        put(base_with(tmp_path / "base", tuned), bundle, new)

    def agreeing(weights: Weights) -> None:
        tuned(weights)
        weights[f"{LAYER}self_attn.k_norm.weight"] = weights[f"{LAYER}self_attn.q_norm.weight"]

    base = base_with(tmp_path / "agreeing", agreeing)
    put(base, bundle, new)
    assert compared(new, base).problem is None


def _tables(model: Any) -> None:
    """One table a layer, as the published bundles have them: looked up, scaled, and joined."""
    graph = model.subgraphs[0]
    lookup = next(op for op in graph.operators if kind(model, op) == "EMBEDDING_LOOKUP")
    first, table, found = lookup.inputs[0], graph.tensors[lookup.inputs[1]], graph.tensors[lookup.outputs[0]]
    codes = np.frombuffer(bytes(model.buffers[table.buffer].data), np.int8).reshape(table.shape)
    pieces, operators = [], []
    for layer in range(6):
        own, part = copy.deepcopy(table), copy.deepcopy(found)
        own.shape, part.shape = [512, 32], [1, 32]
        # Each table has scales of its own.
        own.quantization.scale = (np.asarray(table.quantization.scale) * (1 + layer)).astype(np.float32)
        set_buffer(model, own, np.ascontiguousarray(codes[:, 32 * layer : 32 * layer + 32]).tobytes())
        op = copy.deepcopy(lookup)
        op.inputs, op.outputs = [first, added(graph.tensors, own)], [added(graph.tensors, part)]
        operators.append(op)
        pieces += op.outputs
    join = schema.OperatorT(
        opcodeIndex=code_of(model, "CONCATENATION"),
        inputs=pieces,
        outputs=[lookup.outputs[0]],
        builtinOptionsType=schema.BuiltinOptions.ConcatenationOptions,
        builtinOptions=schema.ConcatenationOptionsT(axis=1),
    )
    at = graph.operators.index(lookup)
    graph.operators[at : at + 1] = [*operators, join]
    # The old table goes, so that no constant is left over.
    table.buffer = 0


def test_a_table_for_each_layer_is_one_weight(tmp_path: Path) -> None:
    bundle = bases.edited_section(tmp_path / "tables.litertlm", "per_layer_embedder", _tables)
    name = f"{PREFIX}embed_tokens_per_layer.weight"

    def scaled(weights: Weights) -> None:
        weights[name] = weights[name] * np.repeat(np.arange(1, 7, dtype=np.float32), 32)

    base = base_with(tmp_path / "base", scaled)
    assert len(places_of(bundle, "embed_tokens_per_layer")) == 6
    # Rows were quantized as wholes: their parts do not reach the last code, and are within half a step.
    assert compared(bundle, base).problem is None
    new, out = base_with(tmp_path / "tuned", tuned), tmp_path / "new.litertlm"
    put(new, bundle, out)
    found = compared(out, new)
    assert found.problem is None
    verdicts = {role.role: role.verdict for role in found.roles}
    assert verdicts["embed_tokens_per_layer"] == HALF_STEP


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
