"""Which drafter llama.cpp takes beside a base by itself: ``llama-server -hf ORG/NAME[:TAG] --spec-type draft-mtp``.

It goes by the names of a repository's files alone, as ``common_download_get_hf_plan`` of llama.cpp's
``common/download.cpp`` says (read at 0216dab364b); nobody there looks whether the two fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mtp_extract.errors import HubError, escape, few
from mtp_extract.formats import is_called
from mtp_extract.formats.gguf import FORMAT

_GGUF = ".gguf"
_DRAFTER = "mtp-"
_NO_MODEL = ("mmproj", "imatrix", _DRAFTER, "eagle3-", "dflash-", "dspark-")
_PRESET = "preset.ini"
"""What is read alone where it is there."""
_UNASKED = ("Q4_K_M", "Q8_0")
_SHARD = re.compile(r"(.+)-(\d{5})-of-\d{5}", re.IGNORECASE)
_TAG = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Pair:
    """What llama.cpp takes where it is asked for ``asked``, ``ORG/NAME`` or ``ORG/NAME:TAG``."""

    asked: str
    base: str
    drafter: str


def sidecar_of(directory: Path, paths: Iterable[str]) -> str:
    """Of the files of a checkpoint the one that llama.cpp finds beside a base.

    Raises:
        HubError: there is none: it is of another format.
    """
    for path in paths:
        if is_called(path, FORMAT.weights_file):
            return path
    raise HubError(f"{escape(directory)}: expected a GGUF, as llama.cpp finds it, found none. Convert it first.")


def paired(repo_id: str, held: Iterable[str], drafter: str) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """What llama.cpp takes once ``drafter`` lies beside the files ``held``, by no type and by those of the bases; and
    what to know of it.

    Raises:
        HubError: no base is there, or none is taken with it.
    """
    if _PRESET in held:
        raise HubError(f"{repo_id}: holds a {_PRESET}, which llama.cpp reads in place of its files. Nothing was sent.")
    files = sorted({*held, drafter})
    pairs = []
    for tag in dict.fromkeys(["", *map(_tag, _models(files))]):
        base = model_of(files, tag)
        if base is not None and (found := drafter_of(files, base, tag)) is not None:
            pairs.append(Pair(f"{repo_id}:{tag}" if tag else repo_id, base, found))
    if not pairs:
        raise HubError(
            f"{repo_id}: expected the GGUF of a base, found {few(sorted(held)) or 'no files'}. Nothing was sent. "
            "Upload the base first, or the drafter to a repository of its own."
        )
    ours = [pair.base for pair in pairs if pair.drafter == drafter]
    if not ours:
        raise HubError(
            f"{repo_id}: expected llama.cpp to take {escape(drafter)} with a base there, found that it takes "
            f"{few(dict.fromkeys(pair.drafter for pair in pairs))}. Nothing was sent. Remove that, or upload the "
            "drafter to a repository of its own."
        )
    name = _plain(drafter.removeprefix(_DRAFTER).removesuffix(_GGUF).rpartition("-")[0])
    odd = few(dict.fromkeys(base for base in ours if name not in _plain(base)))
    return tuple(pairs), (f"Is {odd} the base of {escape(drafter)}? llama.cpp does not look.",) if odd else ()


def _models(files: Iterable[str]) -> Iterator[str]:
    """Of a model in parts the first."""
    for path in files:
        if path.endswith(_GGUF) and not any(word in path.rpartition("/")[2] for word in _NO_MODEL):
            shard = _SHARD.fullmatch(path.removesuffix(_GGUF))
            if shard is None or int(shard[2]) == 1:
                yield path


def _tag(path: str) -> str:
    stem = path.removesuffix(_GGUF)
    shard = _SHARD.fullmatch(stem)
    found = _TAG.search(shard[1] if shard else stem)
    return found[1].upper() if found else ""


def _bits(tag: str) -> int:
    found = _DIGITS.search(tag)
    return int(found[0]) if found else 0


def model_of(files: Iterable[str], tag: str = "") -> str | None:
    """The base that is taken, as ``find_best_model``."""
    models = list(_models(files))
    for wanted in [tag] if tag else _UNASKED:
        for path in models:
            if re.search(f"{re.escape(wanted)}[.-]", path, re.IGNORECASE):
                return path
    return None if tag or not models else models[0]


def drafter_of(files: Iterable[str], model: str, tag: str = "") -> str | None:
    """The drafter that is taken with ``model``, as ``find_best_mtp``: in its folder or nearest above, then by type."""
    folder, wanted = model.split("/")[:-1], _bits(tag or _tag(model))
    found = [
        (-len(parts), not (tag and f"-{tag.upper()}." in path.upper()), abs(_bits(_tag(path)) - wanted), path)
        for path in files
        if path.endswith(_GGUF) and _DRAFTER in path
        if (parts := path.split("/")[:-1]) == folder[: len(parts)]
    ]
    # Of several alike the first that is listed.
    return min(found, key=lambda one: one[:3])[3] if found else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
