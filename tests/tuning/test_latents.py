"""What each mode changes, and what it leaves."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import numpy as np
import pytest
import torch

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.roles import MATRIX
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import Steps, Weight, wrap_array, wrap_codes
from mtp_extract.drafter.load import load_drafter
from mtp_extract.litertlm.storage import Packing
from mtp_extract.tuning.latents import MODES, Latents

from .conftest import Tiny


def move_all(latents: Latents) -> Checkpoint:
    """Return the checkpoint after every parameter has changed a little."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in latents.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=random))
    return latents.build_checkpoint(latents.copy_results())


def replace_weights(tiny: Tiny, mode: str, weights: dict[str, Weight]) -> Latents:
    """Return the latents of the checkpoint with other ``weights``, by role."""
    tensors = MappingProxyType({**tiny.checkpoint.tensors, **weights})
    return Latents(dataclasses.replace(tiny.checkpoint, tensors=tensors), MODES[mode])


@pytest.mark.parametrize("mode", list(MODES))
def test_untrained_is_unchanged(tiny: Tiny, mode: str) -> None:
    latents = Latents(tiny.checkpoint, MODES[mode])
    tuned = latents.build_checkpoint(latents.copy_results())
    for role, tensor in tiny.checkpoint.tensors.items():
        assert np.array_equal(tuned.tensors[role].array(), tensor.array()), role
    before = tiny.drafter.state_dict()
    for path, weight in latents(torch.float32).items():
        assert torch.equal(weight, before[path].reshape(weight.shape)), path


def test_qat_stays_on_the_stored_grid(tiny: Tiny) -> None:
    latents = Latents(tiny.checkpoint, MODES["qat"])
    tuned = move_all(latents)
    weights, drafter = latents(torch.float32), load_drafter(tuned).state_dict()
    changed = 0
    for role in list_shapes(tiny.checkpoint.config):
        if role.kind != MATRIX:
            continue
        old, new = tiny.checkpoint.tensors[role.name], tuned.tensors[role.name]
        assert new.steps is old.steps and new.scheme == old.scheme
        # The least code is one that the quantizer leaves out.
        assert {*new.codes().flat} <= {*range(-7, 8)}
        # What was trained with is, to the bit, what the codes stand for.
        assert np.array_equal(weights[role.path].detach().numpy(), new.array()), role.name
        assert torch.equal(drafter[role.path], weights[role.path])
        changed += int((new.codes() != old.codes()).sum())
    assert changed > 1000


def test_the_gradient_passes_the_rounding(tiny: Tiny) -> None:
    latents = Latents(tiny.checkpoint, MODES["qat"])
    weight = latents(torch.float32)["lm_head.weight"]
    weight.backward(torch.full_like(weight, 2.0))
    assert torch.equal(latents.values["lm_head"].grad, torch.full_like(weight, 2.0))


@pytest.mark.parametrize("factor", [1.0, 30.0])
@pytest.mark.parametrize(("signed", "zero_point"), [(True, 0), (True, 3), (False, 7)])
def test_grids_of_every_kind(tiny: Tiny, factor: float, signed: bool, zero_point: int) -> None:
    """Blocks, zero points, unsigned codes, a factor: values round to their codes, moved values to other codes."""
    shape = tiny.checkpoint.tensors["lm_head"].shape
    random = np.random.default_rng(0)
    low, high = (-8, 7) if signed else (0, 15)
    stored = random.integers(low, high + 1, shape).astype(np.int8 if signed else np.uint8)
    size = random.uniform(0.01, 0.2, (shape[0], shape[1] // 4)).astype(np.float32)
    steps = Steps(4, size, np.full(size.shape, zero_point, np.int64), factor)
    latents = replace_weights(tiny, "qat", {"lm_head": wrap_codes(stored, Packing(4, signed), steps)})
    assert np.array_equal(latents.build_checkpoint(latents.copy_results()).tensors["lm_head"].codes(), stored)
    for moved_by, end in ((100.0, high), (-200.0, low)):
        with torch.no_grad():
            latents.values["lm_head"] += moved_by
        tuned = latents.build_checkpoint(latents.copy_results()).tensors["lm_head"]
        assert {*tuned.codes().flat} == {end}
    assert np.array_equal(latents(torch.float32)["lm_head.weight"].detach().numpy(), tuned.array())


def test_norms_move_in_units_of_their_size(tiny: Tiny) -> None:
    latents = replace_weights(tiny, "norms", {"final_norm": wrap_array(np.full(16, 50.0, np.float32))})
    with torch.no_grad():
        latents.values["final_norm"] += 0.01
    assert latents(torch.float32)["final_norm.weight"].tolist() == pytest.approx([50.5] * 16)
