"""What the page asks for, without the page: the drafter of a bundle on the Hub, within limits.

All that reads a bundle runs in a process of its own (``worker.py``), which is ended when its time is up. The token of
whoever asks goes there over a pipe, and nowhere else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from mtp_extract.cli.terminal import size
from mtp_extract.errors import MtpExtractError, SourceError, escape
from mtp_extract.formats import HEADS, NAMES
from mtp_extract.io.address import HubAddress, parse_address
from mtp_extract.report.markdown import plain, table

LARGEST = 2_000_000_000
"""Bytes of a drafter: of its section, and of its numbers as F32. That of Gemma 4 E4B has 44 MB and 312 MB."""
LONGEST_LOOK, LONGEST_JOB = 60, 300
"""Seconds that looking and extracting may take. That drafter takes 2 s and the time of the download."""
KEPT = 1800
"""Seconds for which files are kept to be downloaded, if the page stays open."""
IN_LINE = 20
"""Jobs that may wait; one runs at a time."""
LIMITS = (
    f"Drafters of up to {LARGEST / 1e9:g} GB, {LONGEST_JOB // 60} minutes a job, one job at a time. Files are removed "
    f"when you leave or reload the page, and {KEPT // 60} minutes after they were made."
)

CHOICES = [name for name in NAMES if name not in HEADS]
_WORKER = Path(__file__).with_name("worker.py")


class OverLimitError(MtpExtractError):
    """More than this page does for anybody."""


def address_of(text: str) -> str:
    """The ``hf://`` address that ``text`` means: an id, or a URL of the Hub's site. Nothing else is opened here.

    Raises:
        SourceError: it is something else, such as a path or another site.
    """
    text = text.strip()
    address = parse_address(text, constants.ENDPOINT)
    if isinstance(address, HubAddress):
        return address.name
    raise SourceError(
        "Expected ORG/NAME or ORG/NAME/FILE of the Hugging Face Hub, or a URL of its site, found "
        f"{escape(text.partition('?')[0]) or 'nothing'}."
    )


def check_size(drafter: Mapping[str, Any], most: int) -> None:
    """``drafter`` as an inspection has it; ``most`` in bytes.

    Raises:
        OverLimitError: it is too large for this page.
    """
    largest = max(drafter["size"], 4 * drafter["parameters"])
    if largest > most:
        raise OverLimitError(
            f"Expected a drafter of up to {most / 1e9:g} GB, found one of {size(largest)}. Extract it on a machine of "
            "yours, with mtp-extract."
        )


def run(what: str, request: Mapping[str, Any], longest: float, told: Callable[[int, int], None]) -> dict[str, Any]:
    """Have ``worker.py`` do ``what``; ``told`` hears of bytes done and in all.

    Raises:
        MtpExtractError: what the library refuses, in its words; or the time is up.
    """
    # The token of whoever runs this page is not theirs.
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name and "SECRET" not in name}
    with subprocess.Popen(
        [sys.executable, str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"HF_TOKEN_PATH": os.devnull, "OMP_NUM_THREADS": "2"},
        text=True,
    ) as process:
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(longest, end)
        clock.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            # One that is gone already says nothing below.
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps({"what": what, "largest": LARGEST, **request}))
                process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                if "result" in said:
                    result: dict[str, Any] = said["result"]
                    return result
                if "refused" in said:
                    raise MtpExtractError(said["refused"])
                told(*said["progress"])
        finally:
            clock.cancel()
            process.kill()
    if late.is_set():
        raise OverLimitError(
            f"Expected to be done in {longest:g} seconds, and was not. Nothing was kept. Try again, or extract it on a "
            "machine of yours, with mtp-extract."
        )
    raise MtpExtractError("The job ended before its time, which is a fault of this page. Please report it.")


def bundle_in_words(found: Mapping[str, Any]) -> str:
    """Markdown of an inspection: the drafter, and what lies beside it."""
    known = f", {plain(found['known_bundle'])}" if found["known_bundle"] else ""
    said = [f"**{plain(Path(found['name']).name)}**, {size(found['size'])}{known}"]
    drafter = found["drafter"]
    if drafter is None:
        said.append(f"**No drafter.** {plain(found.get('no_drafter') or found['problem'])}")
    else:
        shape = drafter["geometry"]
        stored = ", ".join(f"{count} {kind}" for kind, count in drafter["stored_types"].items())
        name = plain(drafter["known_as"] or "of an unlisted model")
        said.append(
            f"**A drafter**: {name}, {drafter['parameters'] / 1e6:.2f} M parameters in {size(drafter['size'])} "
            f"({stored}); {shape['num_layers']} layers, hidden {shape['hidden_size']}, backbone "
            f"{shape['backbone_hidden_size']}, vocabulary {shape['vocab_size']}."
        )
    rows = []
    for section in found["sections"]:
        mark = "**" if drafter is not None and section["index"] == drafter["section"] else ""
        name = plain(section["model_type"] or section["type"])
        rows.append([str(section["index"]), f"{mark}{name}{mark}", size(section["size"])])
    return "\n\n".join([*said, table(["#", "holds", "bytes"], rows)])


class Folders:
    """Where results lie until they are removed: one a session, and none for longer than :data:`KEPT`."""

    def __init__(self, kept: float = KEPT) -> None:
        self._kept, self._lock = kept, threading.Lock()
        self._of: dict[str, Path] = {}

    def new(self, session: str) -> Path:
        """An empty folder for ``session``; the one that it had is removed."""
        self.remove(session)
        folder = Path(tempfile.mkdtemp(prefix="mtp-space-"))
        with self._lock:
            self._of[session] = folder
        clock = threading.Timer(self._kept, self.remove, (session, folder))
        clock.daemon = True
        clock.start()
        return folder

    def of(self, session: str) -> Path | None:
        """The one that it has."""
        with self._lock:
            return self._of.get(session)

    def remove(self, session: str, folder: Path | None = None) -> None:
        """Remove the one that it has, or ``folder``: also one that a job has made again meanwhile."""
        with self._lock:
            had = self._of.get(session)
            if folder in (None, had):
                self._of.pop(session, None)
        if (gone := folder or had) is not None:
            shutil.rmtree(gone, ignore_errors=True)
