"""Every false header and every file of another kind ends in an error of ours, and nothing is written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import flatbuffers
import numpy as np
import pytest
import safetensors.numpy
from helpers.make_bundle import ALIGNMENT, DRAFTER, TABLE, Memory, Part, bundle, parts_of, table, vector
from helpers.make_drafter import plain_drafter
from seam import (
    FormatError,
    MtpExtractError,
    NoDrafterError,
    SourceError,
    TruncatedError,
    UnsupportedError,
    inspect,
    open_bundle,
)

from mtp_extract import extract

DRAFTER_DATA = plain_drafter()
PARTS = [Part(5, b"metadata"), Part(3, DRAFTER_DATA, DRAFTER), Part(4, b"tokenizer")]
SIZE = len(DRAFTER_DATA)


def refuse(path: Path, out: Path, kind: type[MtpExtractError], match: str) -> None:
    """Require that extracting ``path`` ends in an error of ``kind`` and leaves nothing beside ``out``."""
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(kind, match=match):
        extract(path, out)
    assert not any(out.parent.iterdir())
    with suppress(MtpExtractError), open_bundle(path) as opened:
        inspect(opened, tensors=True, graph=True)


def test_the_builder_writes_sound_bundles(tmp_path: Path, sample: Path) -> None:
    """Otherwise everything below would be refused for the wrong reason."""
    for name, data in {"own": bundle(PARTS), "sample": bundle(parts_of(sample))}.items():
        path = tmp_path / f"{name}.litertlm"
        path.write_bytes(data)
        assert "model.safetensors" in extract(path, tmp_path / name).files


def test_truncated_at_every_boundary(tmp_path: Path, sample: Path) -> None:
    """Around the header and the sections, and inside of them."""
    content = sample.read_bytes()
    with open_bundle(sample) as opened:
        assert opened.bundle is not None
        cuts = {1, 7, 8, 9, 12, 24, 31, 32, 36, 40, opened.bundle.header_end // 2, opened.bundle.header_end - 1}
        for section in opened.sections:
            cuts |= {section.begin - 1, section.begin, section.begin + 1, section.begin + section.size // 2}
            cuts |= {section.end - 1, section.end}
    path = tmp_path / "cut.litertlm"
    for cut in sorted(cuts - {len(content)}):
        path.write_bytes(content[:cut])
        refuse(path, tmp_path / "out" / "x", MtpExtractError, r"cut\.litertlm")


def test_a_drafter_truncated_anywhere(tmp_path: Path) -> None:
    """A flatbuffer has its root at the front and what it leads to behind: no prefix is a model."""
    path = tmp_path / "cut.tflite"
    for cut in [*range(1, 64), *range(64, SIZE, 97), SIZE - 4]:
        path.write_bytes(DRAFTER_DATA[:cut])
        refuse(path, tmp_path / "out" / "x", MtpExtractError, r"cut\.tflite")


def test_sections_after_the_drafter_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "odd.litertlm"
    path.write_bytes(bundle([*PARTS, Part(200, b"\0" * 9), Part(3, b"not a model", {"model_type": "tf_lite_aux"})]))
    assert extract(path, tmp_path / "out").record["source"]["section"]["index"] == 1
    with open_bundle(path) as opened:
        assert opened.sections[3].type_name == "unknown (200)"


HEADERS: dict[str, tuple[Callable[[], bytes], type[MtpExtractError], str]] = {
    "version 0": (lambda: bundle(PARTS, version=(0, 9, 0)), UnsupportedError, r"version 0\.9\.0"),
    "version 2": (lambda: bundle(PARTS, version=(2, 0, 0)), UnsupportedError, r"version 2\.0\.0"),
    "header end 0": (lambda: bundle(PARTS, header_end=0), FormatError, "claims to end at byte 0"),
    "header end 2^62": (lambda: bundle(PARTS, header_end=1 << 62), TruncatedError, "header ends at byte"),
    "header end 2^64-1": (lambda: bundle(PARTS, header_end=(1 << 64) - 1), TruncatedError, "header ends at byte"),
    "header end inside": (lambda: bundle(PARTS, header_end=60), FormatError, "flatbuffer"),
    "section backwards": (lambda: _claiming({1: (2 * ALIGNMENT + 8, 2 * ALIGNMENT)}), FormatError, "backwards"),
    "section past the end": (lambda: _claiming({2: (3 * ALIGNMENT, 1 << 40)}), TruncatedError, "ends at byte"),
    "section far past": (lambda: _claiming({2: ((1 << 64) - 9, (1 << 64) - 1)}), TruncatedError, "ends at byte"),
    "section in the header": (lambda: _claiming({0: (8, 64)}), FormatError, "inside the header"),
    "sections overlap": (lambda: _claiming({0: (ALIGNMENT, 2 * ALIGNMENT + 1)}), FormatError, "overlap"),
    "drafter empty": (lambda: _claiming({1: (0, 0)}), FormatError, "not a TFLite model"),
    "drafter shifted": (lambda: _claiming({1: (2 * ALIGNMENT + 4, 2 * ALIGNMENT + SIZE)}), FormatError, "TFL3"),
    "drafter twice": (lambda: bundle([*PARTS, PARTS[1]]), NoDrafterError, "more than one drafter"),
    "names": (lambda: bundle([Part(3, b"", {"model_type": "\x1b../\x00"})]), NoDrafterError, r"\\x1b\.\./\\x00"),
    "drafter cut": (lambda: _claiming({1: (2 * ALIGNMENT, 2 * ALIGNMENT + SIZE // 2)}), FormatError, "offset leads to"),
    "no sections": (lambda: bundle([]) + b"\0" * ALIGNMENT, NoDrafterError, "Models in it: none"),
    "no drafter": (lambda: bundle([PARTS[0], PARTS[2]]), NoDrafterError, "no section holds"),
    "no magic": (lambda: b"LITERTLN" + bundle([PARTS[0]])[8:], NoDrafterError, "first bytes 4c 49 54 45 52 54 4c 4e"),
}


def _claiming(lies: dict[int, tuple[int, int]]) -> bytes:
    true = [(ALIGNMENT, ALIGNMENT + 8), (2 * ALIGNMENT, 2 * ALIGNMENT + SIZE), (3 * ALIGNMENT, 3 * ALIGNMENT + 9)]
    return bundle(PARTS, ranges=[lies.get(i, span) for i, span in enumerate(true)])


@pytest.mark.parametrize("case", HEADERS)
def test_headers(tmp_path: Path, case: str) -> None:
    build, kind, match = HEADERS[case]
    path = tmp_path / "bad.litertlm"
    path.write_bytes(build())
    refuse(path, tmp_path / "out" / "x", kind, match)


def header_of(build: Callable[[flatbuffers.Builder], int]) -> bytes:
    """A bundle whose header is the flatbuffer that ``build`` writes, and nothing else."""
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(build(builder))
    listing = bytes(builder.Output())
    return struct.pack("<8s3I4xQ", b"LITERTLM", 1, 7, 0, 32 + len(listing)) + listing


def test_a_million_sections_that_are_one() -> None:
    """Four megabytes of offsets to one table must not become a million sections."""

    def listing(builder: flatbuffers.Builder) -> int:
        sections = vector(builder, [table(builder, 4)] * (1 << 20))
        return table(builder, 2, (TABLE, 1, table(builder, 1, (TABLE, 0, sections))))

    with pytest.raises(FormatError, match="more elements"):
        open_bundle(Memory(header_of(listing)))


@pytest.mark.parametrize("value", [0xFFFFFFFF, 0x7FFFFFFF, 0x40000000, 1 << 20, 0])
def test_a_vector_count_of_anything(value: int) -> None:
    """Every word of the header in turn, set to a huge number, or leading back to the root: counts, offsets, vtables."""
    data = bundle(PARTS)
    end, root = struct.unpack_from("<Q", data, 24)[0], 32 + struct.unpack_from("<I", data, 32)[0]
    for at in range(32, end - 3, 4):
        changed = bytearray(data)
        # An offset is unsigned and leads forwards only: a reader that lets it wrap around comes back to the root.
        struct.pack_into("<I", changed, at, value or ((1 << 32) - (at - root)) & 0xFFFFFFFF)
        with suppress(MtpExtractError):
            open_bundle(Memory(bytes(changed))).read_drafter()


def test_names_and_values_of_items(tmp_path: Path) -> None:
    """Items reach the terminal and JSON as text, never as control characters or as numbers JSON cannot write."""
    items = {"model_type": "TF_LITE_MTP_DRAFTER", "../../etc": "\x1b]0;x\x07", "\u202e": "\0", "x" * 3000: "y" * 3000}
    data = bytearray(bundle([Part(3, DRAFTER_DATA, {**items, "note": "NOTE"})]))
    at = data.index(b"NOTE")
    data[at : at + 4] = b"\xff\xfe\xc0\x80"
    path = tmp_path / "items.litertlm"
    path.write_bytes(data)
    extract(path, tmp_path / "out")
    with open_bundle(path) as opened:
        (section,) = json.loads(json.dumps(inspect(opened).report, allow_nan=False))["sections"]
    assert section["items"] == {**items, "note": r"\xff\xfe\xc0\x80"}
    assert {p.name for p in tmp_path.iterdir()} == {"items.litertlm", "out"}


def test_an_item_that_is_not_a_number() -> None:
    def listing(builder: flatbuffers.Builder) -> int:
        key, value = builder.CreateString("backend"), table(builder, 1, ("Float32", 0, float("nan")))
        entries = vector(builder, [table(builder, 3, (TABLE, 0, key), ("Uint8", 1, 7), (TABLE, 2, value))])
        return table(builder, 2, (TABLE, 0, table(builder, 1, (TABLE, 0, entries))))

    opened = open_bundle(Memory(header_of(listing)))
    assert opened.bundle is not None
    assert dict(opened.bundle.items) == {"backend": "nan"}


FILES: dict[str, tuple[Callable[[Path], object], type[MtpExtractError], str]] = {
    "missing": (lambda path: None, SourceError, "No such file"),
    "empty": (lambda path: path.touch(), SourceError, r"found an empty file\. Fetch it again"),
    "directory": (lambda path: path.mkdir(), SourceError, "found a directory"),
    "fifo": (os.mkfifo, SourceError, "found a pipe, a socket or a device"),
    "/dev/zero": (lambda path: path.symlink_to("/dev/zero"), SourceError, "or a device"),
    "link to itself": (lambda path: path.symlink_to(path), SourceError, "cannot be opened"),
    "magic alone": (lambda path: path.write_bytes(b"LITERTLM"), TruncatedError, "8 bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_something_else(tmp_path: Path, case: str) -> None:
    build, kind, match = FILES[case]
    path = tmp_path / "file"
    build(path)
    refuse(path, tmp_path / "out" / "x", kind, match)


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 3655827456\n" % (b"0" * 64)
KINDS = {
    "Git LFS pointer": (_POINTER, "a Git LFS pointer. Fetch the file itself: git lfs pull"),
    "page": (b"\n<!DOCTYPE html>\n<html class=''>\n<head>", "an HTML page. Fetch the file itself"),
    "page without a declaration": (b"<HTML><body>404</body></HTML>", "an HTML page"),
    "zip": (b"PK\x03\x04" + bytes(99), "an archive. Unpack it"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(99), "a GGUF file. Give a LiteRT file"),
    "safetensors": (safetensors.numpy.save({"w": np.zeros(9, np.float32)}), "a safetensors file. Give a LiteRT file"),
    "gzip": (b"\x1f\x8b\x08\0", "an archive"),
    "Zstandard": (b"\x28\xb5\x2f\xfd\x24\x01", "an archive"),
    "tar": (b"model.litertlm".ljust(257, b"\0") + b"ustar\x0000", "an archive. Unpack it"),
    "a download that was begun": (bytes(1 << 12), "zeros at its beginning. The download is probably incomplete"),
    "noise": (bytes(range(240, 256)) * 9, "another kind of file (first bytes f0 f1 f2 f3 f4 f5 f6 f7). Check"),
}


@pytest.mark.parametrize("case", KINDS)
def test_a_file_is_called_what_it_is(tmp_path: Path, case: str) -> None:
    data, expected = KINDS[case]
    path = tmp_path / "gemma-4-E4B-it.litertlm"
    path.write_bytes(data)
    with open_bundle(path) as opened, pytest.raises(NoDrafterError) as caught:
        opened.read_drafter()
    message = str(caught.value)
    assert message.startswith(f"{path}: expected a .litertlm bundle or a drafter's .tflite, found {expected}")
    assert message.isprintable()
    assert "b'" not in message
    assert "\\x" not in message


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "new\nline", "\udcff\udcfe", "x" * 250, "\0", "a\0/b", "a" * 5000, "/"])
def test_a_path_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError) as raised:
        extract(os.path.join(tmp_path, name), tmp_path / "out" / "x")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("head", [b"", b"LITERTLM\x01\0\0\0\x07\0\0\0" + b"\0" * 12 + b"\0\0\0\0\1\0\0\0"])
def test_eight_gigabytes_of_nothing(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "sparse.litertlm"
    path.write_bytes(head)
    os.truncate(path, 8 << 30 if head else 1 << 30)
    refuse(path, tmp_path / "out" / "x", MtpExtractError, r"sparse\.litertlm")
