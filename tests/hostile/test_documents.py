"""Directories with pipes, devices and false JSON in place of files end in an error of ours."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.bounds import TooLongError, bounded
from helpers.fuzz_cases import bundle_bytes
from seam import (
    CheckpointError,
    MtpExtractError,
    inspect_checkpoint,
    open_bundle,
    open_regular,
    plan_insertion,
    plan_upload,
    read_base,
    read_prompts,
    read_regular,
    read_safetensors,
    verify,
    verify_against,
)

from mtp_extract import convert, extract

CASES = 160
DOCUMENTS = ("extraction.json", "config.json", "model.safetensors", "codes/codes.safetensors")
CPU_SECONDS = 20
LONGEST = 4000

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, 2.0, 1e308, float("inf"), float("nan"), 1 << 31, 1 << 64, 10**400),
    *("", "x", "0", "transformers", "gguf", "../../etc/passwd", "\x1b[2J", "\ud800", "a" * 5000),
    *([], {}, [[]], [None], {"": None}, ["x"], [1, 2], {"role": "x"}),
)
"""Values of every JSON type, and numbers that JSON does not have."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in _places(value[key], (*path, key)))]


def _lie(document: Any, rng: random.Random) -> Any:
    """Return ``document`` with one value, key or place changed."""
    document = copy.deepcopy(document)
    places = _places(document)
    # Entries near the top are changed as often as numbers deep inside.
    depth = rng.randrange(max(map(len, places)) + 1)
    path = rng.choice([place for place in places if len(place) == depth])
    if not path:
        return rng.choice(_VALUES)
    *way, key = path
    holder = document
    for step in way:
        holder = holder[step]
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("x", "", "model.safetensors", "__metadata__"))] = holder.pop(key)
    elif kind == 2:
        value = document
        for step in rng.choice(places):
            value = value[step]
        holder[key] = copy.deepcopy(value)
    else:
        holder[key] = rng.choice(_VALUES)
    return document


def _change(path: Path, rng: random.Random) -> None:
    """Change the JSON file ``path``, or the header of a file of tensors, in one to three places."""
    data = path.read_bytes()
    tensors = path.suffix == ".safetensors"
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length] if tensors else data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _lie(document, rng)
    text = json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] if tensors else text)


def _insert(place: Path, bundle: Path) -> None:
    with plan_insertion(place, bundle):
        pass


def _uses(place: Path, folder: Path) -> dict[str, Callable[[], object]]:
    return {
        "inspect": lambda: inspect_checkpoint(place, tensors=True),
        "convert": lambda: convert(place, folder / "out", format="litert", overwrite=True),
        "upload": lambda: plan_upload(place),
        "insert": lambda: _insert(place, folder / "bundle.litertlm"),
    }


def test_lies_in_documents(tmp_path: Path) -> None:
    """Each of four uses of the directory succeeds, or ends in one line. The number of a case seeds its changes."""
    (tmp_path / "bundle.litertlm").write_bytes(bundle_bytes())
    extract(tmp_path / "bundle.litertlm", tmp_path / "checkpoint", dtype="f32", codes=True)
    counts, failures = Counter[str](), list[str]()
    for number in range(CASES):
        place, name = tmp_path / "case", DOCUMENTS[number % len(DOCUMENTS)]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path / "checkpoint", place)
        _change(place / name, random.Random(f"record {number}"))
        if name != DOCUMENTS[0]:
            # With the record, its sums alone would refuse the file.
            (place / DOCUMENTS[0]).unlink()
        for use, work in _uses(place, tmp_path).items():
            came, problem = _outcome(work)
            counts[came] += 1
            if problem:
                failures.append(f"case {number}, {name}, {use}: {problem}")
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures[:5])
    assert counts["ok"] > CASES // 4, "changes that are always refused test nothing"
    assert counts["CheckpointError"] > CASES * 3 // 2


def _outcome(work: Callable[[], object]) -> tuple[str, str]:
    """Return the outcome of ``work``, and its fault if that must not happen."""
    try:
        with warnings.catch_warnings(), bounded(CPU_SECONDS):
            warnings.simplefilter("error")
            work()
    except MtpExtractError as error:
        text = str(error)
        return type(error).__name__, "" if text.isprintable() and len(text) <= LONGEST else repr(text[:LONGEST])
    except (Exception, TooLongError):  # noqa: BLE001 - whatever it is, it is the finding
        return "failed", traceback.format_exc()
    return "ok", ""


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_no_file_is_not_waited_for(
    extracted: Path, sample: Path, tmp_path: Path, name: str, kind: str, recorded: bool
) -> None:
    place = Path(shutil.copytree(extracted, tmp_path / "copy"))
    if not recorded:
        (place / "extraction.json").unlink()
    (place / name).unlink(missing_ok=True)
    KINDS[kind](place / name)

    def against() -> None:
        with open_bundle(sample) as opened:
            verify_against(place, opened)

    uses = [against, lambda: convert(place, tmp_path / "out", format="litert"), lambda: plan_upload(place)]
    # No engine reads an empty folder, and without a record nothing says that there are codes.
    if recorded or (name, kind) != ("codes/codes.safetensors", "a directory"):
        uses.append(lambda: verify(place))
    if name == "codes/codes.safetensors":
        uses.append(lambda: _insert(place, sample))
    elif name != "extraction.json":
        uses += [lambda: _insert(place, sample), lambda: inspect_checkpoint(place)]
    for use in uses:
        with pytest.raises(MtpExtractError) as caught:
            use()
        assert str(caught.value).isprintable()
    assert not (tmp_path / "out").exists()


def test_single_files_that_are_none(tmp_path: Path, base: Path) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="found a pipe"):
        read_safetensors(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="found a pipe, a socket or a device"):
            open_regular(path)
        (link := tmp_path / f"{path.name}.jsonl").symlink_to(path)
        with pytest.raises(MtpExtractError, match="found a pipe"):
            read_prompts(link)
    with pytest.raises(OSError, match="embedded null"):
        open_regular(Path("a\0b"))
    (tmp_path / "long").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="expected at most 10 bytes, found 11"):
        read_regular(tmp_path / "long", 10)
    for name in ("config.json", "model.safetensors"):
        copy = Path(shutil.copytree(base, tmp_path / f"base-{name}"))
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(CheckpointError):
            read_base(copy)


ENTRIES: tuple[tuple[str, object], ...] = (
    *(("data_offsets", value) for value in ([0.0, 16.0], [False, 16], ["0", "16"], [0, 16, 16], [-(1 << 64), 16])),
    *(("shape", value) for value in ([4.0], [True, 4], "4", {"4": 4}, [1 << 64, 0, 4], [-4], None)),
    *(("dtype", value) for value in (32, ["F32"])),
)


@pytest.mark.parametrize(("key", "value"), ENTRIES)
def test_headers_with_other_than_integers(tmp_path: Path, key: str, value: object) -> None:
    sound: dict[str, object] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for about, refused in ((sound, False), ({**sound, key: value}, True), ([*sound.values()], True)):
        header = json.dumps({"a": about}).encode()
        (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
        if refused:
            with pytest.raises(CheckpointError, match="damaged"):
                read_safetensors(tmp_path / "x.safetensors")
        else:
            assert read_safetensors(tmp_path / "x.safetensors")[0]["a"].shape == (4,)
