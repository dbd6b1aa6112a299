"""Is a directory the drafter of a bundle? Sound ones are, in every format; of 60 planted faults none is proven, and
what is wrong is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.make_bundle import on_model
from helpers.record_document import forge
from helpers.variant_files import REFUSED, VARIANTS, variant
from safetensors.torch import load_file, save_file
from seam import verify_against

import mtp_extract
from mtp_extract.architecture.roles import roles_of
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.files import read_header
from mtp_extract.errors import CheckpointError, MtpExtractError, ProofError, UnsupportedError
from mtp_extract.formats import FORMATS, read_checkpoint
from mtp_extract.pipeline import identity
from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.identity import NEEDED, check_identity, drafter_for
from mtp_extract.pipeline.writing import convert

ROLES = {role.name: role.names["transformers"] for role in roles_of(4)}
WEIGHTS = "model.safetensors"


def edit(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rewrite a tensor."""
    tensors = load_file(directory / WEIGHTS)
    tensors[name] = change(tensors[name])
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, as integers of its width."""
    return tensor.reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def bit(tensor: torch.Tensor) -> torch.Tensor:
    raw(tensor)[tensor.numel() // 2] ^= 1
    return tensor


def ending_in(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.reshape(-1)[-1] = value
        return tensor

    return change


TENSOR_FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": bit,
    "infinite": ending_in(torch.inf),
    "not a number": ending_in(torch.nan),
    "turned over": torch.neg,
}
"""What one tensor may suffer."""


ROPE = {
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "full_attention": {"rope_theta": 1000000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**ROPE, kind: {**ROPE[kind], **changes}}}


SHAPES = "the checkpoint does not match its config"
"""What is said of a number by which tensors would have other shapes, before a graph is asked."""

CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no cap": ({"final_logit_softcapping": None}, "final_logit_softcap is 30.0, not None"),
    "eps, barely": ({"rms_norm_eps": 1.01e-6}, "rms_norm_eps"),
    "default rope": (rope("full_attention", rope_type="default"), "full_attention.partial_rotary_factor 0.25"),
    "factor": (rope("full_attention", factor=8.0), "rope.factor"),
    "kv heads": ({"num_key_value_heads": 1}, "layers.0.num_kv_heads is 2, not 1"),
    "kv heads of full": ({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, "num_kv_heads"),
    "layer types": ({"layer_types": ["sliding_attention", "full_attention"] * 2}, SHAPES),
    "activation": ({"hidden_activation": "gelu"}, "hidden_activation"),
    "bidirectional": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
}
"""Numbers that a graph fixes, changed; every one of them is in test_intruders.py."""


def header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / WEIGHTS
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@on_model
def swap(header: dict[str, Any], one: str, other: str) -> None:
    header[one], header[other] = header[other], header[one]


@on_model
def renamed(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
NORM = "model.layers.2.input_layernorm.weight"

FILE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped in the header": (lambda d: header(d, swap(GATE, UP)), "layers.1.gate_proj"),
    "layers swapped": (lambda d: header(d, swap(NORM, NORM.replace("2", "0"))), "layers.0.pre_attention_norm"),
    "another type": (lambda d: header(d, lambda h: h[GATE].update(dtype="I32")), "I32"),
    "misnamed": (lambda d: header(d, renamed(NORM, "model.layers.2.norm.weight")), NORM),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "expected model.safetensors"),
    "no generation config": (lambda d: (d / "generation_config.json").unlink(), "generation_config.json is missing"),
    "record of nothing": (lambda d: (d / "extraction.json").write_text("{}"), "extraction.json"),
}
"""What the files may suffer, and a word of what must be said."""


@pytest.fixture(scope="module", params=["f32", "bf16", "f16"])
def stored(request: pytest.FixtureRequest, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored") / request.param
    mtp_extract.extract(sample, directory, dtype=request.param)
    return directory


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "copy"))


def checked(directory: Path, source: Shard) -> dict[str, Check]:
    return {check.name: check for check in check_identity(directory, source)}


def refuted(directory: Path, source: Shard) -> str:
    """What is said of it: the evidence of the first check that fails, or the message that refuses it."""
    try:
        return next(check.evidence for check in checked(directory, source).values() if check.passed is False)
    except MtpExtractError as error:
        assert "\n" not in str(error)
        return str(error)


def test_a_sound_directory(stored: Path, source: Shard, sample: Path, tmp_path: Path) -> None:
    found = checked(stored, source)
    assert {name: check.passed for name, check in found.items()} == dict.fromkeys((*NEEDED, "record"), True)
    with open_bundle(sample) as opened:
        assert verify_against(stored, opened) == [*found.values()]
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stored / name, bare)
    assert [check.passed for check in checked(bare, source).values()] == [True] * len(NEEDED) + [None]


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"jax_hadamard"}))
def test_every_variant(name: str, tmp_path: Path) -> None:
    mtp_extract.extract(variant(name), tmp_path / "d", sliding_window=16 if name in REFUSED else None)
    with open_bundle(variant(name)) as opened:
        drafter = drafter_for(opened, read_checkpoint(tmp_path / "d").mtp)
        assert all(check.passed for check in checked(tmp_path / "d", drafter).values())


def test_the_litert_layout(sample: Path, source: Shard, tmp_path: Path) -> None:
    """The table of roles decides which tensor plays which."""
    mtp_extract.extract(sample, tmp_path / "d", format="litert")
    path = tmp_path / "d" / "mtp_drafter_config.json"
    path.write_text(path.read_text().replace("layers.1.gate_proj.weight", "layers.1.up_proj.weight"))
    assert "gate_proj" in refuted(tmp_path / "d", source)


KINDS = tuple(TENSOR_FAULTS)
# Every role of the first and the last layer and around them, each with one fault, in two types; and every fault on one
# role of each kind.
PLANTED = [role for role in ROLES if not role.startswith(("layers.1.", "layers.2."))]
CASES = [
    *(("bf16" if index % 2 else "f32", role, KINDS[index % len(KINDS)]) for index, role in enumerate(PLANTED)),
    *(("f32", role, fault) for role in ("layers.2.down_proj", "layers.3.layer_scalar") for fault in KINDS),
]


@pytest.mark.parametrize(("stored", "role", "fault"), sorted(CASES), indirect=["stored"])
def test_a_tensor(copy: Path, source: Shard, role: str, fault: str) -> None:
    edit(copy, ROLES[role], TENSOR_FAULTS[fault])
    forge(copy)
    found = checked(copy, source)
    assert [check.passed for check in found.values()] == [True, True, False, None, True]
    assert found["tensors"].evidence.startswith(f"{role} ({ROLES[role]}) ")
    assert ";" not in found["tensors"].evidence


@pytest.mark.parametrize(("changes", "named"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_a_number_of_the_config(copy: Path, source: Shard, changes: dict[str, Any], named: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    for key, value in changes.items():
        place = config["text_config"] if key in config["text_config"] else config
        place[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    forge(copy)
    assert named in refuted(copy, source)


@pytest.mark.parametrize(("plant", "named"), FILE_FAULTS.values(), ids=FILE_FAULTS.keys())
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_a_file(copy: Path, source: Shard, plant: Callable[[Path], object], named: str) -> None:
    plant(copy)
    assert named in refuted(copy, source)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, sample: Path, source: Shard, tmp_path: Path) -> None:
    """Codes are told to be the file's, and scales to be rounded where they are."""
    mtp_extract.extract(sample, tmp_path / "d", format=name)
    found = checked(tmp_path / "d", source)
    assert [check.passed for check in found.values()] == [True] * 5, found
    said = found["tensors"].evidence
    assert said.startswith("all 48 are derived from the file's, every bit; ")
    kept = 23 - name.endswith("sglang") if "codes" in FORMATS[name].dtypes else 0
    assert (f"; {kept} in the file's codes" in said) == bool(kept)
    assert (", rounded to FP16 in their scales" in said) == (name == "gguf")


@pytest.mark.parametrize("name", ["jax_published", "torch_plain_norm"])
def test_a_static_scale_of_activations(name: str, tmp_path: Path) -> None:
    """One that is changed or invented is none of the file's, whatever the weights; without any, none is claimed."""
    mtp_extract.extract(variant(name), tmp_path / "d", format="gemma")
    (tmp_path / "d" / "extraction.json").unlink()
    weights = tmp_path / "d" / "model.safetensors"
    stored = read_header(weights)["model.layers.1.mlp.up_proj.output_activation_scale"]
    data = bytearray(weights.read_bytes())
    with open_bundle(variant(name)) as opened:
        drafter = opened.drafter()
        assert checked(tmp_path / "d", drafter)["tensors"].passed
        data[stored.offset + 3] ^= 0x20
        weights.write_bytes(data)
        found = refuted(tmp_path / "d", drafter)
        assert found.startswith("layers.1.up_proj (")
        assert found.endswith("has other static scales of activations than the file's")
        for entry, place in read_header(weights).items():
            if "activation_scale" in entry:
                data[place.offset : place.offset + place.length] = bytes(place.length)
        weights.write_bytes(data)
        assert checked(tmp_path / "d", drafter)["tensors"].passed


def test_numbers_rounded_on_the_way(sample: Path, source: Shard, tmp_path: Path) -> None:
    """F32 that were BF16 are the file's rounded ones (ones are both); codes made of them are not the file's."""
    mtp_extract.extract(sample, tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "f32", format="transformers", dtype="f32")
    found = checked(tmp_path / "f32", source)
    assert [check.passed for check in found.values()] == [True] * 5, found
    assert found["tensors"].evidence.endswith("every bit; 1 in F32; 47 in F32, rounded to BF16")
    convert(tmp_path / "bf16", tmp_path / "int8", format="compressed-tensors", quantize="int8")
    found = checked(tmp_path / "int8", source)
    assert [check.passed for check in found.values()] == [True] * 5, found
    assert "23 in codes, rounded to BF16, then to integers by int8" in found["tensors"].evidence


def test_exact_gelu(tmp_path: Path) -> None:
    """What is written of a graph with the exact function is read again, whatever the format, and computes the same."""
    from helpers.surgery import sound

    graph = sound("torch")
    for index in range(graph.layers):
        layer = graph.layer(index)
        graph.rewire(layer.activated, graph.call("GELU", layer.gate, approximate=False))
    path = tmp_path / "exact.tflite"
    path.write_bytes(graph.data())
    with open_bundle(path) as opened:
        drafter = opened.drafter()
        assert drafter.config.hidden_activation == "gelu"
        for name in FORMATS:
            try:
                mtp_extract.extract(opened, tmp_path / name, format=name)
            except UnsupportedError as error:
                assert "GELU" in str(error) or "gelu" in str(error)
                continue
            assert read_checkpoint(tmp_path / name).config.hidden_activation == "gelu"
            assert all(check.passed for check in checked(tmp_path / name, drafter).values()), name


@pytest.mark.parametrize(("error", "passed"), [(ProofError, False), (UnsupportedError, None)])
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_a_graph_that_is_not_proven(
    stored: Path, source: Shard, monkeypatch: pytest.MonkeyPatch, error: type[MtpExtractError], passed: bool | None
) -> None:
    """The same config and tensors are not enough."""

    def refuse(drafter: Shard, checkpoint: object) -> None:
        raise error("layers.1: it is otherwise. Look there.")

    monkeypatch.setattr(identity, "prove_checkpoint", refuse)
    found = checked(stored, source)
    assert [check.passed for check in found.values()] == [True, True, True, passed, True]
    assert found["function"].evidence == "layers.1: it is otherwise"
    with pytest.raises(CheckpointError, match=r"function: layers\.1: it is otherwise"):
        verify_against(stored, source.opened)
