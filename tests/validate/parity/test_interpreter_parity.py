"""Parity with Google's interpreter: the right mapping agrees to the last bits, and every wrong one is seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.signature import signature_arguments
from helpers.variant_files import HERE, REFUSED, VARIANTS, variant

import mtp_extract
from mtp_extract.bundle import Shard
from mtp_extract.drafter.arguments import DraftArguments
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError
from mtp_extract.validate.parity import compare as parity_module
from mtp_extract.validate.parity.cases import Case, random_cases, reference_arguments
from mtp_extract.validate.parity.compare import EMULATED_BOUND, Parity, measure_parity
from mtp_extract.validate.parity.emulation import Emulation, attention_schemes, restore, schemes
from mtp_extract.validate.parity.interface import read_interface
from mtp_extract.validate.parity.oracle import Kernels, Oracle, readings, with_outputs

SLIDING_WINDOW = 16


def measured(drafter: MtpDrafter, source: Shard, **options: Any) -> Parity:
    return measure_parity(drafter, source, samples=8, **options)


def test_sample_agrees(drafter: MtpDrafter, source: Shard) -> None:
    found = measured(drafter, source)
    assert found.agrees
    assert found.emulated.max_of_range < 1e-6
    assert (found.emulated.top1, found.emulated.n) == (1.0, 8)
    assert found.emulated_projected.max_of_range < 1e-6
    assert found.first_apart is None
    # The interpreter rounds activations, the reference does not: near, and not the same.
    assert 1e-4 < found.float.max_of_range < 0.1
    assert found.float.cosine > 0.99
    assert found.kinds == {"dynamic": 23}
    assert len(found.weights.exact) == 48
    assert [role.role for role in found.roles][:3] == [
        "pre_projection",
        "layers.0.pre_attention_norm",
        "layers.0.q_proj",
    ]
    assert len(found.roles) == 48
    assert all(role.emulated.max_of_range < 1e-6 for role in found.roles)


def test_interpreters_own_kernels_quantize_otherwise(drafter: MtpDrafter, source: Shard) -> None:
    found = measured(drafter, source, kernels=Kernels.BUILTIN)
    assert found.emulated.max_of_range < 1e-6
    theirs = Oracle(source, Kernels.BUILTIN)
    plan = schemes(source)
    interface = read_interface(source)
    case = random_cases(drafter.config, interface, 8, 0)[4]
    arguments = reference_arguments(case, drafter.config, interface, as_stored=True)
    wrong = Emulation(drafter, plan, {}, Kernels.XNNPACK).drafter(*arguments).logits.numpy().reshape(-1)
    from mtp_extract.validate.parity.cases import signature_inputs

    logits = theirs.run(signature_inputs(case, interface)).logits
    assert np.abs(wrong - logits).max() / np.ptp(logits) > EMULATED_BOUND


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"jax_hadamard"}))
def test_every_way_of_quantizing(name: str, tmp_path: Path) -> None:
    window = SLIDING_WINDOW if name in REFUSED else None
    mtp_extract.extract(variant(name), tmp_path / "d", dtype="bf16", sliding_window=window)
    with mtp_extract.open(variant(name)) as opened:
        found = measured(load_drafter(tmp_path / "d", dtype=torch.float32), opened.drafter(window))
    assert found.agrees
    assert found.emulated.max_of_range < 2e-5
    assert not found.weights.different


@pytest.mark.parametrize(("layout", "dtype"), [("transformers", "bf16"), ("transformers", "f16"), ("litert", None)])
def test_every_layout_and_dtype(sample: Path, source: Shard, tmp_path: Path, layout: str, dtype: Any) -> None:
    mtp_extract.extract(sample, tmp_path / "d", format=layout, dtype=dtype)
    found = measured(load_drafter(tmp_path / "d", dtype=torch.float32), source)
    assert found.emulated.max_of_range < 1e-6
    assert bool(found.weights.rounded) == (layout == "transformers")


def truth_calls() -> list[dict[str, Any]]:
    stored = np.load(HERE / "truth" / "e2e_jax_mix48.io.npz")
    samples = sorted({key.split("/")[0] for key in stored.files})
    return [
        {
            "inputs": {key.split("/")[2]: stored[key] for key in stored.files if key.startswith(f"{sample}/in/")},
            "logits": stored[f"{sample}/litert/logits"].reshape(-1),
            "projected": stored[f"{sample}/litert/projected_activations"].reshape(-1),
        }
        for sample in samples
    ]


@pytest.mark.parametrize("call", truth_calls(), ids=lambda call: f"position{call['inputs']['input_pos'][0]}")
def test_recorded_calls(drafter: MtpDrafter, source: Shard, call: dict[str, Any]) -> None:
    """Inputs from a text, and what the interpreter made of them when the sample was built."""
    run = Oracle(source).run(call["inputs"])
    # Making more tensors readable changes no number.
    assert np.abs(run.logits - call["logits"]).max() < 1e-5
    emulation = Emulation(drafter, schemes(source), attention_schemes(source))
    with torch.inference_mode():
        ours = emulation.drafter(*signature_arguments(drafter.config, call["inputs"]))
    logits, projected = ours.logits.numpy().reshape(-1), ours.projected.numpy().reshape(-1)
    assert np.abs(logits - call["logits"]).max() / np.ptp(call["logits"]) < EMULATED_BOUND
    assert logits.argmax() == call["logits"].argmax()
    assert np.abs(projected - call["projected"]).max() / np.ptp(call["projected"]) < EMULATED_BOUND


def changed(drafter: MtpDrafter, **tensors: torch.Tensor) -> MtpDrafter:
    twin = drafter.with_config(drafter.config)
    twin.load_state_dict({**drafter.state_dict(), **tensors}, assign=True)
    return twin


def swapped(drafter: MtpDrafter, one: str, other: str) -> MtpDrafter:
    state = drafter.state_dict()
    return changed(drafter, **{one: state[other], other: state[one]})


def test_gate_and_up_swapped(drafter: MtpDrafter, source: Shard) -> None:
    found = measured(swapped(drafter, "layers.1.gate_proj.weight", "layers.1.up_proj.weight"), source)
    assert not found.agrees
    assert found.weights.different == ("layers.1.gate_proj", "layers.1.up_proj")
    assert found.first_apart == "layers.1.gate_proj"


def test_wrong_in_the_mapping_too(drafter: MtpDrafter, source: Shard) -> None:
    """A walk that takes gate for up gives a checkpoint that equals it in every weight. Parity knows nothing of it."""
    other = {"layers.1.gate_proj": "layers.1.up_proj", "layers.1.up_proj": "layers.1.gate_proj"}
    roles = tuple(dataclasses.replace(r, role=other.get(r.role, r.role)) for r in source.walk.roles)
    misread = dataclasses.replace(source, walk=dataclasses.replace(source.walk, roles=roles))
    found = measured(swapped(drafter, "layers.1.gate_proj.weight", "layers.1.up_proj.weight"), misread)
    assert not found.weights.different
    assert found.emulated.max_of_range > 10 * EMULATED_BOUND
    assert not found.agrees


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pre_attention_norm", "pre_ffw_norm"),
        ("post_attention_norm", "post_ffw_norm"),
    ],
)
def test_norms_swapped(drafter: MtpDrafter, source: Shard, one: str, other: str) -> None:
    found = measured(swapped(drafter, f"layers.2.{one}.weight", f"layers.2.{other}.weight"), source)
    assert not found.agrees
    assert found.first_apart == f"layers.2.{one}"


def test_layer_scalar_dropped(drafter: MtpDrafter, source: Shard) -> None:
    found = measured(changed(drafter, **{"layers.0.layer_scalar": torch.ones(1)}), source)
    assert not found.agrees
    assert (found.weights.different, found.first_apart) == (("layers.0.layer_scalar",), "layers.0.layer_scalar")


def test_one_row_a_code_off(drafter: MtpDrafter, source: Shard) -> None:
    weight = drafter.state_dict()["layers.3.o_proj.weight"].clone()
    weight[5] *= 1.02
    found = measured(changed(drafter, **{"layers.3.o_proj.weight": weight}), source)
    assert found.weights.different == ("layers.3.o_proj",)
    assert not found.agrees


def test_values_transposed(drafter: MtpDrafter, source: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def misread(case: Case, config: Any, interface: Any, *, as_stored: bool) -> DraftArguments:
        arguments = reference_arguments(case, config, interface, as_stored=as_stored)
        turned = {kind: (k, v.transpose(2, 3).reshape(v.shape)) for kind, (k, v) in arguments.shared_kv.items()}
        return dataclasses.replace(arguments, shared_kv=turned)

    monkeypatch.setattr(parity_module, "reference_arguments", misread)
    found = measured(drafter, source)
    assert not found.agrees
    assert found.first_apart == "layers.0.o_proj"


@pytest.mark.parametrize("control", ["rope", "window", "scale", "cap", "eps"])
def test_wrong_geometry(drafter: MtpDrafter, source: Shard, control: str) -> None:
    config = drafter.config
    narrower = tuple(dataclasses.replace(x, sliding_window=x.sliding_window and 8) for x in config.layers)
    wrong = {
        "rope": config.with_rope("full_attention", partial_rotary_factor=1.0),
        "window": dataclasses.replace(config, layers=narrower),
        "scale": dataclasses.replace(config, attention_scale=0.25),
        "cap": dataclasses.replace(config, final_logit_softcap=None),
        "eps": dataclasses.replace(config, rms_norm_eps=1e-2),
    }[control]
    assert not measured(drafter.with_config(wrong), source).agrees


def test_another_file(drafter: MtpDrafter, tmp_path: Path) -> None:
    with (
        mtp_extract.open(variant("torch_odd_sizes")) as opened,
        pytest.raises(PairError, match="hidden_size 48, found 64"),
    ):
        measured(drafter, opened.drafter())


def test_same_seed_same_numbers(drafter: MtpDrafter, source: Shard) -> None:
    assert measured(drafter, source) == measured(drafter, source)
    assert measured(drafter, source, seed=1).float != measured(drafter, source).float


def test_operators_of_all_roles(source: Shard) -> None:
    found = readings(source)
    assert {role.role for role in source.walk.roles} == set(found)
    assert {found[r].node.kind for r in found if r.endswith(("proj", "projection", "lm_head"))} == {"FULLY_CONNECTED"}
    assert {found[r].node.kind for r in found if r.endswith(("norm", "scalar"))} == {"MUL"}


def test_only_outputs_are_added(source: Shard) -> None:
    region = source.model.region
    plain = region.read(0, region.size)
    patched = with_outputs(source, [3, 5])
    differing = [i for i, byte in enumerate(plain) if byte != patched[i]]
    assert 0 < len(differing) <= 4
    assert differing[-1] - differing[0] < 4


def test_restore_keeps_what_is_not_the_files(drafter: MtpDrafter, source: Shard) -> None:
    state = drafter.state_dict()
    near = state["final_norm.weight"].bfloat16().float()
    far = state["layers.0.q_norm.weight"] * 1.01
    twin, found = restore(changed(drafter, **{"final_norm.weight": near, "layers.0.q_norm.weight": far}), source)
    assert (found.rounded, found.different) == (("final_norm",), ("layers.0.q_norm",))
    assert torch.equal(twin.state_dict()["final_norm.weight"], state["final_norm.weight"])
    assert torch.equal(twin.state_dict()["layers.0.q_norm.weight"], far)
