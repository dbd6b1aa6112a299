"""The reference drafter computes what transformers' Gemma4AssistantForCausalLM and the sample's bundle compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.random_assistants import GEOMETRIES, Geometry, random_assistant
from helpers.random_pairs import drafter_from
from helpers.signature import one_step, run_signature

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, MtpDrafter
from mtp_extract.drafter.protocol import BaseOutput, RoundStart
from mtp_extract.formats.transformers import parse_config

TRUTH = Path(__file__).parent.parent / "truth"
WINDOW_EDGE = (1, 5, 6, 7, 40)
"""Context lengths around the windows used, 1 and 5 (transformers sees window + 1 slots), and well beyond them."""


def load_both(geometry: Geometry) -> tuple[Any, MtpDrafter]:
    theirs = random_assistant(geometry)
    config = parse_config(geometry.config())
    return theirs, drafter_from(config, theirs.state_dict(), torch.float32)


def draw_inputs(config: DrafterConfig, slots: int, queries: int = 1, batch: int = 2, seed: int = 1) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "inputs_embeds": torch.randn(batch, queries, 2 * config.backbone_hidden_size, generator=g),
        "position_ids": torch.randint(slots, 3000, (batch, queries), generator=g),
        "shared_kv_states": {
            kind: tuple(0.5 * torch.randn(batch, layer.num_kv_heads, slots, layer.head_dim, generator=g) for _ in "kv")
            for kind, layer in config.kv_layers.items()
        },
    }


def run_ours(drafter: MtpDrafter, x: dict[str, Any], padding: torch.Tensor | None = None) -> Any:
    """Run one step with transformers' masks: a sliding layer sees ``|query - (slots - 1 - slot)| <= window``."""
    slots, queries = next(iter(x["shared_kv_states"].values()))[0].shape[2], x["inputs_embeds"].shape[1]
    away = (torch.arange(queries)[:, None] - torch.arange(slots).flip(0)).abs()
    kept = torch.ones(1, slots, dtype=torch.bool) if padding is None else padding[:, :slots].bool()
    masks = {
        kind: kept[:, None] & (away <= (layer.sliding_window or slots + queries))
        for kind, layer in drafter.config.kv_layers.items()
    }
    return one_step(drafter, x["inputs_embeds"], x["shared_kv_states"], x["position_ids"], masks)


def assert_equal(theirs: Any, mine: Any) -> None:
    """Equal to 1e-5 of the largest value: what two orders of summation in F32 leave."""
    for expected, actual in ((theirs.logits, mine.logits), (theirs.last_hidden_state, mine.projected)):
        torch.testing.assert_close(actual, expected, atol=1e-5 * max(1.0, float(expected.abs().max())), rtol=0)


@pytest.mark.parametrize("slots", WINDOW_EDGE)
@torch.no_grad()
def test_one_query_and_several(geometry: Geometry, slots: int) -> None:
    """A single query is also tested with padding, which transformers gets as ``attention_mask``."""
    theirs, drafter = load_both(geometry)
    x = draw_inputs(drafter.config, slots)
    assert_equal(theirs(**x), run_ours(drafter, x))
    padding = torch.ones(2, slots + 1, dtype=torch.long)
    padding[1, : slots // 2] = 0
    padding[1, slots // 2 + 2 : slots // 2 + 3] = 0
    assert_equal(theirs(**x, attention_mask=padding), run_ours(drafter, x, padding))

    # Eager: transformers' SDPA path turns "no mask" into a causal one when there is more than one query.
    theirs.set_attn_implementation("eager")
    x = draw_inputs(drafter.config, slots, queries=3)
    # With attentions asked for: else 5.24.0 cuts embeddings by layer down to one query, and an assistant has none.
    assert_equal(theirs(**x, output_attentions=True), run_ours(drafter, x))


@torch.no_grad()
def test_soft_cap() -> None:
    theirs, drafter = load_both(GEOMETRIES["dense"])
    x = draw_inputs(drafter.config, 9)
    capped = drafter.with_config(dataclasses.replace(drafter.config, final_logit_softcap=2.0))
    torch.testing.assert_close(run_ours(capped, x).logits, 2 * torch.tanh(theirs(**x).logits / 2), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bfloat16_accumulates_in_float32() -> None:
    """BF16 weights and activations give nearly the F32 result of the same weights."""
    model = random_assistant(GEOMETRIES["wide-window"]).bfloat16()
    config = parse_config(GEOMETRIES["wide-window"].config())
    half, full = (drafter_from(config, model.state_dict(), d) for d in (torch.bfloat16, torch.float32))
    x = draw_inputs(config, 40)
    narrow = x | {
        "inputs_embeds": x["inputs_embeds"].bfloat16(),
        "shared_kv_states": {k: tuple(t.bfloat16() for t in kv) for k, kv in x["shared_kv_states"].items()},
    }
    logits, exact = run_ours(half, narrow).logits, run_ours(full, x).logits
    assert logits.dtype == torch.bfloat16
    assert torch.cosine_similarity(logits.float().flatten(), exact.flatten(), dim=0) > 0.9995


@torch.no_grad()
def test_norms_and_attention_are_float32_inside() -> None:
    """A sum of squares or of probabilities kept in BF16 would stop growing, since 256 + 1 is 256 there."""
    geometry = dataclasses.replace(GEOMETRIES["dense"], layers=("full_attention",))
    _, drafter = load_both(geometry)
    drafter = drafter_from(drafter.config, random_assistant(geometry).state_dict(), torch.bfloat16)
    norm = drafter.final_norm
    assert norm(torch.full((1, 16), 300.0, dtype=torch.bfloat16)).float().sub(norm.weight.float()).abs().max() < 1e-2
    slots = 4081  # In BF16 1/4081 is 1/4096, and 4081 of those round to 0.996.
    kv = torch.ones(1, 2, slots, 12, dtype=torch.bfloat16)
    seen = []
    drafter.layers[0].o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    inputs = torch.randn(1, 1, 2 * geometry.backbone, generator=torch.Generator().manual_seed(0)).bfloat16()
    one_step(drafter, inputs, {"full_attention": (kv, kv)}, torch.tensor([[slots]]))
    assert torch.equal(seen[0].float(), torch.ones_like(seen[0].float()))


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS, dataclasses.replace(LITERT, unwritten=2)])
def test_which_slots_a_query_sees(convention: Convention) -> None:
    """Up to the token before the pending one, of a cache that goes on after it; sliding layers within their window."""
    _, drafter = load_both(GEOMETRIES["dense"])
    config = drafter.config
    sizes = {"full_attention": 12, "sliding_attention": 9}
    kv = {kind: torch.randn(1, of.num_kv_heads, sizes[kind], of.head_dim) for kind, of in config.kv_layers.items()}
    tokens = torch.arange(12)[None]
    fed = BaseOutput(
        tokens, tokens, torch.randn(1, 12, config.backbone_hidden_size), {}, {k: (v, v) for k, v in kv.items()}
    )
    state = drafter.start(RoundStart(fed, torch.tensor([[8, 10]]), torch.nn.Identity()), convention)
    for layer, view in zip(config.layers, state.views, strict=True):
        groups = config.num_heads // layer.num_kv_heads
        assert view.bias is not None
        for row, pending in enumerate((8, 10) * groups):
            newest = pending - 1 - convention.unwritten
            least = newest - (layer.sliding_window or 99) - convention.window_extra
            seen = [least < position <= newest for position in range(12 - sizes[layer.layer_type], 12)]
            assert (view.bias[0, 0, row] == 0).tolist() == seen


def read_samples(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Read (signature inputs, outputs of transformers with the dequantized weights) of each sample."""
    with np.load(TRUTH / f"{name}.io.npz") as file:
        data = dict(file)
    count = len({key.split("/")[0] for key in data})
    parts = [[f"{i}/in/", f"{i}/torch_dequant/"] for i in range(count)]
    return [
        tuple({key.removeprefix(at): value for key, value in data.items() if key.startswith(at)} for at in both)
        for both in parts
    ]  # type: ignore[misc]


@pytest.mark.parametrize("layout", ["transformers", "litert"])
@pytest.mark.parametrize("name", ["e2e_jax_mix48", "e2e_mix48"])
@torch.no_grad()
def test_equal_to_the_dequantized_drafter(sample_directories: dict[str, Path], layout: str, name: str) -> None:
    drafter = load_drafter(sample_directories[layout])
    positions = []
    for inputs, expected in read_samples(name):
        logits, projected = run_signature(drafter, inputs)
        np.testing.assert_allclose(logits.numpy(), expected["logits"], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(projected.numpy(), expected["projected_activations"], atol=1e-5, rtol=1e-5)
        positions.append(int(inputs["input_pos"][0]))
    assert min(positions) < 16 < max(positions), "the samples must lie on both sides of the window"
