"""Known bundles: what published ``.litertlm`` files are called, and which of them hold no drafter.

The table is ``mappings/bundles.json``. It only names things: a bundle that is not listed is read the same
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mtp_extract.data import load_mapping
from mtp_extract.io.source import Source


@dataclass(frozen=True)
class License:
    """A licence: its id on the Hub, its name, where its text is."""

    id: str
    name: str
    url: str


@dataclass(frozen=True)
class KnownBundle:
    """One published file.

    Attributes:
        name: what people call the model, ``Gemma 4 E4B``.
        repository, file: where it is on the Hub.
        size: bytes of the whole file.
        sha256: of the whole file; None where it was never told.
        drafter_begin, drafter_size: the drafter's section, bytes; None where unknown.
        base_model: Hub id of the model that the drafter drafts for.
        license: Hub id of the licence its weights carry.
    """

    name: str
    repository: str
    file: str
    size: int
    sha256: str | None
    drafter_begin: int | None
    drafter_size: int | None
    base_model: str
    license: str
    note: str | None


def _all() -> list[KnownBundle]:
    return [
        KnownBundle(
            drafter_begin=entry["drafter"]["begin"],
            drafter_size=entry["drafter"]["size"],
            **{key: value for key, value in entry.items() if key != "drafter"},
        )
        for entry in load_mapping("bundles")["bundles"]
    ]


def _identify(size: object, sha256: object, begin: object = None) -> KnownBundle | None:
    for bundle in _all():
        if bundle.size != size or (begin is not None and bundle.drafter_begin not in (None, begin)):
            continue
        # A hash decides where both sides know one; the exact size of a file of gigabytes has to do elsewhere.
        if not (sha256 and bundle.sha256) or sha256 == bundle.sha256:
            return bundle
    return None


def known_bundle(source: Source) -> KnownBundle | None:
    """The published file that ``source`` is, by its size and by its SHA-256 where the source knows it."""
    return _identify(source.size, source.provenance.get("sha256"))


def known_without_drafter(source: Source) -> str | None:
    """What ``source`` is, if it is a published file that holds no drafter; to explain a drafter not found."""
    name = source.name.replace("\\", "/").rpartition("/")[2]
    for entry in load_mapping("bundles")["without_drafter"]:
        if source.size == entry["size"] or fnmatchcase(name, entry["file"]):
            return str(entry["name"])
    return None


def _exactly(extraction: Mapping[str, Any]) -> KnownBundle | None:
    """The published file that an ``extraction.json`` was made from."""
    source = extraction["source"]
    sha256 = (source.get("provenance") or {}).get("sha256")
    return _identify(source["size"], sha256, (source.get("section") or {}).get("begin"))


def bundle_of(extraction: Mapping[str, Any]) -> KnownBundle | None:
    """The published file that an ``extraction.json`` was made from; failing that, one of its name."""
    exact = _exactly(extraction)
    if exact is not None:
        return exact
    known_as = str(extraction.get("known_as") or "").casefold()
    return next((bundle for bundle in _all() if known_as and bundle.name.casefold() in known_as), None)


def base_model_of(extraction: Mapping[str, Any]) -> str | None:
    """Hub id of the base model; for an unknown model the bundle's own repository, if it came from one."""
    bundle = bundle_of(extraction)
    if bundle is not None:
        return bundle.base_model
    for geometry in load_mapping("geometries")["geometries"]:
        if geometry["name"] == extraction.get("known_as"):
            return str(geometry["base_model"])
    repository = (extraction["source"].get("provenance") or {}).get("repository")
    return str(repository) if repository else None


def license_of(extraction: Mapping[str, Any]) -> License | None:
    """Licence of the weights; None unless the bundle is a published file, or comes from the repository of one.

    A drafter of known geometry alone says nothing: a tuned one has it too.
    """
    bundle = _exactly(extraction)
    if bundle is None:
        repository = (extraction["source"].get("provenance") or {}).get("repository")
        bundle = next((known for known in _all() if known.repository == repository), None)
    return License(bundle.license, **load_mapping("bundles")["licenses"][bundle.license]) if bundle else None
