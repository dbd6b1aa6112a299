"""Is a directory what its record says it is? Asked of the bundle: everything is derived again, the record included."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mtp_extract.architecture.config import known_drafter
from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint import record as records
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.holdings import holdings_of
from mtp_extract.errors import CheckpointError, escape, few
from mtp_extract.formats import format_named
from mtp_extract.io.threads import run_all, workers
from mtp_extract.pipeline.check import Verification, as_recorded, read_record, verify_against
from mtp_extract.pipeline.directory import Choice, Prepared, Staged, record_of
from mtp_extract.pipeline.extraction import (
    Hashes,
    checkpoint_of,
    prove_checkpoint,
    prove_converted,
    prove_written,
    record_of_drafter,
)
from mtp_extract.pipeline.staging import CARD, RECORD

UNTOLD: Mapping[str, str] = {
    "tool.version": "which release wrote it",
    "source.name": "what the file was called",
    "source.provenance*": "where the file lay",
    "converted_from": "which directories it was made of",
    f"files.{CARD}*": "the card",
    "tuning": "how it was tuned",
    "ordered_head": "how its head was made",
}
"""Places of a record that no bundle decides, with wildcards, and what they say."""

_INHERITED = ("proof.rounded_by",)
"""Places of a proof that came with a directory and speak of that one."""


def verify_against_source(
    directory: str | os.PathLike[str], opened: Opened, beside: Container[str] = ()
) -> Verification:
    """Check ``directory`` against its own record; derive every tensor from ``opened`` again and compare all bits; and
    make the record anew and compare all of it but :data:`UNTOLD`.

    Raises:
        CheckpointError: something differs; the message lists what.
        MtpExtractError: ``opened`` cannot be read.
    """
    window = read_record(Path(directory))["geometry"].get("sliding_window")
    opened.prefetch()
    found = verify_against_drafter(directory, opened.drafter(window if isinstance(window, int) else None), beside)
    opened.source.confirm()
    return found


def verify_against_drafter(
    directory: str | os.PathLike[str], drafter: Shard, beside: Container[str] = ()
) -> Verification:
    """As :func:`verify_against_source`, of a drafter that was found.

    Raises:
        CheckpointError: as there.
    """
    original, name = checkpoint_of(drafter), drafter.opened.source.name
    own = verify_against(directory, original, name, beside)
    made = json.loads(json.dumps(_made_anew(drafter, original, own)))
    left = [*UNTOLD, *(_INHERITED if (own.record["proof"] or {}).get("inherited") else ())]
    if wrong := list(_apart(own.record, made, left)):
        raise CheckpointError(
            f"{escape(own.directory)}: its {RECORD} is not what {escape(name)} gives: {few(wrong, separator='; ')}. "
            "Extract it again, or fetch it again."
        )
    return own


def _apart(recorded: Any, made: Any, left: Sequence[str], place: str = "") -> Iterator[str]:
    """Where a record differs from the one that is made anew."""
    if any(fnmatchcase(place, pattern) for pattern in left):
        return
    if isinstance(recorded, dict) and isinstance(made, dict):
        for key in {**recorded, **made}:
            yield from _apart(recorded.get(key), made.get(key), left, f"{place}.{key}" if place else key)
    elif recorded != made or isinstance(recorded, bool) != isinstance(made, bool):
        yield f"{escape(place)} is {escape(made)}, not {escape(recorded)}"


def _made_anew(drafter: Shard, original: Checkpoint, own: Verification) -> dict[str, Any]:
    """The record of the directory that was verified, as writing it would make it."""
    record = own.record
    hashes = Hashes(drafter, original)
    with ThreadPoolExecutor(workers()) as pool:
        run_all(pool, hashes.jobs())
    entries = [entry for entry in record["tensors"].values() if "part" not in entry]
    rule = next((entry["made_codes"]["rule"] for entry in entries if entry["made_codes"]), None)
    choice = Choice(format_named(record["layout"]), record["dtype"], CODES_FILE in record["files"], quantize=rule)
    converted = bool(record.get("converted_from"))
    prepared = _rounded(choice, original, record) if converted else choice.prepare(_named(original, record))
    weights, *_ = choice.format.plan(prepared.checkpoint, choice.dtype)
    files = {name: dict(found) for name, found in own.found.items()}
    sums = files[weights.name].pop("tensors")
    staged = Staged(own.directory, choice.format.read(own.directory), weights, sums, files)
    if not converted:
        proof = prove_written(drafter, original, prepared, staged.written)
        return record_of_drafter(drafter, prepared, staged, hashes, proof)
    unknown = record["source"]["kind"] == records.CHECKPOINT
    known = known_drafter(original.mtp) if unknown else drafter.known
    evidence = _Evidence(original, hashes, record, unknown)
    return record_of(
        prepared,
        staged,
        source=record["source"] if unknown else hashes.source(),
        known_as=known["name"] if known else None,
        evidence={role: evidence.of(role) for role in prepared.holdings},
        set_aside=[] if unknown else records.set_aside(drafter),
        kv_inputs={} if unknown else records.caches(drafter),
        converted_from=record["converted_from"],
        proof=_proof(drafter, prepared, staged, record),
    )


def _named(original: Checkpoint, record: Mapping[str, Any]) -> Checkpoint:
    return replace(original, provenance=records.provenance(record["source"]))


def _rounded(choice: Choice, original: Checkpoint, record: Mapping[str, Any]) -> Prepared:
    checkpoint = as_recorded(original, record)
    return Prepared(choice, checkpoint, holdings_of(choice.format, checkpoint, choice.dtype))


def _proof(drafter: Shard, prepared: Prepared, staged: Staged, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The proof that ``record`` can have: where it claims none, none."""
    if record["proof"] is None:
        return None
    if record["proof"].get("inherited"):
        # Of the weights as they were before anything was rounded, in whichever layout.
        proof = prove_checkpoint(drafter, replace(checkpoint_of(drafter), config=staged.written.config))
        return {**proof.as_json(), "inherited": True}
    entries = [entry for entry in record["tensors"].values() if "part" not in entry]
    rounded = any(entry["rounded_before"] or entry["made_codes"] for entry in entries)
    return {**prove_converted(drafter, prepared, staged.written, rounded=rounded).as_json(), "inherited": False}


class _Evidence:
    """What a record of a conversion can say of a role: what was said of it, or of another that was the same tensor
    once; or that nothing is known.
    """

    def __init__(self, original: Checkpoint, hashes: Hashes, record: Mapping[str, Any], unknown: bool) -> None:
        self._original, self._hashes, self._unknown = original, hashes, unknown
        self._recorded = {entry["role"]: entry for entry in record["tensors"].values() if "part" not in entry}

    def of(self, role: str) -> dict[str, Any]:
        """By the reason that is recorded."""
        recorded = self._recorded.get(role, {})
        known = [] if self._unknown else [self._hashes.evidence(one) for one in self._alike(role)]
        found = [*known, records.UNKNOWN]
        chosen = next((one for one in found if one["why"] == recorded.get("why")), found[0])
        return {**chosen, "rounded_before": recorded.get("rounded_before", []), "made_codes": None}

    def _alike(self, role: str) -> list[str]:
        """``role``, and those that are the same constant."""
        tensors = self._original.tensors
        origin = tensors[role].origin if role in tensors else None
        return [role, *(name for name, one in tensors.items() if origin is not None and one.origin == origin)]
