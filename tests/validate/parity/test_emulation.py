"""How rows are quantized, and how a rounding follows the interpreter's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.validate.parity.cases import random_cases, reference_arguments, signature_inputs
from mtp_extract.validate.parity.emulation import Emulation, Guide, Operand, Scheme, quantize_rows
from mtp_extract.validate.parity.interface import Codes, read_interface
from mtp_extract.validate.parity.oracle import Kernels

ROWS = arrays.arrays(
    np.float32, (2, 7), elements=st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
)


@given(ROWS, st.sampled_from(Kernels))
@settings(deadline=None)
def test_rows_move_by_at_most_half_a_step(rows: np.ndarray, kernels: Kernels) -> None:
    x = torch.from_numpy(rows.copy())
    found = quantize_rows(x, kernels)
    step = (
        x.abs().amax(-1) / 127
        if kernels is Kernels.BUILTIN
        else (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / 255
    )
    # A zero point is a whole number, which costs the ends of the range up to half a step more.
    allowed = step * (0.5 if kernels is Kernels.BUILTIN else 1.0) + 1e-4
    assert bool(((found - x).abs() <= allowed[:, None]).all())
    assert bool((found[x == 0] == 0).all())
    assert torch.equal(found[0], quantize_rows(x[:1], kernels)[0])


def test_rows_by_hand() -> None:
    x = torch.tensor([[-1.0, 0.5, 3.0]])
    # Range 4 over 255 codes; -128 + 63.75 = -64.25 from below, 127 - 191.25 = -64.25 from above: zero point -64.
    step = 4 / 255
    codes = torch.tensor([[-64.0, 32.0, 191.0]])
    torch.testing.assert_close(quantize_rows(x, Kernels.XNNPACK), codes * step)
    torch.testing.assert_close(quantize_rows(x, Kernels.BUILTIN), torch.tensor([[-42.0, 21.0, 127.0]]) * 3 / 127)
    zero = torch.zeros(1, 4)
    assert all(torch.equal(quantize_rows(zero, kernels), zero) for kernels in Kernels)


def test_positive_rows_keep_zero() -> None:
    assert quantize_rows(torch.tensor([[0.0, 10.0, 10.0]]), Kernels.XNNPACK)[0, 0] == 0


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_codes_round_and_clip(dtype: type) -> None:
    limit = 1 << (8 * np.dtype(dtype).itemsize - 1)
    codes = Codes(0.5, 3, dtype)
    assert codes.encode(np.array([0.25, 0.75, -0.25, 1e9, -1e9], np.float32)).tolist() == [3, 5, 3, limit - 1, -limit]
    assert codes.encode(np.zeros(1, np.float32)).dtype == dtype
    assert codes.decode(np.array([5], dtype)).tolist() == [1.0]
    assert codes.largest == 0.5 * (limit - 4)


def test_follows_only_what_is_near(drafter: MtpDrafter, source: Shard) -> None:
    interface = read_interface(source)
    case = random_cases(drafter.config, interface, 3, 0)[1]
    arguments = reference_arguments(case, drafter.config, interface, as_stored=True)
    plan = {"pre_projection": Scheme("dynamic", None, None)}
    x = torch.cat((arguments.embedding, arguments.hidden), -1)
    with torch.inference_mode():
        alone = Emulation(drafter, plan, {}).drafter(*arguments).logits

        def following(theirs: torch.Tensor) -> tuple[torch.Tensor, int]:
            emulation = Emulation(drafter, plan, {})
            emulation.follow(Guide({"pre_projection": Operand(theirs, None)}, {}))
            return emulation.drafter(*arguments).logits, emulation.followed.codes

        # A last bit of difference is followed, and changes at most a rounding.
        near, moved = following(x * (1 + 1e-7))
        assert moved <= 2
        assert (near - alone).abs().max() < 0.5
        # What is further off is not taken over.
        far, moved = following(x * 1.01)
        assert moved == 0
        assert torch.equal(far, alone)


def test_cases_are_the_same_in_both_programs(drafter: MtpDrafter, source: Shard) -> None:
    interface = read_interface(source)
    cases = random_cases(drafter.config, interface, 6, 3)
    assert [case.position for case in cases][:: len(cases) - 1] == [1, interface.slots - 1]
    for case in cases:
        inputs = signature_inputs(case, interface)
        arguments = reference_arguments(case, drafter.config, interface, as_stored=True)
        assert set(inputs) == set(source.signature.inputs)
        assert inputs["mask"].sum() == case.position + 1
        for kind, (key, value) in interface.caches.items():
            k, v = arguments.shared_kv[kind]
            seen = case.position + 1
            assert np.array_equal(inputs[key.name][:, :, :seen], k.numpy())
            assert np.array_equal(inputs[value.name][..., :seen].swapaxes(2, 3), v.numpy())
            assert not inputs[key.name][:, :, seen:].any()
