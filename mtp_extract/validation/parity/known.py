"""Whether another program may judge a drafter: it may while it calls one right that is known to be right."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.files import write_file
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.formats import format_named
from mtp_extract.pipeline.extraction import checkpoint_of

Examine = Callable[[Path, MtpDrafter, Shard], tuple[bool, str]]
"""Of a directory, its drafter in F32, and that in its file: whether it is right, and the evidence."""


def why_no_judge(examine: Examine) -> str:
    """The evidence by which ``examine`` calls the drafter of the packaged sample wrong; empty where it does not."""
    with _sample() as known:
        passed, evidence = examine(*known)
    return "" if passed else evidence


@contextmanager
def _sample() -> Iterator[tuple[Path, MtpDrafter, Shard]]:
    with tempfile.TemporaryDirectory() as folder, open_bundle(sample_bundle()) as opened:
        place, source = Path(folder), opened.drafter()
        for file in arrange(format_named("transformers"), checkpoint_of(source), "f32").files:
            write_file(place, file)
        yield place, load_drafter(place), source
