"""The same draft step in the terms of both programs, and the integers of a signature's inputs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.variant_files import variant

import mtp_extract
from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import UnsupportedError
from mtp_extract.validation.parity.cases import (
    Codes,
    caches_of,
    random_cases,
    reference_arguments,
    signature_inputs,
    slots_of,
)


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_codes_round_and_clip(dtype: type) -> None:
    limit = 1 << (8 * np.dtype(dtype).itemsize - 1)
    codes = Codes(0.5, 3, np.dtype(dtype), True)
    assert codes.encode(np.array([0.25, 0.75, -0.25, 1e9, -1e9], np.float32)).tolist() == [3, 5, 3, limit - 1, -limit]
    assert codes.encode(np.zeros(1, np.float32)).dtype == dtype
    assert codes.decode(np.array([5], dtype)).tolist() == [1.0]


def test_cases_are_the_same_in_both_programs(drafter: MtpDrafter, source: Shard) -> None:
    cases = random_cases(source, 6, 3)
    assert [case.position for case in cases][:: len(cases) - 1] == [1, slots_of(source) - 1]
    for case in cases:
        inputs, arguments = signature_inputs(source, case, floats=True), reference_arguments(case, drafter.config)
        assert set(inputs) == set(source.signature.inputs)
        assert inputs["mask"].sum() == case.position + 1
        for kind, (key, value) in caches_of(source).items():
            k, v = arguments.shared_kv[kind]
            seen = case.position + 1
            assert np.array_equal(inputs[key][:, :, :seen], k.numpy())
            assert np.array_equal(inputs[value][..., :seen].swapaxes(2, 3), v.numpy())
            assert not inputs[key][:, :, seen:].any()


def test_integers_without_a_scale_are_refused() -> None:
    with mtp_extract.open(variant("torch_static8_mix48_kv8")) as opened:
        source = opened.drafter()
        name = caches_of(source)["full_attention"][0]
        codes = Codes.of(source, name)
        assert codes is not None
        assert (codes.dtype, codes.own) == (np.int8, True)
        tensor = source.model.tensor(source.signature.subgraph, source.signature.inputs[name])
        object.__setattr__(tensor, "quantization", None)
        with pytest.raises(UnsupportedError, match="integers without a scale"):
            Codes.of(source, name)
        # Where the graph multiplies them by one, that is it.
        scaled = dataclasses.replace(source, walk=dataclasses.replace(source.walk, cache_scales={name: 0.25}))
        assert Codes.of(scaled, name) == Codes(0.25, 0, np.dtype(np.int8), False)


def test_an_unknown_input_is_refused(source: Shard) -> None:
    inputs = {**source.signature.inputs, "more": 0}
    signature = dataclasses.replace(source.signature, inputs=inputs)
    (case,) = random_cases(source, 1, 0)
    with pytest.raises(UnsupportedError, match="found also more"):
        signature_inputs(dataclasses.replace(source, signature=signature), case, floats=True)
