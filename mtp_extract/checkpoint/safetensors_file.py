"""Writing safetensors without ever holding a tensor, and reading back what was written.

The format: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps. The ``safetensors`` package wants every tensor in memory and orders metadata keys
differently from run to run; here a few threads each produce, sum, write and read back one tensor after the other, and
the bytes depend on the input alone. The tests hold this writer and reader against that package.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from mtp_extract.checkpoint.dtypes import DTYPES, Dtype
from mtp_extract.checkpoint.lazy import FloatsOnly, rows_of
from mtp_extract.checkpoint.planned import DTYPE_SIZES, PlannedTensor
from mtp_extract.errors import CheckpointError, OutputError
from mtp_extract.litertlm.quantized import Floats

__all__ = [
    "StoredColumns",
    "StoredTensor",
    "StoredWeight",
    "check_safetensors",
    "differing",
    "output_error",
    "read_header",
    "run_all",
    "workers",
    "write_safetensors",
]

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""

# One writer at a time: two would spin on the file's lock in the kernel instead of computing.
_WRITING = threading.Lock()
# Small enough that the buffer is reused rather than mapped anew, page by page, for every read.
_READ = 1 << 18
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: ``length`` bytes at ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class StoredWeight(FloatsOnly):
    """A weight that is a tensor in the safetensors file at ``path``: floats, or the indices of an ordered head."""

    path: Path
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def origin(self) -> object:
        return self.path, self.stored.offset

    @property
    def dtype(self) -> Dtype:
        """Its type.

        Raises:
            CheckpointError: it does not hold floats.
        """
        for dtype in DTYPES.values():
            if dtype.safetensors == self.stored.dtype:
                return dtype
        raise CheckpointError(f"{self.path}: expected weights in floats, found {self.stored.dtype}.")

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        rows, columns = rows_of(self.shape)
        row = columns * self.dtype.size
        begin, end = first * row, (rows if last is None else last) * row
        with open(self.path, "rb", buffering=0) as file:
            for piece in _pieces(self.path, file.fileno(), self.stored.offset + begin, end - begin):
                yield self.dtype.widen(piece)

    def indices(self) -> npt.NDArray[np.int64]:
        """All of it, where it holds int64.

        Raises:
            CheckpointError: it does not.
        """
        if self.stored.dtype != "I64":
            raise CheckpointError(f"{self.path}: expected indices in I64, found {self.stored.dtype}.")
        with open(self.path, "rb", buffering=0) as file:
            stored = b"".join(_pieces(self.path, file.fileno(), self.stored.offset, self.stored.length))
        return np.frombuffer(bytearray(stored), "<i8").reshape(self.shape)


@dataclass(frozen=True)
class StoredColumns(FloatsOnly):
    """Columns ``[begin, end)`` of a weight in a file; no others are read."""

    whole: StoredWeight
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[0], self.end - self.begin

    @property
    def dtype(self) -> Dtype:
        """As the whole's."""
        return self.whole.dtype

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        rows, columns = rows_of(self.whole.shape)
        size, dtype = self.dtype.size, self.dtype
        with open(self.whole.path, "rb", buffering=0) as file:
            for row in range(first, rows if last is None else last):
                at = self.whole.stored.offset + (row * columns + self.begin) * size
                length = (self.end - self.begin) * size
                yield dtype.widen(b"".join(_pieces(self.whole.path, file.fileno(), at, length)))


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
    """Write ``tensors`` to ``path``, read them back, and return the XXH3-128 (32 hex digits) of each one's data.

    ``beside`` are further jobs for the same threads.

    Raises:
        OutputError: the file cannot be written, or reads back differently.
    """
    header, offsets = _header(tensors, metadata)
    sums: dict[str, str] = {}
    try:
        with open(path, "x+b", buffering=0) as file, ThreadPoolExecutor(workers()) as pool:
            fd = file.fileno()
            _reserve(fd, len(header) + sum(t.length for t in tensors))
            _write_all(fd, memoryview(header), 0)

            def writing(tensor: PlannedTensor) -> Callable[[], None]:
                def job() -> None:
                    offset = len(header) + offsets[tensor.name]
                    sums[tensor.name] = _write_tensor(fd, tensor, offset, progress)
                    if _sum_of_range(path, fd, offset, tensor.length) != sums[tensor.name]:
                        raise _read_back_differently(path)

                return job

            # The longest first: it decides when the last thread ends.
            run_all(pool, [*map(writing, sorted(tensors, key=lambda t: -t.length)), *beside])
    except OSError as error:
        raise output_error(path, error) from error
    described = {name: (t.dtype, t.shape, t.length) for name, t in read_header(path).items()}
    if described != {t.name: (t.dtype, t.shape, t.length) for t in tensors}:
        raise _read_back_differently(path)
    # In the order of the file, not in that in which threads came to an end.
    return {tensor.name: sums[tensor.name] for tensor in tensors}


def _read_back_differently(path: Path) -> OutputError:
    return OutputError(f"{path}: what was written reads back differently. The disk may be failing; nothing was kept.")


def _write_tensor(fd: int, tensor: PlannedTensor, offset: int, progress: Progress) -> str:
    """Produce, sum and write ``tensor``; its XXH3-128."""
    digest, at = xxh3_128(), offset
    for chunk in tensor.produce():
        data = chunk.view(np.uint8).data
        digest.update(data)
        with _WRITING:
            _write_all(fd, data, at)
        at += len(data)
        progress(len(data))
    if at - offset != tensor.length:
        raise OutputError(f"{tensor.name}: produced {at - offset} bytes, planned {tensor.length}.")
    return digest.hexdigest()


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
        if tensor.offset != at or tensor.length != elements * DTYPE_SIZES.get(tensor.dtype, -1) or tensor.length < 0:
            raise CheckpointError(f"{path}: its header gives {name!r} a place or a size that cannot be.")
        at += tensor.length
    if at != size:
        raise CheckpointError(f"{path}: it has {size} bytes, its header describes {at}.")
    return tensors


def _pieces(path: Path, fd: int, offset: int, length: int) -> Iterator[bytes]:
    """``length`` bytes from ``offset``, a little at a time.

    Raises:
        CheckpointError: the file ends before that, or cannot be read.
    """
    while length:
        try:
            piece = os.pread(fd, min(_READ, length), offset)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        if not piece:
            raise CheckpointError(f"{path}: the file shrank while it was being read.")
        yield piece
        offset, length = offset + len(piece), length - len(piece)


def _sum_of_range(path: Path, fd: int, offset: int, length: int) -> str:
    digest = xxh3_128()
    for piece in _pieces(path, fd, offset, length):
        digest.update(piece)
    return digest.hexdigest()


def check_safetensors(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """XXH3-128 (32 hex digits) of every tensor's data, read from the file."""
    sums: dict[str, str] = {}
    with open(path, "rb") as file, ThreadPoolExecutor(workers()) as pool:

        def summing(name: str, tensor: StoredTensor) -> Callable[[], None]:
            def job() -> None:
                sums[name] = _sum_of_range(path, file.fileno(), tensor.offset, tensor.length)

            return job

        run_all(pool, [summing(name, tensor) for name, tensor in stored.items()])
    return {name: sums[name] for name in stored}


def differing(path: Path, stored: Mapping[str, StoredTensor], planned: Sequence[PlannedTensor]) -> list[str]:
    """Names of the tensors of the file at ``path`` whose bytes are not those that ``planned`` produces."""
    different: list[str] = []
    with open(path, "rb") as file, ThreadPoolExecutor(workers()) as pool:

        def comparing(tensor: PlannedTensor) -> Callable[[], None]:
            def job() -> None:
                at = stored[tensor.name].offset
                for chunk in tensor.produce():
                    data = chunk.tobytes()
                    if os.pread(file.fileno(), len(data), at) != data:
                        different.append(tensor.name)
                        return
                    at += len(data)

            return job

        run_all(pool, map(comparing, planned))
    return different
