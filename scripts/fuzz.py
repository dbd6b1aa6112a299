"""Coverage-guided fuzzing of what reads a drafter: anything but a sound reading or an error of ours is a finding.

An input says what to do to a small drafter: its parsed model is changed (numbers, lists, parts that become one
another), packed again, and then some words of its bytes are replaced, which makes tables share their parts. What
comes of it is read and proven, within bounds of CPU time and memory; what is proven is written too, once. Tens of
inputs are tried a second where a core is free. atheris is needed, which nothing else here uses::

    pip install atheris
    python scripts/fuzz.py build/fuzz -max_total_time=3600

Options are libFuzzer's; the folder is the corpus, which begins with a hundred seeds. Another folder may be given to
start from what an earlier run found. A finding is written to ``crash-…``, and ``scripts/fuzz.py crash-…`` runs it
alone.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional, and without types
from atheris.import_hook import HookManager  # type: ignore[import-not-found,import-untyped,unused-ignore]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

_NOT_TRACED = {"mtp_extract.errors", "mtp_extract.io.source", "mtp_extract.litertlm.flatbuffer"}
"""What is called for every word of a file; its branches are those of whoever calls it."""

# Numbers that are compared are none of an input's bytes, so that they are not traced.
with HookManager({"mtp_extract"}, _NOT_TRACED, enable_loader_override=True, trace_dataflow=False):
    from helpers.bounds import bounded
    from helpers.make_bundle import Memory, load, pack
    from helpers.make_drafter import DrafterSpec, plain_drafter
    from seam import prove

    from mtp_extract import extract
    from mtp_extract.bundle import open_bundle
    from mtp_extract.errors import MtpExtractError

DRAFTERS = [plain_drafter(DrafterSpec(windows=windows)) for windows in ((None,), (4, None))]
SEEDS = [b"", *(random.Random(number).randbytes(60) for number in range(100))]
LIMITS = ("-timeout=600", "-report_slow_units=600", "-rss_limit_mb=2500", "-len_control=0", "-max_len=256")
"""libFuzzer's time is that of a clock, which a busy machine stretches: what an input may take is counted below."""
CPU_SECONDS = 20
LONGEST_MESSAGE = 4000
MOST_WRITTEN = 500
_WORDS = [0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


class _Logged(Memory):
    """A source that keeps the places of the words that were read one by one."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.places = set[int]()

    def read_small(self, offset: int, length: int) -> bytes:
        self.places.update(range(offset & ~3, min(offset + length, self.size - 3), 4))
        return self.read(offset, length)


@cache
def find_structure(data: bytes) -> list[int]:
    """Find the words of a sound drafter that are structure; all others are in constants and padding."""
    source = _Logged(data)
    prove(source)
    return sorted(source.places)


def list_parts(value: Any) -> Iterator[Any]:
    """List every object of a parsed model, from the outside in."""
    if hasattr(value, "__dict__"):
        yield value
        for field in vars(value).values():
            yield from list_parts(field)
    elif isinstance(value, list):
        for entry in value:
            yield from list_parts(entry)


def change(model: Any, provider: Any) -> None:
    """Give a field of some part of ``model`` another value: a number, or what the same field of another part has."""
    parts = list(list_parts(model))
    part = provider.PickValueInList(parts)
    field = provider.PickValueInList(sorted(vars(part)))
    value = getattr(part, field)
    if isinstance(value, int):
        setattr(part, field, provider.ConsumeInt(4))
    elif isinstance(value, list) and value:
        place = provider.ConsumeIntInRange(0, len(value) - 1)
        source = provider.PickValueInList(value)
        if provider.ConsumeBool():
            value[place] = source
        else:
            value.insert(place, source)
    elif isinstance(value, bytes):
        setattr(part, field, provider.ConsumeBytes(16))
    else:
        peers = [peer for peer in parts if type(peer) is type(part)]
        setattr(part, field, getattr(provider.PickValueInList(peers), field))


def replace_words(data: bytearray, places: list[int], provider: Any) -> None:
    """Replace some words by others of the file, by numbers at an end of their range, or move them by a little."""
    for _ in range(provider.ConsumeIntInRange(0, 6)):
        place = provider.PickValueInList(places)
        (word,) = struct.unpack_from("<I", data, place)
        kind = provider.ConsumeIntInRange(0, 2)
        if kind == 0:
            word = provider.PickValueInList(_WORDS)
        elif kind == 1:
            word += 4 * provider.ConsumeIntInRange(-64, 64)
        else:
            # Two offsets that lead to one place.
            source = provider.PickValueInList(places)
            word = source + struct.unpack_from("<I", data, source)[0] - place
        struct.pack_into("<I", data, place, word & 0xFFFFFFFF)


def draw_changed_drafter(provider: Any) -> bytes | None:
    """Draw a changed drafter's file; None if the schema's own writer refuses the change."""
    content = provider.PickValueInList(DRAFTERS)
    if changes := provider.ConsumeIntInRange(0, 6):
        model = load(content)
        try:
            for _ in range(changes):
                change(model, provider)
            content = pack(model)
        except (TypeError, ValueError, AttributeError, AssertionError, struct.error, OverflowError):
            return None
    data = bytearray(content)
    # The schema's writer has its own order: what it packed anew is changed anywhere.
    replace_words(data, list(range(0, len(data) - 3, 4)) if changes else find_structure(content), provider)
    return bytes(data)


_written = set[int]()
"""Hashes of what was written: most of what is proven is what a change to nothing of value leaves."""


def run_case(content: bytes) -> None:
    """Run one case for libFuzzer: a foreign exception is a finding, and so is an unreadable message."""
    data = draw_changed_drafter(atheris.FuzzedDataProvider(content))
    if data is None:
        return
    with warnings.catch_warnings(), bounded(CPU_SECONDS):
        warnings.simplefilter("error")
        try:
            prove(Memory(data))
        except MtpExtractError as error:
            message = str(error)
            assert message.isprintable() and len(message) < LONGEST_MESSAGE, message
            return
        if len(_written) < MOST_WRITTEN and hash(data) not in _written:
            _written.add(hash(data))
            with tempfile.TemporaryDirectory() as folder:
                # What is proven is written, read back and compared: no error is expected of it.
                extract(open_bundle(Memory(data)), Path(folder) / "drafter", dtype="f32")


def main() -> None:
    """Write the seeds into the first folder that is given, and run."""
    folder = next((Path(argument) for argument in sys.argv[1:] if argument[:1] != "-"), None)
    if folder is not None and not folder.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(SEEDS):
            (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:]], run_case)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
