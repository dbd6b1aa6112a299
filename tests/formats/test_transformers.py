"""The checkpoint in transformers: strict loading, and the same function as the stored weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.variant_files import HERE, REFUSED, VARIANTS, variant
from transformers import Gemma4AssistantForCausalLM

from mtp_extract import extract


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Gemma4AssistantForCausalLM:
    model, info = Gemma4AssistantForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - REFUSED))
def test_loads_strictly(name: str, tmp_path: Path) -> None:
    extract(variant(name), tmp_path / "out")
    model = load(tmp_path / "out", torch.bfloat16)
    assert model.config.text_config.num_kv_shared_layers == 4


def test_values_arrive(extracted: Path) -> None:
    from safetensors.torch import load_file

    state = load(extracted).state_dict()
    stored = load_file(extracted / "model.safetensors")
    assert set(state) == {*stored, "lm_head.weight"}
    for name, tensor in stored.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    torch.testing.assert_close(state["lm_head.weight"], stored["model.embed_tokens.weight"], rtol=0, atol=0)


def test_forward_equals_the_stored_function(extracted: Path) -> None:
    """The truth was computed by transformers over weights dequantized from the quantizer's own integers."""
    model = load(extracted)
    samples = np.load(HERE / "truth" / "e2e_jax_mix48.io.npz")
    cap = model.config.text_config.final_logit_softcapping
    assert cap == 30.0
    for index in range(4):
        given = {k.split("/")[-1]: torch.from_numpy(samples[k]) for k in samples.files if k.startswith(f"{index}/in/")}
        position = int(samples[f"{index}/pos"])
        # The base's sliding cache holds the last 16 positions, which is what the shard's mask lets through.
        # (transformers' own mask is wider by one: it takes the window as an inclusive distance.)
        seen = {"sliding_attention": (2, slice(max(0, position - 15), position + 1))}
        seen["full_attention"] = (3, slice(0, position + 1))
        shared = {
            kind: (given[f"kv_cache_k_{n}"][:, :, slots], given[f"kv_cache_v_{n}"].transpose(2, 3)[:, :, slots])
            for kind, (n, slots) in seen.items()
        }
        with torch.no_grad():
            output = model(
                inputs_embeds=given["activations"], position_ids=torch.tensor([[position]]), shared_kv_states=shared
            )
        # transformers leaves the soft cap to the sampler; the shard applies it.
        logits = cap * torch.tanh(output.logits / cap)
        expected = torch.from_numpy(samples[f"{index}/torch_dequant/logits"])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        projected = torch.from_numpy(samples[f"{index}/torch_dequant/projected_activations"])
        torch.testing.assert_close(output.last_hidden_state, projected, rtol=0, atol=1e-5)


def test_config_is_what_other_readers_expect(tmp_path: Path) -> None:
    """The fields that llama.cpp's converter, vLLM and SGLang read, as in the official configurations."""
    extract(variant("jax_published"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["Gemma4AssistantForCausalLM"]
    assert config["model_type"] == "gemma4_assistant"
    assert config["backbone_hidden_size"] == 64
    assert config["use_ordered_embeddings"] is False
    assert config["tie_word_embeddings"] is text["tie_word_embeddings"] is True
    assert (text["head_dim"], text["global_head_dim"]) == (32, 64)
    assert text["num_kv_shared_layers"] == text["num_hidden_layers"] == 4
    assert text["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert text["rope_parameters"]["full_attention"] == {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {
        "is_assistant": True,
        "num_assistant_tokens": 6,
        "num_assistant_tokens_schedule": "constant",
    }
    extract(variant("jax_kv_mixed"), tmp_path / "mixed")
    mixed = json.loads((tmp_path / "mixed" / "config.json").read_text())["text_config"]
    assert (mixed["num_key_value_heads"], mixed["num_global_key_value_heads"], mixed["attention_k_eq_v"]) == (
        2,
        1,
        True,
    )
