"""``mtp-insert``: from a checkpoint back into a bundle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_extract.cli._drafter import say_proof
from mtp_extract.cli._options import AsJson
from mtp_extract.cli._planned import given
from mtp_extract.cli._run import new_app, run_lean
from mtp_extract.cli.terminal import doing_unless, progress, progress_of, say, say_notes, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import check_place, files_of
from mtp_extract.options import About, ChatTemplate

if TYPE_CHECKING:
    from mtp_extract.insertion.plan import InsertionPlan
    from mtp_extract.io.source import Progress

_OF_DRAFTER = ("graph_from", "section", "base", "prompts")


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
        About("What the base continues for that; by default about 100 of ours.", metavar="FILE"),
    ] = None,
    chat_template: ChatTemplate = True,
    section: Annotated[
        int | None,
        About("Index of the drafter's section in BUNDLE; asked for only where there are several.", least=0),
    ] = None,
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
        from mtp_extract.insertion.base import planned_base_insertion

        if out is not None:
            check_place(out, overwrite=overwrite, inputs=(source, *files_of(base_weights)))
        _carry_out(partial(planned_base_insertion, base_weights, source), out, overwrite, print_json)
        return
    if bundle is None:
        raise typer.BadParameter("name the BUNDLE that the weights of DIR go into.")
    if Path(bundle).is_dir():
        raise typer.BadParameter(f"{escape(bundle)}: expected a .litertlm. DIR comes first, then the BUNDLE.")
    if base is None and prompts is not None:
        raise typer.BadParameter("--prompts are for a base to continue: name it with --base.")
    source = checkpoint_here(source, or_bundle=True)
    if base is not None and not Path(source).is_dir():
        raise typer.BadParameter("--base runs the checkpoint of a directory, and DIR is none. Extract it first.")

    from mtp_extract.insertion.drafter import planned_insertion

    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(bundle, source, graph_from, *files_of(base), prompts))
    ranges = None
    if base is not None:
        from mtp_extract.validate.calibration import measure_ranges

        say_step = doing_unless(print_json)
        with progress_of("batch", print_json) as show:
            ranges = measure_ranges(source, base, prompts, chat_template=chat_template, say=say_step, show=show)
    planned = planned_insertion(source, bundle, ranges=ranges, graph_from=graph_from, section=section)
    _carry_out(lambda progress: planned, out, overwrite, print_json)


def _carry_out(
    planned: Callable[[Progress], AbstractContextManager[InsertionPlan]],
    out: Path | None,
    overwrite: bool,
    print_json: bool,
) -> None:
    """Show what is planned and write it to ``out``; None is a dry run."""
    result = None
    with ExitStack() as stack:
        with progress(quiet=print_json) as tick:
            plan = stack.enter_context(planned(tick))
        if not print_json:
            _show_plan(plan)
        if out is not None:
            with progress(quiet=print_json) as tick:
                result = plan.write(out, overwrite=overwrite, progress=tick)
    if print_json:
        write_json(plan.as_json(result))
    elif result is not None:
        base, drafter = ", read again and compared, role by role", "; its drafter was read back and compared"
        say(f"Wrote {escape(result.path)} ({size(result.size)}){base if plan.of_base else drafter}")
        if result.proof is not None:
            say_proof("Proven, its graph and its weights", result.proof.as_json())
        say_notes(result.notes[len(plan.notes) :])


def _show_plan(plan: InsertionPlan) -> None:
    every = [(role, encoding) for role, own in plan.encodings.items() for encoding in own]
    changed = [(role, each) for role, each in every if each.how != "kept"]
    where = f"rebuilt, with {plan.rebuilt} roles in a new place" if plan.rebuilt else "in place"
    what = "The base of" if plan.of_base else "A drafter added to" if plan.added else "The drafter of"
    say(f"{what} {escape(plan.name)}, {where}: {len(changed)} of {len(every)} weights change, {size(plan.size)}")
    if changed:
        say("How far what will be stored is from the checkpoint (relative RMS error):")
        rows = [[role, each.storage.type.name, each.how, f"{each.error:.2g}"] for role, each in changed]
        table(rows, ["role", "stored", "what", "error"])
    say_notes(plan.notes)


_EXAMPLES = {
    "mtp-insert tuned gemma-4-E4B-it.litertlm -o tuned.litertlm": "The bundle, with the drafter in tuned/.",
    "mtp-insert tuned gemma-4-E4B-it.litertlm --dry-run": "What would become of each weight, and its error.",
}

app = new_app(command, _EXAMPLES)
main = partial(run_lean, app)
