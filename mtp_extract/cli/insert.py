"""``mtp-insert``: from a checkpoint back into a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mtp_extract.cli._run import AsJson, new_app, run_lean
from mtp_extract.cli.terminal import doing, progress, say, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.proof.words import in_words

if TYPE_CHECKING:
    from mtp_extract.insert.plan import InsertionPlan, InsertionResult

app = new_app()

_TYPES = ("int8", "int4", "int2", "float32")


@app.command()
def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[DIR]",
            help="A checkpoint that this program reads; or a .litertlm or .tflite whose drafter is taken. Not with "
            "--base-weights.",
        ),
    ],
    bundle: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Argument(metavar="BUNDLE", help="The .litertlm that they go into; it stays as it is."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Option("-o", "--out", metavar="NEW.litertlm", help="The new bundle."),
    ] = None,
    base_weights: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="CHECKPOINT", help="Put a Gemma 4 base, as transformers writes it, into BUNDLE instead."),
    ] = None,
    types: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--types", metavar="TYPE", help=f"Store every matrix as {', '.join(_TYPES)}."),
    ] = None,
    type_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--type", metavar="ROLE=TYPE", help="Store one so, or all that match: 'layers.*.gate_proj=int8'."),
    ] = None,
    graph_from: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE", help="For a bundle without a drafter: the .litertlm or .tflite whose drafter is added."
        ),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="MODEL",
            help="For a graph with static activations: the base beside which their scales are calibrated anew.",
        ),
    ] = None,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="What the base continues for that; by default the prompts that are shipped."),
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template/--no-chat-template", help="Apply the base's chat template, if it has one.")
    ] = True,
    section: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Index of the drafter's section in BUNDLE; asked for only where there are several."),
    ] = None,
    signature: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="The drafter's signature; asked for only where there are several."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace NEW.litertlm if it is there.")] = False,
    print_json: AsJson = False,
) -> None:
    """Put the weights of a drafter's checkpoint into a LiteRT bundle, whose other sections stay as they are."""
    if (out is None) != dry_run:
        raise typer.BadParameter("name NEW.litertlm with --out, or say --dry-run; one of the two.")
    if base_weights is not None:
        given: dict[str, object] = {"DIR": bundle, "--types": types, "--type": type_, "--graph-from": graph_from}
        given |= {"--section": section, "--signature": signature, "--base": base, "--prompts": prompts}
        if wrong := [name for name, value in given.items() if value is not None and value != []]:
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
    wanted = _wanted(types, type_ or [])

    from mtp_extract.insert.drafter import planned_insertion
    from mtp_extract.io.place import check_place, files_of

    if out is not None:
        inputs = (bundle, source, graph_from, *files_of(base), prompts)
        check_place(out, overwrite=overwrite, inputs=inputs)
    ranges = None
    if base is not None:
        from mtp_extract.validate.calibration import measure_ranges

        ranges = measure_ranges(source, base, prompts, chat_template=chat_template, say=doing)
    with planned_insertion(
        source, bundle, types=wanted, ranges=ranges, graph_from=graph_from, section=section, signature=signature
    ) as plan:
        result = None
        if not print_json:
            _show_plan(plan)
        if out is not None:
            with progress(quiet=print_json) as tick:
                result = plan.write(out, overwrite=overwrite, progress=tick)
    if print_json:
        write_json(_document(plan, result))
    elif result is not None:
        _show_result(result)


def _insert_base(directory: Path, bundle: str, out: Path | None, overwrite: bool, print_json: bool) -> None:
    from mtp_extract.base.insertion import planned_base_insertion
    from mtp_extract.io.place import check_place, files_of

    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(bundle, *files_of(directory)))
    with planned_base_insertion(directory, bundle) as plan:
        result = None
        if not print_json:
            rows = [
                [role, d.storage.type.name, d.how, f"{d.error:.2g}"]
                for role, each in plan.decisions.items()
                for d in each
            ]
            table(rows, ["role", "stored", "what", "error"])
            say(f"The base of {escape(plan.name)}: {size(plan.changed)} in {plan.written} places of {size(plan.size)}")
            for note in plan.notes:
                say(f"Note: {note}")
        if out is not None:
            with progress(quiet=print_json) as tick:
                result = plan.write(out, overwrite=overwrite, progress=tick)
    notes = list(result.notes if result else plan.notes)
    if print_json:
        write_json(
            {
                "bundle": plan.name,
                "out": str(result.path) if result else None,
                "size": plan.size,
                "places_written": plan.written,
                "bytes_written": plan.changed,
                "roles": {
                    role: [{"what": d.how, "stored": d.storage.type.name, "relative_rms_error": d.error} for d in each]
                    for role, each in plan.decisions.items()
                },
                "notes": notes,
            }
        )
    elif result is not None:
        say(f"Wrote {escape(result.path)} ({size(result.size)}), walked again and compared, role by role")
        for note in notes[len(plan.notes) :]:
            say(f"Note: {note}")


def _wanted(types: str | None, each: list[str]) -> dict[str, str]:
    """Pattern of roles → type, the general one first."""
    wanted = {"*": types} if types is not None else {}
    for entry in each:
        role, equals, name = entry.partition("=")
        if not equals:
            raise typer.BadParameter(f"{escape(entry)!r}: expected ROLE=TYPE, such as lm_head=int8.")
        wanted[role] = name
    for name in wanted.values():
        if name not in _TYPES:
            raise typer.BadParameter(f"{escape(name)!r}: expected a type of {', '.join(_TYPES)}.")
    return wanted


def _show_plan(plan: InsertionPlan) -> None:
    rows = []
    for role, (decision,) in plan.decisions.items():
        before, after = decision.before.name, decision.storage.type.name
        rows.append([role, before if before == after else f"{before} → {after}", decision.how, f"{decision.error:.2g}"])
    table(rows, ["role", "stored", "what", "error"])
    where = f"rebuilt, with {plan.rebuilt} roles in a new place" if plan.rebuilt else "in place"
    say(f"{'A drafter added to' if plan.added else 'The drafter of'} {escape(plan.name)}: {where}, {size(plan.size)}")
    for note in plan.notes:
        say(f"Note: {note}")


def _show_result(result: InsertionResult) -> None:
    say(f"Wrote {escape(result.path)} ({size(result.size)}); its drafter was read back and compared")
    assert result.proof is not None
    first, *others = in_words(result.proof.as_json())
    say(f"Proven, its graph and its weights: {first}")
    for line in others:
        say(f"  {line}")
    for note in result.notes:
        say(f"Note: {note}")


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
        "notes": result.notes if result else plan.notes,
        "proof": result.proof.as_json() if result and result.proof else None,
    }


def main() -> None:
    """Entry point."""
    run_lean(app)
