"""The formats that pack integers hold the bundle's codes, report what they cannot hold, and name damage; their
configurations are those that engines were seen to load."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from helpers.variant_files import STORED, variant
from safetensors.numpy import load_file, save_file

from mtp_extract import convert, extract
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import attach_codes
from mtp_extract.checkpoint.files import write_file
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.checkpoint.stored import FileWeight
from mtp_extract.checkpoint.weight import Steps, Weight, center_codes, has_exact_steps, wrap_codes
from mtp_extract.errors import MtpExtractError, NoCodesError, UnsupportedError
from mtp_extract.formats import load_format, read_checkpoint
from mtp_extract.litertlm.storage import Packing
from mtp_extract.pipeline.extraction import build_checkpoint

PACKED = ("mlx", "compressed-tensors", "compressed-tensors-sglang", "gemma")


@pytest.fixture(scope="module", params=STORED)
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A variant's bundle, and its F32 extraction with codes, from which every format can be converted."""
    directory = tmp_path_factory.mktemp("extracted") / request.param
    extract(variant(request.param), directory, dtype="f32", codes=True)
    return variant(request.param), directory


@pytest.fixture
def checkpoint(sample: Path) -> Iterator[Checkpoint]:
    with open_bundle(sample) as opened:
        yield build_checkpoint(opened.read_drafter())


def replace_weights(checkpoint: Checkpoint, config: dict[str, Any] | None = None, **tensors: Weight) -> Checkpoint:
    """Replace weights by role, with ``__`` for its dots."""
    named = {role.replace("__", "."): tensor for role, tensor in tensors.items()}
    weights = MappingProxyType({**checkpoint.tensors, **named})
    return replace(checkpoint, config=replace(checkpoint.config, **(config or {})), tensors=weights)


def draw_codes(shape: tuple[int, int], bits: int, block: int, per_tensor: bool = False) -> Weight:
    generator = np.random.default_rng(shape[0] + bits)
    codes = generator.integers(-(1 << bits - 1), 1 << bits - 1, shape).astype(np.int8)
    sizes = generator.uniform(0.01, 0.1, (shape[0], shape[1] // block)).astype(np.float32)
    if per_tensor:
        sizes[:] = sizes[0, 0]
    return wrap_codes(codes, Packing(bits, True), Steps.around_zero(block, sizes))


def write_and_read(format_: str, checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    for file in load_format(format_).plan(checkpoint, "codes").files:
        write_file(directory, file)
    return read_checkpoint(directory)


@pytest.mark.parametrize("format_", (*PACKED, "gguf"))
def test_codes_and_scales_are_the_files(coded: tuple[Path, Path], tmp_path: Path, format_: str) -> None:
    """GGUF files are read with the gguf package, too."""
    source, directory = coded
    convert(directory, tmp_path / "out", format=format_)
    converted, by_gguf = read_checkpoint(tmp_path / "out"), dict[str, Any]()
    for path in tmp_path.glob("out/*.gguf"):
        by_gguf = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    with open_bundle(source) as opened:
        original = build_checkpoint(opened.read_drafter())
        assert converted.config == replace(original.config, max_position_embeddings=131072)
        for role, shape in list_shapes(original.config).items():
            tensor, actual = original.complete().tensors[role.name], converted.tensors[role.name]
            assert (actual.scheme is not None) == holds(format_, role.name, tensor, shape)
            expected, most = tensor.array(), 0.0
            if actual.scheme is not None:
                mine, theirs = center_codes(tensor), center_codes(actual)
                np.testing.assert_array_equal(mine.codes(), theirs.codes(), err_msg=role.name)
                scales, exact_scales = (np.repeat(c.steps.size, c.steps.block, axis=1) for c in (theirs, mine))
                if format_ == "gguf":
                    exact_scales = exact_scales.astype(np.float16).astype(np.float32)
                    expected = mine.codes() * exact_scales
                np.testing.assert_array_equal(scales, exact_scales, err_msg=role.name)
                assert theirs.bits == (max(mine.bits, 4) if format_ == "gguf" else mine.bits)
                # The numbers differ only where a factor was divided out of the scales.
                most = 0 if has_exact_steps(tensor) else 2**-22
            np.testing.assert_allclose(actual.array(), expected, rtol=most, err_msg=role.name)
            if by_gguf:
                np.testing.assert_array_equal(by_gguf[role.names["gguf"]].reshape(shape), actual.array())


def holds(format_: str, role: str, tensor: Weight, shape: tuple[int, ...]) -> bool:
    """State again, without the package's tables, whether a format can hold the codes of a matrix."""
    try:
        block = center_codes(tensor).steps.block
    except NoCodesError:
        return False
    is_whole, is_grouped = block == shape[1], any(block % group == 0 for group in (32, 64, 128))
    fits = {"gemma": is_whole, "mlx": is_grouped, "gguf": block % 32 == 0, "compressed-tensors": is_whole or is_grouped}
    return fits.get(format_, (is_whole or is_grouped) and role != "lm_head")


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
    notes = " ".join(extract(variant(name), tmp_path / "out", format=format_).notes)
    assert re.search(expected, notes), notes


def test_targets_find_what_engines_fuse(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Targets match each module once under any prefix, and fused modules by their names in vLLM and SGLang if a gate is
    packed like what it is fused with."""
    mixed = replace_weights(checkpoint, layers__0__up_proj=draw_codes((128, 64), 8, 64))
    converted = write_and_read("compressed-tensors", mixed, tmp_path)
    assert [converted.tensors[f"layers.0.{name}_proj"].bits for name in ("up", "gate")] == [8, 4]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    groups = config["quantization_config"]["config_groups"].values()
    bits = {target.removeprefix("re:"): group["weights"]["num_bits"] for group in groups for target in group["targets"]}
    modules = {
        **{f"layers.1.mlp.{name}_proj": [4] for name in ("gate_up", "gate", "up")},
        **{f"layers.1.self_attn.{name}_proj": [8] for name in ("qkv", "q", "k", "v", "o")},
        **{"pre_projection": [8], "lm_head": [4], "embed_tokens": [], "layers.11.mlp.gate_proj": []},
        **{"layers.0.mlp.gate_up_proj": [], "layers.0.mlp.gate_proj": [4], "layers.0.mlp.up_proj": [8]},
    }
    for prefix in ("", "model.", "draft_model.", "draft_model.model."):
        for module, expected in modules.items():
            assert [n for pattern, n in bits.items() if re.match(pattern, prefix + module)] == expected, module


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("format_", PACKED)
def test_blocks_of_every_size(checkpoint: Checkpoint, tmp_path: Path, format_: str, block: int, bits: int) -> None:
    """Rows of 512 are stored in the longest group that fits, else as floats, with the same numbers."""
    new = {
        "pre_projection": draw_codes((64, 512), bits, block),
        "post_projection": draw_codes((256, 64), bits, 64, per_tensor=True),
    }
    coded = replace_weights(checkpoint, {"backbone_hidden_size": 256}, **new)
    how = load_format(format_).plan(coded, "codes").stored["pre_projection"].how
    converted = write_and_read(format_, coded, tmp_path)
    assert (how == "codes") == (block == 512 or (block >= 32 and format_ != "gemma"))
    if how == "codes":
        # MLX repeats a row's scale for each of its groups; reading merges them.
        assert converted.tensors["pre_projection"].steps.block == (min(block, 128) if block < 512 else 512)
    for role, tensor in new.items():
        np.testing.assert_array_equal(converted.tensors[role].array(), tensor.array())


def test_codes_beside_are_of_what_is_in_floats(tmp_path: Path) -> None:
    extract(variant("torch_asymmetric"), tmp_path / "out", format="mlx", codes=True)
    tensors = attach_codes(tmp_path / "out", read_checkpoint(tmp_path / "out").tensors)
    stored = {name.rpartition(".")[0] for name in load_file(tmp_path / "out" / "codes" / "codes.safetensors")}
    assert "pre_projection.weight" in stored and "model.embed_tokens.weight" not in stored
    assert all(tensor.scheme is not None for tensor in tensors.values() if len(tensor.shape) == 2)


@pytest.mark.parametrize("name", ["jax_published", "torch_static8_mix48_kv8"])
def test_gemma_holds_static_scales(tmp_path: Path, name: str) -> None:
    result = extract(variant(name), tmp_path / "out", format="gemma")
    assert any("Static scales of activations are held" in note for note in result.notes)
    activations = read_checkpoint(tmp_path / "out").activations
    with open_bundle(variant(name)) as opened:
        pairs = build_checkpoint(opened.read_drafter()).activations.items()
    expected = {role: pair for role, pair in pairs if any(pair)}
    assert set(activations) == set(expected) != set()
    for role, pair in expected.items():
        assert [a and np.float32(a.scale) for a in activations[role]] == [a and np.float32(a.scale) for a in pair]
    stored_scale = load_file(tmp_path / "out" / "model.safetensors")["lm_head.input_activation_scale"]
    assert stored_scale.shape == () and stored_scale == 0


def test_static_scales_that_are_not_around_zero(checkpoint: Checkpoint) -> None:
    odd, plain, wide = Activation("int8", 0.5, 3), Activation("int8", 0.25, 0), Activation("int16", 0.5, 0)
    pairs = {"pre_projection": (odd, plain), "post_projection": (plain, plain)}
    weights, wide_weights = (
        load_format("gemma").plan(replace(checkpoint, activations=activations), "codes").files[0]
        for activations in (pairs, {"lm_head": (wide, None)})
    )
    assert len(weights.notes) == 2 and "Activations of pre_projection are not rounded" in weights.notes[1]
    assert len(wide_weights.notes) == 1 and "Activations of lm_head are not rounded" in wide_weights.notes[0]
    scales = {t.name: float(next(iter(t.produce()))) for t in weights.tensors if "activation" in t.name}
    assert scales["pre_projection.input_activation_scale"] == 0
    assert scales["pre_projection.output_activation_scale"] == 0.25
    assert scales["post_projection.input_activation_scale"] == 0.25


@pytest.mark.parametrize("format_", PACKED)
def test_a_drafter_of_floats_is_refused(extracted: Path, format_: str) -> None:
    with pytest.raises(UnsupportedError, match=f"The {format_} format needs matrices of integers"):
        assert load_format(format_).plan(read_checkpoint(extracted), "codes").files


@pytest.mark.parametrize("format_", PACKED)
def test_an_ordered_head_of_floats_is_kept(
    checkpoint: Checkpoint, extracted: Path, tmp_path: Path, format_: str
) -> None:
    """An official assistant's ordered head is kept beside integer matrices; a head of integers is refused by name."""
    ordering, head = tmp_path / "ordering.safetensors", OrderedHeadConfig(num_centroids=8, top_k=2)
    save_file({"order": np.random.default_rng(0).permutation(512)}, ordering)
    new = {
        "ordered_head__centroids": draw_codes((8, 64), 4, 64),
        "ordered_head__token_ordering": FileWeight(ordering, read_safetensors(ordering)[0]["order"], "order"),
    }
    coded = replace_weights(checkpoint, {"ordered_head": head}, **new)
    if format_ != "compressed-tensors-sglang":
        with pytest.raises(UnsupportedError, match="lm_head: an ordered head picks rows of floats"):
            assert load_format(format_).plan(coded, "codes").files
    mixed = replace_weights(coded, lm_head=read_checkpoint(extracted).tensors["lm_head"])
    converted = write_and_read(format_, mixed, tmp_path / "out")
    assert converted.config.ordered_head == head
    order = converted.tensors["ordered_head.token_ordering"].indices()
    np.testing.assert_array_equal(order, load_file(ordering)["order"])
    assert converted.tensors["ordered_head.centroids"].scheme is not None
    for role in ("lm_head", "ordered_head.centroids"):
        np.testing.assert_array_equal(converted.tensors[role].array(), mixed.tensors[role].array())


@pytest.fixture(scope="module")
def sound(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Format → the sample in it, written once."""

    @functools.cache
    def of(format_: str) -> Path:
        directory = tmp_path_factory.mktemp("written") / format_
        extract(sample, directory, format=format_)
        return directory

    return of


CT, CT_GROUP = "compressed-tensors", "config_groups/group_0"
DAMAGES: list[tuple[str, str, Any, str]] = [
    ("mlx", "pre_projection.scales", None, "pre_projection.weight: expected shape"),
    ("mlx", "pre_projection.biases", None, "pre_projection.biases: expected a tensor"),
    (
        "mlx",
        "pre_projection.scales",
        lambda s: np.where(s == s.max(), np.nan, s),
        "pre_projection: expected finite scales and biases",
    ),
    ("mlx", "pre_projection.weight", lambda w: w.view(np.int32), "pre_projection.weight: expected U32"),
    ("mlx", "quantization/pre_projection/group_size", 64, "says quantization.*group_size 64"),
    ("mlx", "quantization/pre_projection/mode", "mxfp4", "says quantization.*mode mxfp4"),
    ("mlx", "/tie_word_embeddings", False, "says tie_word_embeddings False"),
    (CT, "lm_head.weight_scale", None, "lm_head.weight_packed: expected no such tensor"),
    (CT, "lm_head.weight_shape", lambda s: s + 1, "lm_head: expected weight_shape as"),
    (CT, f"{CT_GROUP}/weights/num_bits", 4, "group_0.weights.num_bits 4"),
    (CT, f"{CT_GROUP}/weights/symmetric", False, "weights.symmetric False"),
    (CT, f"{CT_GROUP}/input_activations", {"num_bits": 8}, "says .*input_activations"),
    (CT, f"{CT_GROUP}/targets", ["Linear"], r"targets \['Linear'\]"),
    (CT, "quantization_config/format", "nvfp4-pack-quantized", "format nvfp4-pack-quantized"),
    (CT, "quantization_config/kv_cache_scheme", {"num_bits": 8}, "says .*kv_cache_scheme"),
    (CT, "quantization_config/ignore", ["lm_head"], r"ignore \['lm_head'\]"),
    ("gemma", "lm_head.input_activation_scale", None, "input_activation_scale: expected a tensor"),
    ("gemma", "lm_head.output_activation_scale", lambda s: s * np.nan, "lm_head: expected a scale of activations that"),
    ("gemma", "pre_projection.weight", lambda w: w.view(np.uint8), "pre_projection.weight: expected I8"),
    ("gemma", "module_quant_configs/^lm_head$/num_bits", 2, "lm_head.*num_bits 2"),
]
"""Format; name of a tensor, or path of keys in the configuration; its new value, or a function of the old one, None to
remove it; the expected message."""


@pytest.mark.parametrize(("format_", "place", "value", "expected"), DAMAGES)
def test_damage_is_named(
    sound: Callable[[str], Path], tmp_path: Path, format_: str, place: str, value: Any, expected: str
) -> None:
    directory = Path(shutil.copytree(sound(format_), tmp_path / "copy"))
    config = json.loads((directory / "config.json").read_text())
    holder: dict[str, Any] = load_file(directory / "model.safetensors")
    tensors, (*way, key) = holder, place.split("/")
    if way:
        holder = config if way[0] in ("", *config) else config["quantization_config"]
        for step in filter(None, way):
            holder = holder[step]
    old = holder.pop(key, None)
    if value is not None:
        holder[key] = value(old) if callable(value) else value
    (directory / "config.json").write_text(json.dumps(config))
    ordered = {name: np.array(tensor, order="C") for name, tensor in tensors.items()}
    save_file(ordered, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(MtpExtractError, match=expected):
        for tensor in read_checkpoint(directory).tensors.values():
            tensor.array()


CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text())
"""Variant → ``config.json`` in transformers' format, and the additions of each packed format."""


def merge(document: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge ``more`` into ``document``, object by object."""
    inner = {key: merge(document[key], value) for key, value in more.items() if isinstance(document.get(key), dict)}
    return {**document, **more, **inner}


@pytest.mark.parametrize(("name", "format_"), [(name, kind) for name, formats in CONFIGS.items() for kind in formats])
def test_a_configuration_is_what_it_was(name: str, format_: str, tmp_path: Path) -> None:
    extract(variant(name), tmp_path / "out", format=format_)

    documents = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*config.json")}
    assert documents["config"] == merge(CONFIGS[name]["transformers"], CONFIGS[name][format_])
    drafts = {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "constant"}
    assert documents["generation_config"] == {"is_assistant": True, **drafts}
