"""Published bundles: names, base models and licences of ``.litertlm`` files, known by SHA-256.

The table is ``mappings/bundles.json``. It only names things: a bundle that is not listed is read the same way. Sizes
and file names are no evidence: a drafter that was tuned and inserted again leaves both as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        sha256: of the whole file; None where it was never published.
        drafter_sha256: of the drafter's section; None where nobody recorded it.
        base_model: Hub id of the model that the drafter drafts for.
        license: Hub id of the licence its weights carry.
    """

    name: str
    repository: str
    file: str
    size: int
    sha256: str | None
    drafter_sha256: str | None
    base_model: str
    license: str
    note: str | None


def _all() -> list[KnownBundle]:
    return [
        KnownBundle(drafter_sha256=entry["drafter"]["sha256"], **{k: v for k, v in entry.items() if k != "drafter"})
        for entry in load_mapping("bundles")["bundles"]
    ]


def known_bundle(source: Source) -> KnownBundle | None:
    """The published file that ``source`` is, by the SHA-256 that the Hub gives for it; None without one."""
    return _identify(source.provenance.get("sha256"), None)


def bundle_of(extraction: Mapping[str, Any]) -> KnownBundle | None:
    """The published file that an ``extraction.json`` was made from, by the SHA-256 of the file or of its section."""
    source = extraction["source"]
    return _identify((source.get("provenance") or {}).get("sha256"), (source.get("section") or {}).get("sha256"))


def _identify(sha256: str | None, section: str | None) -> KnownBundle | None:
    return next(
        (b for b in _all() if (sha256 and sha256 == b.sha256) or (section and section == b.drafter_sha256)), None
    )


def base_model_of(extraction: Mapping[str, Any]) -> str | None:
    """Hub id of the base: by the published bundle, by the geometry, or the repository that the bundle came from."""
    if bundle := bundle_of(extraction):
        return bundle.base_model
    for geometry in load_mapping("geometries")["geometries"]:
        if geometry["name"] == extraction.get("known_as"):
            return str(geometry["base_model"])
    return _repository(extraction)


def license_of(extraction: Mapping[str, Any]) -> License | None:
    """Licence of the weights; None unless the bundle is a published file, or comes from the repository of one.

    A drafter of known geometry alone says nothing: a tuned one has it too.
    """
    repository = _repository(extraction)
    bundle = bundle_of(extraction) or next((b for b in _all() if b.repository == repository), None)
    return License(bundle.license, **load_mapping("bundles")["licenses"][bundle.license]) if bundle else None


def _repository(extraction: Mapping[str, Any]) -> str | None:
    repository = (extraction["source"].get("provenance") or {}).get("repository")
    return str(repository) if repository else None
