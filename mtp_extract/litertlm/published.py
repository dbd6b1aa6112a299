"""Published bundles: names, base models and licences of ``.litertlm`` files, identified by SHA-256.

The table is ``mappings/bundles.json``. A bundle that is not listed is read the same way, but has no name. Size and file
name do not identify a bundle: inserting a tuned drafter changes neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mtp_extract.data import load_mapping
from mtp_extract.errors import SourceError
from mtp_extract.io.source import Source
from mtp_extract.progress import SILENT, Reporter

_SHA256 = re.compile(r"[0-9a-f]{64}")

Entry = Mapping[str, Any]
"""A bundle in the table (name, repository and file on the Hub, base model, id of the licence), or a licence (id on the
Hub, name, where its text is)."""


def _find_entry(sha256: str | None, section: str | None = None) -> Entry | None:
    """Find the bundle by the SHA-256 of the file or of the drafter's section; if both are None, nothing matches."""
    entries: list[Entry] = load_mapping("bundles")["bundles"]
    for entry in entries:
        if (sha256 and sha256 == entry["sha256"]) or (section and section == entry["drafter"]["sha256"]):
            return entry
    return None


def find_published_bundle(source: Source) -> Entry | None:
    """Find the published file ``source`` by the SHA-256 that the Hub states; None if it states none, or is unknown."""
    return _find_entry(find_stated_sha256(source.provenance))


def compare_with_published(source: Source, reporter: Reporter = SILENT) -> dict[str, Any] | None:
    """Hash a local file that has the size of a published one, or a SHA-256 stated by the Hub, and compare the sums.

    Returns:
        The computed ``sha256``; name, repository, base and note of the ``published`` file of that size, if any; and
        whether it ``is_published``, or only has the size, as after an insertion. None, without hashing, if the file is
        not local or there is nothing to compare with.

    Raises:
        SourceError: it is a copy in the Hub's cache whose SHA-256 is not the stated one.
    """
    published = next((entry for entry in load_mapping("bundles")["bundles"] if entry["size"] == source.size), None)
    stated = find_stated_sha256(source.provenance)
    if source.path is None or (published is None and stated is None):
        return None
    computed = source.compute_sha256(reporter)
    if stated not in (None, computed):
        raise SourceError(
            f"{source.name}: expected the SHA-256 {stated}, as the Hub states it, found {computed}. The copy in the "
            "Hub's cache is damaged: delete it, and fetch the file again."
        )
    known = _find_entry(computed) or published
    keys = ("name", "repository", "file", "base_model", "note")
    description = {key: known[key] for key in keys} if known else None
    return {"sha256": computed, "published": description, "is_published": _find_entry(computed) is not None}


def find_stated_sha256(provenance: Mapping[str, str]) -> str | None:
    """Return the SHA-256 that the Hub states as a file's ETag; None for a small file, whose ETag is git's blob id, and
    for other servers, whose ETags may be anything."""
    stated = provenance.get("sha256") or (provenance.get("etag") if "repository" in provenance else None)
    return stated if stated and _SHA256.fullmatch(stated) else None


def find_bundle_of_origin(extraction: Mapping[str, Any]) -> Entry | None:
    """Find the published file behind an ``extraction.json``, by the SHA-256 of the file or of the drafter's section."""
    source = extraction["source"]
    return _find_entry(find_stated_sha256(source.get("provenance") or {}), (source.get("section") or {}).get("sha256"))


def find_base_model(extraction: Mapping[str, Any]) -> str | None:
    """Return the Hub id (or directory) of the base: the one of a tuning or an ordered head, or the published bundle's.

    None if the record does not say it. The shape would not tell: a fine-tuned base has the shape of the published one.
    """
    fitted = extraction.get("tuning") or extraction.get("ordered_head")
    if fitted:
        return str(fitted["base"])
    bundle = find_bundle_of_origin(extraction)
    return str(bundle["base_model"]) if bundle else None


def find_license(extraction: Mapping[str, Any]) -> Entry | None:
    """Return the licence of the weights; None unless the bundle is published, or from the repository of one that is."""
    bundles, bundle = load_mapping("bundles"), find_bundle_of_origin(extraction)
    by_repository = {entry["repository"]: entry["license"] for entry in bundles["bundles"]}
    provenance = extraction["source"].get("provenance") or {}
    id_ = bundle["license"] if bundle else by_repository.get(provenance.get("repository"))
    return {"id": id_, **bundles["licenses"][id_]} if id_ else None
