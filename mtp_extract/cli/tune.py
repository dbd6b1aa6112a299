"""``mtp-tune``: fit a drafter to its base."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import BASE, Device, Overwrite, ServedModel
from mtp_extract.cli.terminal import TerminalReporter, say, say_error, say_notes, say_table
from mtp_extract.errors import escape
from mtp_extract.tuning.plan import EAGLE3, ORDERED, Mode, TuningPlan

if TYPE_CHECKING:
    from mtp_extract.evaluation.intervals import Interval
    from mtp_extract.tuning.run import Outcome
    from mtp_extract.tuning.verdict import Comparison, Comparisons

_WIDEST = 30  # characters of a name in a table: so that lines stay within 100


def tune_command(
    *,
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The drafter: extracted, an official assistant, or a head; or its Hub id."),
    ] = None,
    base: Annotated[str, BASE],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Where the result goes; by default DIR-tuned or MODEL-eagle3."),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep text, state and log here, to resume; by default OUT.work.")
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="What to train. norms: norms and layer scalars. qat: also the codes, on the stored grid. float: every "
            "weight. ordered: a head that scores clusters of tokens first. eagle3: a new head; leave DIR out."
        ),
    ] = "norms",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts of your workload, as .txt or .jsonl; by default ours.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts by people instead, or prompts with answers, in the same forms."),
    ] = None,
    text_from: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server that has the base and writes its texts: http://HOST:PORT."),
    ] = None,
    text_model: ServedModel = None,
    new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Most tokens of each of the base's texts.")] = 256,
    temperature: Annotated[
        float,
        typer.Option(min=0, max=100, metavar="X", help="Temperature of serving and of the base's text; 0 is greedy."),
    ] = 0.0,
    chat_template: Annotated[bool, typer.Option(help="Put prompts into the base's chat format.")] = True,
    draft_steps: Annotated[int, typer.Option(min=1, metavar="N", help="Drafts a round to train for.")] = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Optimizer steps; by default 500, eagle3 300, ordered 600.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Texts a step, of all processes together.")] = 16,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="Rate; by default the mode's own, by width.")
    ] = None,
    draft_vocab: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens that an eagle3 head can propose, the most frequent ones.")
    ] = 32000,
    device: Device = "auto",
    force: Annotated[bool, typer.Option("--force", help="Save the result even if it is not better.")] = False,
    overwrite: Overwrite = False,
    version: Version = False,
) -> None:
    """Tune a drafter to the base that it is served with, on what that base writes; or make a new head.

    The result is saved only if, on held-out text, it needs significantly fewer rounds, gets worse on no workload, and
    loses at most 0.05 tokens per round after tokens that training has not seen; an ordered head if it drafts as the
    dense one does. Otherwise the exit status is 1; --force saves it anyway. Ctrl-C ends the training and measures the
    best so far; pressed again, nothing is saved. The same command resumes where it stopped.
    """
    plan = TuningPlan(
        directory=directory,
        base=base,
        out=out,
        work=work,
        mode=mode,
        prompts=prompts,
        text=text,
        text_from=text_from,
        text_model=text_model,
        new_tokens=new_tokens,
        temperature=temperature,
        chat_template=chat_template,
        draft_steps=draft_steps,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        draft_vocab=draft_vocab,
        device=device,
        force=force,
        overwrite=overwrite,
    )
    from mtp_extract.api import tune

    # torchrun and accelerate number their processes; the first one prints for all.
    first = os.environ.get("RANK", "0") == "0"
    before = _find_last_write(plan.kept_in)
    try:
        with _TuningReporter(quiet=not first) as reporter:
            outcome = tune(plan, reporter)
    except BaseException:
        # Not for an earlier run's text alone: another run may be using it, or this one may have another base.
        if first and _find_last_write(plan.kept_in) != before:
            say(f"Text and state so far are in {escape(plan.kept_in)}/: the same command goes on there.")
        raise
    if first:
        _show(outcome, plan)
    if outcome.directory is None:
        if first:
            why = "nothing changed" if _is_unchanged(outcome, plan) else "; ".join(outcome.refused)
            say_error(
                f"{escape(plan.target)}: nothing was saved: {why}. Tune on more or other text, or save it (--force)."
            )
        raise typer.Exit(1)


class _TuningReporter(TerminalReporter):
    """Ends the training at the first Ctrl-C, once training asks; the second Ctrl-C interrupts as everywhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._is_asked = False
        self._before = signal.getsignal(signal.SIGINT)

    def is_stopped(self) -> bool:
        """Return whether Ctrl-C was pressed since this was first called."""
        # A job in the background ignores Ctrl-C, and still does.
        if self._before is not signal.SIG_IGN and not self._is_asked:
            signal.signal(signal.SIGINT, self._ask)
        return self._is_asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        signal.signal(signal.SIGINT, self._before)
        self.say("measuring the best so far; Ctrl-C again to keep nothing")

    def close(self) -> None:
        """Take the bar off the screen, and handle Ctrl-C as before."""
        super().close()
        signal.signal(signal.SIGINT, self._before)


def _is_unchanged(outcome: Outcome, plan: TuningPlan) -> bool:
    """Return whether training improved nothing, and the best drafter is the one it began with; False for a new head."""
    return plan.mode not in (ORDERED, EAGLE3) and outcome.record["best_step"] == 0


def _find_last_write(work: Path) -> int:
    """Return when text or a log was last written into ``work``, in nanoseconds; 0 if there is none."""
    return max((path.stat().st_mtime_ns for path in work.glob("*.jsonl")), default=0)


def _show(outcome: Outcome, plan: TuningPlan) -> None:
    _say_what_was_made(outcome, plan)
    if not _is_unchanged(outcome, plan):
        _show_comparisons(outcome.comparisons, plan)
    say_notes(outcome.notes)
    if outcome.directory is not None:
        forced = f"; forced: {'; '.join(outcome.refused)}" if outcome.refused else ""
        say(f"Wrote {escape(outcome.directory)}/, read back and compared{forced}")


def _say_what_was_made(outcome: Outcome, plan: TuningPlan) -> None:
    record = outcome.record
    if _is_unchanged(outcome, plan):
        overall = outcome.comparisons.overall
        say(
            f"Nothing changed: no step of {record['steps_done']} made it draft better on the watched texts. It stays "
            f"as it was: {overall.before.tokens_per_round:.3f} tokens per round on {overall.texts} held-out texts."
        )
    elif plan.mode == ORDERED:
        say(
            f"{record['centroids']} clusters of {record['tokens_a_cluster']} tokens, learned from {record['states']} "
            f"states; {record['top_k']} are looked into: {record['rows_read']} rows instead of {record['rows_dense']}"
        )
        shares = ", ".join(f"{name} {_format_share(agreement)}" for name, agreement in record["kinds"].items())
        say(f"Kept of the dense head's choices on held-out text, by kind of text: {shares}")
    else:
        texts = len(outcome.corpus.trained)
        say(
            f"Trained {record['numbers']} numbers on {texts} texts, {record['steps_done']} steps, "
            f"best after {record['best_step']}{'; interrupted' if record['interrupted'] else ''}"
        )


def _format_share(agreement: Mapping[str, Any]) -> str:
    interval = agreement["interval"]
    bounds = " ({:.2%} to {:.2%})".format(*interval) if interval else ""
    return f"{agreement['share']:.2%}{bounds}"


def _show_comparisons(comparisons: Comparisons, plan: TuningPlan) -> None:
    """Print the gain over all held-out texts and those new to training, by workload, and the texts that lose most."""
    when = ("dense", ORDERED) if plan.mode == ORDERED else ("before", "after")
    say(f"On held-out text, with {plan.draft_steps} drafts a round, 95 % intervals over texts:")
    say_table(_list_overall_rows(comparisons), ("", "texts", *when, "change", ""))

    say("By workload, teacher-forced tokens per round, and rounds:")
    by_workload = [
        [name, *_list_lengths(comparison), f"x {comparison.rounds.ratio:.3f}"]
        for name, comparison in comparisons.workloads.items()
    ]
    say_table(by_workload, ("", "texts", *when, "change", "", "rounds"), longest=_WIDEST)

    say("Texts that lose most, or gain least, teacher-forced tokens per round:")
    worst = [[text.workload, text.name, f"{text.before:.2f} to {text.after:.2f}"] for text in comparisons.worst]
    say_table(worst, longest=_WIDEST)


def _list_overall_rows(comparisons: Comparisons) -> list[list[Any]]:
    overall = comparisons.overall
    before = overall.before
    after = overall.after
    ratio = f"x {overall.rounds.ratio:.3f}"
    rounds = [f"{before.rounds:.0f}", f"{after.rounds:.0f}", ratio, _format_interval(overall.rounds.interval, ".3f")]
    tokens = [f"{before.tokens_per_round:.3f}", f"{after.tokens_per_round:.3f}", "", ""]
    unseen = _list_lengths(comparisons.unseen) if comparisons.unseen else [0, "", "", "", ""]
    return [
        ["rounds, before for one after", overall.texts, *rounds],
        ["tokens per round", overall.texts, *tokens],
        ["teacher-forced tokens per round", *_list_lengths(overall)],
        ["… where text is new to training", *unseen],
    ]


def _format_interval(bounds: Interval | None, form: str) -> str:
    return f"({bounds.low:{form}} to {bounds.high:{form}})" if bounds else ""


def _list_lengths(comparison: Comparison) -> list[Any]:
    before = f"{comparison.before.teacher_forced:.3f}"
    after = f"{comparison.after.teacher_forced:.3f}"
    change = comparison.change
    return [comparison.texts, before, after, f"{change.mean:+.3f}", _format_interval(change.interval, "+.3f")]


_EXAMPLES = {
    "mtp-tune gemma-4-E4B-it-mtp-drafter --base google/gemma-4-E4B-it": "On what the base writes for our prompts.",
    "mtp-tune drafter --base BASE --prompts mine.jsonl --mode float": "On your prompts, and every weight of it.",
}

app, main = make_command(
    tune_command, _EXAMPLES, kept="no drafter was written; the same command goes on where this one stopped"
)
