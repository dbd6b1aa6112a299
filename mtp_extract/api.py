"""What the commands do, as functions of ``mtp_extract``: the same arguments by the same names, typed results.

Extracting, converting and uploading are functions of the library as they are; here are the others, which a command puts
together. Their arguments are the fields of the plans that their docstrings name, where each is explained.
"""

from __future__ import annotations

import inspect as python
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from mtp_extract.base.comparison import BaseComparison, compare_base
from mtp_extract.bundle import open_bundle
from mtp_extract.errors import UnsupportedError
from mtp_extract.evaluate.progress import Show, silent
from mtp_extract.insert.drafter import planned_insertion
from mtp_extract.insert.plan import InsertionPlan, InsertionResult
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import PathLike, check_place, files_of
from mtp_extract.io.source import Progress
from mtp_extract.pipeline import inspection
from mtp_extract.pipeline.check import Verification, verify, with_record
from mtp_extract.pipeline.identity import verify_against
from mtp_extract.pipeline.inspection import Inspection, inspect_checkpoint
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.report.files import REPORT_FILES, REPORT_LISTED
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.tune.plan import TuningPlan, default_directory
from mtp_extract.tune.run import run_tuning
from mtp_extract.validate.plan import Validating

if TYPE_CHECKING:
    from mtp_extract.serving.result import Benchmark
    from mtp_extract.tune.run import Outcome
    from mtp_extract.validate.result import Validation

Say = Callable[[str], None]
_P = ParamSpec("_P")
_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


def _nothing_shown(done: int, total: int) -> None:
    """As :func:`~mtp_extract.evaluate.progress.silent`, of bytes."""


def _asking(
    asked: Callable[Concatenate[Any, _P], _Asked],
) -> Callable[[Callable[[_Asked], _Found]], Callable[Concatenate[PathLike, _P], _Found]]:
    """A function whose arguments are the fields of the dataclass ``asked``, of which it is given one."""

    def made(function: Callable[[_Asked], _Found]) -> Callable[Concatenate[PathLike, _P], _Found]:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> _Found:
            return function(asked(*args, **kwargs))

        called.__signature__ = python.signature(asked)  # type: ignore[attr-defined]
        return called

    return made


@dataclass(frozen=True)
class CheckpointInspection:
    """What :func:`inspect` found in a checkpoint.

    Attributes:
        holds: format, geometry, stored types and findings, as ``mtp-inspect --json`` prints them.
        verification: of its files against its record, or of everything against the bundle that was named; None where
            it has neither.
    """

    holds: Mapping[str, Any]
    verification: Verification | None


def inspect(
    source: str | os.PathLike[str],
    *,
    tensors: bool = False,
    graph: bool = False,
    section: int | None = None,
    against: str | os.PathLike[str] | None = None,
    sliding_window: int | None = None,
    progress: Progress = _nothing_shown,
) -> Inspection | CheckpointInspection | BaseComparison:
    """What a bundle or a checkpoint holds.

    Args:
        source: a bundle, as :func:`~mtp_extract.bundle.open_source` takes it, or a checkpoint: a directory or a
            ``.gguf``.
        against: of a checkpoint, the bundle that all is derived from again and compared with, bit for bit; of a bundle,
            the directory of a base's checkpoint.
        tensors, graph, section, sliding_window: as :func:`~mtp_extract.pipeline.inspection.inspect` explains them; the
            last three are of a bundle.

    Returns:
        Of a bundle an Inspection, with ``against`` a BaseComparison; of a checkpoint a CheckpointInspection.

    Raises:
        CheckpointError, SourceError, FormatError: damaged, or not to be had, or not what its record says.
    """
    source = checkpoint_here(source, or_bundle=True)
    place = Path(source)
    if place.is_dir() or (place.suffix == ".gguf" and place.is_file()):
        place = with_record(place)
        verification = None
        if against is not None:
            with open_bundle(against, progress=progress) as opened:
                verification = verify_against(place, opened, REPORT_FILES)
        elif (place / RECORD).exists():
            verification = verify(place, REPORT_FILES)
        return CheckpointInspection(inspect_checkpoint(place, tensors=tensors), verification)
    with open_bundle(source, progress=progress) as opened:
        if against is not None:
            return compare_base(opened, Path(against), progress)
        return inspection.inspect(opened, tensors=tensors, graph=graph, section=section, sliding_window=sliding_window)


def insert(
    source: PathLike,
    bundle: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    graph_from: PathLike | None = None,
    base: str | None = None,
    prompts: PathLike | None = None,
    chat_template: bool = True,
    section: int | None = None,
    signature: str | None = None,
    overwrite: bool = False,
    say: Say = silent,
    progress: Progress = _nothing_shown,
) -> InsertionResult | InsertionPlan:
    """Put the weights of a drafter's checkpoint into a bundle, whose other sections stay as they are.

    Args:
        source: a checkpoint, or a bundle or model whose drafter is taken.
        bundle: where they go; it stays as it is.
        out: the new bundle.
        dry_run: write nothing and return what would be done; ``out`` is then None.
        graph_from: for a bundle without a drafter, the bundle or model whose drafter's graph it gets.
        base, prompts, chat_template: for a graph with static activations, the base beside which their scales are
            measured anew, and what it continues for that.
        section, signature: the drafter's in ``bundle``, where there are several.

    Raises:
        PairError, UnsupportedError, OutputError, ProofError: as their names say; nothing is left behind.
        ValueError: neither or both of ``out`` and ``dry_run``.
    """
    if (out is None) != dry_run:
        raise ValueError("out: expected a place for the new bundle, or a dry run; one of the two.")
    if out is not None:
        check_place(Path(out), overwrite=overwrite, inputs=(bundle, source, graph_from, *files_of(base), prompts))
    ranges, source = None, checkpoint_here(source, or_bundle=True)
    if base is not None:
        from mtp_extract.validate.calibration import measure_ranges

        if not Path(source).is_dir():
            raise UnsupportedError(
                "Expected the directory of a checkpoint to run beside a base, found none. Extract the drafter first.",
                remedies=("base",),
            )
        ranges = measure_ranges(source, base, prompts, chat_template=chat_template, say=say)
    with planned_insertion(
        source, bundle, ranges=ranges, graph_from=graph_from, section=section, signature=signature
    ) as plan:
        return plan if out is None else plan.write(out, overwrite=overwrite, progress=progress)


@_asking(Validating)
def validate(asked: Validating) -> Validation:
    """Whether a checkpoint is the drafter of its file (``source``), and whether it drafts what its base would say.

    Args:
        directory: what was extracted, or an official assistant.
        report: where to write the report; None for nowhere.
        overwrite: replace an older report.
        say, show: told what is begun, and how far it is.

    The others are explained in :class:`~mtp_extract.validate.plan.ValidationPlan`.

    Raises:
        MtpExtractError: a part is missing, or does not fit.
    """
    to: dict[str, Any] = {"overwrite": asked.overwrite, "inputs": asked.inputs}
    if asked.report is not None:
        check_place(asked.report, **to, listed=REPORT_LISTED)
    plan = asked if asked.directory is None else replace(asked, directory=Path(asked.directory))
    plan.check()
    from mtp_extract.validate.run import run_validation

    found = run_validation(plan, asked.say, asked.show)
    if asked.report is not None:
        from mtp_extract.validate.page import write_validation

        write_validation(found, Path(asked.report), **to)
    return found


def tune(
    directory: PathLike | None,
    out: PathLike | None = None,
    *,
    base: str,
    work: PathLike | None = None,
    say: Say = silent,
    progress: Show = silent,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Outcome:
    """Fit a drafter to the base that it is served with; or make an ordered head for it, or a new EAGLE-3 head.

    Args:
        directory: the drafter; None for a new EAGLE-3 head (``mode="eagle3"``), of which every weight is trained.
        out: where to save what is better; by default the directory's name and "-tuned", of a new head the base's and
            "-eagle3".
        base: a directory, or an id of the Hub.
        work: text, state and log, to resume from; by default the result's name and ".work".
        say: told what is being done.
        progress: called after every batch of text and every step.
        stop: asked after every step; True ends the training there.
        options: further fields of :class:`~mtp_extract.tune.plan.TuningPlan`.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    drafter = None if directory is None else Path(directory)
    target = default_directory(drafter, base) if out is None else Path(out)
    place = target.with_name(f"{target.name}.work") if work is None else Path(work)
    return run_tuning(TuningPlan(drafter, base, target, place, **options), say, progress, stop)


@_asking(BenchPlan)
def bench(asked: BenchPlan) -> Benchmark:
    """How fast a running server is, with and without its drafter, and what comes of the drafts.

    Args:
        url: an OpenAI-compatible server.
        report: where to write ``bench.json`` and its page; None for nowhere.
        overwrite: replace an older report.
        say, show: told what is begun, and how far it is.

    The others are explained in :class:`~mtp_extract.serving.plan.BenchPlan`.

    Raises:
        ServerError: the server refuses, or says what makes no sense.
    """
    from mtp_extract.serving.benchmark import run_benchmark
    from mtp_extract.serving.page import BENCH_LISTED, write_bench

    to: dict[str, Any] = {"overwrite": asked.overwrite, "inputs": (asked.prompts,)}
    if asked.report is not None:
        check_place(asked.report, **to, listed=BENCH_LISTED)
    found = run_benchmark(asked)
    if asked.report is not None:
        write_bench(found, Path(asked.report), **to)
    return found
