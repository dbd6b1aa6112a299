"""``mtp-insert``: put a checkpoint into a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import AsJson
from mtp_extract.cli._written import say_proof
from mtp_extract.cli.terminal import TerminalReporter, format_size, say, say_notes, say_table, write_json
from mtp_extract.errors import escape

if TYPE_CHECKING:
    from mtp_extract.insertion.encoding import Encoding
    from mtp_extract.insertion.plan import InsertionPlan, InsertionResult


def insert_command(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A drafter's checkpoint, or a .litertlm or .tflite whose drafter is taken; or a Gemma 4 base, as "
            "transformers writes it.",
        ),
    ],
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="The .litertlm that they go into; the file itself stays as it is.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="NEW.litertlm", help="The new bundle.")] = None,
    graph_from: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The .litertlm or .tflite whose drafter is added to a bundle without one."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For static activations: the base to calibrate a drafter's with again; or, if a base is put in, the "
            "old one, to measure what their scales clip.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would change; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace NEW.litertlm if it is there.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write NEW.litertlm even if a base loses over a tenth of a weight.")
    ] = False,
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Put the weights of a drafter, or of a base, into a LiteRT bundle, whose other sections stay as they are."""
    if (out is None) != dry_run:
        raise typer.BadParameter("name NEW.litertlm with --out, or say --dry-run; one of the two.")

    from mtp_extract.api import insert
    from mtp_extract.insertion.plan import InsertionResult

    with TerminalReporter(quiet=print_json) as reporter:
        inserted = insert(
            source,
            bundle,
            out,
            dry_run=dry_run,
            graph_from=graph_from,
            base=base,
            overwrite=overwrite,
            force=force,
            reporter=reporter,
        )
    result = inserted if isinstance(inserted, InsertionResult) else None
    plan = inserted.plan if isinstance(inserted, InsertionResult) else inserted
    if print_json:
        write_json(plan.as_json(result))
    else:
        _show(plan, result)
    if result is None and not force and plan.refusal is not None:
        raise plan.refusal


def _describe_change(plan: InsertionPlan, changed: Sequence[Encoding], stored: int) -> str:
    if not plan.of_base:
        return f"{len(changed)} of {stored} weights change"
    # A role may be stored several times, as a table for each layer, or not at all; mtp-inspect counts roles.
    roles = len({encoding.slot.role for encoding in changed})
    return f"{roles} of {len(plan.encodings)} roles change ({len(changed)} of {stored} stored weights)"


def _show(plan: InsertionPlan, result: InsertionResult | None) -> None:
    encodings = [encoding for of_role in plan.encodings.values() for encoding in of_role]
    changed = [encoding for encoding in encodings if encoding.how != "kept"]
    subject = "The base of" if plan.of_base else "A drafter added to" if plan.added else "The drafter of"
    change = _describe_change(plan, changed, len(encodings))
    say(f"{subject} {escape(plan.source.name)}: {change}, {format_size(plan.source.size)}")
    if changed:
        say("What is stored, and how far it is from the checkpoint (relative RMS error):")
        rows = [
            [encoding.slot.label, encoding.storage.type.name, encoding.how, f"{encoding.error:.2g}"]
            for encoding in changed
        ]
        say_table(rows, ["role", "stored", "what", "error"])
    if plan.losses.roles:
        say(plan.losses.description)
    say_notes(plan.notes)
    if result is None:
        say("Nothing was written.")
    else:
        _show_result(plan, result)


def _show_result(plan: InsertionPlan, result: InsertionResult) -> None:
    checked = "read again and compared, role by role" if plan.of_base else "its drafter was read back and compared"
    say(f"Wrote {escape(result.path)} ({format_size(result.size)}), {checked}")
    if result.proof is not None:
        from mtp_extract.proof.proof import describe_proof
        from mtp_extract.report.card import PROVEN, describe_verdict

        say_proof(describe_verdict(PROVEN), describe_proof(result.proof))
    say_notes(result.notes[len(plan.notes) :])


_EXAMPLES = {
    "mtp-insert tuned gemma-4-E4B-it.litertlm -o tuned.litertlm": "Writes the bundle with the drafter in tuned/.",
    "mtp-insert tuned gemma-4-E4B-it.litertlm --dry-run": "Lists the weights that would change, and their errors.",
}

app, main = make_command(insert_command, _EXAMPLES, is_short=True)
