"""Parts of a file that were never downloaded: pages of zeros where a scale says that there are numbers.

A download that was preallocated, or fetched in pieces, has its size from the beginning, and zeros where a piece is
missing. A quantizer's scale of a row is its largest number over the largest code, so that a row with a scale of its own
holds that code. Rows that are zero in truth get a scale that says so, one for all of them: ai-edge-quantizer 0.10.0
writes 1e-9 over the largest code (its ``min_bound``); others may write 0 or 1.

Only whole pages count: pieces are larger, and a single row of zeros in between is nobody's download.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mtp_extract.io.source import Region
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import ELEMENT_BITS

PAGE = 4096
"""Bytes, aligned in the file: what file systems leave out of a sparse file, and no piece of a download is smaller."""

_CHUNK_BYTES = 1 << 20

# Above what quantizers write for a row of zeros, below any scale of weights that a drafter computes with.
_SMALLEST_SCALE = 1e-7


def zero_pages(region: Region) -> Iterator[tuple[int, int]]:
    """Runs of whole pages of the file that are zero: ``(begin, end)`` in bytes of ``region``."""
    first = -region.begin % PAGE
    length_of_pages = max(region.size - first, 0) // PAGE * PAGE
    # With a page before and behind that is not zero, so that every run has two edges.
    is_zero = np.zeros(length_of_pages // PAGE + 2, np.bool_)
    for begin in range(0, length_of_pages, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, length_of_pages - begin)
        words = np.frombuffer(region.read(first + begin, length), np.uint64).reshape(-1, PAGE // 8)
        # Almost every page is told from a hole by its first word.
        suspects = np.flatnonzero(words[:, 0] == 0)
        is_zero[1 + begin // PAGE + suspects] = ~words[suspects].any(axis=1)
    edges = (first + PAGE * np.flatnonzero(np.diff(is_zero))).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def missing_rows(constant: QuantizedTensor) -> range | None:
    """The first rows (blocks, where these have scales) that were not downloaded, or whose scales were not.

    None where there are none, or nothing can be said: numbers without scales, or one scale for all.
    """
    storage, scale = constant.storage, constant.scale.reshape(-1)
    if not storage.by_rows:
        return None
    bits = storage.columns * ELEMENT_BITS[storage.type]
    for begin, end in zero_pages(constant.location):
        first, last = -(-begin * 8 // bits), end * 8 // bits
        if first < last and _belong_to_numbers(scale, first, last):
            return range(first, last)
    return _find_rows_without_scales(constant, scale)


def _belong_to_numbers(scale: Floats, first: int, last: int) -> bool:
    """Whether the scales of rows ``[first, last)``, whose codes are all 0, are not those of rows of zeros."""
    scales = scale[first:last]
    if scales.max() <= _SMALLEST_SCALE:
        return False
    if scales.size > 1:
        # What a quantizer writes for a row of zeros is one number.
        return bool((scales != scales[0]).any())
    others = np.concatenate([scale[:first], scale[last:]])
    return bool(others.size and scales[0] != 1 and others.min() <= scales[0] <= others.max())


def _find_rows_without_scales(constant: QuantizedTensor, scale: Floats) -> range | None:
    """Rows of a page of scales that are 0, where a code is not: no quantizer divides by 0."""
    rows = np.flatnonzero(scale == 0)
    # A single scale of a block may be too small for FP16, and its codes stay.
    if constant.storage.kind != "per_channel" or rows.size < PAGE // scale.itemsize or not constant.storage.symmetric:
        return None
    columns = constant.storage.columns
    for row in rows.tolist():
        # A range of codes begins on a byte.
        begin = row * columns // 8 * 8
        if constant.codes(begin, (row + 1) * columns)[row * columns - begin :].any():
            return range(row, row + 1)
    return None
