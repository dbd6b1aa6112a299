"""Writing a file whose size is known before its content is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtp_extract.errors import OutputError

__all__ = ["output_error", "reserve", "staged_file", "write_all"]


def reserve(fd: int, size: int) -> None:
    """Claim the space now: a disk that is too small says so before any work is done.

    Raises:
        OSError: it is too small.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:
        # macOS has no such call.
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        # Some file systems cannot reserve: a full disk then shows while writing.
        os.ftruncate(fd, size)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def output_error(path: Path, error: OSError) -> OutputError:
    """What to tell the user when writing ``path`` failed."""
    return OutputError(f"{path}: cannot be written: {error.strerror or error}. Nothing was kept.")


@contextmanager
def staged_file(target: Path, overwrite: bool) -> Iterator[Path]:
    """The name of a new file beside ``target`` that takes its name when the block ends without an error.

    When the block fails the file is removed; when the process is killed it stays behind as ``.NAME.partial-…``.

    Raises:
        OutputError: it cannot be written there, or something took the name meanwhile.
    """
    target = Path(os.path.abspath(target))
    stage = target.parent / f".{target.name}.partial-{os.urandom(6).hex()}"
    try:
        yield stage
        if not overwrite and os.path.lexists(target):
            raise OutputError(f"{target}: exists by now. Nothing was kept.", remedies=("overwrite", "out"))
        os.replace(stage, target)
    except OSError as error:
        raise output_error(target, error) from error
    finally:
        stage.unlink(missing_ok=True)
