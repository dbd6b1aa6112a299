"""Find parts of a file that were never downloaded: pages of zero codes whose rows have ordinary scales.

A download that was preallocated, or fetched in pieces, has its full size from the beginning, and zeros where a piece is
missing. A quantizer's scale of a row is its largest number over the largest code, so that a row with a scale of its own
has a code that is not 0. Rows that really are zero all get one scale: ai-edge-quantizer 0.10.0 writes 1e-9 over the
largest code (its ``min_bound``); others may write 0 or 1.

Only whole pages count, because pieces of a download are larger than a single row of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mtp_extract.io.source import Region
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import ELEMENT_BITS

PAGE = 4096
"""Bytes of a page, aligned in the file: the unit of sparse files, and the least that a download can miss."""

_CHUNK_BYTES = 1 << 20

# Above the scale of a row of zeros, below any scale of a drafter's weights.
_SMALLEST_SCALE = 1e-7


def find_zero_pages(region: Region) -> Iterator[tuple[int, int]]:
    """Find runs of zero pages: ``(begin, end)`` in bytes of ``region``, aligned in the file."""
    first = -region.begin % PAGE
    length_of_pages = max(region.size - first, 0) // PAGE * PAGE
    # Padded with a page that is not zero at either end, so that every run has two edges.
    is_zero = np.zeros(length_of_pages // PAGE + 2, np.bool_)
    for begin in range(0, length_of_pages, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, length_of_pages - begin)
        words = np.frombuffer(region.read(first + begin, length), np.uint64).reshape(-1, PAGE // 8)
        # The first word shows of almost every page that it is not zero.
        suspects = np.flatnonzero(words[:, 0] == 0)
        is_zero[1 + begin // PAGE + suspects] = ~words[suspects].any(axis=1)
    edges = (first + PAGE * np.flatnonzero(np.diff(is_zero))).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def find_missing_rows(constant: QuantizedTensor) -> range | None:
    """Find the first rows (or blocks with scales) whose codes or scales were not downloaded.

    None if there are none, or it cannot be known: floats, or one scale for all rows.
    """
    storage, scale = constant.storage, constant.scale.reshape(-1)
    if not storage.by_rows:
        return None
    bits = storage.columns * ELEMENT_BITS[storage.type]
    for begin, end in find_zero_pages(constant.location):
        first, last = -(-begin * 8 // bits), end * 8 // bits
        if first < last and _belong_to_numbers(scale, first, last):
            return range(first, last)
    return _find_rows_without_scales(constant, scale)


def _belong_to_numbers(scale: Floats, first: int, last: int) -> bool:
    """Whether rows ``[first, last)``, whose codes are all 0, have scales that a quantizer gives to other numbers."""
    scales = scale[first:last]
    if scales.max() <= _SMALLEST_SCALE:
        return False
    if scales.size > 1:
        # A quantizer gives all rows of zeros the same scale.
        return bool((scales != scales[0]).any())
    others = np.concatenate([scale[:first], scale[last:]])
    return bool(others.size and scales[0] != 1 and others.min() <= scales[0] <= others.max())


def _find_rows_without_scales(constant: QuantizedTensor, scale: Floats) -> range | None:
    """Find a row with a scale of 0 and codes that are not, if a page of scales is 0: no quantizer divides by 0."""
    rows = np.flatnonzero(scale == 0)
    # A block's scale may have vanished in FP16 alone.
    if constant.storage.kind != "per_channel" or rows.size < PAGE // scale.itemsize or not constant.storage.symmetric:
        return None
    columns = constant.storage.columns
    for row in rows.tolist():
        # Reading has to begin on a byte.
        begin = row * columns // 8 * 8
        if constant.codes(begin, (row + 1) * columns)[row * columns - begin :].any():
            return range(row, row + 1)
    return None
