"""Print a drafter's sizes and proof, and a checkpoint that was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.cli.terminal import format_size, say, say_notes, say_table, say_unbroken, write_json
from mtp_extract.errors import escape, format_count
from mtp_extract.formats import find_format_architecture
from mtp_extract.report.card import NAMED, PROVEN, describe_verdict, list_roundings
from mtp_extract.report.serving import format_next_command

if TYPE_CHECKING:
    from mtp_extract.pipeline.writing import ExtractionResult


def show_written(
    result: ExtractionResult, engine: str | None, head: str, *, verbose: bool = False, print_json: bool
) -> None:
    """Print what was written, whether it is verified, and the next command for ``engine``.

    Args:
        engine: as the user named it; None names the README in place of a command.
        head: the first line.
        verbose: print geometry, proof and files too.
        print_json: print everything as JSON instead.
    """
    if print_json:
        written = {"directory": result.directory, "files": result.files, "notes": result.notes}
        write_json(written | {"extraction": result.record})
        return
    record = result.record
    directory = escape(result.directory)
    kind = find_format_architecture(record["layout"])
    say(head)
    if verbose:
        say_geometry(kind, record["geometry"], result.parameters)
    numbers = "floats" if record["dtype"] == "codes" else record["dtype"].upper()
    holds = f"{format_count(result.integers, 'weight')} as integers" if result.integers else numbers
    total = format_size(sum(result.files.values()))
    say(f"Wrote {directory}/ ({record['layout']} format, {holds}, {total}), read back and compared")
    _say_evidence(kind, record, directory, verbose=verbose)
    if verbose:
        say_table([[file, format_size(length)] for file, length in result.files.items()])
    say_notes(result.notes)
    command = format_next_command(engine.lower(), record, result.directory) if engine else None
    if command:
        say_unbroken(f"Next: {command}")
    else:
        say(f"{directory}/README.md shows how engines load it.")


def _say_evidence(kind: Architecture, record: Mapping[str, Any], directory: str, *, verbose: bool) -> None:
    """Print the verdict; for a converted checkpoint only what its record claims, since anybody can write a record."""
    if (proof := record["proof"]) is not None:
        claimed = "extraction.json says that it was verified when it was extracted"
        verdict = claimed if record["converted_from"] else describe_verdict(PROVEN)
        before = "before rounding, " if is_rounded(record) else ""
        if verbose:
            say_proof(f"{verdict}: {before}".rstrip(" :,"), proof)
        else:
            claim = "the checkpoint computes what the bundle computes, for every input, in real numbers"
            say(f"{verdict}: {before}{claim}")
    elif record.get("not_proven"):
        say_not_proven(record)
        say(f"With mtp-validate {directory} --source FILE it is measured against Google's interpreter.")
    elif kind.is_bundled:
        say(f"{describe_verdict(None)}: no record says which file it came from")


def say_not_proven(record: Mapping[str, Any], indent: str = "") -> None:
    """Print why a drafter's graph was not proven, and what stands in place of the proof."""
    when = " when it was extracted" if record["converted_from"] else ""
    say(f"{indent}{describe_verdict(NAMED)}{when}: {escape('; '.join(record['not_proven']), longest=2000)}")


def is_rounded(record: Mapping[str, Any]) -> bool:
    """Return whether a record says that numbers were rounded, by this command or an earlier one."""
    return bool(list_roundings(*record["converted_from"], record))


def describe_place(section: int | None, found_by: str) -> str:
    """Describe where the drafter lies, and how it was found."""
    prefix = f"section {section}, " if section is not None else ""
    return f"{prefix}found by {found_by}" if found_by != "bare model" else "a bare model"


def say_proof(claim: str, proof: Sequence[str]) -> None:
    """Print the sentences of a ``proof``, as ``extraction.json`` has them, after the ``claim``."""
    first, *others = proof
    say(f"{claim}: {first}")
    for line in others:
        say(f"  {line}")


def say_geometry(kind: Architecture, geometry: Mapping[str, Any], parameters: int) -> None:
    """Print the sizes of a drafter of that ``kind``, in a few lines; ``geometry`` as in ``extraction.json``."""
    shape, *others = kind.describe(geometry)
    say(f"  {parameters / 1e6:.2f} M parameters, {shape}")
    for line in others:
        say(f"  {line}")
