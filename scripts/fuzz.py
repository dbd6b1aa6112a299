"""Coverage-guided fuzzing of what reads a drafter: anything but a sound reading or an error of ours is a finding.

An input says what to do to a small drafter: its parsed model is changed (numbers, lists, parts that become one
another), packed again, and then some words of its bytes are replaced, which makes tables share their parts. What
comes of it is read and proven. atheris is needed, which nothing else here uses::

    pip install atheris
    python scripts/fuzz.py build/fuzz -max_total_time=3600

Options are libFuzzer's; the folder is the corpus, which begins with a few seeds. Another folder may be given to start
from what an earlier run found. A finding is written to ``crash-…``, and ``scripts/fuzz.py crash-…`` runs it alone.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional, and without types

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

with atheris.instrument_imports(include=["mtp_extract"]):
    from helpers.make_bundle import Memory, load, pack
    from helpers.make_drafter import DrafterSpec, plain_drafter
    from seam import prove

    from mtp_extract.errors import MtpExtractError

DRAFTERS = [plain_drafter(DrafterSpec(windows=windows)) for windows in ((None,), (4, None))]
SEEDS = (b"\0", b"\1", *(bytes([which, edits, *range(40)]) for which in (0, 1) for edits in (1, 4)))
LIMITS = ("-timeout=20", "-rss_limit_mb=1500", "-len_control=0")
_WORDS = [0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def parts_of(value: Any) -> Iterator[Any]:
    """Every object of a parsed model, from the outside in."""
    if hasattr(value, "__dict__"):
        yield value
        for field in vars(value).values():
            yield from parts_of(field)
    elif isinstance(value, list):
        for entry in value:
            yield from parts_of(entry)


def change(model: Any, provider: Any) -> None:
    """Give a field of some part of ``model`` another value: a number, or what the same field of another part has."""
    parts = list(parts_of(model))
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
        others = [other for other in parts if type(other) is type(part)]
        setattr(part, field, getattr(provider.PickValueInList(others), field))


def replace_words(data: bytearray, provider: Any) -> None:
    """Replace some words by others of the file, by numbers at an end of their range, or move them by a little."""
    for _ in range(provider.ConsumeIntInRange(0, 6)):
        place = 4 * provider.ConsumeIntInRange(0, len(data) // 4 - 1)
        (word,) = struct.unpack_from("<I", data, place)
        kind = provider.ConsumeIntInRange(0, 2)
        if kind == 0:
            word = provider.PickValueInList(_WORDS)
        elif kind == 1:
            word += 4 * provider.ConsumeIntInRange(-64, 64)
        else:
            # Two offsets that lead to one place.
            other = 4 * provider.ConsumeIntInRange(0, len(data) // 4 - 1)
            word = other + struct.unpack_from("<I", data, other)[0] - place
        struct.pack_into("<I", data, place, word & 0xFFFFFFFF)


def changed_drafter(provider: Any) -> bytes | None:
    """A drafter's file, changed; None where the schema's own writer does not take the change."""
    model = load(provider.PickValueInList(DRAFTERS))
    try:
        for _ in range(provider.ConsumeIntInRange(0, 6)):
            change(model, provider)
        data = bytearray(pack(model))
    except (TypeError, ValueError, AttributeError, AssertionError, struct.error, OverflowError):
        return None
    replace_words(data, provider)
    return bytes(data)


def run(content: bytes) -> None:
    """What libFuzzer calls: an exception that is none of ours is a finding."""
    data = changed_drafter(atheris.FuzzedDataProvider(content))
    if data is not None:
        with suppress(MtpExtractError):
            prove(Memory(data))


def main() -> None:
    """Write the seeds into the first folder that is given, and run."""
    folder = next((Path(argument) for argument in sys.argv[1:] if argument[:1] != "-"), None)
    if folder is not None and not folder.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(SEEDS):
            (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
