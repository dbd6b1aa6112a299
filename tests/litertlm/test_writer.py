"""Bundles with added sections: every section lies where the header says."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import flatbuffers
import pytest
from helpers.make_bundle import ALIGNMENT, Memory, Part, bundle
from hypothesis import given
from hypothesis import strategies as st

from mtp_extract.errors import OutputError, TruncatedError, UnsupportedError
from mtp_extract.io.assembled import Assembled, Put, write_copy
from mtp_extract.io.source import LocalSource, Region
from mtp_extract.litertlm.container import read_bundle_header
from mtp_extract.litertlm.writer import NewSection, add_sections

SIZES = st.sampled_from([0, 1, 7, 5000, ALIGNMENT, ALIGNMENT + 1])
CONTENT = st.builds(lambda value, size: bytes([value]) * size, st.integers(0, 255), SIZES)
ITEMS = st.dictionaries(st.sampled_from(["model_type", "backend_constraint", "x"]), st.text(max_size=9), max_size=3)
PARTS = st.lists(st.builds(Part, st.integers(0, 12), CONTENT, ITEMS), min_size=1, max_size=5)


def wrap(data: bytes) -> Region:
    return Region(Memory(data), 0, len(data), "all of it")


def split_in_two(data: bytes) -> Region:
    """Build a section with the content ``data`` from two overlapping pieces."""
    half = len(data) // 2
    pieces = [(0, wrap(data[:half] + b"?"[: len(data) - half])), (half, wrap(data[half:]))]
    return Region(Assembled("made", len(data), pieces), 0, len(data), "the section")


@given(PARTS, PARTS)
def test_sections_added(parts: list[Part], new: list[Part]) -> None:
    read = read_bundle_header(Memory(bundle(parts)))
    extended = add_sections(read, [NewSection(part.data_type, part.items, split_in_two(part.data)) for part in new])
    result = read_bundle_header(extended)
    assert [(s.data_type, dict(s.items), extended.read(s.begin, s.size)) for s in result.sections] == [
        (part.data_type, dict(part.items), part.data) for part in parts + new
    ]
    assert all(s.begin % ALIGNMENT == 0 for s in result.sections if s.size)
    assert result.version == read.version


def test_what_is_written_is_what_was_planned(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(range(256)) * 100)
    with LocalSource(tmp_path / "source") as source:
        pieces = [(10, Region(source, 300, 25_000, "a part")), (100, wrap(b"over it")), (200, wrap(bytes(50)))]
        planned = Assembled("planned", 30_000, pieces)

        def fill(put: Put) -> None:
            for at, data in ((29_600, b"y" * 400), (29_000, b"x" * 600), (1000, b"z" * 50)):
                put(at, data)

        write_copy(tmp_path / "out", planned, fill=fill)
        written = (tmp_path / "out").read_bytes()
        for begin, end in ((0, 1000), (1050, 29_000)):
            assert written[begin:end] == planned.read(begin, end - begin)
    assert written[29_000:] == b"x" * 600 + b"y" * 400
    assert written[1000:1050] == b"z" * 50
    assert written[100:107] == b"over it"
    assert written[200:250] == bytes(50)


def test_a_source_that_shrank(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(10_000))
    with LocalSource(tmp_path / "source") as source:
        os.truncate(tmp_path / "source", 5000)
        with pytest.raises(TruncatedError):
            write_copy(tmp_path / "out", source)


@pytest.mark.parametrize("number", [5, 15, 30, 45])
def test_what_is_written_wrongly_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied, inserted, filled or zero: every byte of the new file is read back and compared."""
    (tmp_path / "source").write_bytes(bytes(range(100)))

    def spoil(path: Path) -> LocalSource:
        data = bytearray(path.read_bytes())
        data[number] ^= 1
        path.write_bytes(data)
        return LocalSource(path)

    with LocalSource(tmp_path / "source") as source:
        planned = Assembled("planned", 50, [(0, Region(source, 30, 20, "a part")), (10, wrap(b"other12345"))])
        monkeypatch.setattr("mtp_extract.io.assembled.LocalSource", spoil)
        with pytest.raises(OutputError, match="reads back differently"):
            write_copy(tmp_path / "out", planned, fill=lambda put: put(25, b"made......"))


def test_a_header_without_room() -> None:
    read = read_bundle_header(Memory(bundle([Part(1, b"x")])))
    many = [NewSection(1, {"key": "v" * 300}, split_in_two(b"y")) for _ in range(60)]
    with pytest.raises(UnsupportedError, match="no room"):
        add_sections(read, many)


def test_a_header_with_a_field_that_is_not_known() -> None:
    """A root with three fields, of which two are known: the third would be lost."""
    builder = flatbuffers.Builder()
    builder.StartObject(3)
    builder.PrependInt32Slot(2, 9, 0)
    builder.Finish(builder.EndObject())
    header = bytes(builder.Output())
    data = b"LITERTLM" + struct.pack("<3I4xQ", 1, 7, 0, 32 + len(header)) + header
    with pytest.raises(UnsupportedError, match="newer than this release"):
        add_sections(read_bundle_header(Memory(data)), [NewSection(1, {}, split_in_two(b"y"))])
