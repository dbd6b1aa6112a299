"""``mtp-validate``: is a checkpoint the drafter of its file, and does it draft what its base would say?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from mtp_extract.cli._run import AsJson, new_app, run
from mtp_extract.cli.terminal import doing, error, say, say_all, table, write_json
from mtp_extract.errors import MtpExtractError, escape

app = new_app()

# What a control means is said in a sentence.
_LONGEST_TEXT = 1000


def _steps(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or min(steps) < 1:
        raise typer.BadParameter(f"expected whole numbers from 1, such as 1,2,4,8, found {text!r}.")
    return steps


def _trees(asked: Sequence[str]) -> list[str]:
    from mtp_extract.validate.acceptance.drafting import parse_wanted

    try:
        return [text for text in asked if parse_wanted(text)]
    except MtpExtractError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


@app.command()
def command(
    directory: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Argument(metavar="DIR", help="A checkpoint that mtp-extract wrote, or an official assistant."),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="MODEL", help="The base model: a directory, or an id of the Hugging Face Hub."),
    ] = None,
    beside: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="DIR", help="Another drafter of that base, on the same texts; may be repeated."),
    ] = None,
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="The .litertlm it was extracted from: proof that this is its drafter."),
    ] = None,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE", help='JSON {"workload": ["prompt", …]}, or one a line; by default about 100 of ours.'
        ),
    ] = None,
    draft_steps: Annotated[str, typer.Option(metavar="K,…", help="Drafts a round.")] = "1,2,4,8",
    tree: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="TREE",
            help="Drafts that branch, too: 4x2x1, auto:8 (grown by confidence), best:14 (by measured ranks); may be "
            "repeated.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs.")] = "auto",
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens the base adds to a prompt.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Random inputs for parity.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    chat_template: Annotated[
        bool, typer.Option("--chat-template/--no-chat-template", help="Apply the base's chat template, if it has one.")
    ] = True,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", metavar="DIR", help="Write report.html, .md and .json, pair.json and figures there."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older report.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Validate the sample that comes with mtp-extract.")] = False,
    print_json: AsJson = False,
) -> None:
    """Validate a drafter: proof that it is the file's (--source), measurements beside the base (--base).

    Exit status 1 also when a check or a measurement refutes the drafter.
    """
    steps, trees = _steps(draft_steps), _trees(tree or ())
    if (directory is None) != sample:
        raise typer.BadParameter("name a DIR, or --sample; one of the two.")
    if sample and (base or source):
        raise typer.BadParameter("--sample brings its own base and source; leave --base and --source out.")
    if trees and base is None and not sample:
        raise typer.BadParameter("--tree is measured beside a base: give --base MODEL.")
    if not sample and base is None and source is None:
        raise typer.BadParameter("give --base MODEL, --source FILE.litertlm, or both.")

    from mtp_extract.evaluate.extras import require

    require("torch", "safetensors")
    if out is not None:
        require("matplotlib")

    from mtp_extract.io.place import check_place, files_of
    from mtp_extract.report.tables import REPORT_LISTED
    from mtp_extract.validate.report.document import as_json
    from mtp_extract.validate.report.pages import write_report
    from mtp_extract.validate.run import Plan, run_validation, sample_plan

    inputs = (directory, *(beside or ()), source, prompts, *files_of(base))
    if out is not None:
        check_place(out, overwrite=overwrite, inputs=inputs, listed=REPORT_LISTED)
    plan = Plan(
        directory,
        base=base,
        beside=tuple(beside or ()),
        source=source,
        prompts=prompts,
        draft_steps=steps,
        trees=trees,
        device=device,
        new_tokens=new_tokens,
        batch=batch,
        samples=samples,
        seed=seed,
        chat_template=chat_template,
    )
    found = run_validation(sample_plan(plan) if sample else plan, (lambda what: None) if print_json else doing)
    report = as_json(found)
    # Before it is written: what took hours is then seen where a disk is full.
    (write_json if print_json else _show)(report)
    files = write_report(found, out, overwrite=overwrite, inputs=inputs) if out is not None else []
    if files and not print_json:
        say(f"Wrote {escape(out)}/: {', '.join(files)}")
    if found.refuted:
        error("the validation shows that something is wrong; the verdict says what.")
        raise typer.Exit(1)


def _show(report: Mapping[str, Any]) -> None:
    from mtp_extract.report.tables import measurements

    say_all(report["verdict"])
    for part in measurements(report):
        if not part.detail:
            say(part.title)
            table(part.rows, part.columns, longest=_LONGEST_TEXT)
            if part.after:
                say_all(f"  {part.after}")
    for note in report["notes"]:
        say_all(f"Note: {note}")
    if report["parity"] is None:
        say("With --source FILE.litertlm it is compared with the file it came from.")
    if report["agreement"] is None:
        say("With --base MODEL it is run beside the model it drafts for.")


def main() -> None:
    """Entry point."""
    run(app)
