"""``mtp-tune``: a drafter, fitted to its base."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mtp_extract.cli._run import AsJson, new_app, run
from mtp_extract.cli._writing import BaseModel, License, Title, card_words
from mtp_extract.cli.terminal import doing, error, redrawn, say, table, write_json
from mtp_extract.errors import escape

if TYPE_CHECKING:
    from mtp_extract.tune.outcome import Outcome
    from mtp_extract.tune.status import Status
    from mtp_extract.tune.verdict import Comparison, Comparisons

app = new_app()

_MODES = {
    "norms": "norms and layer scalars, every code and scale stays",
    "qat": "also the codes, on the stored grid, every scale stays",
    "float": "every weight, as floats",
}
_OBJECTIVES = ("ce", "kl", "tv")

Mode = Enum("Mode", {name: name for name in _MODES}, type=str)  # type: ignore[misc]  # not a literal
Objective = Enum("Objective", {name: name for name in _OBJECTIVES}, type=str)  # type: ignore[misc]
Head = Enum("Head", {"ordered": "ordered"}, type=str)
New = Enum("New", {"eagle3": "eagle3"}, type=str)
_DEFAULT = next(iter(_MODES))

_TOLD = 20
"""Lines of progress, where there is no terminal to redraw one on."""


@app.command()
def command(
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="The base model: a directory, or an id of the Hugging Face Hub.")
    ],
    directory: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Argument(
            metavar="[DIR]", help="A checkpoint that mtp-extract wrote, an official assistant, or an EAGLE-3 head."
        ),
    ] = None,
    new: Annotated[
        Optional[New],  # noqa: UP045
        typer.Option(help="Make a new head for the base, and train every weight of it; DIR is left out."),
    ] = None,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            help='Prompts of your workload: JSON lines {"prompt": …, "source": …}, JSON {"workload": ["prompt", …]}, '
            "or a .txt, one a line. By default those that come with mtp-extract.",
        ),
    ] = None,
    text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Texts by people instead, in the same forms."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help="Where to write; by default DIR's name + -tuned, of a new head MODEL's + -eagle3.",
        ),
    ] = None,
    mode: Annotated[
        Optional[Mode],  # noqa: UP045
        typer.Option(
            help=" ".join(f"{name}: {about}." for name, about in _MODES.items()) + f" {_DEFAULT} if nothing is said."
        ),
    ] = None,
    head: Annotated[
        Optional[Head],  # noqa: UP045
        typer.Option(
            help="Instead of a mode: ordered makes a head that looks into the nearest clusters of tokens alone. "
            "All other weights stay."
        ),
    ] = None,
    centroids: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=2, help="Clusters of that head; by default 128 tokens each, in a small vocabulary 16."),
    ] = None,
    top_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Clusters it looks into; by default the least that keep 99.5 % of the best tokens."),
    ] = None,
    states: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Most states of the drafter that it is made from; by default 200 a cluster."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="At which the base is served, and writes the text; 0 is greedy.")
    ] = 0.0,
    objective: Annotated[
        Optional[Objective],  # noqa: UP045
        typer.Option(help="ce for greedy serving, tv or kl for sampled; by default chosen by the temperature."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Of the optimizer; by default 200, for a new head 300, for an ordered one 600."),
    ] = None,
    draft_steps: Annotated[int, typer.Option(min=1, help="Drafts a round to train for.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of each of the base's texts.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Texts a step.")] = 16,
    anchors: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Places in each of them to draft from; by default 24."),
    ] = None,
    learning_rate: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, help="By default the mode's own, by the drafter's width."),
    ] = None,
    draft_vocab: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            help="Of a new head: how many tokens it can propose, the base's most frequent ones; by default 32000.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed on the same machine gives the same bytes.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs.")] = "auto",
    chat_template: Annotated[
        bool, typer.Option("--chat-template/--no-chat-template", help="Put prompts into the base's chat format.")
    ] = True,
    work: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Text, state and log, to go on from; by default the result's name + .work."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write also what is not better.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DIR if it is such a checkpoint.")] = False,
    license_: License = None,
    base_model: BaseModel = None,
    title: Title = None,
    print_json: AsJson = False,
) -> None:
    """Tune a drafter to the base that it is served with, on what that base writes; or train a new one.

    What is written is better on held-out text at 95 %, and on no workload worse at 95 % (an ordered head: as good as
    the dense one); else nothing is, and the exit status is 1. Ctrl-C ends the training and keeps the best so far if it
    is better; once more, and nothing is kept. The same command goes on where it stopped.
    """
    from mtp_extract.tune.head import HeadPlan, run_ordered_head
    from mtp_extract.tune.run import Plan, default_directory, run_tuning
    from mtp_extract.tune.setting import Setting

    card = card_words(license_, base_model, title)
    if (directory is None) != (new is not None):
        raise typer.BadParameter("name a DIR, or a kind of head with --new; one of the two.")
    if new is not None and (head is not None or mode is not None):
        raise typer.BadParameter("--new trains all of a head of its own kind; leave --head and --mode out.")
    if new is None and draft_vocab is not None:
        raise typer.BadParameter("--draft-vocab is of a new head; a head in a DIR keeps its own. Leave it out.")
    target = out or (
        default_directory(directory) if directory is not None else Path(f"{Path(base).resolve().name}-eagle3")
    )
    setting = Setting(
        directory,
        base,
        work or target.with_name(target.name + ".work"),
        prompts=prompts,
        text=text,
        new_tokens=new_tokens,
        temperature=temperature,
        chat_template=chat_template,
        draft_steps=draft_steps,
        batch=batch,
        seed=seed,
        device=device,
    )
    of_mode = {"--mode": mode, "--objective": objective, "--anchors": anchors, "--learning-rate": learning_rate}
    of_head = {"--centroids": centroids, "--top-k": top_k, "--states": states}
    for option, value in (of_mode if head else of_head).items():
        if value is not None:
            why = "trains no head; leave it or --head out" if head else "is of an ordered head; add --head ordered"
            raise typer.BadParameter(f"{option} {why}.")
    if head is not None:
        head_plan = HeadPlan(
            setting,
            target,
            centroids=centroids,
            top_k=top_k,
            states=states,
            steps=steps or HeadPlan.steps,
            force=force,
            overwrite=overwrite,
            card=card,
        )
        with _progress(quiet=print_json) as tell:
            made = run_ordered_head(head_plan, (lambda line: None) if print_json else doing, tell)
        if print_json:
            write_json({"directory": _name(made.directory), "ordered_head": made.record, "notes": made.notes})
        else:
            _show_head(made)
        _require_written(made, target)
        return
    plan = Plan(
        setting,
        target,
        mode=mode.value if mode else _DEFAULT,
        objective=objective.value if objective else None,
        steps=steps,
        anchors=anchors or Plan.anchors,
        learning_rate=learning_rate,
        draft_vocab=draft_vocab or Plan.draft_vocab,
        force=force,
        overwrite=overwrite,
        card=card,
    )
    # As torchrun and accelerate number the processes that they start: the first speaks for all.
    first = os.environ.get("RANK", "0") == "0"
    with _progress(quiet=print_json or not first) as tell, _asked_to_stop(tell_so=first) as stop:
        tuned = run_tuning(plan, (lambda line: None) if print_json else doing, tell, stop)
    if first:
        if print_json:
            write_json({"directory": _name(tuned.directory), "tuning": tuned.record, "notes": tuned.notes})
        else:
            _show(tuned, setting.work)
    _require_written(tuned, target, first)


def _name(directory: Path | None) -> str | None:
    return None if directory is None else str(directory)


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
    """A line that is redrawn on a terminal; else one now and then."""
    terminal, told = sys.stderr.isatty(), 0

    def tell(status: Status) -> None:
        nonlocal told
        if quiet:
            return
        line = f"{status.kind} {status.done} of {status.total}"
        if status.loss is not None:
            line += f", loss {status.loss:.3f}, mean accepted length {status.watched:.3f} on watched texts"
        line += f", {_duration(status.seconds_left)} left"
        if terminal:
            draw(line)
        elif (part := _TOLD * status.done // status.total) != told:
            told = part
            doing(line)

    with redrawn() as draw:
        yield tell


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _show(tuned: Outcome, work: Path) -> None:
    record = tuned.record
    say(
        f"Trained {record['numbers']} numbers on {len(tuned.corpus.trained)} texts, {record['steps_done']} steps, best "
        f"after {record['best_step']}{'; interrupted' if record['interrupted'] else ''}"
    )
    _compare(tuned.comparisons, tuned.corpus.shared, "before", "after")
    for note in tuned.notes:
        say(f"Note: {escape(note)}")
    say(f"Log and figure: {escape(work / 'log.jsonl')}, {escape(work / 'progress.png')}")
    if tuned.directory is not None:
        _wrote(tuned)


def _show_head(made: Outcome) -> None:
    record, kept = made.record, made.record["kept"]
    low, high = kept["interval"] or (None, None)
    say(
        f"{record['centroids']} clusters of {record['tokens_a_cluster']} tokens, learned from {record['states']} "
        f"states; {record['top_k']} are looked into: {record['rows_read']} rows instead of {record['rows_dense']}"
    )
    bounds = "" if low is None else f" ({low:.2%} to {high:.2%})"
    say(f"Of the dense head's choices on held-out text it keeps {kept['share']:.2%}{bounds}")
    _compare(made.comparisons, made.corpus.shared, "dense", "ordered")
    for note in made.notes:
        say(f"Note: {escape(note)}")
    if made.directory is not None:
        _wrote(made)


def _compare(comparisons: Comparisons, shared: float, before: str, after: str) -> None:
    overall, other = comparisons.overall, comparisons.otherwise
    say(f"Mean accepted length with {len(overall.before.conditional)} drafts, 95 % intervals over held-out texts:")
    table(
        [
            *[_row(name, comparison) for name, comparison in comparisons.workloads.items()],
            _row("all that was trained on", overall),
            *([_row(f"the same prompts, {_served(comparisons)}", other)] if other is not None else []),
        ],
        ("workload", "texts", before, "", after, "", "change", ""),
    )
    say(f"  {100 * shared:.0f} % of the held-out texts' sequences of 8 tokens stand in training texts too")


def _wrote(made: Outcome) -> None:
    forced = f"; forced: {'; '.join(made.refused)}" if made.refused else ""
    say(f"Wrote {escape(made.directory)}/, read back and compared{forced}")


def _served(comparisons: Comparisons) -> str:
    temperature = comparisons.other_temperature
    return f"served at temperature {temperature:g}" if temperature else "served greedily"


def _row(name: str, comparison: Comparison) -> list[Any]:
    found = comparison.as_json()

    def interval(bounds: list[float] | None, form: str) -> str:
        return f"({bounds[0]:{form}} to {bounds[1]:{form}})" if bounds else ""

    before, after, change = found["before"], found["after"], found["change"]
    return [
        name,
        found["texts"],
        f"{before['mean_accepted_length']:.3f}",
        interval(before["interval"], ".3f"),
        f"{after['mean_accepted_length']:.3f}",
        interval(after["interval"], ".3f"),
        f"{change['mean']:+.3f}",
        interval(change["interval"], "+.3f"),
    ]


def main() -> None:
    """Entry point."""
    run(app, kept="no drafter was written; the same command goes on where this one stopped")
