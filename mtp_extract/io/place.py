"""Write the result of a command to its place: decide whether it may replace what is there, and replace it.

An input is never replaced, nor what contains one or lies in one; nor a directory with a file that its record does not
list.

A result is written in the directory ``.NAME.partial`` beside its place. One run at a time locks it; the lock ends with
the process. It contains

- ``mtp-extract``, an empty file: a run may clear this directory,
- ``new``, the result, until it is renamed to its place,
- ``old``, the directory that is replaced. If ``new`` is there too, the next run puts ``old`` back; else it removes it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mtp_extract.errors import MtpExtractError, OutputError, escape, list_few
from mtp_extract.io.threads import check_interrupted

try:
    import fcntl
except ImportError as error:
    raise MtpExtractError(
        "This system has no file locks of POSIX: mtp-extract runs on Linux and macOS. On Windows, run it in WSL."
    ) from error

PathLike = str | os.PathLike[str]

InputPaths = Iterable[PathLike | None]
"""The files and directories that a command reads; addresses and ids of the Hub among them are ignored."""

OwnFiles = Callable[[Path], Container[str]]
"""Directory to be replaced → the files in it that mtp-extract wrote; raises OutputError if it wrote none."""

_MARK = "mtp-extract"
_NEW = "new"
_OLD = "old"
_STAGED = re.compile(rf"/\.([^/]+)\.partial/{_NEW}(?=/|$)")
_LEFT_BY_PROGRAMS = re.compile(r"(.*/)?(\.DS_Store|\.gitattributes|Thumbs\.db|desktop\.ini)|\.cache/huggingface/.*")
"""Files that programs such as the Hub's client leave in directories: they are removed with their directory."""
_ELSEWHERE = "Move it elsewhere, or choose another place."


def make_own_files(record: str, files: Container[str]) -> OwnFiles:
    """Return a function that lists ``files`` as ours in a directory with the file ``record``, and refuses any other."""

    def listed(place: Path) -> Container[str]:
        if not (place / record).is_file():
            raise _make_refusal(place, f"is not replaced, as mtp-extract did not write it (it has no {record}).")
        return files

    return listed


def list_files(directory: PathLike | None) -> list[Path]:
    """Return the files directly in ``directory``, none if it is not on this machine.

    As inputs they are protected, while a result may still be written into the directory.
    """
    root, _, names = next(os.walk(directory or ""), ("", (), ()))
    return [Path(root, name) for name in sorted(names)]


def check_place(place: PathLike, *, overwrite: bool, inputs: InputPaths = (), listed: OwnFiles | None = None) -> None:
    """Raise OutputError, before any work is done, if :func:`stage_output` may not write to ``place``.

    Args:
        overwrite: replace what is there, if it is of the same kind.
        inputs: files and directories that are read: they are neither replaced nor written into.
        listed: which files of a directory may be replaced; None if the result is a file.
    """
    with _open_stage(_resolve_parent(place), overwrite, inputs, listed):
        pass


@contextmanager
def stage_output(
    place: PathLike, *, overwrite: bool, inputs: InputPaths = (), listed: OwnFiles | None = None
) -> Iterator[Path]:
    """Yield the path of a new directory, or of a file to create, and rename it to ``place`` when the block ends.

    Before that it is synced to the disk. If the block fails, nothing is left; if the process is killed, the next run in
    the same place clears up. Modes follow the umask. Arguments are those of :func:`check_place`.

    Raises:
        OutputError: ``place`` may not be replaced, cannot be written, or another run is writing there.
    """
    target = _resolve_parent(place)
    with _open_stage(target, overwrite, inputs, listed) as stage:
        new = stage / _NEW
        if listed is not None:
            new.mkdir()
        yield new
        _check_free(target, overwrite, listed)
        check_interrupted()
        for root, _, names in os.walk(new, topdown=False):
            for name in (*names, "."):
                _sync(Path(root, name))
        if listed is None:
            _sync(new)
        elif target.is_dir() and any(target.iterdir()):
            # The system cannot replace a directory with files in one step.
            os.rename(target, stage / _OLD)
        os.rename(new, target)
        _sync(stage)
        _sync(target.parent)


def format_path(path: Path) -> str:
    """Return ``path`` as a user knows it: its final place, relative to the current directory if it lies there."""
    path = Path(_STAGED.sub(r"/\1", str(path)))
    with suppress(OSError, ValueError):
        path = path.relative_to(Path.cwd())
    return escape(path)


def make_write_error(path: Path, error: OSError) -> OutputError:
    return _make_refusal(path, f"cannot be written: {error.strerror or escape(error)}. Nothing was kept.")


def _make_refusal(target: Path, why: str, what_to_do: str = "Choose another place.") -> OutputError:
    return OutputError(f"{format_path(target)}: {why} {what_to_do}", remedies=("out",))


def _resolve_parent(place: PathLike) -> Path:
    """Return ``place`` as an absolute path in which only the last part may be a link."""
    path = Path(place)
    return Path(os.path.realpath(path.parent), path.name) if os.path.islink(path) else Path(os.path.realpath(path))


@contextmanager
def _open_stage(target: Path, overwrite: bool, inputs: InputPaths, listed: OwnFiles | None) -> Iterator[Path]:
    """Yield the locked directory in which the result for ``target`` is written; raise OutputError if it may not be.

    What a killed run left there is put back or removed first. At the end the directory is removed, and so are the
    parents that had to be created, unless they contain something.
    """
    missing = [parent for parent in target.parents if not os.path.lexists(parent)]
    try:
        _check_inputs(target, inputs)
        if not (nearest := target.parents[len(missing)]).is_dir():
            raise _make_refusal(target, f"{format_path(nearest)} is not a directory.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock_stage(target.parent / f".{target.name}.partial", target) as stage:
            try:
                _clear(stage, target)
                _check_free(target, overwrite, listed)
                yield stage
            finally:
                _clear(stage, target)
                # If this fails, the next run removes the directory: its mark is there.
                with suppress(OSError):
                    if os.listdir(stage) == [_MARK]:
                        os.unlink(stage / _MARK)
                        os.rmdir(stage)
    except OSError as error:
        raise make_write_error(target, error) from error
    finally:
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()


def _check_inputs(target: Path, inputs: InputPaths) -> None:
    """Raise OutputError if the result would replace an input, or lie in one."""
    for path in inputs:
        if path is None or not os.path.exists(path):
            continue
        resolved = Path(os.path.realpath(path))
        if target in resolved.parents:
            raise _make_refusal(target, f"holds {escape(path)}, which is read and stays as it is.")
        if resolved in target.parents:
            raise _make_refusal(target, f"lies inside {escape(path)}, which is read and stays as it is.")
        if target.exists() and target.samefile(resolved):
            raise _make_refusal(target, "is read and stays as it is.")


def _check_free(target: Path, overwrite: bool, listed: OwnFiles | None) -> None:
    """Raise OutputError if something is at ``target`` that may not be replaced."""
    if not os.path.lexists(target):
        return
    is_kind, kind = (target.is_file(), "file") if listed is None else (target.is_dir(), "directory")
    if not is_kind or target.is_symlink():
        raise _make_refusal(target, f"exists and is not a {kind}.")
    if listed is not None:
        if not any(target.iterdir()):
            return
        if foreign := sorted(_find_foreign_files(target, listed(target))):
            why = f"has files that its record does not list, so it is not replaced: {list_few(foreign)}."
            raise _make_refusal(target, why, _ELSEWHERE)
    if not overwrite:
        exists = f"{format_path(target)}: exists. Replace it, or choose another place."
        raise OutputError(exists, remedies=("overwrite", "out"))


def _find_foreign_files(folder: Path, ours: Container[str], below: str = "") -> Iterator[str]:
    """Yield every path below ``folder``, relative to it, that is neither a directory nor a file of ``ours``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _find_foreign_files(Path(entry), ours, f"{path}/")
            elif not (entry.is_file(follow_symlinks=False) and (path in ours or _LEFT_BY_PROGRAMS.fullmatch(path))):
                yield path


@contextmanager
def _lock_stage(stage: Path, target: Path) -> Iterator[Path]:
    """Create ``stage``, mark it as ours, and lock it until the block ends."""
    why = f"{escape(stage)} is in the way, and no run of mtp-extract left it."
    in_the_way = _make_refusal(target, why, _ELSEWHERE)
    with ExitStack() as opened:
        while True:
            with suppress(FileExistsError):
                stage.mkdir()
            try:
                lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), stage.lstat()):
                    break
            except FileNotFoundError:
                pass  # another run ended and removed its stage between two of these steps
            except BlockingIOError as error:
                advice = "Wait for it, or choose another place."
                raise _make_refusal(target, "another run is writing there.", advice) from error
            except NotADirectoryError as error:
                raise in_the_way from error
        if (names := os.listdir(stage)) and _MARK not in names:
            raise in_the_way
        (stage / _MARK).touch()
        yield stage


def _clear(stage: Path, target: Path) -> None:
    """Put back the directory that a killed run was replacing; remove all results in ``stage``, but not its mark."""
    new, old = stage / _NEW, stage / _OLD
    if os.path.lexists(new) and os.path.lexists(old):
        try:
            os.rename(old, target)
        except OSError as error:
            why = f"what a killed run was replacing is in {escape(old)}, and cannot be put back: {error.strerror}."
            raise _make_refusal(target, why, "Move one of the two elsewhere.") from error
        _sync(target.parent)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
        with suppress(OSError):
            leftover.unlink()


def _sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems cannot sync directories.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)
