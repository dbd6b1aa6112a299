"""What engines would read of a checkpoint's directory that is no part of the drafter that is read there."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.errors import CheckpointError, escape, few
from mtp_extract.formats import format_of, reading
from mtp_extract.pipeline.staging import RECORD

_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "processor_config.json", "preprocessor_config.json"),
)
"""Drafts are tokens of the base: what the drafter's own tokenizer calls them changes none."""

_CODE = "auto_map"
"""Key of a configuration that names code to be run."""

LEGAL = tuple(f"{name}{ending}" for name in ("LICENSE", "NOTICE") for ending in ("", "*.txt", "*.md"))
_HARMLESS = (*LEGAL, "CITATION.cff", *(f"*.{ending}" for ending in ("md", "png", "jpg", "jpeg", "gif", "webp", "pdf")))
"""What no engine reads: it is for people."""

_FOUND_BY_ENDING = (".safetensors", ".gguf", ".npz", ".bin", ".pt", ".pth", ".py", ".json")
"""What some engines look for by ``*`` and this, which finds hidden files too. No others of those are read."""


def is_harmless(name: str) -> bool:
    """Whether a file of that name, relative to the directory, is read by no engine or changes nothing."""
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return not base.endswith(_FOUND_BY_ENDING)
    return name in _TOKENIZER or any(fnmatchcase(base, pattern) for pattern in _HARMLESS)


def require_manifest(place: Path, allowed: Container[str] = ()) -> None:
    """Check that ``place`` holds a drafter and nothing else that an engine may read.

    Args:
        place: a directory, or a file that is a checkpoint.
        allowed: names of other files that may be there: those of a report.

    Raises:
        CheckpointError: there is more, which is named, or it holds no drafter, or a damaged one.
    """
    if found := unexpected_in(place, allowed):
        raise CheckpointError(
            f"{escape(place)}: expected a drafter and nothing else that an engine may read, found that "
            f"{few(found, separator='; ')}. Move aside or undo what does not belong there, or extract the drafter "
            "again."
        )


def unexpected_in(place: Path, allowed: Container[str] = ()) -> list[str]:
    """What :func:`require_manifest` refuses, each as a clause that names a file. What the drafter's own files say is
    checked where they are read.

    Raises:
        CheckpointError: ``place`` holds no drafter, or a damaged one.
    """
    own = _own_files(place)
    files = [] if place.is_file() else sorted(_unexpected_files(place, own, allowed))
    configs = [place / name for name in _TOKENIZER if name.endswith("_config.json") and (place / name).is_file()]
    return files + [f"{path.name} names code" for path in configs if _CODE in read_object(path)]


def _own_files(place: Path) -> set[str]:
    """Names of the files that are read as the drafter's, or that its format writes besides."""
    found = format_of(place)
    if place.is_file():
        return {place.name}
    own = {
        min((path.name for path in place.glob(pattern)), default=pattern)
        for pattern in (found.marker, found.weights_file, *found.further_files)
    }
    if (index := reading.index_of(place, found.weights_file)) is not None:
        own |= {index.name, *(path.name for path, _ in reading.read_shards(place, found.weights_file).values())}
    return own


def _unexpected_files(folder: Path, own: Container[str], allowed: Container[str]) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        # No engine looks into hidden directories: they are git's, the Hub's and editors'.
        folders[:] = [name for name in folders if not name.startswith(".")]
        # Engines follow links to directories; os.walk does not.
        links = [name for name in folders if Path(root, name).is_symlink()]
        for name in (*links, *names):
            path = Path(root, name).relative_to(folder).as_posix()
            if path in (RECORD, CODES_FILE) or path in own or path in allowed or is_harmless(path):
                if not Path(root, name).is_file():
                    yield f"{escape(path)} is no file"
            else:
                yield f"{escape(path)} belongs neither to the checkpoint nor to a report"
