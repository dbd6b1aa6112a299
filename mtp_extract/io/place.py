"""The place of a result: whether what is there may be replaced, and how it is.

Every command that writes asks here. Never replaced is what is read, what holds it and what lies in it; and a directory
with a file that its record does not list.

A result is made in the directory ``.NAME.partial`` beside its place. One run at a time locks that directory; the lock
ends with the process, however that ends. In there are

``mtp-extract``
    an empty file: the directory is ours, and a run may clear it,
``new``
    the result, until it takes its name; a file takes the name of another in one step,
``old``
    the directory that it replaces: beside ``new`` it is to be put back, without ``new`` it has been replaced.

So the next run in the same place knows what a killed run has left, and clears it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from mtp_extract.errors import OutputError, escape, few
from mtp_extract.io.threads import check_interrupted

PathLike = str | os.PathLike[str]

Inputs = Iterable[PathLike | None]
"""What a command reads, files and directories; addresses and ids among them are not looked at."""

Listed = Callable[[Path], Container[str]]
"""A directory that is to be replaced → the files below it that are ours; raises OutputError for one that is not."""

_MARK, _NEW, _OLD = "mtp-extract", "new", "old"
_STAGED = re.compile(rf"/\.([^/]+)\.partial/{_NEW}(?=/|$)")
_VERSIONED = ".git"
_OF_PROGRAMS = frozenset({".DS_Store", ".gitattributes", "Thumbs.db", "desktop.ini"})
_OF_DOWNLOADS = tuple(
    f".cache/huggingface/{name}" for name in (".gitignore", "CACHEDIR.TAG", "*.metadata", "*.lock", "*.incomplete")
)
"""What programs leave in directories, the Hub's client among them, and nobody wrote: it goes with what it lies in."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def listing(record: str, files: Container[str]) -> Listed:
    """Of a directory in which the file ``record`` lies: ``files``."""

    def listed(place: Path) -> Container[str]:
        if not (place / record).is_file():
            why = f"exists and is none that mtp-extract wrote (it has no {record}), so it is not replaced."
            raise _refusal(place, why)
        return files

    return listed


def files_of(directory: PathLike | None) -> list[Path]:
    """The files in ``directory``, where it is one here: the inputs, if other things may be written beside them."""
    try:
        found = sorted(Path(directory).iterdir()) if directory is not None and os.path.isdir(directory) else []
        return [path for path in found if not path.is_dir()]
    except OSError:
        # Who reads it will say so.
        return []


def check_place(place: PathLike, *, overwrite: bool, inputs: Inputs = (), listed: Listed | None = None) -> None:
    """Check that :func:`staged` may put its result at ``place``, before any work is done.

    Args:
        overwrite: replace what is there, if it is of the same kind.
        inputs: what is read, and so is neither replaced nor written into.
        listed: of a directory; None for a file.

    Raises:
        OutputError: it may not; the message says why.
    """
    target = _absolute(place)
    with _errors_of(target):
        if _is_there(_stage(target)):
            with _held(target):
                pass
        _check(target, overwrite, inputs, listed)
    nearest = next(parent for parent in target.parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "is read-only, or not yours to write to" if nearest.is_dir() else "is not a directory"
        raise _refusal(target, f"{shown(nearest)} {why}.")


@contextmanager
def staged(place: PathLike, *, overwrite: bool, inputs: Inputs = (), listed: Listed | None = None) -> Iterator[Path]:
    """The path of a new directory, or of a file to be made, that takes the name ``place`` when the block ends well.

    It is on the disk before that. When the block fails nothing is left; when the process is killed, the next run in
    the same place finds what it left. Modes follow the umask.

    Args:
        overwrite, inputs, listed: as for :func:`check_place`.

    Raises:
        OutputError: ``place`` may not be replaced, or cannot be written to, or another run is writing there.
    """
    target, inputs = _absolute(place), tuple(inputs)
    with _errors_of(target), ExitStack() as at_the_end:
        _check(target, overwrite, inputs, listed)
        if listed is not None:
            missing = [parent for parent in target.parents if not parent.exists()]
            at_the_end.callback(_remove_empty, missing)
            target.parent.mkdir(parents=True, exist_ok=True)
        stage = at_the_end.enter_context(_held(target))
        _check(target, overwrite, inputs, listed)
        new = stage / _NEW
        if listed is not None:
            new.mkdir()
        yield new
        _check(target, overwrite, inputs, listed)
        check_interrupted()
        _put_in_place(new, target, stage / _OLD)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that were made for a result, the innermost first, unless something lies there."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def _errors_of(target: Path) -> Iterator[None]:
    """Say of a system's error that ``target`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise _refusal(target, f"cannot be written: {error.strerror or escape(error)}. Nothing was kept.") from error


@contextmanager
def naming(argument: str) -> Iterator[None]:
    """Around what may refuse a place: the error says that it is to be changed by ``argument``."""
    try:
        yield
    except OutputError as error:
        remedies = tuple(argument if name == "out" else name for name in error.remedies)
        raise OutputError(str(error), remedies=remedies) from error


def _absolute(place: PathLike) -> Path:
    """``place`` with every link resolved but its last."""
    path = Path(place)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent), path.name)


def _stage(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def _is_there(path: Path) -> bool:
    """Whether anything is at ``path``; an OSError where its name is none that could be."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def shown(path: Path) -> str:
    """``path`` as a user knows it: where it is to be in the end, and from the current directory if it lies in there."""
    path = Path(_STAGED.sub(r"/\1", str(path)))
    with suppress(OSError, ValueError):
        path = path.relative_to(Path.cwd())
    return escape(path)


def _refusal(target: Path, why: str, what_to_do: str = "Choose another place.") -> OutputError:
    return OutputError(f"{shown(target)}: {why} {what_to_do}", remedies=("out",))


# May it be replaced?


def _check(target: Path, overwrite: bool, inputs: Inputs, listed: Listed | None) -> None:
    if listed is None and not target.parent.is_dir():
        raise _refusal(target, f"there is no directory {shown(target.parent)}.", "Make it, or choose another place.")
    for read in inputs:
        why = _conflict(target, Path(read)) if read is not None and os.path.exists(read) else ""
        if why:
            raise _refusal(target, f"{why} and stays as it is.")
    if not os.path.lexists(target):
        return
    is_kind = target.is_file() if listed is None else target.is_dir()
    if not is_kind or target.is_symlink():
        kind = "file" if listed is None else "directory"
        raise _refusal(target, f"exists and is not a {kind}.")
    if listed is not None:
        if not any(target.iterdir()):
            return
        if foreign := sorted(_foreign(target, listed(target))):
            why = f"holds what its record does not list, so it is not replaced: {few(foreign)}."
            raise _refusal(target, why, "Move that elsewhere, or choose another place.")
    if not overwrite:
        raise OutputError(
            f"{shown(target)}: exists. Replace it, or choose another place.", remedies=("overwrite", "out")
        )


def _conflict(target: Path, read: Path) -> str:
    """Whether ``target`` is ``read``, holds it, or lies in it; empty if it does not."""
    found = Path(os.path.realpath(read))
    if target.exists() and os.path.samefile(found, target):
        return "is read"
    if target.exists() and any(os.path.samefile(parent, target) for parent in found.parents):
        return f"holds {escape(read)}, which is read"
    if any(parent.exists() and os.path.samefile(parent, found) for parent in target.parents):
        return f"lies inside {escape(read)}, which is read"
    return ""


def _foreign(folder: Path, ours: Container[str]) -> Iterator[str]:
    """Whatever lies below ``folder`` and is none of ``ours``; versions that are kept there are never ours."""

    def unreadable(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=unreadable):
        inside = Path(root).relative_to(folder)
        links = [name for name in folders if Path(root, name).is_symlink()]
        if _VERSIONED in folders:
            yield f"{(inside / _VERSIONED).as_posix()}/"
        folders[:] = [name for name in folders if name not in (*links, _VERSIONED)]
        for name in (*links, *names):
            path = (inside / name).as_posix()
            known = path in ours or name in _OF_PROGRAMS or any(fnmatchcase(path, name) for name in _OF_DOWNLOADS)
            is_file = stat.S_ISREG(Path(root, name).lstat().st_mode)
            if not (known and is_file and name != _VERSIONED):
                yield path


# How it is replaced.


@contextmanager
def _held(target: Path) -> Iterator[Path]:
    """The directory beside ``target`` in which its successor is made, locked by this run and empty but for its mark."""
    stage = _stage(target)
    lock = None
    while lock is None:
        lock = _locked(stage, target)
    try:
        _settle(stage, target)
        yield stage
    finally:
        try:
            _settle(stage, target)
        finally:
            # What cannot be removed now, the next run removes, and knows it by the mark.
            with suppress(OSError):
                if os.listdir(stage) == [_MARK]:
                    os.unlink(stage / _MARK)
                    os.rmdir(stage)
            os.close(lock)


def _locked(stage: Path, target: Path) -> int | None:
    """Make ``stage`` this run's own; the descriptor that locks it, or None if another run has just removed it."""
    made = True
    try:
        stage.mkdir()
    except FileExistsError:
        made = False
    try:
        lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _in_the_way(stage, target) if error.errno in (errno.ENOTDIR, errno.ELOOP) else error from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _refusal(target, "another run is writing there.", "Wait for it, or choose another place.") from error
        except OSError as error:
            # Without locks, nothing tells a run that goes on from one that was killed.
            if not made or error.errno not in _NO_LOCKS:
                raise
        if os.path.samestat(os.fstat(lock), os.stat(stage)):
            names = os.listdir(stage)
            if names and _MARK not in names:
                raise _in_the_way(stage, target)
            os.close(os.open(stage / _MARK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
            kept, lock = lock, -1
            return kept
    except FileNotFoundError:
        return None
    finally:
        if lock >= 0:
            os.close(lock)
    return None


def _in_the_way(stage: Path, target: Path) -> OutputError:
    why = f"{escape(stage)} is in the way, and not what a run of mtp-extract has left."
    return _refusal(target, why, "Move it elsewhere, or choose another place.")


def _settle(stage: Path, target: Path) -> None:
    """Put back what was on its way out, and remove what was not to stay."""
    new, old = stage / _NEW, stage / _OLD
    if os.path.lexists(new) and os.path.lexists(old):
        try:
            os.rename(old, target)
        except OSError as error:
            raise OutputError(
                f"{escape(target)}: what was there before a run that was killed is in {escape(old)}, and cannot be put "
                f"back: {error.strerror}. Move one of the two elsewhere."
            ) from error
        _sync(target.parent)
    for left in (new, old):
        if left.is_dir():
            # What is left of it, the next run removes.
            shutil.rmtree(left, ignore_errors=True)
        else:
            with suppress(OSError):
                left.unlink()


def _put_in_place(new: Path, target: Path, old: Path) -> None:
    for root, _, names in os.walk(new, topdown=False):
        for name in names:
            _sync(Path(root, name))
        _sync(Path(root))
    if not new.is_dir():
        _sync(new)
        os.replace(new, target)
    else:
        # A directory with files in it cannot be replaced in one step.
        if target.is_dir() and any(target.iterdir()):
            os.rename(target, old)
        os.rename(new, target)
    _sync(new.parent)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until ``path`` is on the disk: content of a file, names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems have no such call for directories.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)
