"""The sample: the drafter over dequantized weights, fed the inputs of LiteRT's signature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.signature import run_signature

from mtp_extract.drafter.load import load_drafter

TRUTH = Path(__file__).parent.parent / "truth"


def samples(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(signature inputs, outputs of transformers over the dequantized weights) of each sample."""
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
    for inputs, expected in samples(name):
        logits, projected = run_signature(drafter, inputs)
        np.testing.assert_allclose(logits.numpy(), expected["logits"], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(projected.numpy(), expected["projected_activations"], atol=1e-5, rtol=1e-5)
        positions.append(int(inputs["input_pos"][0]))
    assert min(positions) < 16 < max(positions), "the samples must lie on both sides of the window"
