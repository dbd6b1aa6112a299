"""Does the sample hold its base? Yes; and whatever is planted in either is named, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.bases import PREFIX, Weights, base_with, broken, fewer, more, patched, places_of, scalar, scale_of

from mtp_extract.bundle import open_bundle
from mtp_extract.errors import CheckpointError, MtpExtractError, PairError, UnsupportedError
from mtp_extract.insertion.comparison import (
    DIFFERENT,
    EQUAL,
    HALF_STEP,
    NEAREST,
    NOT_FOUND,
    BaseComparison,
    compare_base,
)

LAYER = f"{PREFIX}layers.0."
TABLE, TIED = f"{PREFIX}embed_tokens.weight", ("embed_tokens", "lm_head")


def compared(bundle: Path, base: Path) -> BaseComparison:
    with open_bundle(bundle) as opened:
        return compare_base(opened, base)


def apart(found: BaseComparison) -> dict[str, str]:
    """Roles that differ or are not there, with the reason."""
    return {role.role: role.why or "" for role in found.roles if role.verdict in (DIFFERENT, NOT_FOUND)}


def test_the_sample_holds_its_base(sample: Path, base: Path) -> None:
    found = compared(sample, base)
    assert (len(found.roles), found.layers) == (102, 6)
    assert found.problem is None
    by_role = {role.role: role for role in found.roles}
    assert {role.verdict for role in found.roles if len(role.shape) == 1} == {EQUAL}
    assert {role.verdict for role in found.roles if len(role.shape) == 2} == {HALF_STEP}
    assert by_role["lm_head"].tensor == by_role["embed_tokens"].tensor == TABLE
    assert all(role.steps is None or 0.4 < role.steps < 0.5001 for role in found.roles)
    # Layers 4 and 5 read the caches of others.
    owners = {role.role.split(".")[1] for role in found.roles if role.role.endswith(".k_proj")}
    assert owners == {"0", "1", "2", "3"}


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_rounded_and_sharded_base_is_the_same_one(sample: Path, tmp_path: Path, dtype: str) -> None:
    found = compared(sample, base_with(tmp_path / "base", dtype=dtype, shards=3))
    assert found.problem is None
    assert len(found.roles) == 102
    assert {role.verdict for role in found.roles if len(role.shape) == 1} == {EQUAL}
    matrices = [role for role in found.roles if len(role.shape) == 2]
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
    found = compared(patched(tmp_path / "b.litertlm", {at: bytes([(code + 2) % 256])}), base)
    assert list(apart(found)) == [role]
    assert apart(found)[role].startswith("1 weights differ, by up to ")
    assert found.problem is not None and role in str(found.problem)


@pytest.mark.parametrize("signature", ["prefill_32", "decode", "verify"])
def test_one_scale_of_one_signature_is_named(sample: Path, base: Path, tmp_path: Path, signature: str) -> None:
    def found(factor: float) -> BaseComparison:
        other = scale_of(sample, "layers.1.down_proj", signature, 5, factor)
        return compared(patched(tmp_path / f"{factor}.litertlm", other), base)

    assert list(apart(found(1.5))) == ["layers.1.down_proj"]
    # So little changes no weight by more than half a step.
    assert not apart(found(1.00001))


def test_codes_that_are_nearest_by_scales_far_too_large_are_another_weight(
    sample: Path, base: Path, tmp_path: Path
) -> None:
    """All of them are 0, and no number is further from that than half a step."""
    role = "layers.1.down_proj"
    changes = {}
    for model, tensor in places_of(sample, role):
        data, quantization = model.locate(tensor), tensor.quantization
        changes[data.begin] = bytes(data.size)
        scales = (quantization.scale * np.float32(1000)).astype("<f4")
        changes[model.region.begin + quantization.scales.start] = scales.tobytes()
    found = apart(compared(patched(tmp_path / "zeros.litertlm", changes), base))
    assert found == {role: "nearest codes of 8 bits: loses 100%, and with other scales 1%"}


def test_the_lowest_code_of_a_type_is_no_wrong_one(sample: Path, tmp_path: Path) -> None:
    """Quantizers leave −128 out; where it is what is wanted, it is right, beside a number beyond the last code."""
    model, tensor = places_of(sample, "layers.0.up_proj")[0]
    scale = tensor.quantization.scale[0]

    def change(weights: Weights) -> None:
        weights[f"{LAYER}mlp.up_proj.weight"][0, :2] = -128 * scale, 200 * scale

    bundle = patched(tmp_path / "b.litertlm", {model.locate(tensor).begin: bytes([0x80, 0x7F])})
    found = compared(bundle, base_with(tmp_path / "base", change))
    verdicts = {role.role: (role.verdict, role.why) for role in found.roles}
    assert verdicts["layers.0.up_proj"] == (NEAREST, "1 weights lie beyond the last code of their row")


def made(name: str, change: Callable[[np.ndarray], np.ndarray], source: str = "") -> Callable[[Weights], None]:
    """Puts in the tensor ``name``, made of the one that is there as ``source``."""
    return lambda weights: weights.update({name: change(weights[source or name])})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            made(f"{LAYER}input_layernorm.weight", lambda norm: norm - 1),
            {"layers.0.pre_attention_norm": "weights differ"},
        ),
        (made(f"{LAYER}self_attn.k_proj.weight", np.transpose), {"layers.0.k_proj": "weights differ, by up to"}),
        (scalar, {"layers.0.layer_scalar": "1 weights differ"}),
        (made(TABLE, lambda table: table + np.eye(512, 1, -7, dtype="f4")), dict.fromkeys(TIED, "64 weights differ")),
        (made("lm_head.weight", lambda table: table * np.float32(1.5), TABLE), {"lm_head": "weights differ, by up to"}),
        (broken, {"layers.0.up_proj": "weights differ"}),
        (fewer, {"layers.0.v_proj": "the checkpoint has no such tensor"}),
        # As its configuration does not say.
        (
            made(TABLE, lambda table: np.concatenate([table, table])),
            dict.fromkeys(TIED, "the checkpoint's is [1024, 64], the bundle's [512, 64]"),
        ),
        (more, {f"{LAYER}self_attn.v_norm.weight": "the bundle has no place for this tensor"}),
    ],
)
def test_what_is_planted_in_the_checkpoint_is_named(
    sample: Path, tmp_path: Path, change: Callable[[Weights], None], expected: dict[str, str]
) -> None:
    found = apart(compared(sample, base_with(tmp_path / "base", change)))
    assert set(found) == set(expected)
    assert all(reason in found[role] for role, reason in expected.items())


def test_kv_of_layers_that_share_another_s_are_not_missed(sample: Path, tmp_path: Path) -> None:
    """The published checkpoints have them; transformers does not load them."""

    unused = f"{PREFIX}layers.4.self_attn.k_proj.weight"
    others = {unused: np.zeros((64, 64), np.float32), "model.vision_tower.patch.weight": np.zeros(3, np.float32)}
    found = compared(sample, base_with(tmp_path / "base", lambda weights: weights.update(others)))
    assert found.problem is None
    assert found.not_compared == {"vision_tower": 1, "K and V that layers share": 1}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model_type": "llama"}, CheckpointError, "expected model_type gemma4"),
        ({"vocab_size": 1024}, PairError, "vocab_size 1024 instead of 512"),
        ({"hidden_size": 128}, PairError, "hidden_size 128 instead of 64"),
        ({"num_hidden_layers": 7}, PairError, "num_hidden_layers 7 instead of 6"),
        ({"num_hidden_layers": "six"}, CheckpointError, "num_hidden_layers"),
        ({"rms_norm_eps": 1e-5}, PairError, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, PairError, "rms_norm_eps"),
        ({"final_logit_softcapping": "30"}, PairError, "final_logit_softcapping 30 instead of 30.0"),
        ({"final_logit_softcapping": None}, PairError, "final_logit_softcapping"),
    ],
)
def test_another_model_is_refused(
    sample: Path, tmp_path: Path, config: dict[str, Any], error: type[MtpExtractError], words: str
) -> None:
    with pytest.raises(error, match=words):
        compared(sample, base_with(tmp_path / "base", **config))


def test_weights_in_integers_are_refused(sample: Path, tmp_path: Path) -> None:
    packed = made(f"{LAYER}mlp.up_proj.weight", lambda weight: weight.astype(np.uint8))
    with pytest.raises(UnsupportedError, match="expected weights in floats, found U8"):
        compared(sample, base_with(tmp_path / "base", packed))


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
        compared(sample, path.parent)


def test_a_checkpoint_in_several_files_is_all_there_and_once(sample: Path, tmp_path: Path) -> None:
    one, two = (base_with(tmp_path / f"{shards}", shards=shards) for shards in (3, 2))
    (one / "model-00003-of-00003.safetensors").unlink()
    assert set(apart(compared(sample, one)).values()) == {"the checkpoint has no such tensor"}
    (two / "model.safetensors").write_bytes((two / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"expected tensors in one file each, found .* in two"):
        compared(sample, two)
