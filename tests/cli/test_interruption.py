"""Ctrl-C at every step of an extraction: what is said is that it was interrupted, and nothing is kept.

No signal is sent after a time: the handler is called at a chosen step, where a signal could have come. Python runs a
handler in the main thread alone; where that is in a finalizer, what the handler raises is dropped.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run_here

from mtp_extract.checkpoint import files, safetensors_file
from mtp_extract.io import place, threads
from mtp_extract.pipeline import extraction


def raises() -> None:
    """The handler as Python calls it between two instructions of the main thread."""
    threads.interrupt(signal.SIGINT, None)


def is_lost() -> None:
    """The handler as Python calls it in the callback of a weak reference, which drops what is raised."""

    class Held:
        pass

    held = Held()
    watched = weakref.ref(held, lambda _: raises())
    del held
    assert watched() is None


PLACES: dict[str, tuple[object, str]] = {
    "before anything is written": (files, "new_file"),
    "while it is written": (files, "write_all"),
    "before it is read back": (files, "_sums"),
    "while it is read back": (safetensors_file, "open_regular"),
    "before it is proven": (extraction, "prove_checkpoint"),
    "before it takes its name": (place, "_sync"),
    "while it takes its name": (os, "rename"),
}
TOO_LATE = {"before it takes its name", "while it takes its name"}
"""Nobody looks any more whether a signal was lost: the result is whole, and is kept."""


@pytest.mark.parametrize(
    ("come", "where"),
    [(raises, where) for where in PLACES] + [(is_lost, where) for where in PLACES if where not in TOO_LATE],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_is_said_to_be_interrupted(
    come: Callable[[], None], where: str, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = PLACES[where]
    real = getattr(module, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        come()
        # What an interruption leaves undone is not written either.
        return None if name == "write_all" else real(*arguments, **named)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            done = run_here("extract", sample, "-o", tmp_path / "new")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")
    assert done.stderr.splitlines()[-1:] == ["error: interrupted; nothing was kept."]
    assert list(tmp_path.iterdir()) == []
