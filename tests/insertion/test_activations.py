"""New scales of static activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.make_bundle import load, pack
from helpers.variant_files import variant

from mtp_extract.bundle import open_bundle
from mtp_extract.insertion.run import plan_insertion

STATIC = variant("torch_static8_mix48_kv8")


@pytest.fixture
def static(extracted_variant: Callable[[str], Path]) -> Path:
    return extracted_variant(STATIC.stem)


def read_scales(path: Path) -> dict[str, tuple[float, int, float, int]]:
    with open_bundle(path) as opened:
        return {
            role.role: (role.input.scale, role.input.zero_point, role.output.scale, role.output.zero_point)
            for role in opened.read_drafter().structure.roles
            if role.input is not None and role.output is not None
        }


def test_without_a_base_there_is_a_warning(static: Path, noisy: Path, sample: Path) -> None:
    for source, into, warned in ((static, STATIC, False), (noisy, STATIC, True), (noisy, sample, False)):
        with plan_insertion(source, into) as plan:
            assert any("calibrated for the old weights" in note for note in plan.notes) == warned


def test_new_scales_are_the_ranges(static: Path, tmp_path: Path) -> None:
    before = read_scales(STATIC)
    # Another range for every role; gate and up read one value.
    ends = {role: 5 + i / 100 for i, role in enumerate(before)}
    low = {role: 5.0 if role.endswith(("gate_proj", "up_proj")) else end for role, end in ends.items()}
    ranges = {role: ((-low[role], 0.5), (-0.25, ends[role])) for role in before}
    with plan_insertion(static, STATIC, measure=lambda: ranges) as plan:
        plan.write(tmp_path / "new.tflite")
        assert any("22 matrices were calibrated anew" in note for note in plan.notes)
    expected = {role: (pytest.approx(low[role] / 127), 0, pytest.approx(ends[role] / 127), 0) for role in before}
    assert read_scales(tmp_path / "new.tflite") == expected
    old, new = (np.frombuffer(path.read_bytes(), np.uint8) for path in (STATIC, tmp_path / "new.tflite"))
    # Two scales a role, of which gate and up share one.
    assert old.size == new.size and 40 <= np.flatnonzero(old != new).size <= 4 * 40


def test_zero_points_that_are_none(static: Path, tmp_path: Path) -> None:
    """An asymmetric activation gets scale and zero point; a range of 0 changes nothing."""
    model = load(STATIC.read_bytes())
    with open_bundle(STATIC) as opened:
        result = next(r.result for r in opened.read_drafter().structure.roles if r.role == "layers.0.o_proj")
        assert result is not None and result.producer is not None
        tensor = result.producer.get_operand(0).tensors[-1]
    model.subgraphs[0].tensors[tensor.index].quantization.zeroPoint = np.array([-7], np.int64)
    (tmp_path / "old.tflite").write_bytes(pack(model))
    zero_range = (0.0, 0.0)
    ranges = {"layers.0.o_proj": ((-1.0, 4.1), zero_range), "layers.1.o_proj": (zero_range, zero_range)}
    with plan_insertion(static, tmp_path / "old.tflite", measure=lambda: ranges) as plan:
        plan.write(tmp_path / "new.tflite")
    before, after = read_scales(tmp_path / "old.tflite"), read_scales(tmp_path / "new.tflite")
    scale, zero_point, *out = after["layers.0.o_proj"]
    assert scale == pytest.approx(5.1 / 255)
    assert zero_point == -128 + round(1 / (5.1 / 255))
    assert out == list(before["layers.0.o_proj"][2:])
    assert after["layers.1.o_proj"] == before["layers.1.o_proj"]
