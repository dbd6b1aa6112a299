"""Google's interpreter in floats: the right drafter agrees to the last bits, and every wrong one is seen."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import torch
from helpers.first_pair import first_bundle
from helpers.make_drafter import DrafterSpec, plain_drafter
from helpers.variant_files import REFUSED, STORED, VARIANTS, variant
from seam import model_of

import mtp_extract
from mtp_extract.bundle import BundledDrafter
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import UnsupportedError
from mtp_extract.pipeline.extraction import build_checkpoint
from mtp_extract.validation import interpreter
from mtp_extract.validation.interpreter import (
    XNNPACK_SLOTS,
    Parity,
    convert_to_floats,
    decode_output,
    encode_input,
    measure_parity,
    needs_reference_kernels,
    run_interpreter,
)
from mtp_extract.validation.parity import (
    OutputDifference,
    Outputs,
    compare_outputs,
    compute_allowed_difference,
    draw_inputs,
    list_cache_inputs,
)
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.run import run_validation


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_codes_are_rounded_and_clipped(dtype: type) -> None:
    limit = 1 << (8 * np.dtype(dtype).itemsize - 1)
    detail = {"name": "kv_cache_k", "dtype": dtype, "quantization": (0.5, 3)}
    codes = encode_input(np.array([0.25, 0.75, -0.25, 1e9, -1e9], np.float32), detail)
    assert (codes.tolist(), codes.dtype) == ([3, 5, 3, limit - 1, -limit], dtype)
    assert decode_output(np.array([[5]], dtype), detail).tolist() == [1.0]
    with pytest.raises(UnsupportedError, match="kv_cache_k holds integers without a scale"):
        encode_input(np.zeros(1, np.float32), {**detail, "quantization": (0.0, 0)})


def measure(source: BundledDrafter, drafter: MtpDrafter | None = None, seed: int = 0) -> Parity:
    """Of ``drafter``, by default the one that is extracted from ``source``."""
    return measure_parity(drafter or load_drafter_of(source), source, 16, seed)


def load_drafter_of(source: BundledDrafter) -> MtpDrafter:
    return load_drafter(build_checkpoint(source).complete(), dtype=torch.float32)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_sample_agrees(drafter: MtpDrafter, source: BundledDrafter, seed: int) -> None:
    """Whatever is drawn, it is the order of additions, and nothing that a code may tip over."""
    found = measure(source, drafter, seed)
    assert found.agrees
    # Half of what is allowed was too little for one CPU of another kind, by half a percent.
    assert found.in_floats.logits > 1e-7 and found.in_floats.worst < found.nearby_allowed
    assert found.in_floats.top1 > 16
    # The interpreter rounds activations, the reference does not: near, and not the same.
    assert 1e-3 < found.as_it_is.logits < 0.1
    assert found.as_it_is.correlation > 0.99


@pytest.mark.parametrize(
    ("nearby", "everywhere", "correlation", "agrees"),
    [
        (0.9e-5, 0.9e-4, 0.51, True),
        (1.1e-5, 2e-5, 0.99, False),
        (1e-6, 1.1e-4, 0.99, False),
        (1e-6, 1e-6, 0.4, False),
        (np.nan, np.inf, np.nan, False),
    ],
)
def test_what_agrees(nearby: float, everywhere: float, correlation: float, agrees: bool) -> None:
    rough = OutputDifference(0.1, 0.1, correlation, 16)
    found = Parity(
        OutputDifference(nearby, 0.0, 1.0, 16), OutputDifference(0.0, everywhere, 1.0, 16), rough, 1e-5, 1e-4
    )
    assert found.agrees == agrees


BOTH_KERNELS = [
    *((XNNPACK_SLOTS, name) for name in sorted(set(VARIANTS) - REFUSED)),
    *((0, name) for name in STORED),
]


@pytest.mark.parametrize(("slots", "name"), BOTH_KERNELS)
def test_every_way_of_quantizing_agrees(slots: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By XNNPACK's kernels, and by the reference ones."""
    monkeypatch.setattr(interpreter, "XNNPACK_SLOTS", slots)
    with mtp_extract.open(variant(name)) as opened:
        found = measure(opened.read_drafter())
    assert found.agrees
    assert found.in_floats.worst < found.nearby_allowed
    # The twins' grids are as coarse as Google's, and so made for other numbers than random ones.
    assert found.as_it_is.correlation > (0.8 if name.startswith("twin_") else 0.9)


@pytest.mark.parametrize("name", ["jax_published", "torch_static8_mix48_kv8"])
def test_both_kernels_make_the_same_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 caches and activations, INT4 codes down to -8, which LiteRT's third kernels take for another number."""
    with mtp_extract.open(variant(name)) as opened:
        source = opened.read_drafter()
        xnnpack = run_interpreter(source, draw_inputs(source, 16), floats=False)
        monkeypatch.setattr(interpreter, "XNNPACK_SLOTS", 0)
        reference = run_interpreter(source, draw_inputs(source, 16), floats=False)
    states = [np.array_equal(ours[1], theirs[1]) for ours, theirs in zip(reference, xnnpack, strict=True)]
    assert sum(states) >= 12  # two codes may be as near
    assert compare_outputs(reference, xnnpack).correlation > 0.998


def test_reference_kernels_are_given_the_code_that_they_misread_as_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT8's -128 against float activations, for which they compute -(-128) in 8 bits; XNNPACK reads it right."""
    spec = DrafterSpec(hidden=64, ffn=128, head_dim=16, backbone=64, vocab=64, cache=64, lowest_code=-128)
    with plain_source(tmp_path, spec) as source:
        xnnpack = run_interpreter(source, draw_inputs(source, 8), floats=False)
        monkeypatch.setattr(interpreter, "XNNPACK_SLOTS", 0)
        reference = run_interpreter(source, draw_inputs(source, 8), floats=False)
        assert measure(source).agrees
    assert compare_outputs(reference, xnnpack).correlation > 0.99


def test_codes_of_a_cache_are_exact() -> None:
    """Both programs are given the same numbers: what differs as it is are activations alone."""
    with mtp_extract.open(variant("torch_static8_mix48_kv8")) as opened:
        source = opened.read_drafter()
        for inputs in draw_inputs(source, 4):
            for name in {name for pair in list_cache_inputs(source).values() for name, _ in pair}:
                known = source.structure.caches[name].quantization
                assert known is not None
                codes = encode_input(inputs[name], {"dtype": np.int8, "quantization": (float(known.scale[0]), 0)})
                assert np.array_equal(codes * known.scale[0], inputs[name])
                assert np.unique(codes).size > 25


def test_caches_with_as_many_slots_as_dimensions(tmp_path: Path) -> None:
    """Their shapes do not say which axis is which; the graph does. Here V lies as K does."""
    with plain_source(tmp_path, DrafterSpec(head_dim=16, cache=16)) as source:
        assert measure(source).agrees


LONG = DrafterSpec(cache=32003, cache_step=0.02)


@contextmanager
def plain_source(folder: Path, spec: DrafterSpec) -> Iterator[BundledDrafter]:
    path = folder / "drafter.tflite"
    path.write_bytes(plain_drafter(spec))
    with mtp_extract.open(path) as opened:
        yield opened.read_drafter()


def test_long_caches_take_no_gigabytes(tmp_path: Path) -> None:
    """XNNPACK would take 4.1 GB for these, a float for each two slots."""
    with plain_source(tmp_path, LONG) as source:
        assert needs_reference_kernels(source)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = measure(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert found.agrees
    assert found.as_it_is.correlation > 0.99


@pytest.mark.parametrize(("slots", "reference"), [(4096, False), (4097, True)])
def test_short_caches_are_left_to_the_kernels_of_litert_lm(tmp_path: Path, slots: int, reference: bool) -> None:
    with plain_source(tmp_path, dataclasses.replace(LONG, cache=slots)) as source:
        assert needs_reference_kernels(source) == reference


def test_the_tolerance_grows_with_what_is_summed_and_with_the_angle() -> None:
    unit = 2.0**-24
    assert compute_allowed_difference(256, 0) == pytest.approx(160 * unit)
    assert compute_allowed_difference(1, 0) == compute_allowed_difference(256, 0)
    assert compute_allowed_difference(25600, 0) == pytest.approx(1600 * unit)
    assert compute_allowed_difference(256, 1000) == pytest.approx(2160 * unit)


@pytest.mark.parametrize("backbone", [8, 2560])
@pytest.mark.parametrize(("share", "agrees"), [(0.0, True), (0.4, True), (1.6, False)])
def test_a_fault_is_found_just_above_the_tolerance(tmp_path: Path, backbone: int, share: float, agrees: bool) -> None:
    """The projected state too large, by a share of what is allowed at its size."""
    allowed, name = compute_allowed_difference(2 * backbone, 15), "post_projection.weight"
    with plain_source(tmp_path, DrafterSpec(backbone=backbone)) as source:
        drafter = load_drafter_of(source)
        # The largest number is half of its range, more or less.
        wrong = drafter.state_dict()[name] * (1 + 2 * share * allowed)
        found = measure(source, drafter.with_tensors({name: wrong}))
    assert found.allowed == pytest.approx(allowed)
    assert found.agrees == agrees


Fault = Callable[[MtpDrafter], MtpDrafter]


def change_half(name: str) -> Fault:
    """Every other number of a tensor 2 % too large: many of these networks do not see a tensor that is all larger."""

    def plant(drafter: MtpDrafter) -> MtpDrafter:
        tensor = drafter.state_dict()[name].clone()
        tensor.reshape(-1)[::2] *= 1.02
        return drafter.with_tensors({name: tensor})

    return plant


def swap_tensors(one: str, other: str) -> Fault:
    def plant(drafter: MtpDrafter) -> MtpDrafter:
        state = drafter.state_dict()
        return drafter.with_tensors({one: state[other], other: state[one]})

    return plant


def change_config(change: Callable[[Any], Any]) -> Fault:
    return lambda drafter: drafter.with_config(change(drafter.config))


def change_window(config: Any, window: int) -> Any:
    layers = tuple(dataclasses.replace(x, sliding_window=x.sliding_window and window) for x in config.layers)
    return dataclasses.replace(config, layers=layers)


def list_tensor_names() -> list[str]:
    with mtp_extract.open(first_bundle()) as opened:
        # The last layer's scalar changes nothing: a norm follows.
        return [name for name in load_drafter_of(opened.read_drafter()).state_dict() if name != "layers.3.layer_scalar"]


FAULTS: dict[str, Fault] = {
    **{f"half of {name}": change_half(name) for name in list_tensor_names()},
    "no layer scalar": lambda drafter: drafter.with_tensors({"layers.0.layer_scalar": torch.ones(1)}),
    "gate and up swapped": swap_tensors("layers.1.gate_proj.weight", "layers.1.up_proj.weight"),
    "norms before swapped": swap_tensors("layers.2.pre_attention_norm.weight", "layers.2.pre_ffw_norm.weight"),
    "norms after swapped": swap_tensors("layers.2.post_attention_norm.weight", "layers.2.post_ffw_norm.weight"),
    "layers swapped": swap_tensors("layers.0.down_proj.weight", "layers.1.down_proj.weight"),
    "epsilon": change_config(lambda config: dataclasses.replace(config, rms_norm_eps=1e-5)),
    "scale of attention": change_config(lambda config: dataclasses.replace(config, attention_scale=0.25)),
    "no soft cap": change_config(lambda config: dataclasses.replace(config, final_logit_softcap=None)),
    "soft cap": change_config(lambda config: dataclasses.replace(config, final_logit_softcap=30.01)),
    "exact gelu": change_config(lambda config: dataclasses.replace(config, hidden_activation="gelu")),
    "all of full rotated": change_config(lambda c: c.replace_rope("full_attention", partial_rotary_factor=1.0)),
    "theta of sliding": change_config(lambda c: c.replace_rope("sliding_attention", theta=10_001.0)),
    "theta of full": change_config(lambda c: c.replace_rope("full_attention", theta=1_010_000.0)),
    "window": change_config(lambda config: change_window(config, 8)),
    "window by one": change_config(lambda config: change_window(config, config.sliding_window - 1)),
}


@pytest.fixture(scope="module")
def theirs() -> list[Outputs]:
    """What the interpreter computes of the sample in floats."""
    with mtp_extract.open(first_bundle()) as opened:
        source = opened.read_drafter()
        return run_interpreter(source, draw_inputs(source, 16, quiet=True), floats=True)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refuted(
    drafter: MtpDrafter, source: BundledDrafter, theirs: list[Outputs], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What it computes as it is says nothing here.
    monkeypatch.setattr(interpreter, "run_interpreter", lambda source, steps, floats: theirs[: len(list(steps))])
    found = measure(source, FAULTS[name](drafter))
    assert found.nearby.worst > found.nearby_allowed or found.in_floats.worst > found.allowed


def test_a_wrong_reading_of_the_graph_is_refuted(source: BundledDrafter) -> None:
    """A walk that takes gate for up gives a checkpoint of which every tensor is the file's."""
    other = {"layers.1.gate_proj": "layers.1.up_proj", "layers.1.up_proj": "layers.1.gate_proj"}
    roles = tuple(dataclasses.replace(r, role=other.get(r.role, r.role)) for r in source.structure.roles)
    misread = dataclasses.replace(source, structure=dataclasses.replace(source.structure, roles=roles))
    found = measure(misread)
    assert not found.agrees
    assert found.in_floats.logits > 1e-2


def test_floats_that_are_not_the_files_are_refuted(
    drafter: MtpDrafter, source: BundledDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both programs would compute with codes that are read the wrong way round; the file as it is does not."""
    from mtp_extract.litertlm.storage import Packing

    unpack = Packing.unpack

    def swap_outputs(packing: Packing, stored: bytes) -> np.ndarray:
        codes = unpack(packing, stored)
        return codes if packing.bits == 8 else codes.reshape(-1, 2)[:, ::-1].reshape(-1)

    monkeypatch.setattr(Packing, "unpack", swap_outputs)
    found = measure(source)
    assert found.in_floats.logits < found.nearby_allowed
    assert found.as_it_is.correlation < 0.5
    assert not found.agrees


def test_constants_behind_the_flatbuffer_are_brought_in(source: BundledDrafter) -> None:
    """As a model of more than 2 GB has them: a place and a size in the file."""
    from ai_edge_litert import schema_py_generated as schema

    region = source.model.region
    moved = schema.ModelT.InitFromPackedBuf(region.read(0, region.size))
    behind, at = b"", 0
    for wanted in (False, True):
        for buffer in moved.buffers:
            if not wanted and buffer.data is not None and len(buffer.data):
                buffer.offset, buffer.size = 1 << 40, len(buffer.data)
                behind, buffer.data = behind + bytes(buffer.data), None
            elif buffer.size and wanted:
                buffer.offset, at = at, at + buffer.size
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(moved.Pack(builder), b"TFL3")
        at = len(builder.Output())
    assert convert_to_floats(model_of(bytes(builder.Output()) + behind)) == convert_to_floats(source.model)


def test_weights_in_another_section_are_not_asked(drafter: MtpDrafter, source: BundledDrafter) -> None:
    apart_from = dataclasses.replace(source.model, weights=source.model.region)
    with pytest.raises(UnsupportedError, match="a section of their own"):
        measure(dataclasses.replace(source, model=apart_from), drafter)


def test_a_directory_that_is_rounded_is_as_sharply_compared(tmp_path: Path) -> None:
    """Its tensors are held against the file's by identity; parity is of the file's."""
    mtp_extract.extract(first_bundle(), tmp_path / "d", dtype="f16")

    validation = run_validation(ValidationPlan(tmp_path / "d", source=str(first_bundle()), samples=4))

    (check,) = (check for check in validation.checks if check.name == "interpreter")
    assert check.passed and validation.verified
