"""What a result may replace, how it is replaced, and what a killed run leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.killing import killed_everywhere
from helpers.record_document import read_files

from mtp_extract.errors import OutputError
from mtp_extract.io import threads
from mtp_extract.io.place import OwnFiles, check_place, list_files, make_own_files, stage_output
from mtp_extract.io.threads import Interrupted

LISTED = make_own_files("record.json", {"record.json", "weights", "codes/codes"})
OLD = {"record.json": b"old", "weights": b"old weights", "codes/codes": b"old codes"}
NEW = {"record.json": b"new", "weights": b"new weights"}


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return fill(tmp_path / "here" / "x", OLD)


def check_refused(place: Path, match: str, *inputs: object, listed: OwnFiles | None = LISTED) -> None:
    """Check that ``place`` is refused before any work and when it is written, and that nothing changes."""
    before = read_files(place.parent), list_names(place.parent)
    with pytest.raises(OutputError, match=match):
        check_place(place, overwrite=True, inputs=inputs, listed=listed)  # type: ignore[arg-type]
    with pytest.raises(OutputError, match=match), stage_output(place, overwrite=True, inputs=inputs, listed=listed):  # type: ignore[arg-type]
        raise AssertionError
    assert (read_files(place.parent), list_names(place.parent)) == before


def write_new(place: Path) -> None:
    with stage_output(place, overwrite=True, listed=LISTED) as stage:
        fill(stage, NEW)


def link(at: Path, to: Path) -> Path:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(to)
    return at


SPELLINGS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "itself": (lambda x: x, "is read"),
    "a file in it": (lambda x: x / "weights", "holds .*weights"),
    "a link to it": (lambda x: link(x.parent / "link", x), "is read"),
    "a link into it": (lambda x: link(x.parent / "link", x / "weights"), "holds"),
    "through a link to its parent": (lambda x: link(x.parent.parent / "link", x.parent) / "x" / "weights", "holds"),
    "what holds it": (lambda x: x.parent, "lies inside"),
}


@pytest.mark.parametrize(("make", "match"), SPELLINGS.values(), ids=SPELLINGS)
def test_what_is_read_stays(place: Path, make: Callable[[Path], Path], match: str) -> None:
    check_refused(place, match, None, "hf://org/name/file", make(place))


def test_a_file_that_is_read_stays(tmp_path: Path) -> None:
    target = fill(tmp_path, {"file": b"bytes", "folder/other": b""}) / "file"
    os.link(target, tmp_path / "hard")
    link(tmp_path / "soft", target)
    for spelled in ("file", "folder/../file", "hard", "soft"):
        check_refused(target, "is read", tmp_path / spelled, listed=None)


def test_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    """A result inside an input would be taken for a part of it; beside an input it is allowed."""
    fill(tmp_path, {"read/weights": b"", "base/weights": b""})
    check_refused(tmp_path / "read" / "new", "lies inside", tmp_path / "read")
    check_refused(tmp_path / "read" / "new", "lies inside", tmp_path / "read", listed=None)
    check_place(tmp_path / "base" / "new", overwrite=False, inputs=list_files(tmp_path / "base"), listed=LISTED)
    check_place(tmp_path / "new", overwrite=False, inputs=[tmp_path / "read", "new"], listed=LISTED)
    assert list_files("org/name") == list_files(None) == []


FOREIGN: dict[str, tuple[dict[str, bytes], str]] = {
    "a file": ({"thesis.tex": b"years"}, r"list.*: thesis\.tex\. Move"),
    "one below": ({"notes/a.txt": b"", "notes/b/c.txt": b""}, r": notes/a\.txt, notes/b/c\.txt\."),
    "many": ({f"{n:03}": b"" for n in range(1000)}, ": 000, 001, 002, 003, 004 and 995 more"),
    "a control character": ({"\x1b[2J": b""}, r": \\x1b\[2J\."),
}


@pytest.mark.parametrize(("files", "match"), FOREIGN.values(), ids=FOREIGN)
def test_what_the_record_does_not_list_stays(place: Path, files: dict[str, bytes], match: str) -> None:
    check_refused(fill(place, files), match)


def test_what_is_no_file_stays(place: Path) -> None:
    os.mkfifo(place / "pipe")
    check_refused(place, ": pipe")
    (place / "pipe").unlink()
    (place / "weights").unlink()
    check_refused(link(place / "weights", Path("/etc/passwd")).parent, ": weights")


def test_a_directory_of_another_kind_stays(place: Path, tmp_path: Path) -> None:
    (place / "record.json").unlink()
    check_refused(place, r"as mtp-extract did not write it \(it has no record\.json\)")
    check_refused(place / "weights", "not a directory")
    check_refused(place, "not a file", listed=None)
    check_refused(link(tmp_path / "link", place), "not a directory")
    check_refused(link(tmp_path / "to a file", place / "weights"), "not a file", listed=None)


def test_what_is_listed_is_replaced_when_asked(place: Path) -> None:
    """So are files that programs leave in directories, and a listed file that was edited."""
    fill(place, {".DS_Store": b"", ".gitattributes": b"", "codes/Thumbs.db": b"", ".cache/huggingface/x.lock": b""})
    (place / "weights").write_bytes(b"edited")
    with pytest.raises(OutputError, match="exists") as caught:
        check_place(place, overwrite=False, listed=LISTED)
    assert caught.value.remedies == ("overwrite", "out")
    write_new(place)
    assert (read_files(place), list_names(place.parent)) == (NEW, ["x"])


def test_an_empty_directory_is_as_good_as_none(tmp_path: Path) -> None:
    """So is an empty stage, whose run was killed between two steps."""
    for empty in ("x", "y", ".y.partial"):
        (tmp_path / empty).mkdir()
    for place in (tmp_path / "x", tmp_path / "y", tmp_path / "new" / "parents" / "x"):
        with stage_output(place, overwrite=False, listed=LISTED) as stage:
            fill(stage, NEW)
        assert read_files(place) == NEW
    assert list_names(tmp_path) == ["new", "x", "y"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize(("name", "listed"), [("x", LISTED), ("new", LISTED), ("file", None)])
def test_a_failure_leaves_the_old_and_nothing_else(
    place: Path, error: type[BaseException], name: str, listed: OwnFiles | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a signal whose exception was lost."""
    with pytest.raises(error), stage_output(place.parent / name, overwrite=True, listed=listed) as stage:
        fill(stage, {"weights": b"half"}) if listed else stage.write_bytes(b"half")
        if error is not Interrupted:
            raise error
        monkeypatch.setattr(threads, "_signals", [2])
    assert (read_files(place), list_names(place.parent)) == (OLD, ["x"])


def test_a_signal_between_two_steps_puts_the_old_one_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename_and_interrupt(old: Path, new: Path) -> None:
        real(old, new)
        monkeypatch.setattr(os, "rename", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_new(place)
    assert (read_files(place), list_names(place.parent)) == (OLD, ["x"])


@pytest.mark.parametrize("listed", [LISTED, None])
def test_a_place_that_is_taken_meanwhile(tmp_path: Path, listed: OwnFiles | None) -> None:
    target = tmp_path / "x"
    with pytest.raises(OutputError, match="exists"), stage_output(target, overwrite=False, listed=listed) as stage:
        fill(stage, NEW) if listed else stage.write_bytes(b"new")
        fill(target, OLD) if listed else target.write_bytes(b"theirs")
    assert list_names(tmp_path) == ["x"]
    assert read_files(target) == OLD if listed else target.read_bytes() == b"theirs"


def test_everything_is_on_the_disk_before_it_has_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System calls sync content, then the directories that contain it; then they rename, and sync the parent."""
    calls: list[str] = []
    here = place.parent

    def format_path(path: object) -> str:
        return Path(os.fspath(path)).relative_to(here).as_posix()  # type: ignore[call-overload, no-any-return]

    def record_calls(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object) -> object:
            paths = [Path(f"/proc/self/fd/{arguments[0]}").readlink()] if name == "fsync" else arguments
            calls.append(" ".join((name, *map(format_path, paths))))
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace"):
        record_calls(name)
    with stage_output(place, overwrite=True, listed=LISTED) as stage:
        fill(stage, {"weights": b"new", "codes/codes": b"new"})
    assert set(calls[:4]) == {f"fsync .x.partial/new{part}" for part in ("/codes/codes", "/codes", "/weights", "")}
    assert calls.index("fsync .x.partial/new/codes/codes") < calls.index("fsync .x.partial/new/codes")
    assert calls[3] == "fsync .x.partial/new"
    assert calls[4:] == ["rename x .x.partial/old", "rename .x.partial/new x", "fsync .x.partial", "fsync ."]
    calls.clear()
    with stage_output(here / "file", overwrite=False) as stage:
        stage.write_bytes(b"new")
    steps = ["fsync .file.partial/new", "rename .file.partial/new file", "fsync .file.partial", "fsync ."]
    assert calls == steps


def test_a_disk_that_cannot_keep_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO is an error; EINVAL for a directory is not, as some file systems cannot sync directories."""

    def fail_to_sync(fd: int) -> None:
        if number == errno.EIO or stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))

    number = errno.EIO
    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(OutputError, match=r"x: cannot be written: Input/output error\. Nothing was kept"):
        write_new(place)
    assert (read_files(place), list_names(place.parent)) == (OLD, ["x"])
    number = errno.EINVAL
    write_new(place)
    assert read_files(place) == NEW


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The error is raised before any work, and cleaning up afterwards does not hide it."""
    for call in ("mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, call, Mock(side_effect=OSError(number, os.strerror(number))))
    for listed in (LISTED, None):
        with pytest.raises(OutputError, match=f"x: cannot be written: {os.strerror(number)}"):
            check_place(tmp_path / "x", overwrite=False, listed=listed)


def test_a_place_that_cannot_be_is_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for listed in (LISTED, None):
        with pytest.raises(OutputError, match="file is not a directory"):
            check_place(tmp_path / "file" / "x", overwrite=False, listed=listed)
        check_place(tmp_path / "new" / "folder" / "x", overwrite=False, listed=listed)
    assert list_names(tmp_path) == ["file"]
    for length in (247, 300):  # of the result, or of what it is made in
        with pytest.raises(OutputError, match="cannot be written: File name too long"):
            check_place(tmp_path / ("a" * length), overwrite=True, listed=LISTED)


def write_file(place: Path) -> None:
    with stage_output(place.parent / "file", overwrite=True) as stage:
        stage.write_bytes(b"new")


@pytest.mark.parametrize(("write", "new"), [(write_new, NEW), (write_file, {"file": b"new"})])
def test_it_is_killed_at_every_step(place: Path, write: Callable[[Path], None], new: dict[str, bytes]) -> None:
    """The place has the old or the new, or the next run puts the old one back; and no other file is left."""
    seen, target = set(), place if new is NEW else place.parent / "file"
    old, listed = (OLD, LISTED) if new is NEW else ({"file": b"old"}, None)

    def state() -> dict[str, bytes]:
        return read_files(target) if new is NEW else {"file": target.read_bytes()}

    def prepare() -> None:
        shutil.rmtree(place.parent)
        fill(place if new is NEW else place.parent, old)

    for number in killed_everywhere(prepare, lambda: write(place)):
        missing = not target.exists()
        assert missing or state() in (old, new), number
        with pytest.raises(OutputError, match="exists"):
            check_place(target, overwrite=False, listed=listed)
        assert list_names(place.parent) == [target.name], number
        assert state() in ([old] if missing else [old, new]), number
        seen.add("missing" if missing else "new" if state() == new else "old")
        write(place)
        assert (state(), list_names(place.parent)) == (new, [target.name]), number
    assert seen == {"old", "new"} | ({"missing"} if new is NEW else set())


def test_putting_back_is_killed_at_every_step(place: Path) -> None:
    stage = place.parent / ".x.partial"

    def prepare() -> None:
        shutil.rmtree(place.parent)
        fill(stage, {"mtp-extract": b""})
        fill(stage / "old", OLD)
        fill(stage / "new", NEW)

    def put_back() -> None:
        check_place(place, overwrite=True, listed=LISTED)

    for number in killed_everywhere(prepare, put_back):
        put_back()
        assert (read_files(place), list_names(place.parent)) == (OLD, ["x"]), number


def test_what_cannot_be_put_back_is_kept(place: Path) -> None:
    """If something else has taken the place, neither is lost."""
    stage = fill(place.parent / ".x.partial", {"mtp-extract": b""})
    fill(stage / "old", {"record.json": b"older"})
    fill(stage / "new", NEW)
    with pytest.raises(OutputError, match=r"what a killed run was replacing is in .*\.x\.partial/old"):
        check_place(place, overwrite=True, listed=LISTED)
    assert read_files(stage / "old") == {"record.json": b"older"}
    assert read_files(place) == OLD


def test_two_runs_in_one_place(place: Path) -> None:
    """The second is refused, and the work of the first is untouched."""
    with stage_output(place, overwrite=True, listed=LISTED) as stage:
        fill(stage, NEW)
        with pytest.raises(OutputError, match="another run is writing there"):
            write_new(place)
        assert read_files(stage) == NEW
    assert (read_files(place), list_names(place.parent)) == (NEW, ["x"])


def test_a_run_that_ends_while_another_takes_its_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tries again if the directory that it locked is gone."""
    real, stage = fcntl.flock, place.parent / ".x.partial"
    gone = []

    def lock_and_remove(fd: int, how: int) -> None:
        real(fd, how)
        if not gone:
            gone.append(True)
            shutil.rmtree(stage)

    monkeypatch.setattr(fcntl, "flock", lock_and_remove)
    write_new(place)
    assert (read_files(place), list_names(place.parent)) == (NEW, ["x"])


def test_a_file_system_without_locks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks nothing tells whether another run is at work: nothing is written or removed."""
    fill(place.parent / ".x.partial", {"mtp-extract": b"", "new/weights": b"half"})
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with pytest.raises(OutputError, match="No locks available"):
        write_new(place)
    assert read_files(place.parent / ".x.partial") == {"mtp-extract": b"", "new/weights": b"half"}
    assert read_files(place) == OLD


@pytest.mark.parametrize(
    "make",
    [
        lambda stage: fill(stage, {"new": b"thesis"}),
        lambda stage: fill(stage, {"new/a": b"", "old/b": b""}),
        lambda stage: stage.write_bytes(b"file"),
        lambda stage: link(stage, fill(stage.parent / "theirs", {"new/precious": b"", "old/precious": b""})),
    ],
)
def test_a_stage_that_no_run_has_left(place: Path, make: Callable[[Path], object]) -> None:
    """A directory with that name but no mark is somebody else's, and stays."""
    stage = place.parent / ".x.partial"
    make(stage)
    before = (read_files(place.parent), stage.is_symlink())
    for attempt in (write_new, lambda place: check_place(place, overwrite=True, listed=LISTED)):
        with pytest.raises(OutputError, match=r"\.x\.partial is in the way"):
            attempt(place)
        assert (read_files(place.parent), stage.is_symlink()) == before


def test_the_parent_of_a_link(tmp_path: Path) -> None:
    """Every step takes ``link/..`` for the parent of the directory that the link leads to."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    link(tmp_path / "link", tmp_path / "far" / "away")
    with stage_output(tmp_path / "link" / ".." / "x", overwrite=False) as stage:
        stage.write_bytes(b"")
    assert list_names(tmp_path / "far") == ["away", "x"]


def test_a_folder_that_cannot_be_read_may_hold_anything(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("codes"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    check_refused(place, "cannot be written: Permission denied")
