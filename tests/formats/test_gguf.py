"""GGUF: compared with the gguf package, an independent implementation; hostile files are refused by name."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_extract import extract
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.architecture.roles import list_roles
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import BLOCK_TYPES
from mtp_extract.checkpoint.files import OutputFile, write_file
from mtp_extract.checkpoint.gguf_file import read_gguf
from mtp_extract.checkpoint.weight import Steps, Weight, build_constant_weight, center_codes, wrap_codes
from mtp_extract.errors import CheckpointError, MtpExtractError, UnsupportedError
from mtp_extract.formats import load_format, read_checkpoint
from mtp_extract.formats.gguf import _derive_base_name, _split_base_name
from mtp_extract.litertlm.storage import Packing

FILE = "mtp-sample-Q4_0.gguf"


@pytest.fixture(scope="module")
def sample_gguf(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample as GGUF."""
    directory = tmp_path_factory.mktemp("gguf") / "sample"
    extract(sample, directory, format="gguf")
    return directory


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([4, 8]),
    blocks=st.integers(1, 3),
    rows=st.integers(1, 5),
    by_row=st.booleans(),
)
def test_codes_come_back(seed: int, bits: int, blocks: int, rows: int, by_row: bool) -> None:
    """Our reader and the gguf package agree, for any FP16 scale, per row or per block."""
    kind, rng, block = BLOCK_TYPES[bits], np.random.default_rng(seed), 32 * blocks if by_row else 32
    codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, (rows, 32 * blocks)).astype(np.int8)
    steps = rng.standard_normal((rows, 32 * blocks // block)).astype(np.float16).astype(np.float32)
    stored = kind.pack(codes, steps)
    np.testing.assert_array_equal(kind.codes(stored), codes)
    np.testing.assert_array_equal(kind.steps(stored), np.repeat(steps, block // 32, axis=1))
    ours = wrap_codes(codes, Packing(bits, True), Steps.around_zero(block, steps))
    np.testing.assert_array_equal(dequantize(stored, GGMLQuantizationType[kind.name]), ours.array())


def test_the_header_is_what_llama_cpp_reads(sample_gguf: Path) -> None:
    """Every key has the type that llama.cpp's loader requires, and the sample's value."""
    fields = GGUFReader(sample_gguf / FILE).fields
    expected = json.loads(Path(__file__).with_name("gguf_header.json").read_text())
    assert {key: [fields[key].types[0].name, fields[key].contents()] for key in expected} == expected
    source = json.loads((sample_gguf / "extraction.json").read_text())["source"]
    assert fields["mtp_extract.source.name"].contents() == source["name"] == "sample.litertlm"
    assert fields["mtp_extract.section.sha256"].contents() == source["section"]["sha256"]
    (factors,) = (tensor for tensor in GGUFReader(sample_gguf / FILE).tensors if tensor.name == "rope_freqs.weight")
    np.testing.assert_array_equal(factors.data, np.float32([1.0] * 8 + [1e30] * 24))


def build_rows(scale: float, columns: int = 64, block: int = 32, zero: int = 0) -> Weight:
    count = columns // block
    grid = Steps(block, np.full((4, count), scale, np.float32), np.full((4, count), zero, np.int64))
    return wrap_codes(np.ones((4, columns), np.int8), Packing(8, True), grid)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (build_rows(0.5), ()),
        (build_rows(2.0**-24), ()),  # subnormal in FP16, and exact
        (build_rows(0.1), ("FP16",)),
        (build_rows(1e-5), "a scale of 1e-05 is out of FP16's range"),
        (build_rows(7e4), "a scale of 7e\\+04 is out of FP16's range"),
        (build_rows(0.5, columns=48, block=48), "rows of 48"),
        (build_rows(0.5, block=16), "blocks of 16"),
        (build_rows(0.5, zero=3), "its zero points are not 0"),
        (build_rows(0.5, block=1), "blocks of 1,"),
    ],
)
def test_what_is_kept(tensor: Weight, expected: tuple[str, ...] | str) -> None:
    stored = load_format("gguf").store(list_roles(1)[0], tensor, CODES)
    if isinstance(expected, tuple):
        assert (stored.how, stored.rounded_to) == (CODES, *(expected or ("",)))
        sizes = center_codes(stored.weight).steps.size
        np.testing.assert_array_equal(sizes, tensor.steps.size.astype(np.float16).astype(np.float32))
    else:
        assert (stored.how, stored.rounded_to) == ("floats", "")
        assert re.search(expected, stored.why), stored.why


LAYER = LayerConfig(SLIDING, 32, 2, 512, RopeConfig(1e4))
FULL_LAYER = LayerConfig(FULL, 64, 2, None, RopeConfig(1e6, 0.25))


def build_shape(*layers: LayerConfig, **changes: Any) -> DrafterConfig:
    """Build a small drafter of ``layers``, by default one of each type."""
    shape = DrafterConfig(96, 64, 128, 512, 4, layers or (LAYER, FULL_LAYER), max_position_embeddings=1000)
    return replace(shape, **changes)


CONFIGS = [
    build_shape(),
    build_shape(rms_norm_eps=1.0000001e-6, final_logit_softcap=29.999999999),
    build_shape(hidden_activation="gelu"),
    build_shape(LAYER, replace(FULL_LAYER, rope=RopeConfig(1e6, 0.3))),
    build_shape(LAYER, replace(FULL_LAYER, rope=RopeConfig(1234567.891, 0.25, 8.0))),
    build_shape(LAYER, replace(FULL_LAYER, rope=RopeConfig(1e6, 0.5, 3.3333333333))),
    build_shape(LAYER, replace(FULL_LAYER, rope=RopeConfig(1e6))),
    build_shape(LAYER, replace(FULL_LAYER, num_kv_heads=1)),
    build_shape(FULL_LAYER, FULL_LAYER),
]


def build_checkpoint(shape: DrafterConfig) -> Checkpoint:
    tensors = {role.name: build_constant_weight(size, 0.5) for role, size in list_shapes(shape).items()}
    return Checkpoint(shape, tensors, "f32")


def write(folder: Path, shape: DrafterConfig, **more: Any) -> OutputFile:
    (file,) = load_format("gguf").plan(build_checkpoint(shape), "f32").files
    write_file(folder, replace(file, metadata={**file.metadata, **more}))
    return file


@pytest.mark.parametrize("shape", CONFIGS, ids=range(len(CONFIGS)))
def test_a_configuration_comes_back(tmp_path: Path, shape: DrafterConfig) -> None:
    notes = write(tmp_path, shape).notes
    assert read_checkpoint(tmp_path).config == shape
    assert ("tanh approximation" in " ".join(notes)) == (shape.hidden_activation == "gelu")


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (build_shape(attention_scale=0.5), "llama.cpp's is 1"),
        (build_shape(replace(LAYER, rope=RopeConfig(1e4, 0.5)), FULL_LAYER), "in full layers only"),
        (build_shape(LAYER, FULL_LAYER, replace(FULL_LAYER, head_dim=32)), "to be alike"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(shape: DrafterConfig, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        assert load_format("gguf").plan(build_checkpoint(shape), "f32").files


ARCH = "gemma4-assistant"


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (f"{ARCH}.vocab_size", 511, "says gemma4-assistant.vocab_size 511"),
        (f"{ARCH}.block_count", 3, "sliding_window_pattern and head_count_kv of 3 layers"),
        (f"{ARCH}.attention.value_length", 32, "says gemma4-assistant.attention.value_length 32"),
        (f"{ARCH}.attention.head_count_kv", [2, 2, 2], "head_count_kv of 2 layers"),
        (f"{ARCH}.attention.sliding_window_pattern", [True, True], "expected rope_freqs.weight as"),
        ("mtp_extract.rope.partial_rotary_factor", np.float64(0.5), "expected rope_freqs.weight as"),
        ("mtp_extract.rope.freq_base", np.float64(5e5), "says gemma4-assistant.rope.freq_base 1000000"),
        ("mtp_extract.hidden_activation", "silu", "mtp_extract.hidden_activation"),
        ("tokenizer.ggml.tokens", ["a", "b"], "512 tokens in .*, found 2"),
    ],
)
def test_a_contradiction_is_named(tmp_path: Path, key: str, value: Any, what: str) -> None:
    write(tmp_path, build_shape(), **{key: value})
    with pytest.raises(CheckpointError, match=what):
        read_checkpoint(tmp_path)


def test_what_another_converter_wrote_is_read(tmp_path: Path) -> None:
    """A file of llama.cpp's converter, in FP16 and without our keys, is read, unless it has another tensor."""
    (file,) = load_format("gguf").plan(build_checkpoint(build_shape()), "f16").files
    known = {key: value for key, value in file.metadata.items() if "mtp_extract" not in key and "vocab_size" not in key}
    theirs = replace(file, metadata={**known, "tokenizer.ggml.tokens": ["x"] * 512})
    more = replace(file.tensors[0], name="blk.0.attn_k.weight")
    for name, written in (("sound", theirs), ("more", replace(theirs, tensors=(*file.tensors, more)))):
        (tmp_path / name).mkdir()
        write_file(tmp_path / name, written)
    checkpoint = read_checkpoint(tmp_path / "sound")
    assert (checkpoint.config, checkpoint.dtype) == (build_shape(), "f16")
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k\.weight: expected no such tensor"):
        read_checkpoint(tmp_path / "more")


def test_a_file_of_the_gguf_package_is_read(tmp_path: Path) -> None:
    """With every value type of the package, and tensors of all our types and one other."""
    writer = GGUFWriter(tmp_path / "x.gguf", "some")
    values: dict[str, object] = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 1 << 31}
    values |= {"int32": -5, "uint64": 1 << 63, "int64": -(1 << 40), "float32": 0.5, "float64": 0.1, "bool": True}
    values["string"] = "Ünïcode"
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("texts", ["a", "", "bc"])
    writer.add_array("numbers", [1, -2])
    tensors = {
        "F32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "F16": np.arange(3, dtype=np.float16),
        "Q4_0": quantize(np.ones((2, 64), np.float32), GGMLQuantizationType.Q4_0),
        "Q8_0": quantize(np.ones((2, 32), np.float32), GGMLQuantizationType.Q8_0),
        "Q4_K": np.zeros((2, 144), np.uint8),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=GGMLQuantizationType[name] if name.startswith("Q") else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, places = read_gguf(tmp_path / "x.gguf")
    assert metadata == {"general.architecture": "some", **values, "texts": 3, "numbers": [1, -2]}
    data = (tmp_path / "x.gguf").read_bytes()
    assert [data[p.offset : p.offset + p.length] for p in places.values()] == [t.tobytes() for t in tensors.values()]
    shapes = {"F32": (2, 3), "F16": (3,), "Q4_0": (2, 64), "Q8_0": (2, 32), "Q4_K": (2, 256)}
    assert {name: p.shape for name, p in places.items()} == {p.dtype: p.shape for p in places.values()} == shapes


def pack_text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pack_entry(kind: str, *value: int, key: str = "k") -> bytes:
    """Pack a key with its typed value; ``kind`` is in struct's letters."""
    return pack_text(key) + struct.pack(f"<{kind}", *value)


def pack_tensor(name: str, dimensions: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """Pack a tensor's entry in the header; the dimension with the shortest stride comes first."""
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return pack_text(name) + sizes + struct.pack("<IQ", kind, offset)


def pack_gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Pack a file; ``counts`` replace the true numbers of tensors and entries."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries))))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


ONE = [pack_tensor("t", (2,))]
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "version 2": (pack_gguf(version=2), "expected GGUF version 3, .*found 2"),
    "more tensors than bytes": (pack_gguf(counts=(1 << 60, 0)), "at most 65536 keys and tensors"),
    "a few more tensors": (pack_gguf(counts=(3, 0)), "cut short"),
    "more entries than bytes": (pack_gguf(counts=(0, 1 << 63)), "at most 65536 keys"),
    "long key": (pack_gguf([struct.pack("<Q", 1 << 62)]), "cut short"),
    "text past the end": (pack_gguf([pack_entry("IQ", 8, 1 << 20)]), "cut short"),
    "no text": (pack_gguf([pack_entry("I", 8) + pack_text(b"\xff\xfe")]), "UTF-8"),
    "unknown type of value": (pack_gguf([pack_entry("IQ", 13, 0)]), "found values of type 13"),
    "long list": (pack_gguf([pack_entry("IIQ", 9, 10, 1 << 61)]), "cut short"),
    "long list of text": (pack_gguf([pack_entry("IIQ", 9, 8, 1 << 61)]), "cut short"),
    "twice the same key": (pack_gguf([pack_entry("II", 4, 1)] * 2), "each key once, found k"),
    "alignment 64": (pack_gguf([pack_entry("II", 4, 64, key="general.alignment")]), "general.alignment 32, found 64"),
    "twice the same tensor": (pack_gguf([], ONE * 2, bytes(64)), "each tensor once, found t"),
    "type of another": (pack_gguf([], [pack_tensor("t", (256,), 99)], bytes(160)), "found type 99"),
    "vast shape": (pack_gguf([], [pack_tensor("t", (1 << 40, 1 << 40))], bytes(32)), "cannot be"),
    "shape of 0 times vast": (pack_gguf([], [pack_tensor("t", (0, 1 << 63))], bytes(32)), "cannot be"),
    "offset past the end": (pack_gguf([], [pack_tensor("t", (2,), 0, 1 << 50)], bytes(32)), "to begin at byte 0"),
    "overlapping": (pack_gguf([], [*ONE, pack_tensor("u", (2,))], bytes(64)), "u to begin at byte 32, found 0"),
    "cut short": (pack_gguf([], [pack_tensor("t", (9,))], bytes(32)), "cut short"),
    "too long": (pack_gguf([], ONE, bytes(64)), "its header describes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_named(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / FILE
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    with pytest.raises(MtpExtractError):
        read_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None)
@given(cut=st.booleans(), at=st.integers(0, 4900), byte=st.integers(0, 255))
def test_no_changed_byte_of_a_header_does_harm(
    sample_gguf: Path, tmp_path_factory: pytest.TempPathFactory, cut: bool, at: int, byte: int
) -> None:
    """A changed or cut file is read or refused by name, and no size that it claims is allocated."""
    folder, stored = tmp_path_factory.mktemp("changed"), bytearray((sample_gguf / FILE).read_bytes())
    stored[at] = byte
    (folder / FILE).write_bytes(stored[: 20 * at] if cut else stored)
    try:
        read_checkpoint(folder)
    except MtpExtractError as error:
        assert str(error)


def test_an_ordered_head_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    """llama.cpp computes the dense head, which the file has; its own converter drops the ordered head, too."""
    shape = build_shape(ordered_head=OrderedHeadConfig(32, 4))
    arranged = load_format("gguf").plan(build_checkpoint(shape), "f32")
    left = {role for role, kept in arranged.stored.items() if kept.how == "nothing"}
    assert left == {"ordered_head.centroids", "ordered_head.token_ordering"}
    (note,) = arranged.notes
    assert "Left out: ordered_head.centroids, ordered_head.token_ordering, because llama.cpp" in note
    write(tmp_path, shape)
    assert read_checkpoint(tmp_path).config == build_shape()


@pytest.mark.parametrize(
    ("source", "base", "parts"),
    [
        ("gemma-4-E4B-it.litertlm", "gemma-4-E4B-it", ("gemma-4", "E4B", "it")),
        ("hf://org/repo@main/gemma-4-26B-A4B-it.litertlm", "gemma-4-26B-A4B-it", ("gemma-4", "26B-A4B", "it")),
        ("gemma-4-E2B-it-assistant", "gemma-4-E2B-it", ("gemma-4", "E2B", "it")),
        ("mtp-gemma-4-31B-it.gguf", "gemma-4-31B-it", ("gemma-4", "31B", "it")),
        ("my model ☃.tflite", "my-model", ("my-model", None, None)),
        ("", "drafter", ("drafter", None, None)),
    ],
)
def test_it_is_called_after_its_base(source: str, base: str, parts: tuple[str | None, ...]) -> None:
    name = _derive_base_name({"source.name": source})
    assert name == base
    keys = _split_base_name(name)
    assert tuple(keys.get(f"general.{key}") for key in ("basename", "size_label", "finetune")) == parts
