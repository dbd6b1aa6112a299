"""``mtp-doctor``: why a server rejects drafts; or whether a file holds a drafter at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from mtp_extract.cli._command import AsJson, new_app, run
from mtp_extract.cli.terminal import doing_unless, say_all, say_report, write_json
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.errors import escape


def command(plan: DoctorPlan, print_json: AsJson = False) -> None:
    """Find out why a server rejects drafts: whether the pair fits, what is expected, what is served, which fault it is.

    Of a .litertlm it says in one line whether it holds a drafter, which, and for which base. The exit status is 1 if it
    holds none, or if drafter and base do not fit.
    """
    from mtp_extract.io.opening import checkpoint_here, is_checkpoint

    path = Path(checkpoint_here(plan.place, or_bundle=True))
    if not is_checkpoint(path):
        for_a_pair = {"--base": plan.base, "--server": plan.server, "--prompts": plan.prompts}
        if wrong := [flag for flag, value in for_a_pair.items() if value is not None]:
            what = "is no drafter's directory. Extract one from a bundle first."
            raise typer.BadParameter(f"{', '.join(wrong)}: {escape(plan.place)} {what}")
        _file(plan.place, print_json)
        return
    if plan.base is None:
        raise typer.BadParameter(f"{escape(plan.place)}: name the base that it drafts for, with --base MODEL.")
    from mtp_extract.evaluation.extras import require

    require("torch", "transformers")
    from mtp_extract.doctor.run import diagnose
    from mtp_extract.doctor.verdict import tables
    from mtp_extract.report.page import plain_json

    found = diagnose(plan, path, doing_unless(print_json))
    if print_json:
        write_json(plain_json(found))
    else:
        say_report(plain_json(found), tables(found))
    if found.outcome == "does not fit":
        raise typer.Exit(1)


def _file(source: str, print_json: bool) -> None:
    """The first line of ``mtp-inspect``, and an exit status."""
    from mtp_extract.bundle import open_bundle
    from mtp_extract.cli.inspect import headline
    from mtp_extract.pipeline.inspection import inspect

    with open_bundle(source) as opened:
        found = inspect(opened)
    if print_json:
        write_json(found.report)
    else:
        say_all(headline(found.report))
    if found.problem is not None:
        raise found.problem
    if found.report["drafter"] is None:
        raise typer.Exit(1)


_EXAMPLES = {
    "mtp-doctor drafter --base google/gemma-4-E4B-it --server http://localhost:8000": "Compares expected and served.",
    "mtp-doctor gemma-4-E4B-it.litertlm": "Says whether it holds a drafter, and for which base.",
}

app = new_app(command, _EXAMPLES)
main = partial(run, app)
