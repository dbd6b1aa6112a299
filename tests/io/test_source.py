"""Small reads go through cached pages, and return the bytes of the source."""

from __future__ import annotations

import random

import pytest

from mtp_extract.errors import TruncatedError
from mtp_extract.io.source import BytesSource, Region

PAGE = 1 << 15
DATA = random.Random(2).randbytes(3 * PAGE + 100)


class Counted(BytesSource):
    reads = 0

    def read(self, offset: int, length: int) -> bytes:
        self.reads += 1
        return super().read(offset, length)


def test_small_reads_are_those_of_the_source() -> None:
    source = Counted(DATA)
    region = Region(source, 10, len(DATA) - 10, "a part").part(5, len(DATA) - 15, "a part of it")
    for offset in (0, 1, PAGE - 17, PAGE - 16, PAGE - 15, 2 * PAGE - 20, 3 * PAGE - 30):
        for length in (0, 1, 8, 50):
            assert region.read(offset, length) == DATA[15 + offset : 15 + offset + length]
    assert source.reads == 4
    assert region.read(3, 2 * PAGE) == DATA[18 : 18 + 2 * PAGE]
    assert region.read(region.size - 4) == DATA[-4:]
    assert source.reads == 5
    for offset, length in ((-1, 2), (region.size, 1), (0, region.size + 1), (3, -1)):
        with pytest.raises(TruncatedError, match=r"a part of it has \d+ bytes, but bytes"):
            region.read(offset, length)
