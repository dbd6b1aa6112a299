"""``mtp-tune``: a drafter, fitted to its base."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_extract.cli._options import AsJson
from mtp_extract.cli._planned import given
from mtp_extract.cli._run import new_app, run
from mtp_extract.cli.terminal import (
    doing,
    doing_unless,
    error,
    progress_lines,
    say,
    say_notes,
    table,
    write_json,
)
from mtp_extract.errors import escape
from mtp_extract.options import About
from mtp_extract.tune.head import HeadPlan, run_ordered_head
from mtp_extract.tune.run import TuningPlan, default_directory, run_tuning
from mtp_extract.tune.setting import Setting

if TYPE_CHECKING:
    from mtp_extract.speculate.intervals import Interval
    from mtp_extract.tune.outcome import Outcome
    from mtp_extract.tune.ruined import TextChange
    from mtp_extract.tune.status import Status
    from mtp_extract.tune.verdict import Comparison, Comparisons

_OF_MODE = ("mode", "objective", "anchors", "learning_rate")
_OF_HEAD = ("centroids", "top_k", "states")
_WORST = 3  # texts that are shown by name
_WIDEST = 30  # characters of a name in a table: so that lines stay within 100


def command(
    *,
    context: typer.Context,
    setting: Annotated[dict[str, Any], Setting],
    new: Annotated[
        str | None,
        About("Make a new head for the base, and train every weight of it; DIR is left out.", choices=("eagle3",)),
    ] = None,
    out: Annotated[
        Path | None,
        About(
            "Where to write; by default DIR's name + -tuned, of a new head MODEL's + -eagle3.",
            names=("-o", "--out"),
            metavar="DIR",
        ),
    ] = None,
    work: Annotated[
        Path | None,
        About("Text, state and log, to go on from; by default the result's name + .work.", metavar="DIR"),
    ] = None,
    plan: Annotated[dict[str, Any], TuningPlan],
    head: Annotated[
        str | None,
        About(
            "Instead of a mode: ordered makes a head that looks into the nearest clusters of tokens alone. All other "
            "weights stay.",
            choices=("ordered",),
        ),
    ] = None,
    head_plan: Annotated[dict[str, Any], HeadPlan],
    print_json: AsJson = False,
) -> None:
    """Tune a drafter to the base that it is served with, on what that base writes; or train a new one.

    Written is only what takes fewer rounds on held-out text, at 95 %, and is not seen to lose: where text is new to
    it, on a single text or a workload, or served at another temperature. (An ordered head: what drafts as the dense one
    does.) What so few texts cannot show is said. Else nothing is written, and the exit status is 1. Ctrl-C ends the
    training and keeps the best so far if it may be kept; once more, and nothing is. The same command goes on where it
    stopped.
    """
    directory, base = setting["directory"], setting["base"]
    if (directory is None) != (new is not None):
        raise typer.BadParameter("name a DIR, or a kind of head with --new; one of the two.")
    if new is not None and (head is not None or given(context, "mode")):
        raise typer.BadParameter("--new trains all of a head of its own kind; leave --head and --mode out.")
    if new is None and (wrong := given(context, "draft_vocab")):
        raise typer.BadParameter(f"{wrong[0]} is of a new head; a head in a DIR keeps its own. Leave it out.")
    if head is not None and (wrong := given(context, *_OF_MODE)):
        raise typer.BadParameter(f"{wrong[0]} trains no head; leave it or --head out.")
    if head is None and (wrong := given(context, *_OF_HEAD)):
        raise typer.BadParameter(f"{wrong[0]} is of an ordered head; add --head ordered.")
    target = out or (default_directory(directory) if directory else Path(f"{Path(base).resolve().name}-eagle3"))
    where = Setting(**setting, work=work or target.with_name(target.name + ".work"))
    # As torchrun and accelerate number the processes that they start: the first speaks for all.
    first = os.environ.get("RANK", "0") == "0"
    # JSON goes to stdout: whoever sits at a terminal sees how far it is.
    quiet = print_json and not sys.stderr.isatty()
    if head is not None:
        if plan["steps"] is not None:
            head_plan["steps"] = plan["steps"]
        with _progress(quiet) as tell:
            made = run_ordered_head(HeadPlan(where, target, **head_plan), doing_unless(quiet), tell)
        if print_json:
            write_json({"directory": made.directory, "ordered_head": made.record, "notes": made.notes})
        else:
            _show(made, _head_made(made), ("dense", "ordered"))
        _require_written(made, target)
        return
    with _progress(quiet or not first) as tell, _asked_to_stop(tell_so=first) as stop:
        tuned = run_tuning(TuningPlan(where, target, **plan), doing_unless(quiet), tell, stop)
    if first:
        if print_json:
            write_json({"directory": tuned.directory, "tuning": tuned.record, "notes": tuned.notes})
        else:
            _show(tuned, [_trained(tuned)], ("before", "after"), where.work)
    _require_written(tuned, target, first)


def _require_written(made: Outcome, target: Path, first: bool = True) -> None:
    if made.directory is None:
        if first:
            why = "; ".join(made.refused)
            error(f"{escape(target)}: nothing was written: {why}. Tune on more or other text, or write it (--force).")
        raise typer.Exit(1)


@contextmanager
def _asked_to_stop(*, tell_so: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed since this was first asked; twice, it is as everywhere."""
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        if tell_so:
            doing("measuring the best so far; Ctrl-C again to keep nothing")

    def stop() -> bool:
        # A job in the background ignores it, and goes on doing so.
        if before is not signal.SIG_IGN and not asked.is_set():
            signal.signal(signal.SIGINT, ask)
        return asked.is_set()

    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Status], None]]:
    """How far the text and the training are."""
    with progress_lines(quiet) as show:

        def tell(status: Status) -> None:
            line = f"{status.kind} {status.done} of {status.total}"
            if status.loss is not None:
                line += (
                    f", loss {status.loss:.3f}, teacher-forced tokens per round {status.watched:.3f} on watched texts"
                )
            show(status.done, status.total, line)

        yield tell


def _trained(tuned: Outcome) -> str:
    record = tuned.record
    return (
        f"Trained {record['numbers']} numbers on {len(tuned.corpus.trained)} texts, {record['steps_done']} steps, best "
        f"after {record['best_step']}{'; interrupted' if record['interrupted'] else ''}"
    )


def _head_made(made: Outcome) -> list[str]:
    record = made.record

    def kept(found: Mapping[str, Any]) -> str:
        bounds = " ({:.2%} to {:.2%})".format(*found["interval"]) if found["interval"] else ""
        return f"{found['share']:.2%}{bounds}"

    reached = record["reached"]
    return [
        f"{record['centroids']} clusters of {record['tokens_a_cluster']} tokens, learned from {record['states']} "
        f"states; {record['top_k']} are looked into: {record['rows_read']} rows instead of {record['rows_dense']}",
        "Of the dense head's choices on held-out text it keeps, by kind of text: "
        + ", ".join(f"{name} {kept(found)}" for name, found in record["kinds"].items()),
        f"The texts that it was made of use {record['tokens_used']} of {record['rows_dense']} tokens, with random ones "
        f"{record['tokens_seen']}; by states made for tokens it reaches {reached['share']:.1%} of {reached['tokens']}",
    ]


def _show(made: Outcome, lines: Sequence[str], when: tuple[str, str], work: Path | None = None) -> None:
    """``lines`` on what was made, the comparison of the drafts ``when`` before and after, and where all of it lies."""
    for line in lines:
        say(line)
    _show_comparisons(made.comparisons, when)
    say_notes(made.notes)
    if work is not None:
        say(f"Log: {escape(work / 'log.jsonl')}")
    if made.directory is not None:
        forced = f"; forced: {'; '.join(made.refused)}" if made.refused else ""
        say(f"Wrote {escape(made.directory)}/, read back and compared{forced}")


def _show_comparisons(found: Comparisons, when: tuple[str, str]) -> None:
    """What is gained in rounds, on text that training has not seen, served otherwise; by workload; of single texts."""
    overall, other = found.overall, found.otherwise
    say(f"On held-out text, with K = {len(overall.before.conditional)} drafts a round, 95 % intervals over texts:")
    before, after, saving = overall.before, overall.after, overall.saving
    rounds = [f"{before.rounds:.0f}", f"{after.rounds:.0f}", f"x {saving.ratio:.3f}", _interval(saving.interval, ".3f")]
    tokens = [f"{before.tokens_a_round:.3f}", f"{after.tokens_a_round:.3f}", "", ""]
    rows = [
        ["rounds, before for one after", before.texts, *rounds],
        ["tokens per round", before.texts, *tokens],
        ["teacher-forced tokens per round", *_lengths(overall)],
        ["all workloads, tokens new to training", *_lengths(found.unseen)],
        ["all workloads, tokens it has seen", *_lengths(found.seen)],
    ]
    if other is not None:
        rows.append([f"served {found.served_otherwise}", *_lengths(other)])
    table(rows, ("", "texts", *when, "change", ""))
    say("By workload: teacher-forced tokens per round, the change that half of the time shows, rounds:")
    head = ("", "texts", *when, "change", "", "shows", "rounds")
    table([[name, *_lengths(one), *_power(one)] for name, one in found.workloads.items()], head, longest=_WIDEST)
    say("Texts that lose most, or gain least, in tokens per round (teacher-forced, then of rounds):")
    table([_text_row(text) for text in found.texts[:_WORST]], longest=_WIDEST)


def _interval(bounds: Interval | None, form: str) -> str:
    return f"({bounds.low:{form}} to {bounds.high:{form}})" if bounds else ""


def _lengths(found: Comparison) -> list[Any]:
    before, after, change = found.before, found.after, found.change
    if not before.texts:
        return [0, "", "", "", ""]
    lengths = (f"{one.mean_accepted_length:.3f}" for one in (before, after))
    return [before.texts, *lengths, f"{change.mean:+.3f}", _interval(change.interval, "+.3f")]


def _power(found: Comparison) -> list[str]:
    return ["" if found.shows is None else f"{found.shows:.3f}", f"x {found.saving.ratio:.3f}"]


def _text_row(text: TextChange) -> list[Any]:
    before, after = text.before, text.after
    return [
        text.workload,
        text.name,
        f"{before.mean_accepted_length:.2f} to {after.mean_accepted_length:.2f}",
        f"{before.tokens_a_round:.2f} to {after.tokens_a_round:.2f}",
        "ruined" if text.ruined else "",
    ]


_EXAMPLES = {
    "gemma-4-E4B-it-mtp-drafter --base google/gemma-4-E4B-it": "Fit it on what the base writes for our prompts.",
    "drafter --base BASE --prompts mine.jsonl --mode float": "On your prompts, and every weight of it.",
}

app = new_app(command, _EXAMPLES)
main = partial(run, app, kept="no drafter was written; the same command goes on where this one stopped")
