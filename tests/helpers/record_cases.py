"""Documents of a checkpoint's directory with lies in them, and what must be true of each.

A case is its number; the same case is the same lie on every machine.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.bounds import TooLongError, bounded
from helpers.fuzz_cases import Outcome, bundle_bytes
from mtp_extract import extract
from mtp_extract.errors import MtpExtractError
from mtp_extract.hub.upload import plan_upload
from mtp_extract.insertion.run import planned_insertion
from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.inspection import inspect_checkpoint

__all__ = ["DOCUMENTS", "prepare", "run"]

DOCUMENTS = ("extraction.json", "config.json", "model.safetensors", "codes/codes.safetensors")
CPU_SECONDS = 20
LONGEST = 4000

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, 2.0, 1e308, float("inf"), float("nan"), 1 << 31, 1 << 64, 10**400),
    *("", "x", "0", "transformers", "gguf", "../../etc/passwd", "\x1b[2J", "\ud800", "a" * 5000),
    *([], {}, [[]], [None], {"": None}, ["x"], [1, 2], {"role": "x"}),
)
"""Of every type that JSON has, and of every one that it lacks."""


def prepare(folder: Path) -> Path:
    """A checkpoint of a small drafter, and the bundle that it is of."""
    (folder / "bundle.litertlm").write_bytes(bundle_bytes())
    extract(folder / "bundle.litertlm", folder / "checkpoint", dtype="f32", codes=True)
    return folder


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in _places(value[key], (*path, key)))]


def _lie(document: Any, rng: random.Random) -> Any:
    """``document`` with one thing in it changed: a value, a key, a place."""
    document = copy.deepcopy(document)
    places = _places(document)
    # A whole entry as often as a number deep inside.
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
        other = document
        for step in rng.choice(places):
            other = other[step]
        holder[key] = copy.deepcopy(other)
    else:
        holder[key] = rng.choice(_VALUES)
    return document


def _change(path: Path, rng: random.Random) -> None:
    """A lie or two in the JSON of ``path``, or of the header of the tensors there, whose data stay."""
    data = path.read_bytes()
    tensors = path.suffix == ".safetensors"
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length] if tensors else data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _lie(document, rng)
    text = json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] if tensors else text)


def _uses(place: Path, folder: Path) -> dict[str, Callable[[], object]]:
    def insert() -> None:
        with planned_insertion(place, folder / "bundle.litertlm"):
            pass

    return {
        "inspect": lambda: inspect_checkpoint(place, tensors=True),
        "convert": lambda: convert(place, folder / "out", format="litert", overwrite=True),
        "upload": lambda: plan_upload(place),
        "insert": insert,
    }


def run(first: int, last: int, folder: Path) -> Outcome:
    """Cases ``[first, last)``, of what :func:`prepare` made in ``folder``."""
    outcome = Outcome(Counter(), [])
    for number in range(first, last):
        rng = random.Random(f"record {number}")
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "checkpoint", place)
        name = DOCUMENTS[number % len(DOCUMENTS)]
        _change(place / name, rng)
        if name != DOCUMENTS[0]:
            # What its record says of it would be all that is seen.
            (place / DOCUMENTS[0]).unlink()
        for use, work in _uses(place, folder).items():
            came, problem = _outcome(work)
            outcome.counts[came] += 1
            if problem:
                outcome.failures.append(f"case {number}, {name}, {use}: {problem}")
    return outcome


def _outcome(work: Callable[[], object]) -> tuple[str, str]:
    """What came of ``work``, and what of that must not be."""
    try:
        with warnings.catch_warnings(), bounded(CPU_SECONDS):
            warnings.simplefilter("error")
            work()
    except MtpExtractError as error:
        said = str(error)
        return type(error).__name__, "" if said.isprintable() and len(said) <= LONGEST else repr(said[:LONGEST])
    except (Exception, TooLongError):  # noqa: BLE001 - whatever it is, it is the finding
        return "failed", traceback.format_exc()
    return "ok", ""
