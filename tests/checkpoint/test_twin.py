"""The sample's twin, which llama.cpp loads: as wide again, and the same function with the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from helpers.make_bundle import drafter_of
from helpers.variant_files import HERE

from mtp_extract.bundle import open_bundle
from mtp_extract.pipeline.extraction import checkpoint_of, extract


def test_googles_interpreter_computes_the_same_of_both(sample: Path, widened: Path) -> None:
    stored = np.load(HERE / "truth" / "e2e_jax_mix48.io.npz")
    runs: list[Any] = [
        Interpreter(model_content=drafter_of(path)).get_signature_runner("mtp_drafter") for path in (sample, widened)
    ]
    for index in {name.split("/")[0] for name in stored.files}:
        feed = {name: stored[f"{index}/in/{name}"] for name in runs[0].get_input_details()}
        expected, found = (run(**feed) for run in runs)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5)


def test_its_codes_and_scales_are_the_samples_and_zeros(sample: Path, widened: Path) -> None:
    with open_bundle(sample) as narrow, open_bundle(widened) as wide:
        expected, found = (checkpoint_of(opened.drafter()).tensors for opened in (narrow, wide))
        for role, tensor in expected.items():
            if tensor.scheme is None:
                continue
            assert found[role].scheme == tensor.scheme
            codes = np.concatenate([chunk.copy() for chunk in found[role].integers()]).reshape(found[role].shape)
            original = np.concatenate([chunk.copy() for chunk in tensor.integers()]).reshape(tensor.shape)
            rows, columns = original.shape
            np.testing.assert_array_equal(codes[:rows, :columns], original)
            assert codes.shape[1] % 32 == 0
            assert np.count_nonzero(codes) == np.count_nonzero(original)
            np.testing.assert_array_equal(found[role].scale[:rows], tensor.scale)


def test_it_is_extracted_and_proven(widened: Path, tmp_path: Path) -> None:
    geometry = extract(widened, tmp_path / "out").record["geometry"]
    assert (geometry["hidden_size"], geometry["backbone_hidden_size"]) == (128, 64)
