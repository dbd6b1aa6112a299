"""What commands print of a drafter: its sizes, its proof, and a checkpoint that was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.cli.terminal import say, say_notes, say_unbroken, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.formats import architecture_in
from mtp_extract.report.card import NAMED, PROVEN, roundings, verdict_word
from mtp_extract.report.serving import next_command

if TYPE_CHECKING:
    from mtp_extract.pipeline.writing import ExtractionResult


def show_written(
    result: ExtractionResult, engine: str | None, head: str, *, verbose: bool = False, print_json: bool
) -> None:
    """What was written, whether it is verified, and the command for ``engine``; ``verbose`` all that is known of it."""
    if print_json:
        made = {"directory": result.directory, "files": result.files, "notes": result.notes}
        write_json(made | {"extraction": result.record})
        return
    record, where = result.record, escape(result.directory)
    kind = architecture_in(record["layout"])
    say(head)
    if verbose:
        say_geometry(kind, record["geometry"], result.parameters)
    numbers = "floats" if record["dtype"] == "codes" else record["dtype"].upper()
    holds = f"{result.integers} weights as integers" if result.integers else numbers
    total = size(sum(result.files.values()))
    say(f"Wrote {where}/ ({record['layout']} format, {holds}, {total}), read back and compared")
    _say_evidence(kind, record, where, verbose=verbose)
    if verbose:
        table([[file, size(length)] for file, length in result.files.items()])
    say_notes(result.notes)
    command = next_command(engine.lower(), record, result.directory) if engine else None
    if command:
        say_unbroken(f"Next: {command}")
    else:
        say(f"{where}/README.md shows how engines load it.")


def _say_evidence(kind: Architecture, record: Mapping[str, Any], where: str, *, verbose: bool) -> None:
    """What is shown of what was written, or of what was converted claimed by its record, which anybody can write."""
    if (proof := record["proof"]) is not None:
        claimed = "extraction.json says that it was verified when it was extracted"
        verdict = claimed if record["converted_from"] else verdict_word(PROVEN)
        before = "before rounding, " if is_rounded(record) else ""
        if verbose:
            say_proof(f"{verdict}: {before}".rstrip(" :,"), proof)
        else:
            claim = "the checkpoint computes what the bundle computes, for every input, in real numbers"
            say(f"{verdict}: {before}{claim}")
    elif record.get("not_proven"):
        say_not_proven(record)
        say(f"With mtp-validate {where} --source FILE it is measured against Google's interpreter.")
    elif kind.is_bundled:
        say(f"{verdict_word(None)}: no record says which file it came from")


def say_not_proven(record: Mapping[str, Any], indent: str = "") -> None:
    """Why a drafter's graph was not proven, and what stands for the proof."""
    when = " when it was extracted" if record["converted_from"] else ""
    say(f"{indent}{verdict_word(NAMED)}{when}: {escape('; '.join(record['not_proven']), longest=2000)}")


def is_rounded(record: Mapping[str, Any]) -> bool:
    """Whether a record says that numbers were rounded, here or before."""
    return bool(roundings(*record["converted_from"], record))


def found_in(section: int | None, found_by: str) -> str:
    """Where it lies and how it was found."""
    where = f"section {section}, " if section is not None else ""
    return f"{where}found by {found_by}" if found_by != "bare model" else "a bare model"


def say_proof(claim: str, proof: Sequence[str]) -> None:
    """What was held against the bundle, in sentences; ``proof`` as in ``extraction.json``."""
    first, *others = proof
    say(f"{claim}: {first}")
    for line in others:
        say(f"  {line}")


def say_geometry(kind: Architecture, geometry: Mapping[str, Any], parameters: int) -> None:
    """A few lines of sizes of a drafter of that ``kind``; its ``geometry`` as in ``extraction.json``."""
    shape, *others = kind.describe(geometry)
    say(f"  {parameters / 1e6:.2f} M parameters, {shape}")
    for line in others:
        say(f"  {line}")
