"""The sample and its base: a comparison names every planted difference and nothing else; an insertion changes every
signature, and no byte that it need not change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import bases
from helpers.bases import PREFIX, Weights, base_with, patched, places_of, scale_of
from helpers.commands import run_here
from helpers.make_bundle import bundle as bundle_of
from helpers.make_bundle import parts_of
from helpers.reporters import Recorder

from mtp_extract.bundle import open_bundle
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.errors import CheckpointError, MtpExtractError, OutputError, PairError, UnsupportedError
from mtp_extract.insertion import base as base_module
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.comparison import (
    DIFFERENT,
    EQUAL,
    HALF_STEP,
    NEAREST,
    NOT_FOUND,
    BaseComparison,
    compare_base,
)
from mtp_extract.insertion.encoding import AS_FLOATS, KEPT, REQUANTIZED
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.insertion.slots import match_roles
from mtp_extract.io.assembled import write_copy

LAYER = f"{PREFIX}layers.0."
ONES = np.ones(32, np.float32).tobytes()
TABLE, TIED = f"{PREFIX}embed_tokens.weight", ("embed_tokens", "lm_head")


def compare(bundle: Path, base: Path) -> BaseComparison:
    with open_bundle(bundle) as opened:
        return compare_base(opened, base)


def list_differences(result: BaseComparison) -> dict[str, str]:
    """Roles that differ or are missing → reasons."""
    return {role.role: role.why or "" for role in result.roles if role.verdict in (DIFFERENT, NOT_FOUND)}


def test_the_sample_holds_its_base(sample: Path, base: Path) -> None:
    result = compare(sample, base)
    assert (len(result.roles), result.layers) == (102, 6)
    assert result.problem is None
    assert result.notes == ()

    by_role = {role.role: role for role in result.roles}
    assert {role.verdict for role in result.roles if len(role.shape) == 1} == {EQUAL}
    assert {role.verdict for role in result.roles if len(role.shape) == 2} == {HALF_STEP}
    assert by_role["lm_head"].tensor == by_role["embed_tokens"].tensor == TABLE
    assert all(role.steps is None or 0.4 < role.steps < 0.5001 for role in result.roles)
    # Layers 4 and 5 read the caches of others.
    owners = {role.role.split(".")[1] for role in result.roles if role.role.endswith(".k_proj")}
    assert owners == {"0", "1", "2", "3"}


def test_settings_that_a_config_leaves_out_are_as_the_bundle_has_them(sample: Path, tmp_path: Path) -> None:
    left_out = dict.fromkeys(("rope_parameters", "sliding_window"))
    assert compare(sample, base_with(tmp_path / "base", **left_out)).problem is None


def test_rope_is_read_by_layer_type_whatever_stands_beside_it(sample: Path, tmp_path: Path) -> None:
    flat = {"rope_type": "default", "rope_theta": 1e4, "sliding_attention": None}
    assert compare(sample, base_with(tmp_path / "base", rope_parameters=flat)).problem is None


def test_a_drafter_without_sliding_layers_tells_nothing_of_the_window(
    sample: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bundle(sample) as opened:
        config = opened.read_drafter().config
    full = replace(config, layers=tuple(layer for layer in config.layers if layer.sliding_window is None))
    assert full.sliding_window is None
    monkeypatch.setattr(base_module, "_read_drafter_config", lambda opened: full)
    assert compare(sample, base).problem is None


def test_an_index_of_other_files_does_no_harm_where_every_tensor_is(sample: Path, tmp_path: Path) -> None:
    base = base_with(tmp_path / "base", shards=2)
    for number, path in enumerate(sorted(base.glob("*.safetensors"))):
        path.rename(base / f"part{number}.safetensors")
    assert compare(sample, base).problem is None


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_rounded_and_sharded_base_is_the_same_one(sample: Path, tmp_path: Path, dtype: str) -> None:
    result = compare(sample, base_with(tmp_path / "base", dtype=dtype, shards=3))
    assert result.problem is None
    assert len(result.roles) == 102
    assert {role.verdict for role in result.roles if len(role.shape) == 1} == {EQUAL}
    matrices = [role for role in result.roles if len(role.shape) == 2]
    assert {role.verdict for role in matrices} == {HALF_STEP}
    # What was rounded twice may lie a little further off than half a step.
    assert max(role.steps or 0 for role in matrices) > 0.5


@pytest.mark.parametrize(
    "role", ["embed_tokens", "lm_head", "embed_tokens_per_layer", "layers.0.q_proj", "layers.3.v_proj"]
)
def test_one_code_is_named(sample: Path, base: Path, tmp_path: Path, role: str) -> None:
    model, tensor = places_of(sample, role)[0]
    at = model.locate(tensor).begin + 70
    code = sample.read_bytes()[at]
    result = compare(patched(tmp_path / "b.litertlm", {at: bytes([(code + 2) % 256])}), base)
    assert list(list_differences(result)) == [role]
    assert list_differences(result)[role].startswith("1 weight differs, by up to ")
    assert result.problem is not None and role in str(result.problem)


@pytest.mark.parametrize("signature", ["prefill_32", "decode", "verify"])
def test_one_scale_of_one_signature_is_named(sample: Path, base: Path, tmp_path: Path, signature: str) -> None:
    def compare_scaled(factor: float) -> BaseComparison:
        change = scale_of(sample, "layers.1.down_proj", signature, 5, factor)
        return compare(patched(tmp_path / f"{factor}.litertlm", change), base)

    assert list(list_differences(compare_scaled(1.5))) == ["layers.1.down_proj"]
    # A change this small moves no weight by more than half a step.
    assert not list_differences(compare_scaled(1.00001))


def test_codes_that_are_nearest_by_scales_far_too_large_are_another_weight(
    sample: Path, base: Path, tmp_path: Path
) -> None:
    """All codes are 0, and no number is more than half a step away."""
    role = "layers.1.down_proj"
    changes = {}
    for model, tensor in places_of(sample, role):
        data, quantization = model.locate(tensor), tensor.quantization
        changes[data.begin] = bytes(data.size)
        scales = (quantization.scale * np.float32(1000)).astype("<f4")
        changes[model.region.begin + quantization.scales.start] = scales.tobytes()
    result = list_differences(compare(patched(tmp_path / "zeros.litertlm", changes), base))
    assert result == {role: "nearest codes of 8 bits: loses 100%, and with other scales 1%"}


def test_the_lowest_code_of_a_type_is_no_wrong_one(sample: Path, tmp_path: Path) -> None:
    """Quantizers leave −128 out, but it is right if it is the nearest code; 200 lies beyond the last code."""
    model, tensor = places_of(sample, "layers.0.up_proj")[0]
    scale = tensor.quantization.scale[0]

    def change(weights: Weights) -> None:
        weights[f"{LAYER}mlp.up_proj.weight"][0, :2] = -128 * scale, 200 * scale

    bundle = patched(tmp_path / "b.litertlm", {model.locate(tensor).begin: bytes([0x80, 0x7F])})
    result = compare(bundle, base_with(tmp_path / "base", change))
    verdicts = {role.role: (role.verdict, role.why) for role in result.roles}
    assert verdicts["layers.0.up_proj"] == (NEAREST, "1 weight lies beyond the last code of its row")


def edit(name: str, change: Callable[[np.ndarray], np.ndarray], source: str = "") -> Callable[[Weights], None]:
    """Set the tensor ``name`` to the changed tensor ``source``."""
    return lambda weights: weights.update({name: change(weights[source or name])})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            edit(f"{LAYER}input_layernorm.weight", lambda norm: norm - 1),
            {"layers.0.pre_attention_norm": "weights differ"},
        ),
        (edit(f"{LAYER}self_attn.k_proj.weight", np.transpose), {"layers.0.k_proj": "weights differ, by up to"}),
        (bases.scalar, {"layers.0.layer_scalar": "1 weight differs"}),
        (edit(TABLE, lambda table: table + np.eye(512, 1, -7, dtype="f4")), dict.fromkeys(TIED, "64 weights differ")),
        (edit("lm_head.weight", lambda table: table * np.float32(1.5), TABLE), {"lm_head": "weights differ, by up to"}),
        (bases.broken, {"layers.0.up_proj": "1 weight differs"}),
        (bases.fewer, {"layers.0.v_proj": "the checkpoint has no such tensor"}),
        # The configuration does not state this shape.
        (
            edit(TABLE, lambda table: np.concatenate([table, table])),
            dict.fromkeys(TIED, "the checkpoint's is [1024, 64], the bundle's [512, 64]"),
        ),
        (bases.more, {f"{LAYER}self_attn.v_norm.weight": "the bundle has no place for this tensor"}),
    ],
)
def test_what_is_planted_in_the_checkpoint_is_named(
    sample: Path, tmp_path: Path, change: Callable[[Weights], None], expected: dict[str, str]
) -> None:
    result = list_differences(compare(sample, base_with(tmp_path / "base", change)))
    assert set(result) == set(expected)
    assert all(reason in result[role] for role, reason in expected.items())


def test_kv_of_layers_that_share_another_s_are_not_missed(sample: Path, tmp_path: Path) -> None:
    """The published checkpoints have them; transformers does not load them."""

    unused = f"{PREFIX}layers.4.self_attn.k_proj.weight"
    others = {unused: np.zeros((64, 64), np.float32), "model.vision_tower.patch.weight": np.zeros(3, np.float32)}
    result = compare(sample, base_with(tmp_path / "base", lambda weights: weights.update(others)))
    assert result.problem is None
    assert result.not_compared == {"vision_tower": 1, "K and V that layers share": 1}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model_type": "llama"}, CheckpointError, "expected model_type gemma4"),
        ({"vocab_size": 1024}, PairError, "vocab_size 1024 instead of 512"),
        ({"hidden_size": 128}, PairError, "hidden_size 128 instead of 64"),
        ({"num_hidden_layers": 7}, PairError, "num_hidden_layers 7 instead of 6"),
        ({"num_hidden_layers": "six"}, CheckpointError, "num_hidden_layers"),
        ({"num_kv_shared_layers": 4}, PairError, "num_kv_shared_layers 4 instead of 2"),
        # As many names were built once.
        ({"num_kv_shared_layers": 10**12, "vocab_size": 1024}, PairError, "vocab_size 1024"),
        ({"rms_norm_eps": 1e-5}, PairError, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, PairError, "rms_norm_eps"),
        ({"final_logit_softcapping": "30"}, PairError, "final_logit_softcapping 30 instead of 30.0"),
        ({"final_logit_softcapping": None}, PairError, "final_logit_softcapping"),
        ({"hidden_activation": "gelu"}, PairError, "hidden_activation gelu instead of gelu_pytorch_tanh"),
        ({"sliding_window": 32}, PairError, "sliding_window 32 instead of 16"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 2e4}}},
            PairError,
            "rope_parameters.sliding_attention.theta 20000.0 instead of 10000.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "proportional"}}},
            PairError,
            "rope_parameters.full_attention.partial_rotary_factor 1.0 instead of 0.25",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "yarn"}}},
            CheckpointError,
            "config.json: .*rope_type",
        ),
    ],
)
def test_another_model_is_refused(
    sample: Path, tmp_path: Path, config: dict[str, Any], error: type[MtpExtractError], words: str
) -> None:
    with pytest.raises(error, match=words):
        compare(sample, base_with(tmp_path / "base", **config))


def test_weights_in_integers_are_refused(sample: Path, tmp_path: Path) -> None:
    packed = edit(f"{LAYER}mlp.up_proj.weight", lambda weight: weight.astype(np.uint8))
    with pytest.raises(UnsupportedError, match="expected weights in floats, found U8"):
        compare(sample, base_with(tmp_path / "base", packed))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model-00001-of-00003.safetensors", lambda data: data[:-100], "not a safetensors file"),
        ("config.json", lambda data: b"{", "not valid JSON"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    sample: Path, tmp_path: Path, file: str, damage: Callable[[bytes], bytes], words: str
) -> None:
    path = base_with(tmp_path / "base", shards=3) / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=words):
        compare(sample, path.parent)


def test_a_checkpoint_in_several_files_is_all_there_and_once(sample: Path, tmp_path: Path) -> None:
    incomplete, duplicated = (base_with(tmp_path / f"{shards}", shards=shards) for shards in (3, 2))
    (incomplete / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"names model-00003-of-00003\.safetensors, which is not there\. Fetch it"
    ):
        compare(sample, incomplete)
    (incomplete / "model.safetensors.index.json").unlink()
    assert set(list_differences(compare(sample, incomplete)).values()) == {"the checkpoint has no such tensor"}
    (duplicated / "model.safetensors").write_bytes((duplicated / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"expected tensors in one file each, found .* in two"):
        compare(sample, duplicated)


def insert_base(base: Path, bundle: Path, out: Path) -> None:
    reporter = Recorder()
    with plan_insertion(base, bundle, reporter=reporter) as plan:
        assert reporter.parts == sorted(reporter.parts) and reporter.parts[-1][1] == reporter.parts[-1][2] > 0
        plan.write(out)


def add_noise(weights: Weights) -> None:
    """Add noise to everything but scalars."""
    random = np.random.default_rng(0)
    for name, weight in weights.items():
        if weight.size > 1:
            weights[name] = (weight * (1 + 0.1 * random.standard_normal(weight.shape))).astype(np.float32)


def test_the_base_that_is_there_changes_nothing(sample: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.litertlm"
    for weights, bundle in ((base, sample), (sample_base(), sample_bundle())):
        with plan_insertion(weights, bundle) as plan:
            assert {encoding.how for of_role in plan.encodings.values() for encoding in of_role} == {KEPT}
            plan.write(out, overwrite=True)
        assert out.read_bytes() == bundle.read_bytes()
    with plan_insertion(base_with(tmp_path / "base", dtype="f16"), sample) as plan:
        norms = [
            encoding.how for role, of_role in plan.encodings.items() if role.endswith("norm") for encoding in of_role
        ]
        assert set(norms) == {KEPT}


def test_a_tuned_base_is_there_in_every_signature(sample: Path, tmp_path: Path) -> None:
    base, out = base_with(tmp_path / "base", add_noise, shards=2), tmp_path / "new.litertlm"
    with plan_insertion(base, sample) as plan:
        assert {of_role[0].how for role, of_role in plan.encodings.items() if role.endswith("norm")} == {AS_FLOATS}
        assert {of_role[0].how for role, of_role in plan.encodings.items() if role.endswith("proj")} == {REQUANTIZED}
        assert max(encoding.error for of_role in plan.encodings.values() for encoding in of_role) < 0.01
        result = plan.write(out)
    assert any("drafter" in note for note in result.notes)
    with open_bundle(out) as opened:
        matches = list(match_roles(find_base(opened).places, read_base(base).weights))
        regions = {place.model.region.begin: place.model.region for match in matches for place in match.places}
    result = compare(out, base)
    assert result.problem is None
    # Some rows keep the old scales, which lose less although they clip a number.
    assert result.counts == {EQUAL: 48, HALF_STEP: 30, NEAREST: 24}
    # All signatures store a role the same way.
    assert {len(match.slots) for match in matches} == {1}
    old, new = sample.read_bytes(), out.read_bytes()
    assert len(old) == len(new)
    inside = np.zeros(len(old), bool)
    for region in regions.values():
        inside[region.begin : region.begin + region.size] = True
    changed = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
    assert changed.any() and not changed[~inside].any()


def test_signatures_that_had_other_scales_get_the_same(sample: Path, tmp_path: Path) -> None:
    """The role has two encodings in the plan, and one constant in the new file."""
    changes = scale_of(sample, "layers.1.down_proj", "decode", 5, 1.5)
    bundle, out = patched(tmp_path / "scale.litertlm", changes), tmp_path / "new.litertlm"
    base = base_with(tmp_path / "base", add_noise)
    with plan_insertion(base, bundle) as plan:
        assert [d.how for d in plan.encodings["layers.1.down_proj"]] == [REQUANTIZED, REQUANTIZED]
        plan.write(out)
    assert compare(out, base).problem is None


def test_what_reads_back_differently_is_not_kept(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale of one signature is wrong in the new file, as after a fault of the disk."""
    base = base_with(tmp_path / "base", add_noise)

    def write_spoiled(path: Path, *arguments: Any) -> None:
        write_copy(path, *arguments)
        with open(path, "r+b") as file:
            for at, scale in scale_of(path, "layers.1.down_proj", "verify", 0, 1.5).items():
                os.pwrite(file.fileno(), scale, at)

    monkeypatch.setattr("mtp_extract.insertion.plan.write_copy", write_spoiled)
    with pytest.raises(OutputError, match=r"layers\.1\.down_proj reads back differently"):
        insert_base(base, sample, tmp_path / "new.litertlm")
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
        insert_base(base_with(tmp_path / "base", change), sample, tmp_path / "new.litertlm")
    assert not list(tmp_path.glob("*.litertlm"))


def share_buffer(sample: Path, out: Path) -> Path:
    """Store layer 0's K norm and the V norm's ones in one buffer, as converters do with equal constants."""
    places = places_of(sample, "layers.0.k_norm")

    def share(model: Any) -> None:
        for _, tensor in places:
            graph = model.subgraphs[tensor.subgraph]
            data = {i: model.buffers[i].data for i in {neighbour.buffer for neighbour in graph.tensors}}
            ones = next(i for i, stored in data.items() if stored is not None and bytes(stored) == ONES)
            graph.tensors[tensor.index].buffer = ones

    return bases.edited_bundle(out, prefill_decode=share)


def test_what_is_shared_with_something_else_is_refused(sample: Path, tmp_path: Path) -> None:
    bundle, new = share_buffer(sample, tmp_path / "shared.litertlm"), tmp_path / "new.litertlm"
    with pytest.raises(UnsupportedError, match=r"layers\.0\.k_norm: .* which plays no role, in the same bytes"):
        insert_base(base_with(tmp_path / "base", add_noise), bundle, new)


def test_the_commands(sample: Path, base: Path, tmp_path: Path) -> None:
    process = run_here("inspect", sample, "--against", base, "--json")
    report = json.loads(process.stdout)
    assert process.returncode == 0
    assert report["verdicts"] == {"equal": 48, "within half a step": 54} and len(report["roles"]) == 102
    new, tuned_base = tmp_path / "new.litertlm", base_with(tmp_path / "base", add_noise)
    process = run_here("inspect", sample, "--against", tuned_base)
    assert process.returncode == 1 and "102 roles: " in process.stdout
    assert "are not the weights of" in process.stderr
    process = run_here("insert", tuned_base, sample, "-o", new)
    assert process.returncode == 0 and "requantized" in process.stdout and f"Wrote {new}" in process.stdout
    process = run_here("inspect", new, "--against", tuned_base)
    assert process.returncode == 0 and "102 roles: 48 equal, 30 within half a step, 24 nearest code" in process.stdout
    process = run_here("inspect", sample, "--against", sample)
    assert process.returncode == 1 and "found none" in process.stderr


def test_a_row_of_zeros_by_a_scale_far_too_large_is_another_weight(sample: Path, base: Path, tmp_path: Path) -> None:
    """No number is further from 0 than half a step, and the row is less than a tenth of the table."""
    changes = {}
    for model, tensor in places_of(sample, "embed_tokens"):
        columns, scale = tensor.shape[1], tensor.quantization.scale[5]
        changes[model.locate(tensor).begin + 5 * columns] = bytes(columns)
        at = model.region.begin + tensor.quantization.scales.start + 4 * 5
        changes[at] = np.float32(1000 * scale).tobytes()
    result = list_differences(compare(patched(tmp_path / "row.litertlm", changes), base))
    assert result == {"embed_tokens": "1 row or block loses more than 50%, and less with other scales"}


def test_a_row_without_a_scale_stays_zeros(sample: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Zeros are not divided by a scale of zero."""
    role, out = "layers.1.down_proj", tmp_path / "new.litertlm"
    places = places_of(sample, role)
    changes = {m.region.begin + t.quantization.scales.start + 4 * 5: bytes(4) for m, t in places}

    def change(weights: Weights) -> None:
        add_noise(weights)
        weights[f"{PREFIX}layers.1.mlp.down_proj.weight"][5] = 0

    base = base_with(tmp_path / "base", change)
    insert_base(base, patched(tmp_path / "zero.litertlm", changes), out)
    model, tensor = places[0]
    begin, columns = model.locate(tensor).begin, tensor.shape[1]
    assert out.read_bytes()[begin + 5 * columns : begin + 6 * columns] == bytes(columns)
    assert compare(out, base).problem is None and not recwarn.list


def test_a_head_that_is_not_tied_is_to_be_there(sample: Path, tmp_path: Path) -> None:
    """If the file with the head was not fetched, the embedding was used as the head."""
    base = base_with(tmp_path / "base", tie_word_embeddings=False)
    assert compare(sample, base).problem is None  # the configuration of the whole model ties the head
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"expected a tensor lm_head\.weight"):
        compare(sample, base)


def test_a_base_that_is_there_twice_is_refused(sample: Path, base: Path, tmp_path: Path) -> None:
    """One of two decoders was compared and written."""
    parts = parts_of(sample)
    twice = [part for part in parts if part.items.get("model_type") == "tf_lite_prefill_decode"]
    (tmp_path / "two.litertlm").write_bytes(bundle_of([*parts, *twice]))
    with pytest.raises(UnsupportedError, match="expected one section prefill_decode, found several"):
        compare(tmp_path / "two.litertlm", base)
