"""Writing safetensors without ever holding a tensor, and reading back what was written.

The format: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps. The ``safetensors`` package wants every tensor in memory and orders metadata keys
differently from run to run; here segments are produced, summed and written by a few threads, and the bytes depend
on the input alone. Loading is left to that package, and the tests hold this writer against it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtp_extract.checkpoint.crc import combine_crc32
from mtp_extract.checkpoint.tensors import PlannedTensor, Segment
from mtp_extract.errors import CheckpointError, OutputError

__all__ = ["StoredTensor", "check_safetensors", "crc32_of_range", "read_header", "write_safetensors"]

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""

# One writer at a time: two would spin on the file's lock in the kernel instead of computing.
_WRITING = threading.Lock()
# Small enough that the buffer is reused rather than mapped anew, page by page, for every read.
_READ = 1 << 18
_LONGEST_HEADER = 100_000_000
_DTYPE_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: ``length`` bytes at ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def workers() -> int:
    """Threads to use: more than four only wait for the disk."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, count))


def run_all(pool: ThreadPoolExecutor, jobs: Iterable[Callable[[], object]]) -> None:
    """Run ``jobs``, and raise the first error after the others have been cancelled or have ended."""
    futures: list[Future[object]] = [pool.submit(job) for job in jobs]
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait_for(futures)


def write_safetensors(
    path: Path,
    tensors: Sequence[PlannedTensor],
    metadata: Mapping[str, str],
    progress: Progress = lambda _: None,
    beside: Iterable[Callable[[], object]] = (),
) -> dict[str, str]:
    """Write ``tensors`` to ``path``, read them back, and return the CRC-32 (8 hex digits) of each one's data.

    ``beside`` are further jobs for the same threads.

    Raises:
        OutputError: the file cannot be written, or reads back differently.
    """
    header, offsets = _header(tensors, metadata)
    total = len(header) + sum(t.length for t in tensors)
    sums: dict[tuple[str, int], int] = {}
    try:
        with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(workers()) as pool:
            _reserve(file.fileno(), total)
            _write_all(file.fileno(), memoryview(header), 0)
            jobs = [
                _writing(
                    file.fileno(),
                    segment,
                    len(header) + offsets[tensor.name],
                    (tensor.name, segment.offset),
                    sums,
                )
                for tensor in tensors
                for segment in tensor.segments
            ]
            run_all(pool, [*beside, *(_reporting(job, progress) for job in jobs)])
    except OSError as error:
        raise output_error(path, error) from error
    crcs = {
        tensor.name: _combined((sums[tensor.name, segment.offset], segment.length) for segment in tensor.segments)
        for tensor in tensors
    }
    _compare(path, tensors, crcs)
    return crcs


def _compare(path: Path, tensors: Sequence[PlannedTensor], crcs: Mapping[str, str]) -> None:
    stored = read_header(path)
    described = {name: (t.dtype, t.shape, t.length) for name, t in stored.items()}
    planned = {t.name: (t.dtype, t.shape, t.length) for t in tensors}
    if described != planned or check_safetensors(path, stored) != crcs:
        raise OutputError(
            f"{path}: what was written reads back differently. The disk may be failing; nothing was kept."
        )


def _header(tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    offsets: dict[str, int] = {}
    at = 0
    for tensor in tensors:
        offsets[tensor.name] = at
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.length],
        }
        at += tensor.length
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets


def _reserve(fd: int, size: int) -> None:
    """Claim the space now: a disk that is too small says so before any work is done."""
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


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _writing(
    fd: int, segment: Segment, base: int, key: tuple[str, int], sums: dict[tuple[str, int], int]
) -> Callable[[], int]:
    def job() -> int:
        crc, at = 0, base + segment.offset
        for chunk in segment.produce():
            data = chunk.view(np.uint8).data
            crc = zlib.crc32(data, crc)
            with _WRITING:
                _write_all(fd, data, at)
            at += len(data)
        if at != base + segment.offset + segment.length:
            raise OutputError(f"{key[0]}: produced {at - base - segment.offset} bytes, planned {segment.length}.")
        sums[key] = crc
        return segment.length

    return job


def _reporting(job: Callable[[], int], progress: Progress) -> Callable[[], None]:
    def reported() -> None:
        progress(job())

    return reported


def _combined(parts: Iterable[tuple[int, int]]) -> str:
    total = 0
    for crc, length in parts:
        total = combine_crc32(total, crc, length)
    return f"{total:08x}"


def output_error(path: Path, error: OSError) -> OutputError:
    """What to tell the user when writing ``path`` failed."""
    return OutputError(f"{path}: cannot be written: {error.strerror or error}. Nothing was kept.")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors file at ``path``, checked against its size.

    Raises:
        CheckpointError: not a safetensors file, or one whose header contradicts its size.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: not a safetensors file (its header claims {length} bytes).")
            entries = json.loads(file.read(length))
        tensors = {
            str(name): StoredTensor(
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: its safetensors header is damaged.") from error
    at = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        elements = math.prod(tensor.shape)
        if tensor.offset != at or tensor.length != elements * _DTYPE_SIZES.get(tensor.dtype, -1) or tensor.length < 0:
            raise CheckpointError(f"{path}: its header gives {name!r} a place or a size that cannot be.")
        at += tensor.length
    if at != size:
        raise CheckpointError(f"{path}: it has {size} bytes, its header describes {at}.")
    return tensors


def crc32_of_range(fd: int, offset: int, length: int) -> int:
    """CRC-32 of ``length`` bytes from ``offset``."""
    crc = 0
    while length:
        piece = os.pread(fd, min(_READ, length), offset)
        if not piece:
            raise CheckpointError("the file ended early")
        crc = zlib.crc32(piece, crc)
        offset, length = offset + len(piece), length - len(piece)
    return crc


def check_safetensors(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """CRC-32 (8 hex digits) of every tensor's data, read from the file."""
    piece = 1 << 24
    sums: dict[tuple[str, int], int] = {}
    with open(path, "rb") as file, ThreadPoolExecutor(workers()) as pool:

        def job(name: str, tensor: StoredTensor, at: int) -> Callable[[], None]:
            def summed() -> None:
                sums[name, at] = crc32_of_range(file.fileno(), tensor.offset + at, min(piece, tensor.length - at))

            return summed

        run_all(pool, [job(name, t, at) for name, t in stored.items() for at in range(0, t.length, piece)])
    return {
        name: _combined((sums[name, at], min(piece, t.length - at)) for at in range(0, t.length, piece))
        for name, t in stored.items()
    }
