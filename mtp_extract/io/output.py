"""Writing a file whose size is known before its content is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mtp_extract.errors import OutputError
from mtp_extract.io.place import shown


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


def aligned(size: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is no less than ``size``."""
    return size + -size % alignment


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def output_error(path: Path, error: OSError) -> OutputError:
    """What to tell the user when writing ``path`` failed."""
    advice = "Make room there, or choose" if error.errno == errno.ENOSPC else "Choose"
    return OutputError(
        f"{shown(path)}: cannot be written: {error.strerror or error}. Nothing was kept. {advice} another place.",
        remedies=("out",),
    )


def read_back_error(path: Path) -> OutputError:
    """What to tell the user when ``path`` does not hold what was written to it."""
    return OutputError(
        f"{shown(path)}: what was written reads back differently. The disk may be failing; nothing was kept."
    )
