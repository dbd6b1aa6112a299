"""Writing a directory so that it is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.checkpoint.tensor_file import header_sum, read_header, write_tensors
from mtp_extract.errors import OutputError, escape
from mtp_extract.io.output import output_error

__all__ = ["RECORD", "check_target", "staged_directory", "write_file"]

RECORD = "extraction.json"
"""The file that makes a directory a checkpoint of ours. It is what ``overwrite`` looks for before it replaces one."""


@contextmanager
def staged_directory(
    target: Path, overwrite: bool, record: str = RECORD, parts: Container[str] | None = None
) -> Iterator[Path]:
    """A new directory beside ``target`` that takes its name when the block ends without an error.

    What it replaces must be one of its kind: a directory with the file ``record`` in it, and nothing but ``parts``
    where these are given.

    Modes follow the umask. When the block fails the directory is removed; when the process is killed it stays
    behind as ``.NAME.partial-…``, which nothing takes for a checkpoint.

    Raises:
        OutputError: ``target`` exists and may not be replaced, or the place cannot be written to.
    """
    target = Path(os.path.abspath(target))
    stage = target.parent / f".{target.name}.partial-{os.urandom(6).hex()}"
    try:
        check_target(target, overwrite, record, parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
    except OSError as error:
        raise OutputError(
            f"{target}: cannot be created: {error.strerror or error}. Choose another place.", remedies=("out",)
        ) from error
    try:
        yield stage
        _put_in_place(stage, target, overwrite, record, parts)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror or error}. Nothing was kept.") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def check_target(target: Path, overwrite: bool, record: str = RECORD, parts: Container[str] | None = None) -> None:
    """Check that :func:`staged_directory` may put its directory at ``target``, before any work is done.

    Raises:
        OutputError: it may not.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise OutputError(f"{target}: exists and is not a directory. Choose another place.", remedies=("out",))
    empty = not any(target.iterdir())
    if empty:
        return
    if not (target / record).is_file():
        raise OutputError(
            f"{target}: exists and is no {Path(record).stem} of mtp-extract (it has no {record}), so it is not "
            "replaced. Choose another place.",
            remedies=("out",),
        )
    foreign = sorted(path.name for path in target.iterdir() if parts is not None and path.name not in parts)
    if foreign:
        raise OutputError(
            f"{target}: holds {escape(foreign[0])}, which is no part of a {Path(record).stem}, so it is not replaced. "
            "Choose another place.",
            remedies=("out",),
        )
    if not overwrite:
        raise OutputError(f"{target}: exists. Replace it, or choose another place.", remedies=("overwrite", "out"))


def _put_in_place(stage: Path, target: Path, overwrite: bool, record: str, parts: Container[str] | None = None) -> None:
    check_target(target, overwrite, record, parts)
    if not target.is_dir() or not any(target.iterdir()):
        os.replace(stage, target)
        return
    # A directory with files in it cannot be replaced in one step: the old one steps aside first.
    old = target.parent / f".{target.name}.replaced-{os.urandom(6).hex()}"
    os.rename(target, old)
    try:
        os.rename(stage, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_file(
    stage: Path, file: OutputFile, tick: Callable[[int], None], beside: Sequence[Callable[[], object]] = ()
) -> dict[str, Any]:
    """Write ``file`` into the directory ``stage`` and read it back; what a record says of it.

    Args:
        tick: called with the number of bytes of tensors written since the last call.
        beside: as for :func:`~mtp_extract.checkpoint.tensor_file.write_tensors`.

    Raises:
        OutputError: it cannot be written, or reads back differently.
    """
    path = stage / file.name
    if file.tensors:
        sums = write_tensors(stage, file, tick, beside)
        return {"size": path.stat().st_size, "header": header_sum(path, read_header(path)), "tensors": sums}
    # Lone surrogates, from names that are not UTF-8, cannot be written; they are shown as escapes instead.
    data = file.text.encode("utf-8", "backslashreplace")
    try:
        path.write_bytes(data)
        if path.read_bytes() != data:
            raise OSError("it reads back differently")
    except OSError as error:
        raise output_error(path, error) from error
    return {"size": len(data), "xxh3": xxh3_128_hexdigest(data)}
