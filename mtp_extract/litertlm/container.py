"""The ``.litertlm`` container: header and sections.

The layout, as written by ``litert-lm-builder``: ``LITERTLM``; u32 major, minor, patch at byte 8; u64 end of the
header at byte 24; from byte 32 a flatbuffer that lists sections, each with typed key/value items and a byte range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from mtp_extract.errors import FormatError, TruncatedError, UnsupportedError, escape
from mtp_extract.io.source import Region, Source
from mtp_extract.litertlm.flatbuffer import Budget, FlatBuffer, Table

MAGIC = b"LITERTLM"
TFLITE_IDENTIFIER = b"TFL3"
"""File identifier of a TFLite flatbuffer, at byte 4."""

Item = int | float | bool | str

TFLITE_MODEL = 3
TFLITE_WEIGHTS = 7

SECTION_TYPES = (
    *("NONE", "GenericBinaryData", "Deprecated", "TFLiteModel", "SP_Tokenizer", "LlmMetadataProto"),
    *("HF_Tokenizer_Zlib", "TFLiteWeights", "EmbeddingMetadataProto", "ExecutorMetadataProto"),
    *("TtsMetadataProto", "AsrMetadataProto"),
)
"""Names by ``data_type``. Ids from 8 on moved between schema versions."""

# Tag of the VData union → struct code of the one field of its table; strings have a tag of their own.
_ITEM_CODES = {1: "B", 2: "b", 3: "H", 4: "h", 5: "I", 6: "i", 7: "f", 8: "?", 10: "Q", 11: "q", 12: "d"}
_ITEM_STRING = 9

HEADER_START = 32
_LONGEST_HEADER = 1 << 24
_FETCH_AGAIN = "The file is damaged: fetch it again."
_MOST_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Section:
    """One section of a bundle: ``[begin, end)`` of the file."""

    index: int
    data_type: int
    begin: int
    end: int
    items: MappingProxyType[str, Item]

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.end - self.begin

    @property
    def type_name(self) -> str:
        """Name of ``data_type``; ``unknown (N)`` for an id this package does not know."""
        is_known = self.data_type < len(SECTION_TYPES)
        return SECTION_TYPES[self.data_type] if is_known else f"unknown ({self.data_type})"

    @property
    def model_type(self) -> str | None:
        """``model_type`` in lower case and without ``tf_lite_``: ``prefill_decode``, ``mtp_drafter``, …

        A TFLite section without the item is a prefill_decode model, as for the runtime.
        """
        value = self.items.get("model_type")
        if isinstance(value, str):
            return value.strip().lower().removeprefix("tf_lite_")
        return "prefill_decode" if self.data_type == TFLITE_MODEL else None

    @property
    def label(self) -> str:
        """Description for messages."""
        kind = self.model_type or self.type_name
        return f"section {self.index} ({escape(kind)})"


@dataclass(frozen=True)
class BundleHeader:
    """The header of a ``.litertlm``."""

    source: Source
    version: tuple[int, int, int]
    header_end: int
    items: MappingProxyType[str, Item]
    sections: tuple[Section, ...]

    def region(self, section: Section) -> Region:
        return Region(self.source, section.begin, section.size, section.label)

    def find_weights(self, section: Section) -> Section | None:
        """Find the TFLiteWeights section with the model_type of ``section``; FormatError if there are several."""
        same = [s for s in self.sections if s.data_type == TFLITE_WEIGHTS and s.model_type == section.model_type]
        if len(same) > 1:
            raise FormatError(
                f"{self.source.name}: expected one section of weights for {section.label}, found "
                f"{', '.join(s.label for s in same)}. Which one a runtime takes is not in the file."
            )
        return same[0] if same else None


def is_bundle(source: Source) -> bool:
    """Whether ``source`` begins as a ``.litertlm`` does."""
    return source.size >= len(MAGIC) and source.read(0, len(MAGIC)) == MAGIC


def read_bundle_header(source: Source) -> BundleHeader:
    """Read and check the header of ``source``.

    Raises:
        FormatError: it is no ``.litertlm``, or its header is inconsistent.
        TruncatedError: the file ends within the header or a section.
        UnsupportedError: its major version is not 1.
    """
    if not is_bundle(source):
        raise FormatError(
            f"{source.name}: expected a .litertlm bundle (first bytes {MAGIC!r}), "
            f"found {source.read(0, min(len(MAGIC), source.size))!r}."
        )
    version, end = _read_start(source)
    region = Region(source, HEADER_START, end - HEADER_START, "the header")
    root = FlatBuffer(region, Budget(_MOST_ELEMENTS)).read_root()
    system, listing = root.table(0), root.table(1)
    sections = tuple(
        Section(index, entry.integer(3, "B"), entry.integer(1, "Q"), entry.integer(2, "Q"), _read_items(entry))
        for index, entry in enumerate(listing.tables(0) if listing else ())
    )
    _check_ranges(source, end, sections)
    return BundleHeader(source, version, end, _read_items(system), sections)


def _read_start(source: Source) -> tuple[tuple[int, int, int], int]:
    """Return the version of a bundle and the end of its header."""
    if source.size < HEADER_START:
        raise TruncatedError(
            f"{source.name}: the file has {source.size} bytes, less than a .litertlm header. Fetch it again."
        )
    head = FlatBuffer(Region(source, 0, source.size, "the header"))
    major, minor, patch = (head.read_integer("I", at) for at in (8, 12, 16))
    if major != 1:
        raise UnsupportedError(
            f"{source.name}: .litertlm version {major}.{minor}.{patch}; this release reads versions 1.x. "
            "Look for a newer release of mtp-extract."
        )
    end = head.read_integer("Q", 24)
    if end > source.size:
        raise TruncatedError(
            f"{source.name}: the header ends at byte {end}, but the file has {source.size}. Fetch it again."
        )
    if not HEADER_START + 8 <= end <= _LONGEST_HEADER:
        raise FormatError(f"{source.name}: the header claims to end at byte {end}, which cannot be. {_FETCH_AGAIN}")
    return (major, minor, patch), end


def _read_items(owner: Table | None) -> MappingProxyType[str, Item]:
    items: dict[str, Item] = {}
    for pair in owner.tables(0) if owner else ():
        key = pair.string(0)
        tag = pair.integer(1, "B")
        value = pair.table(2)
        if key is None or value is None:
            continue
        if tag == _ITEM_STRING:
            items[key] = value.string(0) or ""
        elif tag in _ITEM_CODES:
            number = value.scalar(0, _ITEM_CODES[tag])
            # JSON has no infinity and no NaN.
            items[key] = number if math.isfinite(number) else str(number)
        else:
            items[key] = f"(value of unknown type {tag})"
    return MappingProxyType(items)


def _check_ranges(source: Source, header_end: int, sections: tuple[Section, ...]) -> None:
    for section in sections:
        name = f"{source.name}: {section.label}"
        if section.begin > section.end:
            raise FormatError(f"{name} runs backwards, from byte {section.begin} to {section.end}. {_FETCH_AGAIN}")
        if section.end > source.size:
            raise TruncatedError(
                f"{name} ends at byte {section.end}, but the file has {source.size}. The download is incomplete: fetch "
                "it again."
            )
        if section.size and section.begin < header_end:
            raise FormatError(f"{name} begins at byte {section.begin}, inside the header. {_FETCH_AGAIN}")
    for first, second in pairwise(sorted((s for s in sections if s.size), key=lambda s: s.begin)):
        if second.begin < first.end:
            sections_overlap = f"{first.label} and {second.label} overlap at byte {second.begin}"
            raise FormatError(f"{source.name}: {sections_overlap}. {_FETCH_AGAIN}")
