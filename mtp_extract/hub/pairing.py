"""Which drafter llama.cpp takes beside a base by itself: ``llama-server -hf ORG/NAME[:TAG] --spec-type draft-mtp``.

It goes by the names of a repository's files alone, as ``common_download_get_hf_plan`` of llama.cpp's
``common/download.cpp`` says (read at 0216dab364b); nobody there looks whether the two fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mtp_extract.errors import HubError, escape, few

_PRESET = "preset.ini"
"""What is read alone where it is there."""
_DRAFTER = "mtp-"
_NO_MODEL = ("mmproj", "imatrix", _DRAFTER, "eagle3-", "dflash-", "dspark-")
_UNASKED = ("Q4_K_M", "Q8_0")
_FILE = re.compile(r"(?P<stem>.+?)(?:-(?P<part>\d{5})-(?i:of)-\d{5})?\.gguf")
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")


@dataclass(frozen=True)
class Pair:
    """What llama.cpp takes where it is asked for ``asked``, ``ORG/NAME`` or ``ORG/NAME:TAG``."""

    asked: str
    base: str
    drafter: str


def paired(repo_id: str, held: Iterable[str], drafter: str) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """What llama.cpp takes once ``drafter`` lies beside the files ``held``, by no type and by those of the bases; and
    what to know of it.

    Raises:
        HubError: no base is there, or none is taken with it.
    """
    files = sorted({*held, drafter})
    pairs = [
        Pair(f"{repo_id}:{tag}" if tag else repo_id, base, taken)
        for tag in dict.fromkeys(["", *map(_tag, models_in(files))])
        if (base := model_of(files, tag)) and (taken := drafter_of(files, base, tag))
    ]
    ours = [pair.base for pair in pairs if pair.drafter == drafter]
    if not ours or _PRESET in files:
        others = few(dict.fromkeys(pair.drafter for pair in pairs))
        found = f"{others}, which it takes instead" if others else few(sorted(held)) or "no files"
        raise HubError(
            f"{repo_id}: expected the GGUF of a base with which llama.cpp takes {escape(drafter)}, found "
            f"{f'a {_PRESET}, which it reads alone' if _PRESET in files else found}. Nothing was sent. Choose another "
            "repository, or one of its own for the drafter."
        )
    name = _plain(drafter.removeprefix(_DRAFTER).rpartition("-")[0])
    odd = few(dict.fromkeys(base for base in ours if name not in _plain(base)))
    return tuple(pairs), (f"Is {odd} the base of {escape(drafter)}? llama.cpp does not look.",) if odd else ()


def models_in(files: Iterable[str]) -> list[str]:
    """What may be a base; of one in parts the first."""
    return [
        path
        for path in files
        if (file := _FILE.fullmatch(path)) is not None and int(file["part"] or 1) == 1
        if not any(word in path.rpartition("/")[2] for word in _NO_MODEL)
    ]


def _tag(path: str) -> str:
    file = _FILE.fullmatch(path)
    found = file and _TAG.search(file["stem"])
    return found[1].upper() if found else ""


def _bits(tag: str) -> int:
    found = re.search(r"\d+", tag)
    return int(found[0]) if found else 0


def model_of(files: Iterable[str], tag: str = "") -> str | None:
    """The base that is taken, as ``find_best_model``."""
    models = models_in(files)
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
        if path.endswith(".gguf") and _DRAFTER in path
        if (parts := path.split("/")[:-1]) == folder[: len(parts)]
    ]
    # Of several alike the first that is listed.
    return min(found, key=lambda one: one[:3])[3] if found else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
