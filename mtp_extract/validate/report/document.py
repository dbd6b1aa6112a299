"""A validation as the dictionary that ``report.json`` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.evaluate.agreement import WorkloadFigures
from mtp_extract.io.typed import fill
from mtp_extract.report.page import plain_json
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import DraftLengthResult, GenerationResult
from mtp_extract.validate.report import fields
from mtp_extract.validate.report.verdict import findings, verdict, why
from mtp_extract.validate.result import Validation

_REPORT_VERSION = 2


def as_json(found: Validation) -> dict[str, Any]:
    """``report.json``: only JSON's own types, None where a number does not exist."""
    drafters = [_drafter(drafter) for drafter in found.drafters]
    first = drafters[0] if drafters else {}
    report = fill(
        fields.Report,
        found,
        version=_REPORT_VERSION,
        tool={"name": "mtp-extract", "version": __version__},
        verdict=verdict(found),
        findings=findings(found),
        drafter=found.directory,
        checks=found.checks or None,
        agreement=first.get("agreement"),
        trivial={result.name: result for result in found.trivial},
        controls={result.control.name: _control(result) for result in found.controls} or None,
        generation=first.get("generation"),
        arithmetic=first.get("arithmetic"),
        drafters=drafters or None,
    )
    plain: dict[str, Any] = plain_json(report)
    return plain


def _agreement(overall: WorkloadFigures, workloads: Mapping[str, WorkloadFigures]) -> dict[str, Any]:
    by_name = {name: fill(fields.Workload, figures, steps=_steps(figures)) for name, figures in workloads.items()}
    return fill(fields.Agreement, overall, steps=_steps(overall), workloads=by_name)


def _steps(figures: WorkloadFigures) -> list[dict[str, Any]]:
    return [
        fill(
            fields.Step,
            step=index + 1,
            n=step.top1.trials,
            n_conditional=step.conditional.trials,
            ci95={name: share.interval for name, share in vars(step).items()},
            **{name: share.value for name, share in vars(step).items()},
        )
        for index, step in enumerate(figures.steps)
    ]


def _control(result: ControlResult) -> dict[str, Any]:
    control, figures = result.control, result.figures
    return fill(
        fields.Control,
        result,
        what=control.what,
        suspect=control.suspect,
        mean_accepted_length=figures.mean_accepted_length if figures else None,
        mean_accepted_interval=figures.mean_accepted_interval if figures else None,
        steps=_steps(figures) if figures else [],
        why=why(result),
    )


def _arithmetic(generation: GenerationResult) -> dict[str, Any]:
    return fill(
        fields.Arithmetic,
        generation,
        speedups={
            result.name: {
                "predicted": result.predicted_speedup(generation.base_ms),
                "measured": result.measured_speedup,
            }
            for result in generation.lengths
        },
    )


def _drafter(drafter: DrafterFigures) -> dict[str, Any]:
    facts = drafter.facts
    return fill(
        fields.Drafter,
        facts,
        bytes_a_step=facts.reads.bytes,
        parameters_a_step=facts.reads.parameters,
        change=drafter.change,
        changes=drafter.changes,
        agreement=_agreement(drafter.agreement, drafter.workloads),
        generation={result.name: _length(result) for result in drafter.generation.lengths},
        arithmetic=_arithmetic(drafter.generation),
    )


def _length(result: DraftLengthResult) -> dict[str, Any]:
    steps = zip(result.accepted_by_step, result.conditional, result.unconditional, strict=True)
    return fill(
        fields.DraftLength,
        result,
        chosen_on=len(result.chosen_on),
        steps=[
            fill(
                fields.AcceptedStep,
                step=index + 1,
                accepted=accepted,
                conditional=conditional.value,
                unconditional=unconditional.value,
                n=unconditional.trials,
                n_conditional=conditional.trials,
            )
            for index, (accepted, conditional, unconditional) in enumerate(steps)
        ],
    )
