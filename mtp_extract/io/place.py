"""The place of a result: whether what is there may be replaced, and how it is.

Every command that writes asks here. Never replaced is what is read, what holds it and what lies in it; and a directory
with a file that its record does not list.

A result is made in the directory ``.NAME.partial`` beside its place, which one run at a time locks; the lock ends with
the process, however that ends. In there are ``mtp-extract``, an empty file that says that a run may clear the
directory; ``new``, the result, until it takes its name; and ``old``, the directory that it replaces: beside ``new`` it
is to be put back, without ``new`` it has been replaced. So the next run in the same place knows what a killed one left.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mtp_extract.errors import MtpExtractError, OutputError, escape, few
from mtp_extract.io.threads import check_interrupted

try:
    import fcntl
except ImportError as error:
    raise MtpExtractError(
        "This system has no file locks of POSIX: mtp-extract runs on Linux and macOS. On Windows, run it in WSL."
    ) from error

PathLike = str | os.PathLike[str]

InputPaths = Iterable[PathLike | None]
"""What a command reads, files and directories; addresses and ids among them are not looked at."""

OwnFiles = Callable[[Path], Container[str]]
"""A directory that is to be replaced → the files below it that are ours; raises OutputError for one that is not."""

_MARK = "mtp-extract"
_NEW = "new"
_OLD = "old"
_STAGED = re.compile(rf"/\.([^/]+)\.partial/{_NEW}(?=/|$)")
_LEFT_BY_PROGRAMS = re.compile(r"(.*/)?(\.DS_Store|\.gitattributes|Thumbs\.db|desktop\.ini)|\.cache/huggingface/.*")
"""What programs leave in directories, the Hub's client among them, and nobody wrote: it goes with what it lies in."""
_ELSEWHERE = "Move it elsewhere, or choose another place."


def listing(record: str, files: Container[str]) -> OwnFiles:
    """Of a directory in which the file ``record`` lies: ``files``."""

    def listed(place: Path) -> Container[str]:
        if not (place / record).is_file():
            raise _make_refusal(place, f"is not replaced, as mtp-extract did not write it (it has no {record}).")
        return files

    return listed


def files_of(directory: PathLike | None) -> list[Path]:
    """The files in ``directory``, where it is one here: the inputs, if other things may be written beside them."""
    root, _, names = next(os.walk(directory or ""), ("", (), ()))
    return [Path(root, name) for name in sorted(names)]


def check_place(place: PathLike, *, overwrite: bool, inputs: InputPaths = (), listed: OwnFiles | None = None) -> None:
    """Raise OutputError, before any work is done, unless :func:`staged` may put its result at ``place``.

    Args:
        overwrite: replace what is there, if it is of the same kind.
        inputs: what is read, and so is neither replaced nor written into.
        listed: of a directory; None for a file.
    """
    with _open_stage(_resolve_parent(place), overwrite, inputs, listed):
        pass


@contextmanager
def staged(
    place: PathLike, *, overwrite: bool, inputs: InputPaths = (), listed: OwnFiles | None = None
) -> Iterator[Path]:
    """The path of a new directory, or of a file to be made, that takes the name ``place`` when the block ends well.

    It is on the disk before that. When the block fails nothing is left; when the process is killed, the next run in
    the same place finds what it left. Modes follow the umask. Arguments are those of :func:`check_place`.

    Raises:
        OutputError: ``place`` may not be replaced, or cannot be written to, or another run is writing there.
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
            # A directory with files in it cannot be replaced in one step.
            os.rename(target, stage / _OLD)
        os.rename(new, target)
        _sync(stage)
        _sync(target.parent)


def format_path(path: Path) -> str:
    """``path`` as a user knows it: where it is to be in the end, and from the current directory if it lies in there."""
    path = Path(_STAGED.sub(r"/\1", str(path)))
    with suppress(OSError, ValueError):
        path = path.relative_to(Path.cwd())
    return escape(path)


def make_write_error(path: Path, error: OSError) -> OutputError:
    """What to tell the user when ``path`` cannot be written."""
    return _make_refusal(path, f"cannot be written: {error.strerror or escape(error)}. Nothing was kept.")


def _make_refusal(target: Path, why: str, what_to_do: str = "Choose another place.") -> OutputError:
    return OutputError(f"{format_path(target)}: {why} {what_to_do}", remedies=("out",))


def _resolve_parent(place: PathLike) -> Path:
    """``place`` with every link resolved but its last."""
    path = Path(place)
    return Path(os.path.realpath(path.parent), path.name) if os.path.islink(path) else Path(os.path.realpath(path))


@contextmanager
def _open_stage(target: Path, overwrite: bool, inputs: InputPaths, listed: OwnFiles | None) -> Iterator[Path]:
    """The directory in which the result for ``target`` is made, locked by this run, where it may be written at all.

    It is empty but for its mark: what a killed run has left there is put back or removed. Afterwards it is gone, and
    so are the directories above it that had to be made, unless something lies there.
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
                # What cannot be removed now, the next run removes: it knows the stage by its mark.
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
    """Raise OutputError if the result would replace what is read, or lie in it."""
    for read in inputs:
        if read is None or not os.path.exists(read):
            continue
        resolved = Path(os.path.realpath(read))
        holds, inside = target in resolved.parents, resolved in target.parents
        if holds or inside or (target.exists() and target.samefile(resolved)):
            where = f"{'holds' if holds else 'lies inside'} {escape(read)}, which is" if holds or inside else "is"
            raise _make_refusal(target, f"{where} read and stays as it is.")


def _check_free(target: Path, overwrite: bool, listed: OwnFiles | None) -> None:
    """Raise OutputError unless the result may have its name now."""
    if not os.path.lexists(target):
        return
    is_kind, kind = (target.is_file(), "file") if listed is None else (target.is_dir(), "directory")
    if not is_kind or target.is_symlink():
        raise _make_refusal(target, f"exists and is not a {kind}.")
    if listed is not None:
        if not any(target.iterdir()):
            return
        if foreign := sorted(_find_foreign_files(target, listed(target))):
            why = f"holds what its record does not list, so it is not replaced: {few(foreign)}."
            raise _make_refusal(target, why, _ELSEWHERE)
    if not overwrite:
        exists = f"{format_path(target)}: exists. Replace it, or choose another place."
        raise OutputError(exists, remedies=("overwrite", "out"))


def _find_foreign_files(folder: Path, ours: Container[str], below: str = "") -> Iterator[str]:
    """Whatever lies below ``folder`` and is neither a directory nor a file of ``ours``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _find_foreign_files(Path(entry), ours, f"{path}/")
            elif not (entry.is_file(follow_symlinks=False) and (path in ours or _LEFT_BY_PROGRAMS.fullmatch(path))):
                yield path


@contextmanager
def _lock_stage(stage: Path, target: Path) -> Iterator[Path]:
    """``stage``, marked as ours and locked by this run until the block ends."""
    why = f"{escape(stage)} is in the way, and not what a run of mtp-extract has left."
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
                pass  # a run that ends removes its stage: what was locked is gone, or another's has its name
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
    """Put back what was on its way out, and remove what was not to stay."""
    new, old = stage / _NEW, stage / _OLD
    if os.path.lexists(new) and os.path.lexists(old):
        try:
            os.rename(old, target)
        except OSError as error:
            why = f"what a killed run was to replace is in {escape(old)}, and cannot be put back: {error.strerror}."
            raise _make_refusal(target, why, "Move one of the two elsewhere.") from error
        _sync(target.parent)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
        with suppress(OSError):
            leftover.unlink()


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
