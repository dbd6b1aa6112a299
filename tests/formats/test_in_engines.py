"""Engines load what is written strictly and compute the stored function; packed formats have the same bits.

One drafter of each way to store and of each shape; ``scripts/test_in_engines.py`` tests that drafts are accepted.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.variant_files import variant
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from torch import Tensor, nn
from transformers import Gemma4AssistantForCausalLM
from transformers.integrations import gemma_quant

from mtp_extract import extract
from mtp_extract.architecture.roles import list_roles
from mtp_extract.checkpoint.stored import FileWeight
from mtp_extract.data import sample_base
from mtp_extract.formats import read_checkpoint

INTEGERS = (
    "jax_cap_none",
    "torch_odd_sizes",
    "torch_asymmetric",
    "torch_blockwise32",
    "torch_int2",
    "torch_folded_softcap",
)
"""One variant of each way to store matrices."""
SHAPED = ("jax_cap_none", "jax_kv_mixed", "jax_published_noscalar", "torch_odd_sizes", "twin_e2b_april", "twin_e4b_may")
"""One variant of each shape."""


def load(directory: Path, **options: Any) -> Any:
    """Load with transformers, in F32 by default; only the embedding, which a drafter never reads, may be missing."""
    model, info = Gemma4AssistantForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not info["unexpected_keys"] and not info["mismatched_keys"], info
    untied = not json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    assert all(untied and name.startswith("model.embed_tokens.") for name in info["missing_keys"]), info
    return model.eval()


def feed(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    text = model.config.text_config
    layers = {kind: text.per_layer_config[index] for index, kind in enumerate(text.layer_types)}
    shapes = {kind: (1, layer.num_key_value_heads, 10, layer.head_dim) for kind, layer in layers.items()}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "inputs_embeds": draw(1, 1, 2 * model.config.backbone_hidden_size),
        "position_ids": torch.tensor([[9]]),
        "shared_kv_states": {kind: (draw(*shape), draw(*shape)) for kind, shape in shapes.items()},
    }


def compare(model: Any, reference: Any) -> None:
    """Compare every matrix, to the bit except for a folded lm_head, and the outputs."""
    with torch.no_grad():
        inputs = feed(reference)
        # compressed-tensors unpacks a module when it is first used.
        actual, expected = model(**inputs), reference(**inputs)
        theirs = dict(model.named_modules())
        for name, module in reference.named_modules():
            if isinstance(module, nn.Linear):
                other, bits = theirs[name], 0 if name != "lm_head" else 2**-22
                packed = isinstance(other, gemma_quant.QuantizedLinear)
                weight = other._dequantize_weights() if packed else other.weight
                torch.testing.assert_close(weight, module.weight, rtol=bits, atol=0, msg=name)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SHAPED)
def test_transformers_loads_it_strictly(name: str, tmp_path: Path) -> None:
    extract(variant(name), tmp_path / "out")
    model = load(tmp_path / "out", dtype=torch.bfloat16)
    assert model.config.text_config.num_kv_shared_layers == 4


def test_what_is_loaded_is_what_is_stored(extracted: Path) -> None:
    state, stored = load(extracted).state_dict(), load_torch(extracted / "model.safetensors")
    assert set(state) == {*stored, "lm_head.weight"}
    for name, tensor in {**stored, "lm_head.weight": stored["model.embed_tokens.weight"]}.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Variant → transformers' model of its F32 extraction."""

    @functools.cache
    def of(name: str) -> Any:
        directory = tmp_path_factory.mktemp("f32") / name
        extract(variant(name), directory, dtype="f32")
        return load(directory)

    return of


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("format_", ["compressed-tensors", "compressed-tensors-sglang", "gemma"])
@pytest.mark.parametrize("name", INTEGERS)
def test_transformers_computes_the_same_with_integers(name: str, format_: str, tmp_path: Path, reference: Any) -> None:
    pytest.importorskip("compressed_tensors")
    extract(variant(name), tmp_path / "out", format=format_)
    compare(load(tmp_path / "out"), reference(name))


@pytest.mark.parametrize("name", ["jax_published", "torch_static8_mix48_kv8"])
def test_gemma_rounds_activations_as_the_graph_says(name: str, tmp_path: Path, reference: Any) -> None:
    """It agrees with the F32 extraction whose matrix inputs and outputs are rounded by the scales of the record."""
    static = extract(variant(name), tmp_path / "out", format="gemma").record["activations"]
    gemma, model = load(tmp_path / "out"), reference(name)

    def round_values(values: Tensor, how: dict[str, Any] | None) -> Tensor:
        return values if how is None else torch.clamp(torch.round(values / how["scale"]), -128, 127) * how["scale"]

    modules, hooks = dict(model.named_modules()), []
    for role in [role for role in list_roles(4) if role.name in static]:
        linear, (before, after) = modules[role.names["transformers"].removesuffix(".weight")], static[role.name]
        hooks += [
            linear.register_forward_pre_hook(lambda _, args, how=before: (round_values(args[0], how),)),
            linear.register_forward_hook(lambda _, args, out, how=after: round_values(out, how)),
        ]
    with torch.no_grad():
        inputs = feed(model)
        expected, theirs = model(**inputs), gemma(**inputs)
        for hook in hooks:
            hook.remove()
        plain = model(**inputs)
    torch.testing.assert_close(theirs.logits, expected.logits, rtol=0, atol=1e-4)
    assert float((plain.logits - expected.logits).abs().max()) > 1e-2


@pytest.mark.parametrize("name", INTEGERS)
def test_mlx_dequantizes_to_the_numbers(name: str, tmp_path: Path) -> None:
    """``scale · stored + bias`` in F32 rounds by a fraction of a step, where scale · code would not."""
    mlx = pytest.importorskip("mlx.core")
    extract(variant(name), tmp_path / "out", format="mlx")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    arrays = mlx.load(str(tmp_path / "out" / "model.safetensors"))
    original = read_checkpoint(tmp_path / "out")
    names = {tensor.name for tensor in original.tensors.values() if isinstance(tensor, FileWeight)}
    modules = {module: how for module, how in config.items() if isinstance(how, dict)}
    assert set(arrays) == names | {f"{m}.{part}" for m in modules for part in ("weight", "scales", "biases")}
    extract(variant(name), tmp_path / "f32", dtype="f32")
    expected = load_file(tmp_path / "f32" / "model.safetensors")
    assert modules
    for module, how in modules.items():
        weight, scales, biases = (arrays[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
        values = np.array(mlx.dequantize(weight, scales, biases, **how))
        steps = np.repeat(np.array(scales), how["group_size"], axis=1)
        assert (np.abs(values - expected[f"{module}.weight"]) <= steps * 2e-5).all()


def test_the_snippet_of_a_card_runs_as_somebody_pastes_it(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the base's id and the drafter's path are filled in."""
    directory = extract(sample, tmp_path / "drafter").directory
    card = (directory / "README.md").read_text(encoding="utf-8")
    snippet = next(block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "assistant_model" in block)
    pasted = snippet.replace("BASE_MODEL", str(sample_base())).replace("DRAFTER", str(directory))
    monkeypatch.chdir(tmp_path)

    exec(compile(pasted, "card", "exec"), {})

    assert capsys.readouterr().out.startswith("Name three rivers.")
