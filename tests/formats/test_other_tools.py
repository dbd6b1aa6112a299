"""Directories and files of other tools: sound ones are read, others are refused with a name for what they are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from helpers.random_assistants import GEOMETRIES, random_assistant
from helpers.random_heads import edit, head_config, random_head, write_head
from safetensors.torch import load_file, save_file

from mtp_extract import convert, extract
from mtp_extract.errors import CheckpointError
from mtp_extract.formats import load_format, read_checkpoint
from mtp_extract.pipeline.check import CheckpointDirectory

INDEX = "model.safetensors.index.json"


def split_weights(directory: Path, count: int) -> dict[str, str]:
    """Split the weights into ``count`` files, named as by NeMo and transformers; return tensor → file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, directory / file, {"format": "pt"})
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A random assistant, saved by transformers."""
    random_assistant(GEOMETRIES["dense"]).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_googles_12b_assistant_is_read(tmp_path: Path) -> None:
    """Its class writes ``gemma4_unified_text`` and no sizes of per-layer embeddings."""
    config = GEOMETRIES["k-eq-v"].config()
    text = {key: value for key, value in config.pop("text_config").items() if "per_layer" not in key}
    config |= {"model_type": "gemma4_unified_assistant", "text_config": text | {"model_type": "gemma4_unified_text"}}
    model = transformers.Gemma4UnifiedAssistantForCausalLM(transformers.AutoConfig.for_model(**config)).eval()
    model.save_pretrained(tmp_path / "12b")
    assert json.loads((tmp_path / "12b/config.json").read_text())["text_config"]["model_type"] == "gemma4_unified_text"
    drafter = CheckpointDirectory.of(tmp_path / "12b")
    assert drafter.checkpoint.notes == ()
    kv = drafter.checkpoint.mtp.kv_layers
    assert (kv["sliding_attention"].num_kv_heads, kv["full_attention"].num_kv_heads) == (4, 1)
    stored = load_file(tmp_path / "12b/model.safetensors")
    assert np.array_equal(drafter.checkpoint.tensors["post_projection"].array(), stored["post_projection.weight"])
    convert(tmp_path / "12b", tmp_path / "gguf", format="gguf")
    assert read_checkpoint(tmp_path / "gguf").mtp.kv_layers == kv


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("has_index", [True, False])
def test_weights_in_parts_are_read(saved: Path, tmp_path: Path, count: int, has_index: bool) -> None:
    expected = read_checkpoint(shutil.copytree(saved, tmp_path / "expected"))
    weight_map = split_weights(saved, count)
    if has_index:
        write_index(saved, weight_map)
    drafter = CheckpointDirectory.of(saved)
    assert drafter.checkpoint.notes == () and drafter.sums.keys() == set(weight_map.values())
    for role, weight in expected.tensors.items():
        assert np.array_equal(drafter.checkpoint.tensors[role].array(), weight.array()), role


def test_parts_that_transformers_saves_are_read(tmp_path: Path) -> None:
    random_assistant(GEOMETRIES["ordered"]).save_pretrained(tmp_path, max_shard_size=4000)
    assert (tmp_path / INDEX).is_file() and len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert CheckpointDirectory.of(tmp_path).checkpoint.notes == ()


def test_an_index_beside_one_file_is_read_or_passed_over(saved: Path) -> None:
    """MLX's converters always write one; another that names other files is what some engines would go by."""
    write_index(saved, dict.fromkeys(load_file(saved / "model.safetensors"), "model.safetensors"))
    assert CheckpointDirectory.of(saved).checkpoint.notes == ()
    write_index(saved, {"post_projection.weight": "other.safetensors"})
    assert CheckpointDirectory.of(saved).checkpoint.notes == (f"Passed over: {INDEX} names another file.",)


def _swap_files(directory: Path, weight_map: dict[str, str]) -> object:
    first, second = dict.fromkeys(weight_map.values())
    return {name: second if file == first else first for name, file in weight_map.items()}


def _store_twice(directory: Path, weight_map: dict[str, str]) -> object:
    first, second = (directory / file for file in dict.fromkeys(weight_map.values()))
    save_file(load_file(first) | load_file(second), second)
    return weight_map


HOSTILE: dict[str, tuple[Callable[[Path, dict[str, str]], object], str]] = {
    "another directory": (lambda d, m: {**m, "x": "../elsewhere.safetensors"}, r"found \.\./elsewhere"),
    "an absolute path": (lambda d, m: {**m, "x": "/etc/x.safetensors"}, "found /etc/x"),
    "no text": (lambda d, m: {**m, "x": 3}, "found 3"),
    "no map": (lambda d, m: None, "found None"),
    "another kind of file": (lambda d, m: {**m, "x": "config.json"}, r"found config\.json"),
    "a file that is not there": (lambda d, m: {**m, "x": "gone.safetensors"}, r"names gone\.safetensors, which is not"),
    "a tensor that is not there": (lambda d, m: {**m, "x": next(iter(m.values()))}, "x is not in the file"),
    "files exchanged": (_swap_files, "is not in the file that it names"),
    "a tensor in two files": (_store_twice, "as another part does"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_index_that_lies_is_refused_in_one_line(saved: Path, case: str) -> None:
    change, message = HOSTILE[case]
    write_index(saved, change(saved, split_weights(saved, 2)))
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointDirectory.of(saved)
    assert str(saved) in str(caught.value) and str(caught.value).isprintable()


def test_a_part_that_is_missing_is_named_by_its_tensors(saved: Path) -> None:
    weight_map = split_weights(saved, 3)
    missing = "model-00002-of-00003.safetensors"
    (saved / missing).unlink()
    first = min(name for name, file in weight_map.items() if file == missing)
    with pytest.raises(CheckpointError, match=f"{re.escape(first)}: expected a tensor, found none"):
        CheckpointDirectory.of(saved)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_that_mlx_made_itself_are_read_as_its_numbers(sample: Path, tmp_path: Path, bits: int) -> None:
    """As MLX's converters write them: BF16 scales and biases of its own, and one entry for all modules."""
    mx = pytest.importorskip("mlx.core")
    extract(sample, tmp_path / "d")
    convert(tmp_path / "d", tmp_path / "mlx", format="mlx", quantize="int4")
    for name in ("extraction.json", "README.md"):
        (tmp_path / "mlx" / name).unlink()
    config = json.loads((tmp_path / "mlx/config.json").read_text())
    packed = [name for name, entry in config["quantization"].items() if isinstance(entry, dict)]
    entry = {"group_size": 64, "bits": bits}
    edit(tmp_path / "mlx", quantization=entry, quantization_config=entry)
    tensors, expected = mx.load(str(tmp_path / "d/model.safetensors")), dict[str, Any]()
    for module in packed:
        parts = mx.quantize(tensors[f"{module}.weight"], group_size=64, bits=bits)
        tensors |= dict(zip([f"{module}.weight", f"{module}.scales", f"{module}.biases"], parts, strict=True))
        wide = [part.astype(mx.float32) for part in parts[1:]]
        expected[module] = np.array(mx.dequantize(parts[0], *wide, group_size=64, bits=bits))
    mx.save_safetensors(str(tmp_path / "mlx/model.safetensors"), tensors, {"format": "mlx"})
    write_index(tmp_path / "mlx", dict.fromkeys(tensors, "model.safetensors"))
    assert str(tensors[f"{packed[0]}.scales"].dtype) == "mlx.core.bfloat16"
    checkpoint = CheckpointDirectory.of(tmp_path / "mlx").checkpoint
    assert checkpoint.notes == ()
    for role, module in (("lm_head", "model.embed_tokens"), ("layers.1.gate_proj", "model.layers.1.mlp.gate_proj")):
        np.testing.assert_allclose(checkpoint.tensors[role].array(), expected[module], rtol=2e-6, atol=1e-7)
    entry["mode"] = "mxfp4"
    edit(tmp_path / "mlx", quantization=entry, quantization_config=entry)
    with pytest.raises(CheckpointError, match=r"mode mxfp4"):
        CheckpointDirectory.of(tmp_path / "mlx")


def test_fp8_is_called_so(saved: Path) -> None:
    """By its config, or by its tensors if the config says nothing."""
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    scale = {f"{name}_scale": torch.ones(1)}
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found F8_E4M3, which is not read\. Ask for the drafter in such"):
        CheckpointDirectory.of(saved)
    save_file(tensors | scale | {name: tensors[name].to(torch.float8_e4m3fn)}, saved / "model.safetensors")
    edit(saved, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(CheckpointError, match=r"'fp8'.*another method; it is not read\. Ask for floats in BF16"):
        CheckpointDirectory.of(saved)


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_1", "Q5_1"])
def test_a_type_of_gguf_that_is_not_read_is_called_by_its_name(sample: Path, tmp_path: Path, kind: str) -> None:
    convert_to_gguf(sample, tmp_path, "gemma4-assistant", GGMLQuantizationType[kind])
    refusal = rf"blk\.0\.ffn_up\.weight: .*found {kind} \(and 3 tensors more\), which is not read"
    with pytest.raises(CheckpointError, match=refusal):
        CheckpointDirectory.of(tmp_path / "x.gguf")


@pytest.mark.parametrize("arch", ["gemma4_assistant", "gemma4_mtp"])
def test_a_drafter_for_another_program_is_called_so(sample: Path, tmp_path: Path, arch: str) -> None:
    convert_to_gguf(sample, tmp_path, arch, GGMLQuantizationType.Q8_0)
    with pytest.raises(CheckpointError, match=rf"another program than llama.cpp \(general.architecture {arch}\).*Ask"):
        CheckpointDirectory.of(tmp_path / "x.gguf")


def convert_to_gguf(sample: Path, folder: Path, arch: str, kind: GGMLQuantizationType) -> None:
    """Write the sample's drafter with gguf-py; the ``ffn_up`` matrices have the dtype ``kind``."""
    extract(sample, folder / "d")
    checkpoint = read_checkpoint(folder / "d")
    (file,) = load_format("gguf").plan(checkpoint, "f32").files
    writer = GGUFWriter(folder / "x.gguf", arch)
    for key, value in file.metadata.items():
        if key == "general.architecture" or key.startswith("mtp_extract."):
            continue
        kinds = {list: "array", str: "string", float: "float32", int: "uint32"}
        getattr(writer, f"add_{kinds[type(value)]}")(key.replace("gemma4-assistant", arch), value)
    for tensor in file.tensors:
        numbers = np.concatenate([np.asarray(part) for part in tensor.produce()]).reshape(tensor.shape)
        if "ffn_up" in tensor.name:
            writer.add_tensor(tensor.name, quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_head_with_a_gelu_is_called_so_and_nobody_is_told_to_change_it(tmp_path: Path) -> None:
    """NeMo Automodel trains such heads for Gemma 4, and writes them in parts."""
    directory = write_head(tmp_path / "d", random_head(head_config()), "eagle3")
    write_index(directory, split_weights(directory, 1))
    edit(directory, architectures=["LlamaEagle3DraftModel"])
    assert CheckpointDirectory.of(directory).checkpoint.notes == (
        "Passed over: config.json says architectures ['LlamaEagle3DraftModel'].",
    )
    edit(directory, hidden_act="gelu_pytorch_tanh")
    refusal = r"hidden_act gelu_pytorch_tanh: a gate that is no SiLU.*with silu"
    with pytest.raises(CheckpointError, match=refusal) as caught:
        CheckpointDirectory.of(directory)
    assert "ndo" not in str(caught.value)
