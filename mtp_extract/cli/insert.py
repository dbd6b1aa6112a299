"""``mtp-insert``: from a checkpoint back into a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_extract.cli._drafter import say_proof
from mtp_extract.cli._planned import given
from mtp_extract.cli._run import new_app, run_lean
from mtp_extract.cli.terminal import doing, progress, say, say_notes, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.options import About, AsJson, ChatTemplate, Signature

if TYPE_CHECKING:
    from mtp_extract.insert.plan import InsertionPlan, InsertionResult

_TYPES = ("int8", "int4", "int2", "float32")
_OF_DRAFTER = ("types", "each", "graph_from", "section", "signature", "base", "prompts")


def command(
    *,
    context: typer.Context,
    source: Annotated[
        str,
        About(
            "A checkpoint that this program reads; or a .litertlm or .tflite whose drafter is taken. Not with "
            "--base-weights.",
            metavar="[DIR]",
        ),
    ],
    bundle: Annotated[str | None, About("The .litertlm that they go into; it stays as it is.", metavar="BUNDLE")],
    out: Annotated[Path | None, About("The new bundle.", names=("-o", "--out"), metavar="NEW.litertlm")] = None,
    base_weights: Annotated[
        Path | None,
        About("Put a Gemma 4 base, as transformers writes it, into BUNDLE instead.", metavar="CHECKPOINT"),
    ] = None,
    types: Annotated[
        str | None, About(f"Store every matrix as {', '.join(_TYPES)}.", metavar="TYPE", choices=_TYPES)
    ] = None,
    each: Annotated[
        Sequence[str],
        About("Store one so, or all that match: 'layers.*.gate_proj=int8'.", names=("--type",), metavar="ROLE=TYPE"),
    ] = (),
    graph_from: Annotated[
        str | None,
        About("For a bundle without a drafter: the .litertlm or .tflite whose drafter is added.", metavar="FILE"),
    ] = None,
    base: Annotated[
        str | None,
        About(
            "For a graph with static activations: the base beside which their scales are calibrated anew.",
            metavar="MODEL",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        About("What the base continues for that; by default the prompts that are shipped.", metavar="FILE"),
    ] = None,
    chat_template: ChatTemplate = True,
    section: Annotated[
        int | None,
        About("Index of the drafter's section in BUNDLE; asked for only where there are several.", least=0),
    ] = None,
    signature: Signature = None,
    dry_run: Annotated[bool, About("Say what would be done; write nothing.")] = False,
    overwrite: Annotated[bool, About("Replace NEW.litertlm if it is there.")] = False,
    print_json: AsJson = False,
) -> None:
    """Put the weights of a drafter's checkpoint into a LiteRT bundle, whose other sections stay as they are."""
    if (out is None) != dry_run:
        raise typer.BadParameter("name NEW.litertlm with --out, or say --dry-run; one of the two.")
    if base_weights is not None:
        wrong = ["DIR"] if bundle is not None else []
        if wrong := wrong + given(context, *_OF_DRAFTER):
            raise typer.BadParameter(
                f"{', '.join(wrong)}: for a drafter, and --base-weights puts in a base. Leave it out."
            )
        _insert_base(base_weights, source, out, overwrite, print_json)
        return
    if bundle is None:
        raise typer.BadParameter("name the BUNDLE that the weights of DIR go into.")
    if base is None and prompts is not None:
        raise typer.BadParameter("--prompts are for a base to continue: name it with --base.")
    if base is not None and not Path(source).is_dir():
        raise typer.BadParameter("--base runs the checkpoint of a directory, and DIR is none. Extract it first.")
    wanted = {**({"*": types} if types else {}), **dict(map(_role_and_type, each))}

    from mtp_extract.insert.drafter import planned_insertion
    from mtp_extract.io.place import check_place, files_of

    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(bundle, source, graph_from, *files_of(base), prompts))
    ranges = None
    if base is not None:
        from mtp_extract.validate.calibration import measure_ranges

        ranges = measure_ranges(source, base, prompts, chat_template=chat_template, say=doing)
    with planned_insertion(
        source, bundle, types=wanted, ranges=ranges, graph_from=graph_from, section=section, signature=signature
    ) as plan:
        if not print_json:
            where = f"rebuilt, with {plan.rebuilt} roles in a new place" if plan.rebuilt else "in place"
            what = "A drafter added to" if plan.added else "The drafter of"
            _show_plan(plan, f"{what} {escape(plan.name)}: {where}, {size(plan.size)}")
        result = _write(plan, out, overwrite, print_json)
    if print_json:
        write_json(_document(plan, result))
    elif result is not None:
        say(f"Wrote {escape(result.path)} ({size(result.size)}); its drafter was read back and compared")
        assert result.proof is not None
        say_proof("Proven, its graph and its weights", result.proof.as_json())
        say_notes(result.notes[len(plan.notes) :])


def _insert_base(directory: Path, bundle: str, out: Path | None, overwrite: bool, print_json: bool) -> None:
    from mtp_extract.base.insertion import planned_base_insertion
    from mtp_extract.io.place import check_place, files_of

    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(bundle, *files_of(directory)))
    with planned_base_insertion(directory, bundle) as plan:
        if not print_json:
            _show_plan(
                plan,
                f"The base of {escape(plan.name)}: {size(plan.changed)} in {plan.written} places of {size(plan.size)}",
            )
        result = _write(plan, out, overwrite, print_json)
    if print_json:
        write_json(_base_document(plan, result))
    elif result is not None:
        say(f"Wrote {escape(result.path)} ({size(result.size)}), walked again and compared, role by role")
        say_notes(result.notes[len(plan.notes) :])


def _role_and_type(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{escape(text)!r}: expected ROLE=TYPE, such as lm_head=int8.")
    if name not in _TYPES:
        raise typer.BadParameter(f"{escape(name)!r}: expected a type of {', '.join(_TYPES)}.")
    return role, name


def _write(plan: InsertionPlan, out: Path | None, overwrite: bool, quiet: bool) -> InsertionResult | None:
    """What ``plan`` writes; None for a dry run."""
    if out is None:
        return None
    with progress(quiet=quiet) as tick:
        return plan.write(out, overwrite=overwrite, progress=tick)


def _show_plan(plan: InsertionPlan, summary: str) -> None:
    rows = []
    for role, decisions in plan.decisions.items():
        for decision in decisions:
            before, after = decision.before.name, decision.storage.type.name
            types = before if before == after else f"{before} → {after}"
            rows.append([role, types, decision.how, f"{decision.error:.2g}"])
    table(rows, ["role", "stored", "what", "error"])
    say(summary)
    say_notes(plan.notes)


def _base_document(plan: InsertionPlan, result: InsertionResult | None) -> dict[str, Any]:
    return {
        "bundle": plan.name,
        "out": str(result.path) if result else None,
        "size": plan.size,
        "places_written": plan.written,
        "bytes_written": plan.changed,
        "roles": {
            role: [{"what": d.how, "stored": d.storage.type.name, "relative_rms_error": d.error} for d in each]
            for role, each in plan.decisions.items()
        },
        "notes": (result or plan).notes,
    }


def _document(plan: InsertionPlan, result: InsertionResult | None) -> dict[str, Any]:
    return {
        "bundle": plan.name,
        "out": str(result.path) if result else None,
        "size": plan.size,
        "added": plan.added,
        "rebuilt_roles": plan.rebuilt,
        "roles": {
            role: {
                "what": d.how,
                "stored_before": d.before.name,
                "stored": d.storage.type.name,
                "relative_rms_error": d.error,
            }
            for role, (d,) in plan.decisions.items()
        },
        "notes": (result or plan).notes,
        "proof": result.proof.as_json() if result and result.proof else None,
    }


app = new_app(command)
main = partial(run_lean, app)
