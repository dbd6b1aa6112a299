"""Is a directory the drafter of a bundle? Sound ones are, in every format; of 60 planted faults none is proven, and
what is wrong is named."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.planted import CONFIG_FAULTS, FILE_FAULTS, TENSOR_FAULTS, ConfigFault, edit_config, fill, forge, tensor
from helpers.variant_files import REFUSED, VARIANTS, variant

import mtp_extract
from mtp_extract.architecture.roles import roles_of
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.files import read_header
from mtp_extract.errors import CheckpointError, MtpExtractError, ProofError, UnsupportedError
from mtp_extract.formats import FORMATS, read_checkpoint
from mtp_extract.pipeline import identity
from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.identity import NEEDED, check_identity, drafter_for, verify_against

ROLES = {role.name: role.names["transformers"] for role in roles_of(4)}
KINDS = ("one bit", "scaled by 0.4 %", "infinite", "not a number", "zeroed", "reversed", "turned over")


@pytest.fixture(scope="module")
def source(sample: Path) -> Iterator[Shard]:
    with open_bundle(sample) as opened:
        yield opened.drafter()


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


# Every role of the first and the last layer and around them, each with one fault, in two types; and every fault on one
# role of each kind.
PLANTED = [role for role in ROLES if not role.startswith(("layers.1.", "layers.2."))]
CASES = [
    *(("bf16" if index % 2 else "f32", role, KINDS[index % len(KINDS)]) for index, role in enumerate(PLANTED)),
    *(("f32", role, fault) for role in ("layers.2.down_proj", "layers.3.layer_scalar") for fault in KINDS),
]


@pytest.mark.parametrize(("stored", "role", "fault"), sorted(CASES), indirect=["stored"])
def test_a_tensor(copy: Path, source: Shard, role: str, fault: str) -> None:
    if (role.endswith("layer_scalar") or "norm" in role) and fault == "reversed":
        fault = "one bit"
    TENSOR_FAULTS[fault](copy, ROLES[role])
    forge(copy)
    found = checked(copy, source)
    assert [check.passed for check in found.values()] == [True, True, False, None, True]
    assert found["tensors"].evidence.startswith(f"{role} ({ROLES[role]}) ")
    assert ";" not in found["tensors"].evidence
    assert ("not finite" in found["tensors"].evidence) == (fault in ("infinite", "not a number"))


@pytest.mark.parametrize("stored", ["f32"], indirect=True)
@pytest.mark.parametrize("value", [3e38, 1e-40])
def test_numbers_that_cannot_be_computed_with(copy: Path, source: Shard, value: float) -> None:
    for role in ("layers.1.q_norm", "pre_projection", "layers.3.q_norm"):
        fill(copy, ROLES[role], value)
    assert refuted(copy, source).startswith("pre_projection (pre_projection.weight) has other values")


@pytest.mark.parametrize("fault", CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_a_number_of_the_config(copy: Path, source: Shard, fault: ConfigFault) -> None:
    edit_config(copy, **fault.changes)
    forge(copy)
    assert fault.named in refuted(copy, source)


@pytest.mark.parametrize(("plant", "named"), FILE_FAULTS.values(), ids=FILE_FAULTS.keys())
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_a_file(copy: Path, source: Shard, plant: object, named: str) -> None:
    assert callable(plant)
    plant(copy)
    assert named in refuted(copy, source)


@pytest.mark.parametrize("stored", ["bf16"], indirect=True)
def test_rounded_twice(copy: Path, source: Shard, sample: Path, tmp_path: Path) -> None:
    """A table that is nearest but for one step, as a converter leaves that cuts the bits off, is refuted."""
    mtp_extract.extract(sample, tmp_path / "exact", dtype="f32")
    raw, _ = tensor(tmp_path / "exact", ROLES["lm_head"])
    cut = (raw >> 16).astype("uint16")
    ours, place = tensor(copy, ROLES["lm_head"])
    assert 0 < (cut != ours).mean() < 0.9
    with open(copy / "model.safetensors", "r+b") as file:
        file.seek(place.offset)
        file.write(cut.tobytes())
    assert refuted(copy, source).startswith("lm_head (model.embed_tokens.weight) has other values")


@pytest.mark.parametrize(("name", "named"), [("torch_odd_sizes", "config: "), ("torch_int2", "tensors: ")])
@pytest.mark.parametrize("stored", ["f32"], indirect=True)
def test_another_file(stored: Path, name: str, named: str) -> None:
    """Of another shape; and of the same with other numbers."""
    with open_bundle(variant(name)) as opened, pytest.raises(CheckpointError, match=f"holds: {named}"):
        verify_against(stored, opened)


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

    from mtp_extract.drafter.load import load_drafter

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
            assert load_drafter(tmp_path / name).config.hidden_activation == "gelu"
        assert (tmp_path / "transformers").is_dir()
        convert(tmp_path / "transformers", tmp_path / "back", format="litert")


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
