"""The proof by execution: it holds for every sound drafter, and no planted fault gets past it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.make_bundle import Memory, load, pack
from helpers.make_drafter import DrafterSpec, plain_drafter
from helpers.proving import Floats, Read, held
from helpers.variant_files import REFUSED, VARIANTS, variant

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import roles_of
from mtp_extract.errors import CheckpointError, ProofError, UnsupportedError
from mtp_extract.proof.compare import TOLERANCE
from mtp_extract.proof.proof import Proof

SOUND = sorted(set(VARIANTS) - REFUSED)
LAYERS = 4


@pytest.mark.parametrize("name", SOUND)
def test_every_kind_of_drafter_is_proven(name: str) -> None:
    proof = held(variant(name))
    assert max(*proof.logits, *proof.projected) <= TOLERANCE / 4


def test_the_sample_is_proven(sample: Path) -> None:
    proof = held(sample)
    assert max(*proof.logits, *proof.projected) <= TOLERANCE / 4
    assert proof.sliding_masked
    assert proof.as_json()["positions"] == list(proof.positions)


@pytest.mark.parametrize("windows", [(None,), (4, None), (3, 3, None)])
def test_plain_operators_are_proven(windows: tuple[int | None, ...]) -> None:
    proof = held(Memory(plain_drafter(DrafterSpec(windows=windows))))
    assert max(*proof.logits, *proof.projected) <= TOLERANCE / 4


def test_a_proof_repeats_itself(sample: Path) -> None:
    assert held(sample) == held(sample)


def test_positions_lie_on_both_sides_of_the_window_and_at_the_end(sample: Path) -> None:
    """The window is 16 and the caches have 256 slots."""
    proof: Proof = held(sample)
    assert {15, 16, proof.slots - 1} <= set(proof.positions)
    assert min(proof.positions) < 8


def test_a_published_graph_need_not_show_its_window_the_mask() -> None:
    assert not held(variant("jax_published")).sliding_masked


def perturbed(role: str) -> object:
    """One row of ``role``, and one number of a vector, are five per cent off."""

    def change(read: Read) -> Read:
        def changed(name: str) -> Iterator[Floats]:
            for index, chunk in enumerate(read(name)):
                copy = np.array(chunk, np.float32).reshape(-1)
                if name == role and not index:
                    copy[: 1 if copy.size < 1000 else 64] *= np.float32(1.05)
                yield copy

        return changed

    return change


# The last layer's scalar is taken away again by the final norm: it makes no other function. Its bits are compared.
ROLES = [role.name for role in roles_of(LAYERS) if role.name != f"layers.{LAYERS - 1}.layer_scalar"]


@pytest.mark.parametrize("style", ["torch_plain_norm", "jax_published"])
@pytest.mark.parametrize("role", ROLES)
def test_a_weight_that_is_off_is_named(style: str, role: str) -> None:
    with pytest.raises(ProofError, match=rf"^{role}: the graph and the checkpoint part here"):
        held(variant(style), read=perturbed(role))


def swapped(one: str, other: str) -> object:
    names = {one: other, other: one}
    return lambda read: lambda name: read(names.get(name, name))


SWAPS = [
    ("layers.1.pre_attention_norm", "layers.1.pre_ffw_norm"),
    ("layers.2.post_attention_norm", "layers.2.post_ffw_norm"),
    ("layers.0.gate_proj", "layers.0.up_proj"),
    ("layers.0.q_proj", "layers.1.q_proj"),
    ("layers.3.post_ffw_norm", "final_norm"),
]


@pytest.mark.parametrize(("one", "other"), SWAPS)
def test_exchanged_tensors_are_named_by_the_first(one: str, other: str) -> None:
    with pytest.raises(ProofError, match=rf"^{one}: "):
        held(variant("jax_published"), read=swapped(one, other))


def layer(index: int, **fields: object) -> object:
    """The config with other ``fields`` of layer ``index``."""

    def change(config: DrafterConfig) -> DrafterConfig:
        layers = list(config.layers)
        layers[index] = dataclasses.replace(layers[index], **fields)
        return dataclasses.replace(config, layers=tuple(layers))

    return change


def number(**fields: object) -> object:
    return lambda config: dataclasses.replace(config, **fields)


CONFIGS = {
    "window + 1": (layer(0, sliding_window=17), "layers.0.attention"),
    "window − 1": (layer(2, sliding_window=15), "layers.2.attention"),
    "no window": (layer(1, sliding_window=None), "layers.1.attention"),
    "a window in the full layer": (layer(3, sliding_window=16), "layers.3.attention"),
    "theta": (lambda c: c.with_rope("sliding_attention", theta=10001.0), "layers.0.attention"),
    "theta of the full layer": (lambda c: c.with_rope("full_attention", theta=1.001e6), "layers.3.attention"),
    "share": (lambda c: c.with_rope("full_attention", partial_rotary_factor=0.5), "layers.3.attention"),
    "share of one": (lambda c: c.with_rope("full_attention", partial_rotary_factor=1.0), "layers.3.attention"),
    "factor": (lambda c: c.with_rope("sliding_attention", factor=1.01), "layers.0.attention"),
    "scale": (number(attention_scale=32**-0.5), "layers.0.attention"),
    "epsilon": (number(rms_norm_eps=1e-5), "layers.0.pre_attention_norm"),
    "epsilon of 0": (number(rms_norm_eps=0.0), "layers.0.pre_attention_norm"),
    "no cap": (number(final_logit_softcap=None), "logits"),
    "another cap": (number(final_logit_softcap=31.0), "logits"),
}


@pytest.mark.parametrize("style", ["torch_plain_norm", "jax_published"])
@pytest.mark.parametrize(("change", "where"), CONFIGS.values(), ids=CONFIGS)
def test_a_number_of_the_config_that_is_off_is_found(style: str, change: object, where: str) -> None:
    with pytest.raises(ProofError, match=rf"^{where}: "):
        held(variant(style), config=change)


def test_the_heads_of_k_and_v_are_told_apart() -> None:
    """jax_kv_mixed has other numbers of KV heads in sliding and full layers."""

    def fewer(config: DrafterConfig) -> DrafterConfig:
        return layer(3, num_kv_heads=config.layers[0].num_kv_heads)(config)

    with pytest.raises((ProofError, UnsupportedError, CheckpointError)):
        held(variant("jax_kv_mixed"), config=fewer)


def test_a_tensor_of_another_size_is_an_error() -> None:
    def shorter(read: Read) -> Read:
        return lambda name: [np.concatenate(list(read(name)))[:-64]] if name == "lm_head" else read(name)

    with pytest.raises(CheckpointError, match="lm_head: expected 512 rows"):
        held(variant("jax_published"), read=shorter)


def test_not_a_number_is_no_proof() -> None:
    def poisoned(read: Read) -> Read:
        return lambda name: [c * np.float32(np.nan) for c in read(name)] if name == "final_norm" else read(name)

    with pytest.raises(ProofError, match=r"^final_norm: "):
        held(variant("jax_published"), read=poisoned)


def test_a_mask_that_hides_softly_is_found() -> None:
    """Hidden scores of −10 are small, not hidden: stale slots leak."""
    model = load(variant("torch_plain_norm").read_bytes())
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data
            if data is not None and len(data) == 4 and np.frombuffer(bytes(data), np.float32)[0] < -1e8:
                model.buffers[tensor.buffer].data = np.frombuffer(np.float32(-10).tobytes(), np.uint8)
    with pytest.raises(ProofError, match=r"^layers\.0\.attention: .*(sees slot|is lowered by 10 only)"):
        held(Memory(pack(model)))


def test_caches_whose_names_contradict_their_use_are_refused() -> None:
    model = load(variant("torch_plain_norm").read_bytes())
    other = {b"kv_cache_k_2": b"kv_cache_v_2", b"kv_cache_v_2": b"kv_cache_k_2"}
    for entry in model.signatureDefs[0].inputs:
        entry.name = other.get(entry.name, entry.name)
    with pytest.raises(UnsupportedError, match=r"is used as K"):
        held(Memory(pack(model)))


def test_an_operator_outside_the_list_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtp_extract.graph import evaluate, kernels

    fewer = {name: kernel for name, kernel in kernels.KERNELS.items() if name != "SOFTMAX"}
    monkeypatch.setattr(evaluate, "KERNELS", fewer)
    with pytest.raises(UnsupportedError, match="SOFTMAX is no operator"):
        held(variant("jax_published"))
