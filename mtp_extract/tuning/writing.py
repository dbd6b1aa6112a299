"""What a tuning writes: its folder of text and state, and a directory that loads where its origin does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from filelock import FileLock, Timeout

from mtp_extract.checkpoint.arranged import NOTHING, Arranged
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.errors import OutputError, UnsupportedError, escape
from mtp_extract.formats import EVERY
from mtp_extract.pipeline.conversion import origin_of
from mtp_extract.pipeline.plan import Dtype, WritingPlan
from mtp_extract.pipeline.reading import ReadDirectory
from mtp_extract.pipeline.writing import prepare, write
from mtp_extract.tuning.plan import TuningPlan


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is at ``path`` when the block has ended, whole, or is not there; its folder is made.

    Raises:
        OutputError: it cannot be written. What was there before still is.
    """
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        # What torch makes of a full disk says nothing of one; the cause is its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise _unwritable(path, cause) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Around a run that keeps its state in ``folder``. The lock goes with the process, however that ends.

    Raises:
        OutputError: another run is at work there, or it cannot be written.
    """
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(
            f"{escape(folder)}: expected a place of its own for this run's text and state, found another run at work "
            "there. Wait for it, or choose another place.",
            remedies=("work",),
        ) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(place: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{escape(place)}: expected a place to keep text and state, found that it cannot be written: "
        f"{error.strerror or escape(error)}. Make room there, or choose another place.",
        remedies=("work",),
    )


def arranged(origin: ReadDirectory, checkpoint: Checkpoint) -> Arranged:
    """``checkpoint`` in the format, type and with the codes that ``origin`` has.

    Raises:
        UnsupportedError: the format cannot hold it.
    """
    coded = any(
        weight.scheme is not None and role not in origin.extra_codes
        for role, weight in origin.checkpoint.tensors.items()
    )
    # Integers where they are not beside floats but in their place.
    dtype = CODES if coded and CODES in EVERY[origin.layout].dtypes else origin.checkpoint.dtype
    return prepare(checkpoint, origin.layout, WritingPlan(dtype=cast(Dtype, dtype), codes=bool(origin.extra_codes)))


def as_written(origin: ReadDirectory, checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` as it reads back where it is written like ``origin``: rounded to what that holds."""
    kept = arranged(origin, checkpoint).kept
    rounded = {role: one.written for role, one in kept.items() if one.rounded_to and role in checkpoint.tensors}
    return replace(checkpoint, tensors=MappingProxyType({**checkpoint.tensors, **rounded}))


def check_writable(origin: ReadDirectory, like: Checkpoint, mode: str) -> None:
    """Refuse a mode that makes what the format of ``origin`` has no room for.

    Args:
        like: a checkpoint with all that ``mode`` makes, whatever its numbers are.

    Raises:
        UnsupportedError: it has no room.
    """
    try:
        left_out = [one.why for one in arranged(origin, like).kept.values() if one.how == NOTHING]
        if left_out:
            raise UnsupportedError(f"{left_out[0]}.")
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{escape(origin.directory)}: expected a format with room for what the mode {mode} makes, found "
            f"{origin.layout}: {error} Train norms or codes, or convert it to the transformers format first.",
            remedies=("mode=norms", "mode=qat"),
        ) from error


def write_made(origin: ReadDirectory, made: Checkpoint, plan: TuningPlan, key: str, about: Mapping[str, Any]) -> None:
    """Write ``made`` where ``plan`` wants it, in the format, type and with the codes that ``origin`` has.

    Args:
        made: ``origin`` with other weights or another head.
        key: of the record, under which ``about`` stands: "tuning", or "ordered_head".

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind.
    """
    held = arranged(origin, made)
    own = {"tuned_from" if key == "tuning" else "made_from": origin.sums}
    # What was proven was proven of other weights, or another head.
    new = {**origin_of(origin, held), "proof": None, key: {**about, **own}}
    write(held, plan.target, new, overwrite=plan.overwrite, inputs=plan.inputs)
