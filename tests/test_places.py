"""Every command that writes asks what it may replace, and is killed on the way. ``tests/io/test_place.py`` has how."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.killing import killed_at
from helpers.record_document import TUNING, read_files

from mtp_extract import convert, extract, validate
from mtp_extract.errors import MtpExtractError, OutputError
from mtp_extract.formats import MTP_FORMATS
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.io.place import check_place
from mtp_extract.pipeline.check import CheckpointDirectory, list_recorded_files
from mtp_extract.tuning.pair import write_result
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.validation.plan import ValidationPlan


@pytest.fixture
def mine(extracted: Path, tmp_path: Path) -> Path:
    """A checkpoint of F32 with codes."""
    return Path(shutil.copytree(extracted, tmp_path / "mine"))


@pytest.mark.parametrize("name", ["thesis.tex", ".git/HEAD", "notes/a.txt", "model-00001-of-00002.safetensors"])
def test_a_record_that_lists_what_no_run_has_written(mine: Path, sample: Path, name: str) -> None:
    record = json.loads((mine / "extraction.json").read_text())
    record["files"][name] = {"size": 5, "xxh3": "0"}
    (mine / "extraction.json").write_text(json.dumps(record))
    (mine / name).parent.mkdir(exist_ok=True)
    (mine / name).write_text("years")
    with pytest.raises(OutputError, match="does not list, so it is not replaced"):
        extract(sample, mine, overwrite=True)
    assert (mine / name).read_text() == "years"


def test_every_file_of_every_format_is_a_runs_own(sample: Path, tmp_path: Path) -> None:
    for name in MTP_FORMATS:
        written = extract(sample, tmp_path / name, format=name, codes=True)
        assert list_recorded_files(tmp_path / name) == set(written.files), name


def insert(source: Path, bundle: Path, out: Path) -> None:
    with plan_insertion(source, bundle) as plan:
        plan.write(out, overwrite=True)


def tune(directory: Path, out: Path, base: str = "org/name", work: Path = Path("nowhere")) -> None:
    plan = TuningPlan(directory, base, out, work, overwrite=True)
    plan.check()
    origin = CheckpointDirectory.of(directory)
    write_result(origin, origin.checkpoint, plan, "tuning", TUNING)


def test_the_bundle_that_is_read_stays(sample: Path, mine: Path) -> None:
    """A download of gigabytes beside what was made of it before."""
    bundle = Path(shutil.copy(sample, mine / "gemma.litertlm"))
    (mine.parent / "link").symlink_to(bundle)
    before = read_files(mine)
    with pytest.raises(OutputError, match=r"mine: holds .*, which is read"):
        extract(mine.parent / "link", mine, overwrite=True)
    # Even where the record says that it is its own.
    record = json.loads((mine / "extraction.json").read_text())
    record["files"]["gemma.litertlm"] = {}
    (mine / "extraction.json").write_text(json.dumps(record))
    with pytest.raises(OutputError, match="is read"):
        extract(bundle, mine, overwrite=True)
    assert {**read_files(mine), "extraction.json": before["extraction.json"]} == before


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"files": 5}', '{"files": {}}'])
def test_a_record_that_lists_nothing_gives_nothing_away(sample: Path, mine: Path, record: str) -> None:
    (mine / "extraction.json").write_text(record)
    before = read_files(mine)
    with pytest.raises(OutputError, match="not replaced"):
        extract(sample, mine, overwrite=True)
    assert read_files(mine) == before


def test_a_directory_is_not_converted_into_itself(mine: Path, tmp_path: Path) -> None:
    """F32 with codes became BF16 without, unasked."""
    (tmp_path / "link").symlink_to(mine)
    gguf = convert(mine, tmp_path / "gguf", format="gguf").directory
    before = read_files(tmp_path)
    cases = [(source, mine, "transformers") for source in (mine, tmp_path / "link", mine / "model.safetensors")]
    for source, out, name in [*cases, (gguf, gguf, "gguf"), (next(gguf.glob("*.gguf")), gguf, "gguf")]:
        with pytest.raises(OutputError, match="is read and stays"):
            convert(source, out, format=name, overwrite=True)
    with pytest.raises(OutputError, match="lies inside"):
        convert(mine, mine / "codes", format="transformers", overwrite=True)
    assert read_files(tmp_path) == before


def test_a_bundle_is_not_put_over_what_is_read(sample: Path, base: Path, mine: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(sample, tmp_path / "own.litertlm"))
    weights = Path(shutil.copytree(base, tmp_path / "base"))
    before = read_files(tmp_path)
    files = (mine, own), (mine, mine / "model.safetensors"), (mine, mine / "new.litertlm"), (weights, own)
    for source, out in (*files, (weights, weights / "model.safetensors")):
        with pytest.raises(OutputError, match="is read"):
            insert(source, own, out)
    with pytest.raises(OutputError, match="not a file"):
        insert(mine, own, weights)
    assert read_files(tmp_path) == before


def test_a_tuning_keeps_what_it_reads_and_its_work(mine: Path, extracted: Path, tmp_path: Path) -> None:
    before = read_files(tmp_path)
    base = Path(shutil.copytree(extracted, tmp_path / "base"))
    places = {mine: "is read", base: "holds .*, which is read", mine / "new": "lies inside"}
    for out, match in places.items():
        with pytest.raises(OutputError, match=match):
            tune(mine, out, base=str(base))
    for work in ("out", "out/work", "other/../out/work"):
        with pytest.raises(MtpExtractError, match="text and state kept there") as caught:
            tune(mine, tmp_path / "out", work=tmp_path / work)
        assert caught.value.remedies == ("out", "work")
    shutil.rmtree(base)
    assert read_files(tmp_path) == before


def test_reports_keep_what_they_read(mine: Path, tmp_path: Path) -> None:
    """Said before anything is measured."""
    prompts = tmp_path / "report" / "report.html"
    prompts.parent.mkdir()
    prompts.write_text("prompts")
    (prompts.parent / "report.json").write_text("{}")
    with pytest.raises(OutputError, match=r"report.html, which is read"):
        validate(ValidationPlan(mine, base="base", prompts=prompts, report=prompts.parent, overwrite=True))
    assert prompts.read_text() == "prompts"


COMMANDS: dict[str, Callable[[Path, Path, Path], object]] = {
    "extract": lambda sample, source, out: extract(sample, out, codes=True, overwrite=True),
    "convert": lambda sample, source, out: convert(source, out, format="litert", overwrite=True),
    "tune": lambda sample, source, out: tune(source, out),
    "insert": lambda sample, source, out: insert(source, sample, out),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("there", [True, False])
def test_killed(name: str, there: bool, sample: Path, extracted: Path, tmp_path: Path) -> None:
    """What was there stands whole, or the new one does; the next run in the place leaves nothing else."""
    out = tmp_path / "here" / "out"
    out.parent.mkdir()

    def found() -> dict[str, bytes] | bytes | None:
        return None if not out.exists() else read_files(out) if out.is_dir() else out.read_bytes()

    work = partial(COMMANDS[name], sample, extracted, out)
    work()
    new = found()
    if not there:
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    elif out.is_dir():
        # What an earlier release wrote lists its files too.
        files = json.loads((out / "extraction.json").read_text())["files"]
        (out / "extraction.json").write_text(json.dumps({"format_version": 1, "files": files}))
    else:
        out.write_bytes(b"the one before")
    old = found()
    kept = shutil.copytree(out.parent, tmp_path / "kept")
    number, ended = 1, False
    while not ended:
        ended = not killed_at(number, work)
        left = found()
        # Between two names there is neither; the next run puts the old one back.
        check_place(out, overwrite=True, listed=list_recorded_files if name != "insert" else None)
        after = found()
        assert after in (old, new), number
        assert left in (after, None), number
        assert {p.name for p in out.parent.iterdir()} <= {"out"}, number
        shutil.rmtree(out.parent)
        shutil.copytree(kept, out.parent)
        number = number * 3 // 2 + 1
    assert number > 5
