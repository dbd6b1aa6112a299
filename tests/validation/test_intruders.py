"""Directories that an engine would load as something else, and records that lie: none is proven, each is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import intruders
from helpers.random_heads import LAYOUTS, head_config, random_head, write_head
from helpers.record_document import TUNING

from mtp_extract import extract
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.files import write_file
from mtp_extract.errors import MtpExtractError
from mtp_extract.formats import FORMATS, format_named, read_checkpoint
from mtp_extract.hub.upload import plan_upload
from mtp_extract.insertion.drafter import planned_insertion
from mtp_extract.pipeline.check import unexpected_in, verify
from mtp_extract.pipeline.conversion import ReadDirectory, convert
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.pipeline.identity import NEEDED, check_identity
from mtp_extract.report.files import REPORT_FILES

pytestmark = pytest.mark.xdist_group("intruders")

TRANSFORMERS = ("transformers", "mlx", "compressed-tensors", "compressed-tensors-sglang", "gemma")


@pytest.fixture(scope="module")
def source(sample: Path) -> Iterator[Shard]:
    with open_bundle(sample) as opened:
        yield opened.drafter()


@pytest.fixture(scope="module")
def original(source: Shard) -> Checkpoint:
    return checkpoint_of(source)


@pytest.fixture(scope="module")
def written(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    for name in FORMATS:
        extract(sample, folder / name, format=name, codes=True)
    return {name: folder / name for name in FORMATS}


def copied(directory: Path, place: Path, *, record: bool = False) -> Path:
    """With its ``record`` or without."""
    shutil.copytree(directory, place)
    if not record:
        (place / "extraction.json").unlink()
    return place


def proven(directory: Path, source: Shard) -> bool:
    """Whether validation would say so. What reading refuses, or what is no part of the drafter, needs no execution."""
    try:
        if unexpected_in(directory, REPORT_FILES):
            return False
        checks = check_identity(directory, source, REPORT_FILES).checks
    except MtpExtractError as error:
        assert str(error)
        return False
    return {check.name for check in checks if check.passed} >= set(NEEDED) and all(
        c.passed is not False for c in checks
    )


def refused(directory: Path) -> bool:
    """Whether converting refuses it; and so do the others, which ask the same."""
    try:
        ReadDirectory.of(directory)
    except MtpExtractError:
        return True
    return False


def test_sound_ones_are_proven(written: dict[str, Path], source: Shard, tmp_path: Path) -> None:
    """What the faults are planted into is proven, with what is harmless beside it, with its record and without."""
    for name, directory in written.items():
        bare = copied(directory, tmp_path / name, record=True)
        for file in (
            *("LICENSE", "README.md", "picture.png", ".gitattributes", "report.json"),
            *("tokenizer.json", "tokenizer_config.json", ".git/config", ".cache/model.safetensors"),
        ):
            (bare / file).parent.mkdir(exist_ok=True)
            (bare / file).write_text("{}")
        assert proven(bare, source) and not refused(bare), name
        (bare / "extraction.json").unlink()
        assert proven(bare, source) and not refused(bare), name


RECORDS = ("none", "re-summed")
# What may lie there is a matter of the format, what a record says is not.
BESIDE = [(name, RECORDS[index % 2]) for index, name in enumerate(FORMATS)]


@pytest.mark.parametrize(("name", "record"), sorted({*BESIDE, *(("transformers", record) for record in RECORDS)}))
def test_a_file_beside(written: dict[str, Path], source: Shard, tmp_path: Path, name: str, record: str) -> None:
    directory = copied(written[name], tmp_path / "d", record=record != "none")
    weights = next(directory.glob(format_named(name).weights_file))
    kept = (directory / "extraction.json").read_bytes() if record != "none" else b""
    for file, content in intruders.FILES.items():
        intruders.add_file(directory, file, content, weights)
        if kept:
            intruders.resum(directory)
        named = unexpected_in(directory, REPORT_FILES)
        assert named and file.rpartition("/")[2] in " ".join(named), file
        assert not proven(directory, source), file
        # A file of a report is let through where there is one; nothing else is.
        assert refused(directory), file
        (directory / file).unlink()
        if kept:
            (directory / "extraction.json").write_bytes(kept)
    assert not unexpected_in(directory, REPORT_FILES)


def test_what_is_no_file(written: dict[str, Path], source: Shard, tmp_path: Path) -> None:
    """Links to directories, which engines look through; and what engines would wait for."""
    directory = copied(written["transformers"], tmp_path / "d")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(directory / "model.safetensors", tmp_path / "elsewhere")
    for name in ("sub", "tokenizer.json"):
        (directory / name).symlink_to(tmp_path / "elsewhere")
        assert not proven(directory, source) and refused(directory), name
        (directory / name).unlink()
    os.mkfifo(directory / "tokenizer.json")
    assert not proven(directory, source) and refused(directory)
    (directory / "tokenizer.json").unlink()
    assert proven(directory, source)


def test_a_tensor_that_the_header_names_twice(written: dict[str, Path], source: Shard, tmp_path: Path) -> None:
    directory = copied(written["transformers"], tmp_path / "d")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip()
    name, entry = next((name, entry) for name, entry in json.loads(header).items() if name != "__metadata__")
    header = f'{{"{name}":{json.dumps(entry)},'.encode() + header[1:]
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    assert not proven(directory, source) and refused(directory)


@pytest.mark.parametrize("name", [*TRANSFORMERS, "litert"])
def test_a_key_of_the_configuration(written: dict[str, Path], source: Shard, tmp_path: Path, name: str) -> None:
    directory = copied(written[name], tmp_path / "d")
    files = {"config.json": intruders.CONFIG_KEYS, "generation_config.json": intruders.GENERATION_KEYS}
    for file, keys in ({"mtp_drafter_config.json": intruders.LITERT_KEYS} if name == "litert" else files).items():
        sound = (directory / file).read_text()
        for key, value in keys.items():
            document = json.loads(sound)
            intruders.put(document, key, value)
            (directory / file).write_text(json.dumps(document))
            assert not proven(directory, source), key
        if name != "litert":
            (directory / file).write_text(sound.replace("{", '{"text_config": 1, "is_assistant": true,', 1))
            assert not proven(directory, source), "twice"
        (directory / file).write_text(sound)
    assert proven(directory, source)


def test_a_key_of_a_gguf(original: Checkpoint, source: Shard, tmp_path: Path) -> None:
    (file,) = arrange(format_named("gguf"), original, "codes").files
    for key, value in intruders.GGUF_KEYS.items():
        metadata = {**file.metadata, key: value}
        if value is None:
            del metadata[key]
        (tmp_path / file.name).unlink(missing_ok=True)
        write_file(tmp_path, replace(file, metadata=metadata))
        assert not proven(tmp_path, source), key
        assert not proven(tmp_path / file.name, source), key
        # One key in which numbers of heads are told in another form is read in that form.
        assert refused(tmp_path) or read_checkpoint(tmp_path).config != original.config, key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head(tmp_path: Path, layout: str) -> None:
    """No bundle holds one, so that nothing is proven; converting refuses what engines would take for another head."""
    directory = write_head(tmp_path / "d", random_head(head_config()), layout)
    assert not refused(directory)
    for file, content in intruders.FILES.items():
        intruders.add_file(directory, file, content, directory / "model.safetensors")
        assert refused(directory), file
        (directory / file).unlink()
    sound = (directory / "config.json").read_text()
    for key, value in intruders.HEAD_KEYS.items():
        document = json.loads(sound)
        inner = layout == "speculators" and key not in ("architectures", "auto_map", "dtype")
        intruders.put(document["transformer_layer_config"] if inner else document, key, value)
        (directory / "config.json").write_text(json.dumps(document))
        assert refused(directory), key


@pytest.mark.parametrize("name", ["transformers", "litert"])
def test_edited_codes(written: dict[str, Path], source: Shard, tmp_path: Path, name: str) -> None:
    from mtp_extract.checkpoint.files import read_header

    directory = copied(written[name], tmp_path / "d")
    path = directory / "codes/codes.safetensors"
    sound = path.read_bytes()
    assert proven(directory, source)
    for part in ("codes", "scale", "zero_point"):
        entry = next(stored for tensor, stored in read_header(path).items() if tensor.endswith(part))
        data = bytearray(sound)
        data[entry.offset + 2] ^= 1
        path.write_bytes(data)
        assert not proven(directory, source), part
    for bits in (b'\\"bits\\":', b'\\"bits\\": '):
        path.write_bytes(sound.replace(bits + b"4", bits + b"8"))
        if path.read_bytes() != sound:
            assert not proven(directory, source)


@pytest.mark.parametrize("command", ["convert", "insert", "upload"])
def test_no_command_takes_an_intruder(written: dict[str, Path], sample: Path, tmp_path: Path, command: str) -> None:
    directory = copied(written["transformers"], tmp_path / "d", record=True)
    shutil.copy(directory / "model.safetensors", directory / "a.safetensors")
    for record in ("as it was", "re-summed", "none"):
        if record == "re-summed":
            intruders.resum(directory)
        elif record == "none":
            (directory / "extraction.json").unlink()
        with pytest.raises(MtpExtractError, match=r"a\.safetensors belongs|extraction\.json"):
            if command == "convert":
                convert(directory, tmp_path / "out", format="litert")
            elif command == "upload":
                plan_upload(directory)
            else:
                with planned_insertion(directory, sample):
                    raise AssertionError


def _tell(path: Path, record: dict[str, object], key: str, value: object) -> None:
    told = json.loads(json.dumps(record))
    intruders.put(told, key, value)
    assert told != record, key
    path.write_text(json.dumps(told))


def _refuted(directory: Path, source: Shard) -> str:
    """Why the directory with a record that lies is not what the bundle gives."""
    evidence = next(check.evidence for check in check_identity(directory, source).checks if check.passed is False)
    assert "\n" not in evidence
    return evidence


def test_a_record_that_lies(written: dict[str, Path], source: Shard, tmp_path: Path) -> None:
    """Each statement of it, where the bundle is at hand; what no bundle decides passes."""
    directory = copied(written["transformers"], tmp_path / "d", record=True)
    (directory / "codes/codes.safetensors").unlink()
    (directory / "codes").rmdir()
    extract_again = json.loads((directory / "extraction.json").read_text())
    del extract_again["files"]["codes/codes.safetensors"]
    record = {**extract_again, "rounded": {"BF16": 48}}
    (directory / "extraction.json").write_text(json.dumps(record))
    assert proven(directory, source)
    for key, value in intruders.LIES.items():
        _tell(directory / "extraction.json", record, key, value)
        assert _refuted(directory, source), key
    untold = {
        "tool.version": "0",
        "source.name": "x",
        "source.provenance": {"url": "https://x.test/y"},
        "converted_from": [
            {"layout": "litert", "dtype": "f32", "rounded": {}, "made_codes": None, "version": None, "files": {}}
        ],
    }
    for key, value in untold.items():
        _tell(directory / "extraction.json", record, key, value)
        assert proven(directory, source)


def test_weights_that_are_the_files_are_not_tuned(written: dict[str, Path], source: Shard, tmp_path: Path) -> None:
    """A card that says so would be made of nothing but the record: the bundle decides."""
    directory = copied(written["transformers"], tmp_path / "d", record=True)
    record = json.loads((directory / "extraction.json").read_text())
    _tell(directory / "extraction.json", record, "tuning", TUNING)
    assert verify(directory).record["tuning"] == TUNING
    assert "tuning says that the weights were changed, and they are the file's" in _refuted(directory, source)


def test_a_record_of_a_conversion_that_lies(written: dict[str, Path], source: Shard, tmp_path: Path) -> None:
    """The steps in between are taken from the record; what the bundle says of the weights is not."""
    convert(written["litert"], tmp_path / "d", format="gguf")
    record = json.loads((tmp_path / "d/extraction.json").read_text())
    assert proven(tmp_path / "d", source)
    for key in ("source.section.sha256", "known_as", "rounded", "shared", "proof.positions"):
        _tell(tmp_path / "d/extraction.json", record, key, intruders.LIES[key])
        assert _refuted(tmp_path / "d", source), key
