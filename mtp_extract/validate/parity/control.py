"""A drafter that is known to be right, for when a tool calls one wrong: does it call every one so?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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


@contextmanager
def known_good() -> Iterator[tuple[Path, MtpDrafter, Shard]]:
    """The drafter of the packaged sample: its directory in the transformers format, F32; loaded; and in its file."""
    with tempfile.TemporaryDirectory() as folder, open_bundle(sample_bundle()) as opened:
        place, source = Path(folder), opened.drafter()
        for file in arrange(format_named("transformers"), checkpoint_of(source), "f32").files:
            write_file(place, file)
        yield place, load_drafter(place), source
