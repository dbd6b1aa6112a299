"""Is a directory the drafter of a bundle? Sound ones are, in every format; of others none is, and the tensor that is
another is named. What lies beside it, and what its documents say: ``test_intruders.py``."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.record_document import forge
from helpers.variant_files import variant
from safetensors.torch import load_file, save_file
from seam import verify_against

import mtp_extract
from mtp_extract import convert
from mtp_extract.architecture.roles import list_roles
from mtp_extract.bundle import BundledDrafter, open_bundle
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.errors import CheckpointError, MtpExtractError, ProofError, UnsupportedError
from mtp_extract.formats import MTP_FORMATS, read_checkpoint
from mtp_extract.pipeline import identity
from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.identity import NEEDED, check_identity

ROLES = {role.name: role.names["transformers"] for role in list_roles(4)}
WEIGHTS = "model.safetensors"


def edit(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rewrite a tensor."""
    tensors = load_file(directory / WEIGHTS)
    tensors[name] = change(tensors[name])
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def bit(tensor: torch.Tensor) -> torch.Tensor:
    integers = tensor.reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    integers[tensor.numel() // 2] ^= 1
    return tensor


def build_tail(value: float, tensor: torch.Tensor) -> torch.Tensor:
    tensor.reshape(-1)[-1] = value
    return tensor


TENSOR_FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": bit,
    "infinite": partial(build_tail, torch.inf),
    "not a number": partial(build_tail, torch.nan),
    "turned over": torch.neg,
}
"""What one tensor may suffer."""


@pytest.fixture(scope="module", params=["f32", "bf16", "f16"])
def stored(request: pytest.FixtureRequest, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored") / request.param
    mtp_extract.extract(sample, directory, dtype=request.param)
    return directory


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "copy"))


def run_checks(directory: Path, source: BundledDrafter) -> dict[str, Check]:
    return {check.name: check for check in check_identity(directory, source)}


def list_refuted(directory: Path, source: BundledDrafter) -> str:
    """What is said of it: the evidence of the first check that fails, or the message that refuses it."""
    try:
        return next(check.evidence for check in run_checks(directory, source).values() if check.passed is False)
    except MtpExtractError as error:
        assert "\n" not in str(error)
        return str(error)


def test_a_sound_directory_is_the_drafter(stored: Path, source: BundledDrafter, sample: Path, tmp_path: Path) -> None:
    found = run_checks(stored, source)
    assert {name: check.passed for name, check in found.items()} == dict.fromkeys((*NEEDED, "record"), True)
    with open_bundle(sample) as opened:
        assert verify_against(stored, opened) == [*found.values()]
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stored / name, bare)
    assert [check.passed for check in run_checks(bare, source).values()] == [True] * len(NEEDED) + [None]


CASES = [("f32", "layers.2.down_proj", fault) for fault in TENSOR_FAULTS]
CASES += [("bf16", role, "one bit") for role in ("pre_projection", "layers.3.layer_scalar", "final_norm")]


@pytest.mark.parametrize(("stored", "role", "fault"), CASES, indirect=["stored"])
def test_a_tensor_that_is_another_is_named(copy: Path, source: BundledDrafter, role: str, fault: str) -> None:
    edit(copy, ROLES[role], TENSOR_FAULTS[fault])
    forge(copy)
    found = run_checks(copy, source)
    assert [check.passed for check in found.values()] == [True, True, False, None, None]
    # Its files are as recorded, but a bundle with other weights says nothing of the record's facts on the bundle.
    assert found["record"].evidence == "every file is as recorded; what it says of the bundle was not compared"
    assert found["tensors"].evidence.startswith(f"{role} ({ROLES[role]}) ")
    assert ";" not in found["tensors"].evidence


@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_of_two_tensors_exchanged_in_the_header_one_is_named(copy: Path, source: BundledDrafter) -> None:
    path = copy / WEIGHTS
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    gate, up = (ROLES[f"layers.1.{name}_proj"] for name in ("gate", "up"))
    header[gate], header[up] = header[up], header[gate]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    assert "layers.1.gate_proj" in list_refuted(copy, source)


@pytest.mark.parametrize("name", MTP_FORMATS)
def test_in_every_format_it_is_derived_from_the_file(
    name: str, sample: Path, source: BundledDrafter, tmp_path: Path
) -> None:
    """Codes are told to be the file's, and scales to be rounded where they are."""
    mtp_extract.extract(sample, tmp_path / "d", format=name)
    found = run_checks(tmp_path / "d", source)
    assert [check.passed for check in found.values()] == [True] * 5, found
    evidence = found["tensors"].evidence
    assert evidence.startswith("all 48 are derived from the file's, every bit; ")
    kept = 23 - name.endswith("sglang") if "codes" in MTP_FORMATS[name].dtypes else 0
    assert (f"; {kept} in the file's codes" in evidence) == bool(kept)
    assert (", rounded to FP16 in their scales" in evidence) == (name == "gguf")


@pytest.mark.parametrize("name", ["jax_published", "torch_plain_norm"])
def test_a_static_scale_that_is_not_the_files_is_named(name: str, tmp_path: Path) -> None:
    """One that is changed or invented is none of the file's, whatever the weights; without any, none is claimed."""
    mtp_extract.extract(variant(name), tmp_path / "d", format="gemma")
    (tmp_path / "d" / "extraction.json").unlink()
    weights = tmp_path / "d" / "model.safetensors"
    stored = read_safetensors(weights)[0]["model.layers.1.mlp.up_proj.output_activation_scale"]
    data = bytearray(weights.read_bytes())
    with open_bundle(variant(name)) as opened:
        drafter = opened.read_drafter()
        assert run_checks(tmp_path / "d", drafter)["tensors"].passed
        data[stored.offset + 3] ^= 0x20
        weights.write_bytes(data)
        found = list_refuted(tmp_path / "d", drafter)
        assert found.startswith("layers.1.up_proj (")
        assert found.endswith("has other static scales of activations than the file's")
        for entry, place in read_safetensors(weights)[0].items():
            if "activation_scale" in entry:
                data[place.offset : place.offset + place.length] = bytes(place.length)
        weights.write_bytes(data)
        assert run_checks(tmp_path / "d", drafter)["tensors"].passed


def test_rounding_on_the_way_is_named_step_by_step(sample: Path, source: BundledDrafter, tmp_path: Path) -> None:
    """F32 that were BF16 are the file's rounded ones (ones are both); codes made of them are not the file's."""
    mtp_extract.extract(sample, tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "f32", format="transformers", dtype="f32")
    found = run_checks(tmp_path / "f32", source)
    assert [check.passed for check in found.values()] == [True] * 5, found
    assert found["tensors"].evidence.endswith("every bit; 1 in F32; 47 in F32, rounded to BF16")
    convert(tmp_path / "bf16", tmp_path / "int8", format="compressed-tensors", quantize="int8")
    found = run_checks(tmp_path / "int8", source)
    assert [check.passed for check in found.values()] == [True] * 5, found
    assert "23 in codes, rounded to BF16, then to integers by int8" in found["tensors"].evidence


def test_a_drafter_with_the_exact_gelu_is_read_again_in_every_format(tmp_path: Path) -> None:
    """What is written of a graph with the exact function is read again, whatever the format, and computes the same."""
    from helpers.surgery import sound

    graph = sound("torch")
    for index in range(sum(role.endswith(".q_proj") for role in graph.roles)):
        layer = graph.layer(index)
        graph.rewire(layer.activated, graph.call("GELU", layer.gate, approximate=False))
    path = tmp_path / "exact.tflite"
    path.write_bytes(graph.data())
    with open_bundle(path) as opened:
        drafter = opened.read_drafter()
        assert drafter.config.hidden_activation == "gelu"
        for name in MTP_FORMATS:
            try:
                mtp_extract.extract(opened, tmp_path / name, format=name)
            except UnsupportedError as error:
                assert "GELU" in str(error) or "gelu" in str(error)
                continue
            assert read_checkpoint(tmp_path / name).config.hidden_activation == "gelu"
            assert all(check.passed for check in run_checks(tmp_path / name, drafter).values()), name


@pytest.mark.parametrize(("error", "passed"), [(ProofError, False), (UnsupportedError, None)])
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_the_same_tensors_are_not_enough_without_the_proof(
    stored: Path,
    source: BundledDrafter,
    monkeypatch: pytest.MonkeyPatch,
    error: type[MtpExtractError],
    passed: bool | None,
) -> None:
    """The same config and tensors are not enough."""

    def refuse(drafter: BundledDrafter, checkpoint: object) -> None:
        raise error("layers.1: it is otherwise. Look there.")

    monkeypatch.setattr(identity, "prove_checkpoint", refuse)
    found = run_checks(stored, source)
    assert [check.passed for check in found.values()] == [True, True, True, passed, None]
    assert found["function"].evidence == "layers.1: it is otherwise"
    with pytest.raises(CheckpointError, match=r"function: layers\.1: it is otherwise"):
        verify_against(stored, source.opened)
