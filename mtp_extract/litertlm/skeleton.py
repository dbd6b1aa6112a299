"""Skeletons: models without weights, small enough for an issue; a ZIP file with one TFLite model.

The model is the section byte for byte, with zeros for its weights, which compress to nothing. A line after its end,
which TFLite readers ignore, marks it as a skeleton.
"""

from __future__ import annotations

import io
import zipfile
import zlib

from mtp_extract.errors import FormatError
from mtp_extract.io.source import BytesSource, Source
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER

MARK = b"\nmtp-extract: a skeleton without weights\n"
_LARGEST_FILE = 1 << 24
_LARGEST_MODEL = 1 << 28
_FIRST_BYTES = b"PK\x03\x04"
_MEMBER = "skeleton.tflite"


def pack_skeleton(model: bytes) -> bytes:
    """Pack ``model``, whose weights are zeros; the same model gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(zipfile.ZipInfo(_MEMBER), model + MARK, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def unpack_skeleton(source: Source) -> Source | None:
    """Return the model of a skeleton, packed or not; None if ``source`` is no skeleton.

    Raises:
        FormatError: the archive is damaged, or larger than any drafter.
    """
    if not len(MARK) <= source.size <= _LARGEST_MODEL:
        return None
    # Only now read the end: on a server it costs a request.
    if source.read(4, 4) == TFLITE_IDENTIFIER:
        return source if source.read(source.size - len(MARK), len(MARK)) == MARK else None
    if source.size > _LARGEST_FILE or source.read(0, len(_FIRST_BYTES)) != _FIRST_BYTES:
        return None
    # The name of an archive's first member follows 30 bytes of header.
    if source.read(30, len(_MEMBER)) != _MEMBER.encode():
        return None
    model = _unpack_archive(source)
    if len(model) > _LARGEST_MODEL or not model.endswith(MARK):
        raise FormatError(f"{source.name}: expected a skeleton of mtp-extract, found another model. Make it again.")
    return BytesSource(model, source.name)


def _unpack_archive(source: Source) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(source.read(0, source.size))) as archive:
            if archive.namelist() != [_MEMBER]:
                raise zipfile.BadZipFile("its members are not those of its header")
            with archive.open(_MEMBER) as member:
                # The header's size may be wrong.
                return member.read(_LARGEST_MODEL + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise FormatError(f"{source.name}: is a damaged skeleton. Make it again.") from error
