"""Published bundles: names, base models and licences of ``.litertlm`` files, known by SHA-256.

The table is ``mappings/bundles.json``. It only names things: a bundle that is not listed is read the same way. Sizes
and file names are no evidence: a drafter that was tuned and inserted again leaves both as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.data import load_mapping
from mtp_extract.io.source import Source

Entry = Mapping[str, Any]
"""Of the table: what people call the model, repository and file on the Hub, the model it drafts for, and its licence's
id; or of a licence: its id on the Hub, its name, where its text is."""


def _published(sha256: str | None, section: str | None = None) -> Entry | None:
    """The file with this SHA-256, or whose drafter's section has it; None of both is known of no file."""
    for entry in load_mapping("bundles")["bundles"]:
        if (sha256 and sha256 == entry["sha256"]) or (section and section == entry["drafter"]["sha256"]):
            return dict(entry)
    return None


def known_bundle(source: Source) -> Entry | None:
    """The published file that ``source`` is, by the SHA-256 that the Hub gives for it; None without one."""
    return _published(source.provenance.get("sha256"))


def bundle_of(extraction: Mapping[str, Any]) -> Entry | None:
    """The published file that an ``extraction.json`` was made from, by the SHA-256 of the file or of its section."""
    section = extraction["source"].get("section") or {}
    return _published(_provenance(extraction).get("sha256"), section.get("sha256"))


def base_model_of(extraction: Mapping[str, Any]) -> str | None:
    """Hub id of the base: by the published bundle, by the geometry, or the repository that the bundle came from."""
    if bundle := bundle_of(extraction):
        return str(bundle["base_model"])
    for geometry in load_mapping("geometries")["geometries"]:
        if geometry["name"] == extraction.get("known_as"):
            return str(geometry["base_model"])
    return _provenance(extraction).get("repository")


def license_of(extraction: Mapping[str, Any]) -> Entry | None:
    """Licence of the weights; None unless the bundle is a published file, or comes from the repository of one.

    A drafter of known geometry alone says nothing: a tuned one has it too.
    """
    bundles, bundle = load_mapping("bundles"), bundle_of(extraction)
    by_repository = {entry["repository"]: entry["license"] for entry in bundles["bundles"]}
    id_ = bundle["license"] if bundle else by_repository.get(_provenance(extraction).get("repository"))
    return {"id": id_, **bundles["licenses"][id_]} if id_ else None


def _provenance(extraction: Mapping[str, Any]) -> Mapping[str, str]:
    return extraction["source"].get("provenance") or {}
