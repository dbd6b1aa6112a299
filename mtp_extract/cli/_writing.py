"""What the commands that write a checkpoint share: options, and what they say of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from mtp_extract.architecture.roles import EAGLE3, GEMMA4_MTP
from mtp_extract.cli._drafter import say_geometry, say_proof
from mtp_extract.cli.terminal import say, say_notes, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.formats import EVERY, FORMATS, HEADS
from mtp_extract.pipeline.plan import WritingPlan

if TYPE_CHECKING:
    from mtp_extract.pipeline.writing import ExtractionResult

CHOICES = {name: listed for name, listed in FORMATS.items() if not listed.variant}
FORMATS_ABOUT = " ".join(f"{name}: {listed.about}." for name, listed in CHOICES.items())
HEADS_ABOUT = " ".join(f"{name}: {listed.about}." for name, listed in HEADS.items())


def checked_format(plan: WritingPlan, format_: str | None, architecture: str = GEMMA4_MTP) -> str:
    """The format that ``plan`` chooses; refuses, as wrong usage, what that has no room for."""
    try:
        return plan.choose(format_, architecture)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise typer.BadParameter(f"{'--for' if name == 'engine' else f'--{name}'} {rest}") from None


def chosen_by(plan: WritingPlan, format_: str | None, name: str) -> list[str]:
    """What to say of a format that the user did not name."""
    return [] if format_ or not plan.engine else [f"For {plan.engine}: the {name} format"]


def show_written(result: ExtractionResult, print_json: bool, head: Sequence[str]) -> None:
    """All of ``result`` as JSON, or for people: ``head``, geometry, what was written, its proof, files and notes."""
    if print_json:
        write_json(
            {
                "directory": str(result.directory),
                "files": result.files,
                "notes": result.notes,
                "extraction": result.record,
            }
        )
        return
    record = result.record
    say(head[0])
    say_geometry(record["geometry"], result.parameters)
    for line in head[1:]:
        say(line)
    say(f"Wrote {escape(result.directory)}/ ({record['layout']} format, {holds(record)}), read back and compared")
    if EVERY[record["layout"]].architecture != EAGLE3:
        _say_proof(record)
    table([[file, size(length)] for file, length in result.files.items()])
    say_notes(result.notes)
    if record["layout"] == "transformers":
        say(f"Load it: AutoModelForCausalLM.from_pretrained({str(result.directory)!r}). Its README.md shows engines.")


def _say_proof(record: Mapping[str, Any]) -> None:
    proof = record["proof"]
    if proof is None:
        say("Not proven: nothing here says which file it came from")
        return
    by, before = " by the extraction" if proof["inherited"] else "", " before rounding" if is_rounded(record) else ""
    say_proof(f"Proven{by}{before}", proof)


def is_rounded(record: Mapping[str, Any]) -> bool:
    """Whether a record says that numbers were rounded, here or before."""
    return any(step["rounded"] or step["made_codes"] for step in (*record["converted_from"], record))


def holds(record: Mapping[str, Any]) -> str:
    """In a few words, what the weights that a record describes are held as."""
    held, made = record["counts"]["held"], record["made_codes"]
    types = sorted(held.keys() - {"codes", "indices"})
    if "codes" not in held:
        # A format whose numbers are codes may have been given none.
        return " and ".join(types) if record["dtype"] == "codes" else str(record["dtype"]).upper()
    return (
        f"{held['codes']} of {sum(held.values())} weights as integers"
        + (f", {made['matrices']} of them made here" if made else "")
        + (f", the others in {' and '.join(types)}" if types else "")
    )
