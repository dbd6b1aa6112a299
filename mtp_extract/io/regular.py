"""Opening a file that may be anything: a named pipe is not waited for, a device not read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def regular_descriptor(path: Path) -> int:
    """The descriptor of the regular file at ``path``, open for reading.

    Raises:
        OSError: it cannot be opened, or is something else; ``strerror`` says what.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer that may never come.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise OSError(errno.EINVAL, f"expected a regular file, found {_KINDS.get(kind, 'something else')}", path)
    return fd


def open_regular(path: Path) -> BinaryIO:
    """The same as a file.

    Raises:
        OSError: as :func:`regular_descriptor`.
    """
    return open(regular_descriptor(path), "rb")


def read_regular(path: Path, largest: int) -> bytes:
    """The content of the regular file at ``path``, of at most ``largest`` bytes.

    Raises:
        OSError: as :func:`regular_descriptor`, or it has more.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"expected at most {largest} bytes, found {size}", path)
        return file.read(largest)
