"""The formats that pack the file's integers: what they hold is the file's, what not is said, damage is named."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from helpers.variant_files import REFUSED, VARIANTS, variant
from safetensors.numpy import load_file, save_file

from mtp_extract import extract
from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import Steps, Weight, has_exact_steps, of_codes, row_codes
from mtp_extract.errors import MtpExtractError, NoCodesError, UnsupportedError
from mtp_extract.formats import format_named, read_checkpoint
from mtp_extract.graph.roles import Activation
from mtp_extract.litertlm.storage import Packing
from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.pipeline.identity import verify_against

NAMES = sorted(VARIANTS.keys() - REFUSED)
PACKED = ("mlx", "compressed-tensors", "compressed-tensors-sglang", "gemma")
GROUPS = (32, 64, 128)


@pytest.fixture(scope="module", params=NAMES)
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A variant, and all that it holds: what is converted of it is what is extracted (``test_conversion``)."""
    directory = tmp_path_factory.mktemp("extracted") / request.param
    extract(variant(request.param), directory, dtype="f32", codes=True)
    return variant(request.param), directory


@pytest.mark.parametrize("format_", PACKED)
def test_codes_and_scales_are_the_files(coded: tuple[Path, Path], tmp_path: Path, format_: str) -> None:
    source, directory = coded
    convert(directory, tmp_path / "out", format=format_)
    found = read_checkpoint(tmp_path / "out")
    with open_bundle(source) as opened:
        original = checkpoint_of(opened.drafter())
        assert found.config == replace(original.config, max_position_embeddings=131072)
        for role, shape in shapes_of(original.config).items():
            if role.name not in original.tensors:
                continue
            tensor, there = original.tensors[role.name], found.tensors[role.name]
            if there.scheme is None:
                assert not holds(format_, role.name, tensor, shape)
                np.testing.assert_array_equal(there.array(), tensor.array(), err_msg=role.name)
                continue
            mine, theirs = row_codes(tensor), row_codes(there)
            np.testing.assert_array_equal(mine.codes(), theirs.codes(), err_msg=role.name)
            assert theirs.bits == mine.bits
            np.testing.assert_array_equal(
                *(np.repeat(codes.steps.size, codes.steps.block, axis=1) for codes in (theirs, mine))
            )
            # A rounding of what was folded into the scales, and else nothing, parts the numbers.
            np.testing.assert_allclose(
                there.array(), tensor.array(), rtol=0 if has_exact_steps(tensor) else 2**-22, err_msg=role.name
            )
        if format_ == "mlx":
            assert all(check.passed for check in verify_against(tmp_path / "out", opened))


def holds(format_: str, role: str, tensor: Any, shape: tuple[int, ...]) -> bool:
    """What a format has room for, written down anew."""
    try:
        codes = row_codes(tensor)
    except NoCodesError:
        return False
    if format_ == "gemma":
        return codes.steps.block == shape[1]
    if format_ == "mlx":
        return any(codes.steps.block % group == 0 for group in GROUPS)
    if format_ == "compressed-tensors-sglang" and role == "lm_head":
        return False
    return codes.steps.block == shape[1] or any(codes.steps.block % group == 0 for group in GROUPS)


@pytest.mark.parametrize(
    ("name", "format_", "expected"),
    [
        ("torch_asymmetric", "mlx", "its zero points are not 0"),
        ("torch_odd_sizes", "mlx", "groups of 32, 64 or 128; the compressed-tensors format keeps"),
        ("torch_blockwise32", "gemma", "blocks of 32 .* the compressed-tensors format keeps"),
        ("torch_folded_softcap", "mlx", "Rounded: lm_head, scales of codes to F32, by at most 6.0e-08"),
    ],
)
def test_what_is_not_held_is_said(tmp_path: Path, name: str, format_: str, expected: str) -> None:
    import re

    notes = " ".join(extract(variant(name), tmp_path / "out", format=format_).notes)
    assert re.search(expected, notes), notes


def test_an_engine_that_wants_it_otherwise(sample: Path, tmp_path: Path) -> None:
    extract(sample, tmp_path / "out", format="compressed-tensors-sglang")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is True
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == np.float32
    assert not any("lm_head" in name for name in stored)
    with pytest.raises(ValueError, match="quantize 'q3_k': expected"):
        extract(sample, tmp_path / "other", format="mlx", quantize="q3_k")


def test_targets_find_what_engines_fuse(sample: Path, tmp_path: Path) -> None:
    """Under any prefix, each module once; and by the names of vLLM's and SGLang's fused modules."""
    import re

    extract(sample, tmp_path / "out", format="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    groups = config["quantization_config"]["config_groups"].values()
    bits = {target.removeprefix("re:"): group["weights"]["num_bits"] for group in groups for target in group["targets"]}

    def found(module: str) -> list[int]:
        return [n for pattern, n in bits.items() if re.match(pattern, module)]

    for prefix in ("", "model.", "draft_model.", "draft_model.model."):
        assert found(f"{prefix}layers.1.mlp.gate_up_proj") == [4]
        assert found(f"{prefix}layers.1.mlp.gate_proj") == found(f"{prefix}layers.1.mlp.up_proj") == [4]
        for name in "qkv", "q", "k", "v", "o":
            assert found(f"{prefix}layers.1.self_attn.{name}_proj") == [8]
        assert found(f"{prefix}pre_projection") == [8]
        assert found(f"{prefix}lm_head") == [4]
        assert found(f"{prefix}embed_tokens") == found(f"{prefix}layers.11.mlp.gate_proj") == []


def test_a_gate_is_not_fused_with_what_is_packed_otherwise(sample: Path, tmp_path: Path) -> None:
    with open_bundle(sample) as opened:
        checkpoint = checkpoint_of(opened.drafter())
        tensors = {**checkpoint.tensors, "layers.0.up_proj": random_codes((128, 64), 8, 64)}
        write(format_named("compressed-tensors"), replace(checkpoint, tensors=tensors), tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert r"re:.*layers\\.0\\.mlp\\.gate_proj$" in text
    assert r"re:.*layers\\.1\\.mlp\\.(gate|gate_up)_proj$" in text
    found = read_checkpoint(tmp_path)
    assert found.tensors["layers.0.up_proj"].scheme.bits == 8  # type: ignore[union-attr]
    assert found.tensors["layers.0.gate_proj"].scheme.bits == 4  # type: ignore[union-attr]


def random_codes(shape: tuple[int, int], bits: int, block: int, per_tensor: bool = False) -> Weight:
    generator = np.random.default_rng(shape[0] + bits)
    codes = generator.integers(-(1 << bits - 1), 1 << bits - 1, shape).astype(np.int8)
    sizes = generator.uniform(0.01, 0.1, (shape[0], shape[1] // block)).astype(np.float32)
    if per_tensor:
        sizes[:] = sizes[0, 0]
    return of_codes(codes, Packing(bits, True), Steps.around_zero(block, sizes))


def write(format_: Any, checkpoint: Checkpoint, directory: Path) -> None:
    from mtp_extract.checkpoint.files import write_file

    for file in arrange(format_, checkpoint, "codes").files:
        write_file(directory, file)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("format_", PACKED)
def test_blocks_of_every_size(sample: Path, tmp_path: Path, format_: str, block: int, bits: int) -> None:
    """Rows of 512 in blocks: held in the longest group there is, else in floats; the numbers are the same."""
    with open_bundle(sample) as opened:
        known = checkpoint_of(opened.drafter())
        config = replace(known.config, backbone_hidden_size=256)
        tensors = dict(known.tensors)
        tensors["pre_projection"] = random_codes((64, 512), bits, block)
        tensors["post_projection"] = random_codes((256, 64), bits, 64, per_tensor=True)
        checkpoint = replace(known, config=config, tensors=tensors)
        write(format_named(format_), checkpoint, tmp_path)
        how = arrange(format_named(format_), checkpoint, "codes").kept["pre_projection"].how
    found = read_checkpoint(tmp_path)
    assert (how == "codes") == (block == 512 or (block >= 32 and format_ != "gemma"))
    if how == "codes":
        group = found.tensors["pre_projection"].steps.block  # type: ignore[union-attr]
        # MLX repeats a row's steps for each of its groups; read, they are one again.
        assert group == (min(block, 128) if block < 512 else 512)
    for role in ("pre_projection", "post_projection"):
        np.testing.assert_array_equal(found.tensors[role].array(), tensors[role].array())


def test_codes_beside_are_of_what_is_in_floats(tmp_path: Path) -> None:
    extract(variant("torch_asymmetric"), tmp_path / "out", format="mlx", codes=True)
    found = with_codes(tmp_path / "out", read_checkpoint(tmp_path / "out"))
    stored = {name.rpartition(".")[0] for name in load_file(tmp_path / "out" / "codes" / "codes.safetensors")}
    assert "pre_projection.weight" in stored
    assert "model.embed_tokens.weight" not in stored
    assert all(tensor.scheme is not None for tensor in found.tensors.values() if len(tensor.shape) == 2)


@pytest.mark.parametrize("name", ["jax_published", "torch_static8_mix48_kv8"])
def test_gemma_holds_static_scales(tmp_path: Path, name: str) -> None:
    result = extract(variant(name), tmp_path / "out", format="gemma")
    assert any("Static scales of activations are held" in note for note in result.notes)
    found = read_checkpoint(tmp_path / "out")
    with open_bundle(variant(name)) as opened:
        expected = {role: pair for role, pair in checkpoint_of(opened.drafter()).activations.items() if any(pair)}
    assert set(found.activations) == set(expected) != set()
    for role, pair in expected.items():
        assert [a and np.float32(a.scale) for a in found.activations[role]] == [a and np.float32(a.scale) for a in pair]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["lm_head.input_activation_scale"].shape == ()
    assert stored["lm_head.input_activation_scale"] == 0


def test_static_scales_that_are_not_around_zero(sample: Path) -> None:
    with open_bundle(sample) as opened:
        checkpoint = checkpoint_of(opened.drafter())
        odd, plain = Activation("int8", 0.5, 3), Activation("int8", 0.25, 0)
        pairs = {"pre_projection": (odd, plain), "post_projection": (plain, plain)}
        weights, *_ = arrange(format_named("gemma"), replace(checkpoint, activations=pairs), "codes").files
        wide = {"lm_head": (Activation("int16", 0.5, 0), None)}
        other, *_ = arrange(format_named("gemma"), replace(checkpoint, activations=wide), "codes").files
    assert len(weights.notes) == 2 and "Activations of pre_projection are not rounded" in weights.notes[1]
    assert len(other.notes) == 1 and "Activations of lm_head are not rounded" in other.notes[0]
    planned = {t.name: t for t in weights.tensors}
    made = {name: float(next(iter(planned[name].produce()))) for name in planned if "activation" in name}
    assert made["pre_projection.input_activation_scale"] == 0
    assert made["pre_projection.output_activation_scale"] == 0.25
    assert made["post_projection.input_activation_scale"] == 0.25


@pytest.mark.parametrize("format_", PACKED)
def test_a_drafter_of_floats_is_refused(extracted: Path, format_: str) -> None:
    floats = read_checkpoint(extracted)
    with pytest.raises(UnsupportedError, match=f"The {format_} format needs matrices of integers"):
        assert arrange(format_named(format_), floats, "codes").files


@pytest.mark.parametrize("format_", PACKED)
def test_an_ordered_head_of_floats_is_kept(sample: Path, tmp_path: Path, format_: str) -> None:
    """What an official assistant has, its other matrices made integers; a head of integers is refused by name."""
    ordering = tmp_path / "ordering.safetensors"
    save_file({"order": np.random.default_rng(0).permutation(512)}, ordering)
    with open_bundle(sample) as opened:
        checkpoint = ordered(checkpoint_of(opened.drafter()), ordering)
        if format_ != "compressed-tensors-sglang":
            with pytest.raises(UnsupportedError, match="lm_head: an ordered head picks rows of floats"):
                assert arrange(format_named(format_), checkpoint, "codes").files
        extract(sample, tmp_path / "floats", dtype="f32")
        tensors = {**checkpoint.tensors, "lm_head": read_checkpoint(tmp_path / "floats").tensors["lm_head"]}
        (tmp_path / "out").mkdir()
        write(format_named(format_), replace(checkpoint, tensors=tensors), tmp_path / "out")
    found = read_checkpoint(tmp_path / "out")
    assert found.config.ordered_head == OrderedHeadConfig(num_centroids=8, top_k=2)
    order = found.tensors["ordered_head.token_ordering"]
    np.testing.assert_array_equal(order.indices(), load_file(ordering)["order"])  # type: ignore[attr-defined]
    assert found.tensors["ordered_head.centroids"].scheme is not None
    for role in ("lm_head", "ordered_head.centroids"):
        np.testing.assert_array_equal(found.tensors[role].array(), tensors[role].array())


def ordered(checkpoint: Checkpoint, ordering: Path) -> Checkpoint:
    from mtp_extract.checkpoint.files import read_header

    tensors = {
        **checkpoint.tensors,
        "ordered_head.centroids": random_codes((8, 64), 4, 64),
        "ordered_head.token_ordering": Stored(ordering, read_header(ordering)["order"], "order"),
    }
    config = replace(checkpoint.config, ordered_head=OrderedHeadConfig(num_centroids=8, top_k=2))
    return replace(checkpoint, config=config, tensors=MappingProxyType(tensors))


@pytest.fixture(scope="module")
def written(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The sample in a format; each is written once."""

    @functools.cache
    def of(format_: str) -> Path:
        directory = tmp_path_factory.mktemp("written") / format_
        extract(sample, directory, format=format_)
        return directory

    return of


Damage = Callable[[dict[str, Any], dict[str, np.ndarray]], None]
"""Changes the configuration and the tensors."""


def section(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("quantization") or config["quantization_config"]
    return found


def group(config: dict[str, Any], index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = section(config)["config_groups"][f"group_{index}"]
    return found


def without(name: str) -> Damage:
    return lambda config, tensors: void(tensors.pop(name))


def void(_: object) -> None:
    pass


def put(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return lambda config, tensors: tensors.update({name: np.array(value(tensors[name]), order="C")})


def nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[1] = np.nan
    return array


DAMAGES: dict[str, dict[str, tuple[Damage, str]]] = {
    "mlx": {
        "no scales": (without("pre_projection.scales"), "pre_projection.weight: expected shape"),
        "no biases": (without("pre_projection.biases"), "pre_projection.biases: expected a tensor"),
        "NaN": (put("pre_projection.scales", nan), "pre_projection: expected scales that are finite"),
        "negative": (put("pre_projection.scales", np.negative), "pre_projection: expected scales that are finite"),
        "biases": (
            put("pre_projection.biases", lambda b: b * 2),
            "expected biases as its shape",
        ),
        "shape": (put("pre_projection.weight", lambda w: w[:, :-1]), "pre_projection.weight: expected shape"),
        "type": (put("pre_projection.weight", lambda w: w.view(np.int32)), "pre_projection.weight: expected U32"),
        "group": (lambda c, t: section(c)["pre_projection"].update(group_size=64), "pre_projection.group_size 64"),
        "bits": (lambda c, t: section(c)["pre_projection"].update(bits=4), "says quantization.pre_projection.bits 4"),
        "mode": (lambda c, t: section(c)["pre_projection"].update(mode="mxfp4"), "pre_projection.mode mxfp4"),
        "stranger": (lambda c, t: section(c).update(vision={"bits": 4, "group_size": 64}), "says quantization.vision"),
        "untied": (lambda c, t: untie(c, False), "says tie_word_embeddings False"),
    },
    "compressed-tensors": {
        "no scales": (without("lm_head.weight_scale"), "lm_head.weight_packed: expected no such tensor"),
        "NaN": (put("lm_head.weight_scale", nan), "lm_head: expected scales that are finite"),
        "its own shape": (put("lm_head.weight_shape", lambda s: s + 1), "lm_head: expected weight_shape as"),
        "bits": (lambda c, t: group(c, 0)["weights"].update(num_bits=4), "group_0.weights.num_bits 4"),
        "asymmetric": (lambda c, t: group(c)["weights"].update(symmetric=False), "weights.symmetric False"),
        "group": (lambda c, t: group(c)["weights"].update(strategy="group", group_size=32), "weights.group_size 32"),
        "activations": (lambda c, t: group(c).update(input_activations={"num_bits": 8}), "says .*input_activations"),
        "format": (lambda c, t: section(c).update(format="nvfp4-pack-quantized"), "format nvfp4-pack-quantized"),
        "cache": (lambda c, t: section(c).update(kv_cache_scheme={"num_bits": 8}), "says .*kv_cache_scheme"),
        "ignored": (lambda c, t: section(c).update(ignore=["lm_head"]), r"ignore \['lm_head'\]"),
        "targets": (lambda c, t: group(c).update(targets=["Linear"]), r"targets \['Linear'\]"),
        "twice": (lambda c, t: group(c, 1)["targets"].append(group(c)["targets"][0]), "group_1.targets"),
        "tied": (lambda c, t: untie(c, True), "says tie_word_embeddings True"),
    },
    "gemma": {
        "no scales": (without("lm_head.weight_scale"), "lm_head.weight: expected no such"),
        "no activation scale": (without("lm_head.input_activation_scale"), "input_activation_scale: expected a tensor"),
        "NaN": (put("lm_head.weight_scale", nan), "lm_head: expected scales that are finite"),
        "NaN of an activation": (
            put("lm_head.output_activation_scale", lambda s: np.array(np.nan, np.float32)),
            "lm_head: expected a scale of activations that is finite",
        ),
        "type": (put("pre_projection.weight", lambda w: w.view(np.uint8)), "pre_projection.weight: expected I8"),
        "bits": (lambda c, t: configs(c)["^lm_head$"].update(num_bits=2), "lm_head.*num_bits 2"),
        "stranger": (lambda c, t: configs(c).update({".*": {"num_bits": 4}}), "says .*module_quant_configs"),
        "embeddings": (lambda c, t: section(c).update(quantize_embeddings=False), "quantize_embeddings False"),
        "default skips": (lambda c, t: void(section(c).pop("modules_to_not_convert")), "modules_to_not_convert"),
    },
}


def untie(config: dict[str, Any], tied: bool) -> None:
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied


def configs(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = section(config)["module_quant_configs"]
    return found


@pytest.mark.parametrize(("format_", "damage"), [(f, name) for f, damages in DAMAGES.items() for name in damages])
def test_damage_is_named(written: Callable[[str], Path], tmp_path: Path, format_: str, damage: str) -> None:
    directory = Path(shutil.copytree(written(format_), tmp_path / "copy"))
    change, expected = DAMAGES[format_][damage]
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    change(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(MtpExtractError, match=expected):
        for tensor in read_checkpoint(directory).tensors.values():
            tensor.array()
