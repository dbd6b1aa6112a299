"""Open regular files of this machine, and write files whose size is known before their content."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mtp_extract.errors import OutputError
from mtp_extract.io.place import format_path, make_write_error


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file at ``path`` for reading.

    Raises:
        OSError: it cannot be opened, or is no regular file; ``strerror`` says why.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer that may never come.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from error
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise OSError(errno.EINVAL, f"expected a regular file, found {kind}", path)
    return open(fd, "rb")


def read_regular(path: Path, largest: int) -> bytes:
    """Read the regular file at ``path``. Raise OSError also if it has more than ``largest`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"expected at most {largest} bytes, found {size}", path)
        return file.read(largest)


@contextmanager
def create_file(path: Path, size: int) -> Iterator[int]:
    """Create ``path``, and its folder, with ``size`` zeros, and return a descriptor to write to.

    Raises:
        OutputError: it cannot be written; an OSError raised in the block is turned into one.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "xb") as file:
            os.ftruncate(file.fileno(), size)
            yield file.fileno()
    except OSError as error:
        raise make_write_error(path, error) from error


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def make_read_back_error(path: Path) -> OutputError:
    return OutputError(
        f"{format_path(path)}: what was written reads back differently. The disk may be failing; nothing was kept."
    )


def align_up(size: int, alignment: int) -> int:
    """Round ``size`` up to a multiple of ``alignment``."""
    return size + -size % alignment
