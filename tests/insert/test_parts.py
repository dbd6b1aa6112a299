"""Gate and up in one constant, norms stored less 1, convolutions: out and back, and each part on its own."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from adversary.edits import parameters
from adversary.rewrites.norms import every_norm
from adversary.rewrites.spelled import by_convolution, one_plus
from adversary.rewrites.weights import every_weight
from helpers.surgery import Graph, sound
from safetensors.numpy import load_file, save_file

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.errors import RoleError, UnsupportedError
from mtp_extract.formats import FORMATS
from mtp_extract.insert.drafter import planned_insertion
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.pipeline.inspection import inspect

GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
NORM = "model.layers.0.input_layernorm.weight"
EVEN_ODD = (range(0, 256, 2), range(1, 256, 2))


def codes_of(weight: np.ndarray, per_row: bool) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(weight).max(1 if per_row else None, keepdims=True) / np.float32(127)
    return np.rint(weight / scale).astype(np.int8), scale.reshape(-1).astype(np.float32)


def fused(g: Graph, *, scales: str = "", turned: bool = False, rows: tuple[range, range] | None = None) -> None:
    """Gate and up of layer 0 in one constant, with a scale a row, one for all, or floats."""
    layer = g.layer(0)
    weight = np.concatenate([g.floats(g.roles[f"layers.0.{name}_proj"]) for name in ("gate", "up")])
    if scales:
        codes, found = codes_of(weight, scales == "rows")
        stored = g.constant(codes, np.int8)
        g.main.tensors[stored].quantization = parameters(found, np.zeros(found.size, np.int64))
    else:
        stored = g.transpose(g.constant(np.ascontiguousarray(weight.T)), [1, 0]) if turned else g.constant(weight)
    wide = g.product(layer.ffw_in, stored)
    if rows is not None:
        parts = [g.gather(wide, list(own), -1) for own in rows]
    else:
        shape = [*g.shape(wide)[:-1], len(weight) // 2]
        parts = [g.tensor(shape), g.tensor(shape)]
        sizes, axis = np.array([len(weight) // 2, -1], np.int32), np.array(2, np.int32)
        g.emit("SPLIT_V", [wide, g.constant(sizes, np.int32), g.constant(axis, np.int32)], parts, numSplits=2)
    g.rewire(layer.gate, parts[0])
    g.rewire(layer.up, parts[1])


def made(tmp_path: Path, change: Callable[[Graph], object], style: str = "torch") -> Path:
    graph = sound(style)
    change(graph)
    graph.tidy()
    path = tmp_path / "drafter.tflite"
    path.write_bytes(graph.data())
    return path


def weights_of(path: Path) -> dict[str, np.ndarray]:
    with open_bundle(path) as opened:
        return {role: tensor.array() for role, tensor in checkpoint_of(opened.drafter()).tensors.items()}


def there_and_back(path: Path, tmp_path: Path, changes: dict[str, np.ndarray]) -> Path:
    source = extract(path, tmp_path / "changed", dtype="f32").directory
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, **changes}, source / "model.safetensors", {"format": "pt"})
    out = tmp_path / "new.tflite"
    with planned_insertion(source, path) as plan:
        plan.write(out)
    return out


CHANGES: dict[str, Callable[[Graph], object]] = {
    "rows": lambda g: fused(g, scales="rows"),
    "one scale": lambda g: fused(g, scales="one"),
    "floats": fused,
    "norms less 1": every_norm(one_plus),
    "convolutions": every_weight(by_convolution),
}


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"dtype": "bf16", "codes": True}], ids=["f32", "bf16+codes"])
@pytest.mark.parametrize("name", CHANGES)
def test_untouched_it_is_the_same_file(name: str, options: dict[str, object], tmp_path: Path) -> None:
    path = made(tmp_path, CHANGES[name])
    source = extract(path, tmp_path / "out", **options).directory
    with planned_insertion(source, path) as plan:
        plan.write(tmp_path / "new.tflite")
    assert filecmp.cmp(path, tmp_path / "new.tflite", shallow=False)


@pytest.mark.parametrize("layout", [name for name, listed in FORMATS.items() if "codes" in listed.dtypes])
def test_the_codes_of_a_part_are_its_own_in_every_format(layout: str, tmp_path: Path) -> None:
    path = made(tmp_path, CHANGES["rows"])
    graph = sound("torch")
    with open_bundle(path) as opened:
        tensors = checkpoint_of(opened.drafter()).tensors
        both = np.concatenate([graph.floats(graph.roles[f"layers.0.{name}_proj"]) for name in ("gate", "up")])
        expected, scale = codes_of(both, per_row=True)
        for at, role in ((0, "layers.0.gate_proj"), (128, "layers.0.up_proj")):
            tensor = tensors[role]
            codes = tensor.codes()
            assert np.array_equal(codes, expected[at : at + 128])
            assert np.array_equal(tensor.steps.size.reshape(-1), scale[at : at + 128])
        assert tensors["layers.0.gate_proj"].origin != tensors["layers.0.up_proj"].origin
    source = extract(path, tmp_path / "out", format=layout).directory
    with planned_insertion(source, path) as plan:
        plan.write(tmp_path / "new.tflite")
    assert filecmp.cmp(path, tmp_path / "new.tflite", shallow=False)


@pytest.mark.parametrize("name", ["rows", "floats"])
def test_a_changed_part_goes_to_its_rows_and_leaves_the_others(name: str, tmp_path: Path) -> None:
    path = made(tmp_path, CHANGES[name])
    before = weights_of(path)
    wanted = np.asarray(before["layers.0.up_proj"] * np.float32(1.5))
    out = there_and_back(path, tmp_path, {UP: wanted})
    after = weights_of(out)
    np.testing.assert_allclose(after["layers.0.up_proj"], wanted, rtol=1e-6)
    assert all(np.array_equal(after[role], before[role]) for role in before if role != "layers.0.up_proj")
    assert out.stat().st_size == path.stat().st_size


def test_a_part_that_shares_its_scale_is_not_changed(tmp_path: Path) -> None:
    path = made(tmp_path, CHANGES["one scale"])
    with pytest.raises(UnsupportedError, match=r"layers\.0\.gate_proj: .* beside other weights, and they share scales"):
        there_and_back(path, tmp_path, {GATE: weights_of(path)["layers.0.gate_proj"] * np.float32(1.5)})
    assert not (tmp_path / "new.tflite").exists()


def test_a_norm_stored_less_1_is_changed(tmp_path: Path) -> None:
    path = made(tmp_path, CHANGES["norms less 1"])
    before = weights_of(path)
    wanted = np.linspace(0.5, 2, before["layers.0.pre_attention_norm"].size, dtype=np.float32)
    after = weights_of(there_and_back(path, tmp_path, {NORM: wanted}))
    np.testing.assert_allclose(after["layers.0.pre_attention_norm"], wanted, rtol=1e-6)
    assert all(np.array_equal(after[role], before[role]) for role in before if role != "layers.0.pre_attention_norm")


def test_a_part_is_read_by_name(tmp_path: Path) -> None:
    path = made(tmp_path, CHANGES["rows"])
    with open_bundle(path) as opened:
        found = inspect(opened, graph=True).as_json["drafter"]["roles"]
    roles = {role["role"]: role for role in found}
    gate, up = (roles[f"layers.0.{name}_proj"] for name in ("gate", "up"))
    assert gate["tensor"] == up["tensor"]
    assert gate["why"].startswith("rows 0 to 128 of the weight of")
    assert up["why"].startswith("rows 128 to 256 of the weight of")
    assert gate["shape"] == up["shape"] == [128, 64]
    assert (gate["first_row"], up["first_row"], roles["layers.0.down_proj"]["first_row"]) == (0, 128, None)


def test_rows_that_alternate_are_no_parts(tmp_path: Path) -> None:
    path = made(tmp_path, lambda g: fused(g, rows=EVEN_ODD))
    with pytest.raises(RoleError, match=r"gate_proj: its rows"), open_bundle(path) as opened:
        opened.drafter()


def test_rows_that_no_role_has_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path, lambda g: fused(g, rows=(range(0, 128), range(64, 192))))
    with pytest.raises(RoleError, match="in common"), open_bundle(path) as opened:
        opened.drafter()


def test_columns_of_a_constant_are_refused_by_name(tmp_path: Path) -> None:
    path = made(tmp_path, lambda g: fused(g, turned=True))
    with pytest.raises(UnsupportedError, match=r"layers\.0\.gate_proj"), open_bundle(path) as o:
        o.drafter()
