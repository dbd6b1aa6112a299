"""Converting writes the files that extracting writes; what cannot be converted is refused, and leaves no files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.schemas import validator
from helpers.variant_files import variant
from seam import verify, verify_against

from mtp_extract import convert, extract
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.format import Plan
from mtp_extract.checkpoint.weight import build_constant_weight, wrap_array
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.formats import MTP_FORMATS, load_format, read_checkpoint
from mtp_extract.pipeline.check import list_directory_files

TYPES = [(name, dtype) for name, listed in MTP_FORMATS.items() for dtype in listed.dtypes]
RULES = [(name, rule) for name, listed in MTP_FORMATS.items() for rule in listed.rules]
OWN = {"extraction.json", "README.md"}


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in list_directory_files(directory) if name not in OWN}


@pytest.fixture(scope="module", params=["jax_published", "torch_blockwise32", "torch_asymmetric"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle, and its drafter in F32 with codes."""
    directory = tmp_path_factory.mktemp("kept") / request.param
    extract(variant(request.param), directory, dtype="f32", codes=True)
    return variant(request.param), directory


@pytest.fixture(scope="module")
def bf16(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bf16") / "sample"
    extract(sample, directory)
    return directory


@pytest.fixture
def official(bf16: Path, tmp_path: Path) -> Path:
    """A checkpoint as Google publishes it: config and weights, without a record."""
    directory = tmp_path / "assistant"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(bf16 / name, directory)
    return directory


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_converting_is_extracting(kept: tuple[Path, Path], tmp_path: Path, name: str, dtype: str) -> None:
    source, directory = kept
    try:
        direct = extract(source, tmp_path / "direct", format=name, dtype=dtype)
    except UnsupportedError as error:
        with pytest.raises(UnsupportedError) as refusal:
            convert(directory, tmp_path / "converted", format=name, dtype=dtype)
        assert str(refusal.value) == str(error)
        return
    result = convert(directory, tmp_path / "converted", format=name, dtype=dtype)
    validator("extraction")(result.record)
    assert contents(tmp_path / "converted") == contents(tmp_path / "direct")
    for key in ("source", "known_as", "geometry", "shared", "activations", "rounded", "proof"):
        assert result.record[key] == direct.record[key], key
    (step,) = result.record["converted_from"]
    assert (step["layout"], step["dtype"]) == ("transformers", "f32")
    assert set(step["files"]) == {"model.safetensors", CODES_FILE}
    if dtype == MTP_FORMATS[name].dtypes[0]:
        with open_bundle(source) as opened:
            verify_against(tmp_path / "converted", opened)


@pytest.mark.parametrize("name", MTP_FORMATS)
def test_there_and_back(kept: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """Through any format: the record states roundings on the way, and the check against the bundle finds them."""
    source, directory = kept
    try:
        convert(directory, tmp_path / "there", format=name)
    except UnsupportedError:
        pytest.skip("the format cannot hold it")
    back = convert(tmp_path / "there", tmp_path / "back", format="transformers", dtype="f32")
    with open_bundle(source) as opened:
        verify_against(back.directory, opened)
    assert len(back.record["converted_from"]) == 2
    rounded = any(step["rounded"] for step in back.record["converted_from"])
    same = contents(tmp_path / "back") == {k: v for k, v in contents(directory).items() if k != CODES_FILE}
    assert same == (not rounded)


def test_without_a_record(official: Path, tmp_path: Path) -> None:
    result = convert(official, tmp_path / "out", format="litert")
    validator("extraction")(result.record)
    assert result.record["proof"] is None
    source, size = result.record["source"], (official / "model.safetensors").stat().st_size
    assert [source[key] for key in ("name", "size", "kind", "section")] == ["assistant", size, "checkpoint", None]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "converted from the checkpoint `assistant`" in card and "--against" not in card
    before, after = read_checkpoint(official), read_checkpoint(tmp_path / "out")
    for role, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor.array(), after.tensors[role].array(), err_msg=role)


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_codes_are_made_where_there_are_none(bf16: Path, sample: Path, tmp_path: Path, name: str, rule: str) -> None:
    result = convert(bf16, tmp_path / "out", format=name, quantize=rule)
    validator("extraction")(result.record)
    assert (result.record["rule"], result.record["rounded"]) == (rule, [])
    # Of the 23 matrices SGLang wants the head in floats.
    assert any(f"by {rule}, of {23 - name.endswith('sglang')} matrices" in note for note in result.notes)
    assert f"by `{rule}`" in (tmp_path / "out" / "README.md").read_text()
    before, after = read_checkpoint(bf16), read_checkpoint(tmp_path / "out")
    for role, tensor in after.tensors.items():
        if tensor.scheme is None:
            np.testing.assert_array_equal(tensor.array(), before.tensors[role].array(), err_msg=role)
    # BF16 first, then the rule: the bundle gives the same again.
    with open_bundle(sample) as opened:
        verify_against(tmp_path / "out", opened)
    with pytest.raises(UnsupportedError, match="There is nothing to round by"):
        convert(tmp_path / "out", tmp_path / "again", format=name, quantize=rule)


def test_integers_that_were_asked_for_and_not_written_are_missed(bf16: Path, tmp_path: Path) -> None:
    notes = convert(bf16, tmp_path / "gguf", format="llama.cpp", dtype="codes").notes
    assert "All is in floats: no matrix has integers" in " ".join(notes)


@pytest.mark.torch
@pytest.mark.parametrize("geometry", ["dense", "ordered", "k-eq-v"])
@pytest.mark.parametrize("name", MTP_FORMATS)
def test_official_assistants(tmp_path: Path, geometry: str, name: str) -> None:
    """Written by transformers itself, ordered head or dense; matrices rounded where the format is of codes."""
    from helpers.random_assistants import GEOMETRIES, random_assistant

    official, shape = tmp_path / "official", replace(GEOMETRIES[geometry], hidden=32, intermediate=64, head_dim=8)
    random_assistant(shape).save_pretrained(official)
    (official / "config.json").write_text(json.dumps(shape.config()))
    dtype, rules = "f32" if name == "transformers" else None, MTP_FORMATS[name].rules
    rule = "int8" if "int8" in rules else next(iter(rules), None)
    try:
        result = convert(official, tmp_path / "out", format=name, dtype=dtype, quantize=rule)
    except UnsupportedError as error:
        assert name in ("litert", "gguf") and ("ordered" in str(error) or "heads" in str(error))
        return
    validator("extraction")(result.record)
    before = read_checkpoint(official).tensors
    for role, tensor in read_checkpoint(tmp_path / "out").tensors.items():
        if role == "ordered_head.token_ordering":
            assert before[role].indices().tolist() == tensor.indices().tolist()
        elif tensor.scheme is None:
            np.testing.assert_array_equal(tensor.array(), before[role].array(), err_msg=role)
        else:
            errors = np.abs(tensor.array() - before[role].array())
            assert 0 < errors.max() < 0.01 * np.abs(before[role].array()).max(), role


def cut(directory: Path, name: str = "model.safetensors") -> None:
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[: len(data) // 2])


def test_bad_input(official: Path, base: Path, tmp_path: Path) -> None:
    cut(official)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        convert(official, tmp_path / "results" / "out", format="litert")
    (official / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        convert(official, tmp_path / "results" / "out", format="litert")
    with pytest.raises(CheckpointError, match="not the base model's"):
        convert(base, tmp_path / "results" / "out", format="litert")
    assert not (tmp_path / "results").exists()


def test_a_writer_that_is_wrong_is_noticed(bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is compared as it reads back, whatever sums the files have."""
    kind = type(load_format("litert"))
    plan = kind.plan

    def plan_other_files(self: Any, checkpoint: Checkpoint, dtype: str) -> Plan:
        role = "layers.1.q_norm"
        ones = build_constant_weight(checkpoint.tensors[role].shape)
        changed = replace(checkpoint, tensors={**checkpoint.tensors, role: ones})
        return replace(plan(self, checkpoint, dtype), files=plan(self, changed, dtype).files)

    monkeypatch.setattr(kind, "plan", plan_other_files)
    with pytest.raises(CheckpointError, match=r"layers\.1\.q_norm: the floats read back differ"):
        convert(bf16, tmp_path / "out", format="litert")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [("layers.0.gate_proj", "layers.0.up_proj"), ("layers.0.q_norm",) * 2])
def test_an_extraction_that_reads_back_otherwise_is_noticed(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, first: str, second: str
) -> None:
    """Two weights of one shape are exchanged; or only the last row differs, as with a wrong offset."""
    kind = type(load_format("transformers"))
    read = kind.read

    def read_wrongly(self: Any, directory: Path) -> Checkpoint:
        checkpoint = read(self, directory)
        tensors = dict(checkpoint.tensors)
        tensors[first], tensors[second] = tensors[second], tensors[first]
        if first == second:
            changed = tensors["lm_head"].array()
            changed[-1, -1] += 1
            tensors["lm_head"] = wrap_array(changed)
        return replace(checkpoint, tensors=tensors)

    monkeypatch.setattr(kind, "read", read_wrongly)
    with pytest.raises(CheckpointError, match="the floats read back differ from those that were to be written"):
        extract(sample, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_a_checkpoint_by_itself(bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's converter writes one .gguf of any name, and nothing beside it."""
    convert(bf16, tmp_path / "made", format="gguf", dtype="f32")
    alone = Path(shutil.copy(tmp_path / "made" / "mtp-sample-F32.gguf", tmp_path / "mine.gguf"))
    monkeypatch.chdir(tmp_path)
    result = convert(alone, format="transformers")
    validator("extraction")(result.record)
    assert list(result.record["converted_from"][0]["files"]) == ["mine.gguf"]
    assert contents(tmp_path / "mine-transformers") == contents(bf16)
    # One that lies in a directory of ours is that directory's.
    convert(tmp_path / "made" / "mtp-sample-F32.gguf", tmp_path / "back", format="transformers")
    assert contents(tmp_path / "back") == contents(bf16)
    assert verify(tmp_path / "back")["proof"]
    cut(tmp_path, "mine.gguf")
    with pytest.raises(CheckpointError, match="cut short"):
        convert(alone, tmp_path / "out", format="transformers")
    assert not (tmp_path / "out").exists()


CHAINS: list[tuple[str, list[dict[str, Any]]]] = [
    ("sample", [{"format": "gguf"}, {"format": "compressed-tensors"}]),
    ("sample", [{"format": "gguf"}, {"format": "transformers", "codes": True}]),
    ("sample", [{"format": "gguf"}, {"format": "gemma"}, {"format": "mlx"}]),
    ("torch_folded_softcap", [{"format": "mlx"}, {"format": "compressed-tensors"}]),
    ("torch_blockwise32", [{"format": "gemma"}, {"format": "transformers", "codes": True}]),
    ("torch_folded_softcap", [{"format": "gguf", "dtype": "f32"}, {"format": "gguf"}]),
    ("sample", [{"dtype": "f32"}, {"format": "mlx", "quantize": "q8_0"}]),
    ("sample", [{}, {"format": "gguf", "quantize": "q4_0"}, {"format": "gguf", "dtype": "f32"}]),
]


@pytest.mark.parametrize(("name", "chain"), CHAINS)
def test_what_went_through_other_formats_is_derived_again(
    name: str, chain: list[dict[str, Any]], sample: Path, tmp_path: Path
) -> None:
    """Steps that a format repeated along a row count once, and codes that it left out are not required."""
    source = sample if name == "sample" else variant(name)
    first, *more = chain
    extract(source, tmp_path / "0", **first)
    with open_bundle(source) as opened:
        for index, step in enumerate(more):
            place = convert(tmp_path / f"{index}", tmp_path / f"{index + 1}", **step).directory
            verify_against(place, opened)
            bare = Path(shutil.copytree(place, tmp_path / f"bare {index + 1}"))
            (bare / "extraction.json").unlink()
            assert verify_against(bare, opened)[-1].passed is None
