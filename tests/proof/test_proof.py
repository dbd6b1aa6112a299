"""The proof: it holds for every sound drafter, says what it held, and no planted fault gets past it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adversary.mutations import MUTATIONS
from adversary.rewrites import REWRITES
from helpers.make_bundle import Memory
from helpers.make_drafter import DrafterSpec, plain_drafter
from helpers.variant_files import REFUSED, VARIANTS, variant
from seam import (
    CheckpointError,
    DrafterConfig,
    Floats,
    MtpExtractError,
    ProofError,
    Read,
    RoleError,
    UnsupportedError,
    Weight,
    describe_proof,
    list_roles,
    prove,
    wrap_array,
)

from mtp_extract import extract

SOUND = sorted(set(VARIANTS) - REFUSED)
STYLES = ["torch_plain_norm", "jax_published"]
LAYERS = 4
REPEATED = ("layers.1.", "layers.2.")  # As the first.
Reread = Callable[[Read], Read]
Reconfigure = Callable[[DrafterConfig], DrafterConfig]


def load_case(label: str, style: str = "torch") -> Memory:
    """The file of a case of the adversary."""
    (case,) = [c for c in (*MUTATIONS, *REWRITES) if c.label == label]
    graph = case.apply(style)
    assert graph is not None
    return Memory(graph.data())


# What holds, and what is said of it.


@pytest.mark.parametrize("name", SOUND)
def test_every_kind_of_drafter_is_proven(name: str) -> None:
    proof = prove(variant(name))
    assert proof["positions"] == (96 if name == "torch_odd_sizes" else 256)
    assert len(proof["largest_scores"]) == LAYERS


def test_every_position_and_row_is_held(sample: Path) -> None:
    proof = prove(sample)
    assert proof == prove(sample)
    assert (proof["positions"], proof["mask_rows"]["of"]) == (256, 256)
    assert proof["position_values"] >= 4
    assert json.loads(json.dumps(proof)) == proof
    assert any("256 positions" in line for line in describe_proof(proof))


@pytest.mark.parametrize("windows", [(None,), (4, None), (3, 3, None)])
def test_plain_operators_are_proven(windows: tuple[int | None, ...]) -> None:
    assert prove(Memory(plain_drafter(DrafterSpec(windows=windows))))["positions"] == 16


def test_rows_of_a_large_cache_are_alike() -> None:
    """Two rows stand for all where masks depend on slot less position; else every row is computed, or none is held."""
    proof = prove(Memory(plain_drafter(DrafterSpec(windows=(16, None), cache=6000))))
    assert proof["mask_rows"] == {"computed": 2, "of": 6000, "alike": True}


def test_a_coarse_table_is_said_and_the_exact_theta_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    proof = extract(load_case("same: rounded/fp16_rope_tables"), out).record["proof"]
    coarse = [line for line in proof if "exact theta" in line]
    assert ["layer 0, held in" in coarse[0], "layer 1, held in" in coarse[1]] == [True, True]
    assert len(coarse) == 2 and all("FLOAT16" in line for line in coarse)
    assert "10000.0" in (out / "config.json").read_text()


# Faults of the checkpoint.


def perturb(role: str) -> Reread:
    """One number of ``role`` is a thousandth off."""

    def change(values: Floats) -> Floats:
        values.reshape(-1)[np.abs(values).argmax()] *= np.float32(1.001)
        return values

    return change_tensor(change, role)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("role", [role.name for role in list_roles(LAYERS) if role.name[:9] not in REPEATED])
def test_a_weight_that_is_off_is_named(style: str, role: str) -> None:
    with pytest.raises(ProofError, match=rf"^{role}: "):
        prove(variant(style), read=perturb(role))


@pytest.mark.parametrize("name", ["jax_published", "torch_blockwise32", "torch_int2"])
def test_codes_with_the_scales_of_other_rows_are_named(name: str) -> None:
    """A tensor that is the constant's own codes is not compared number by number; its scales are."""

    def rolled(weight: Weight) -> Weight:
        changed = copy.copy(weight)
        changed.__dict__["steps"] = dataclasses.replace(weight.steps, size=np.roll(weight.steps.size, 1, 0))
        return changed

    with pytest.raises(ProofError, match=r"^lm_head: "):
        prove(variant(name), read=lambda read: lambda role: rolled(read(role)) if role == "lm_head" else read(role))


def change_tensor(change: Callable[[Floats], Floats], role: str) -> Reread:
    return lambda read: lambda name: wrap_array(change(read(name).array())) if name == role else read(name)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30])
def test_not_a_number_is_no_proof(number: float) -> None:
    with pytest.raises(ProofError, match=r"^final_norm: "):
        prove(variant("jax_published"), read=change_tensor(lambda c: np.full_like(c, number), "final_norm"))


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: np.append(c, 0), lambda c: c[:0]])
def test_a_tensor_of_another_size_is_an_error(change: Callable[[Floats], Floats]) -> None:
    with pytest.raises(CheckpointError, match="lm_head"):
        prove(variant("jax_published"), read=change_tensor(change, "lm_head"))


def change_layer(index: int, **fields: Any) -> Reconfigure:
    """The config with other ``fields`` of layer ``index``."""

    def change(config: DrafterConfig) -> DrafterConfig:
        layers = list(config.layers)
        layers[index] = dataclasses.replace(layers[index], **fields)
        return dataclasses.replace(config, layers=tuple(layers))

    return change


def change_numbers(**fields: Any) -> Reconfigure:
    return lambda config: dataclasses.replace(config, **fields)


CONFIGS: dict[str, tuple[Reconfigure, str]] = {
    "window + 1": (change_layer(0, sliding_window=17), "layers.0.attention"),
    "window − 1": (change_layer(2, sliding_window=15), "layers.2.attention"),
    "no window": (change_layer(1, sliding_window=None), "layers.1.attention"),
    "a window in the full layer": (change_layer(3, sliding_window=16), "layers.3.attention"),
    "theta": (lambda c: c.replace_rope("sliding_attention", theta=10001.0), "layers.0.attention"),
    "theta of the full layer": (lambda c: c.replace_rope("full_attention", theta=1.001e6), "layers.3.attention"),
    "share": (lambda c: c.replace_rope("full_attention", partial_rotary_factor=0.5), "layers.3.attention"),
    "share of one": (lambda c: c.replace_rope("full_attention", partial_rotary_factor=1.0), "layers.3.attention"),
    "factor": (lambda c: c.replace_rope("sliding_attention", factor=1.01), "layers.0.attention"),
    "scale": (change_numbers(attention_scale=32**-0.5), "layers.0.attention"),
    "epsilon": (change_numbers(rms_norm_eps=1e-5), "rms_norm_eps"),
    "epsilon of 0": (change_numbers(rms_norm_eps=0.0), "rms_norm_eps"),
    "no cap": (change_numbers(final_logit_softcap=None), "final_logit_softcap"),
    "another cap": (change_numbers(final_logit_softcap=31.0), "final_logit_softcap"),
    "another function": (change_numbers(hidden_activation="gelu"), "hidden_activation"),
    "heads": (change_numbers(num_heads=2), "heads"),
    "KV heads": (change_layer(3, num_kv_heads=1), "heads"),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fault", CONFIGS)
def test_a_number_of_the_config_that_is_off_is_found(style: str, fault: str) -> None:
    change, where = CONFIGS[fault]
    with pytest.raises(ProofError, match=rf"^{where}: "):
        prove(variant(style), config=change)


# Faults of the file.


CAUSES: dict[str, tuple[type[MtpExtractError], str]] = {
    "positions/angle_at_37": (MtpExtractError, "position 37"),
    "positions/window_of_all_at_37": (ProofError, "position 37"),
    "positions/window_late_at_37": (ProofError, "position 37"),
    "tables/row_37_of_cos_is_1": (ProofError, "position 37"),
    "tables/window_table_row_37": (ProofError, "position 37"),
    "mask kinds/minus_100": (ProofError, "not lowered"),
    "mask kinds/all_of_16_shown": (UnsupportedError, "SELECT_V2"),
    "smooth/row_and_hole": (UnsupportedError, "mask"),
    "loudness/keys_within_30": (UnsupportedError, "of a cache"),
    "loudness/largest_score_favoured": (UnsupportedError, "scores"),
    "number types/position_int8": (UnsupportedError, "QUANTIZE"),
    "smooth/scores_plus_sigmoid_above_90": (UnsupportedError, "of a score"),
    "interfaces/value_unmapped": (RoleError, "does not name"),
    "names/key_and_value": (UnsupportedError, "is used as K"),
}


@pytest.mark.parametrize("label", CAUSES)
def test_the_true_cause_is_named(label: str) -> None:
    error, noun = CAUSES[label]
    with pytest.raises(error, match=noun):
        prove(load_case(label))
