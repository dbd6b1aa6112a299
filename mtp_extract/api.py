"""What the commands do, as functions of ``mtp_extract``: the same work, typed results.

Extracting, converting and uploading are functions of the library as they are, and so is tuning; here are the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.bundle import open_bundle
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.evaluation.extras import require
from mtp_extract.evaluation.progress import Say, Show, silent
from mtp_extract.insertion.activations import Grids
from mtp_extract.insertion.base_checkpoint import holds_base
from mtp_extract.insertion.comparison import BaseComparison, compare_base
from mtp_extract.insertion.plan import InsertionPlan, InsertionResult
from mtp_extract.insertion.run import planned_insertion
from mtp_extract.io.opening import checkpoint_here, is_checkpoint
from mtp_extract.io.place import PathLike, check_place, files_of
from mtp_extract.io.source import Progress, nothing_shown
from mtp_extract.pipeline import inspection
from mtp_extract.pipeline.inspection import Inspection
from mtp_extract.report.files import REPORT_LISTED
from mtp_extract.serving.benchmark import run_benchmark as bench
from mtp_extract.tuning.run import run_tuning as tune
from mtp_extract.validation.plan import ValidationPlan

if TYPE_CHECKING:
    from mtp_extract.validation.result import Validation

__all__ = ["bench", "insert", "inspect", "tune", "validate"]


_LARGEST_BASE = 100_000_000_000
"""Bytes of a base that is fetched to be compared: no Gemma 4 has more. It is read tensor by tensor."""


def inspect(
    source: str | os.PathLike[str],
    *,
    tensors: bool = False,
    graph: bool = False,
    against: str | os.PathLike[str] | None = None,
    progress: Progress = nothing_shown,
) -> Inspection | BaseComparison:
    """What a bundle or a checkpoint holds.

    Args:
        source: a bundle, as :func:`~mtp_extract.bundle.open_source` takes it, or a checkpoint: a directory or a
            ``.gguf``.
        against: of a checkpoint, the bundle that all is derived from again and compared with, bit for bit; of a bundle,
            a base's directory or its id on the Hub, from which it is fetched into the Hub's cache.
        tensors, graph: as :func:`~mtp_extract.pipeline.inspection.inspect` explains them; ``graph`` is of a bundle.

    Returns:
        An Inspection; of a bundle ``against`` a base's directory a BaseComparison.

    Raises:
        CheckpointError, SourceError, FormatError: damaged, or not to be had, or not what its record says.
        UnsupportedError: what is asked for does not go together.
    """
    source = checkpoint_here(source, or_bundle=True)
    if graph and (against or is_checkpoint(source)):
        why = "expected a bundle alone, whose graph is asked for. Leave that out."
        raise UnsupportedError(f"{escape(source)}: {why}", remedies=("graph",))
    if is_checkpoint(source):
        return inspection.inspect_checkpoint(Path(source), against, tensors=tensors, progress=progress)
    with open_bundle(source, progress=progress, skeleton=against is None) as opened:
        if against is not None:
            place = Path(checkpoint_here(against, largest=_LARGEST_BASE))
            if not place.is_dir():
                why = f"expected the directory of a checkpoint to compare {escape(source)} with, found none. Give one."
                raise UnsupportedError(f"{escape(against)}: {why}", remedies=("against",))
            return compare_base(opened, place, progress)
        return inspection.inspect(opened, tensors=tensors, graph=graph)


def insert(
    source: PathLike,
    bundle: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    graph_from: PathLike | None = None,
    base: str | None = None,
    section: int | None = None,
    overwrite: bool = False,
    force: bool = False,
    say: Say = silent,
    show: Show = silent,
    progress: Progress = nothing_shown,
) -> InsertionResult | InsertionPlan:
    """Put the weights of a checkpoint into a bundle, whose other sections stay as they are.

    Args:
        source: a drafter's checkpoint, or a bundle or model whose drafter is taken; or the checkpoint of a Gemma 4
            base, as transformers writes it.
        bundle: where they go; it stays as it is.
        out: the new bundle.
        dry_run: write nothing and return what would be done; ``out`` is then None.
        graph_from: for a bundle without a drafter, the bundle or model whose drafter's graph it gets.
        base: for a graph with static activations, the base beside which their scales are measured anew, on our prompts;
            of a base that is put in the one that was there, to measure what their grids cut off of each.
        section: index of the drafter's in ``bundle``, where there are several.
        force: write although rounding to the bundle's types loses more than a tenth of a role of a base.
        say, show: told what is measured, and how far it is.

    Raises:
        PairError, UnsupportedError, OutputError, ProofError: as their names say; nothing is left behind.
        ValueError: neither or both of ``out`` and ``dry_run``.
    """
    if (out is None) != dry_run:
        raise ValueError("out: expected a place for the new bundle, or a dry run; one of the two.")
    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(bundle, source, graph_from, *files_of(base)))
    if is_checkpoint(bundle):
        swapped = "The first argument is a bundle, the second a checkpoint: swap them."
        advice = swapped if os.path.isfile(source) and not is_checkpoint(source) else "Give a .litertlm in its place."
        raise UnsupportedError(
            f"{escape(bundle)}: expected the bundle that weights go into, found a checkpoint. {advice}"
        )
    source, measuring = checkpoint_here(source, or_bundle=True), dict[str, Any]()
    if base is not None:
        require("torch", "transformers")
        if not Path(source).is_dir():
            why = "expected the directory of a checkpoint to run beside a base. Extract the drafter first."
            raise UnsupportedError(f"{escape(source)}: {why}", remedies=("base",))
        # Before anything is read: only static grids want it, and loading it would find out last.
        checkpoint_here(base, largest=_LARGEST_BASE, fetch=False)
        measuring = _measuring(source, base, say, show)
    with planned_insertion(
        source, bundle, **measuring, graph_from=graph_from, section=section, progress=progress
    ) as plan:
        return plan if out is None else plan.write(out, overwrite=overwrite, force=force, progress=progress)


def _measuring(source: str, base: str, say: Say, show: Show) -> dict[str, Any]:
    """What an insertion of ``source`` measures beside ``base``: the drafter's ranges, or what grids cut off."""
    if holds_base(Path(source)):
        from mtp_extract.insertion.clipping import measure_cut_off

        def cut_off(grids: Grids) -> tuple[float, float]:
            before, after = (measure_cut_off(model, grids, say=say, show=show) for model in (base, source))
            return before, after

        return {"cut_off": cut_off}
    from mtp_extract.insertion.calibration import measure_ranges

    return {"measure": partial(measure_ranges, source, base, say=say, show=show)}


def validate(plan: ValidationPlan, tell: Callable[[Validation], None] = silent) -> Validation:
    """Whether a checkpoint is the drafter of its file (``source``), and whether it drafts what its base would say.

    Args:
        tell: told the result before a report of it is written, which a full disk may prevent.

    Raises:
        MtpExtractError: a part is missing, or does not fit.
    """
    to: dict[str, Any] = {"overwrite": plan.overwrite, "inputs": plan.inputs}
    if plan.report is not None:
        check_place(plan.report, **to, listed=REPORT_LISTED)
    plan.check()
    from mtp_extract.validation import page, run

    validation = run.run_validation(plan)
    tell(validation)
    if plan.report is not None:
        page.write_validation(validation, plan.report, **to)
    return validation
