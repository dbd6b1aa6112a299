"""Published bundles: names, base models and licences of ``.litertlm`` files, known by SHA-256.

The table is ``mappings/bundles.json``. It only names things: a bundle that is not listed is read the same way. Sizes
and file names are no evidence: a drafter that was tuned and inserted again leaves both as they were.
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
"""Of the table: what people call the model, repository and file on the Hub, the model it drafts for, and its licence's
id; or of a licence: its id on the Hub, its name, where its text is."""


def _find_entry(sha256: str | None, section: str | None = None) -> Entry | None:
    """The file with this SHA-256, or whose drafter's section has it; None of both is known of no file."""
    entries: list[Entry] = load_mapping("bundles")["bundles"]
    for entry in entries:
        if (sha256 and sha256 == entry["sha256"]) or (section and section == entry["drafter"]["sha256"]):
            return entry
    return None


def known_bundle(source: Source) -> Entry | None:
    """The published file that ``source`` is, by the SHA-256 that the Hub gives for it; None without one."""
    return _find_entry(find_stated_sha256(source.provenance))


def compare_with_published(source: Source, reporter: Reporter = SILENT) -> dict[str, Any] | None:
    """Hash a local file that has the size of a published one, or whose SHA-256 the Hub states, and compare the sums.

    Returns:
        The computed ``sha256``; name, repository, base and note of the ``published`` file of that size, if there is
        one; and whether it ``is_published``. Inserting a drafter leaves the size as it was, and changes the sum. None
        where there is nothing to compare with, or the file is not here: nothing is hashed then.

    Raises:
        SourceError: it is a copy in the Hub's cache, and not what the Hub states.
    """
    published = next((entry for entry in load_mapping("bundles")["bundles"] if entry["size"] == source.size), None)
    stated = find_stated_sha256(source.provenance)
    if source.path is None or (published is None and stated is None):
        return None
    computed = source.sha256(reporter)
    if stated not in (None, computed):
        raise SourceError(
            f"{source.name}: expected the SHA-256 {stated}, as the Hub states it, found {computed}. The copy in the "
            "Hub's cache is damaged: delete it, and fetch the file again."
        )
    known = _find_entry(computed) or published
    stated_keys = ("name", "repository", "file", "base_model", "note")
    named = {key: known[key] for key in stated_keys} if known else None
    return {"sha256": computed, "published": named, "is_published": _find_entry(computed) is not None}


def find_stated_sha256(provenance: Mapping[str, str]) -> str | None:
    """The SHA-256 that the Hub states for a file, as its ETag; None for a small file, which has git's blob id.

    Of another server an ETag is any text, and says nothing.
    """
    stated = provenance.get("sha256") or (provenance.get("etag") if "repository" in provenance else None)
    return stated if stated and _SHA256.fullmatch(stated) else None


def bundle_of(extraction: Mapping[str, Any]) -> Entry | None:
    """The published file that an ``extraction.json`` was made from, by the SHA-256 of the file or of its section."""
    source = extraction["source"]
    return _find_entry(find_stated_sha256(source.get("provenance") or {}), (source.get("section") or {}).get("sha256"))


def base_model_of(extraction: Mapping[str, Any]) -> str | None:
    """Hub id of the base: what a training or an ordered head was made beside, or the published bundle's.

    A shape names no base: a fine-tuned base and its drafter have the shape of the published ones. None where nothing
    says it; of what was fitted beside a directory, the directory's name.
    """
    fitted = extraction.get("tuning") or extraction.get("ordered_head")
    if fitted:
        return str(fitted["base"])
    bundle = bundle_of(extraction)
    return str(bundle["base_model"]) if bundle else None


def license_of(extraction: Mapping[str, Any]) -> Entry | None:
    """Licence of the weights; None unless the bundle is a published file, or comes from the repository of one.

    A drafter of known geometry alone says nothing: a tuned one has it too.
    """
    bundles, bundle = load_mapping("bundles"), bundle_of(extraction)
    by_repository = {entry["repository"]: entry["license"] for entry in bundles["bundles"]}
    provenance = extraction["source"].get("provenance") or {}
    id_ = bundle["license"] if bundle else by_repository.get(provenance.get("repository"))
    return {"id": id_, **bundles["licenses"][id_]} if id_ else None
