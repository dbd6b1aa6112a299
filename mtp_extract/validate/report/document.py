"""A validation as the dictionary that ``report.json`` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.evaluate.agreement import Share, WorkloadFigures
from mtp_extract.evaluate.measured import Change
from mtp_extract.evaluate.reads import Reads
from mtp_extract.report.page import plain_json
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import DraftLengthResult, GenerationResult
from mtp_extract.validate.parity.compare import Comparison, Parity
from mtp_extract.validate.report.verdict import findings, verdict, why
from mtp_extract.validate.result import Validation

_REPORT_VERSION = 2


def as_json(validation: Validation) -> dict[str, Any]:
    """``report.json``: only JSON's own types, None where a number does not exist."""
    found = validation
    parity, generation = found.parity, found.generation
    report = {
        "version": _REPORT_VERSION,
        "tool": {"name": "mtp-extract", "version": __version__},
        "verdict": verdict(found),
        "proven": found.proven,
        "refuted": found.refuted,
        "findings": findings(found),
        "drafter": found.directory,
        "source": found.source,
        "base": dataclasses.asdict(found.base) if found.base else None,
        "settings": dict(found.settings),
        "notes": list(found.notes),
        "checks": [dataclasses.asdict(check) for check in found.checks] or None,
        "parity": _parity(parity) if parity else None,
        "agreement": _agreement(found.agreement, found.workloads) if found.agreement else None,
        "trivial": {
            result.name: {
                "top1": result.share,
                "difference": result.difference,
                "difference_ci95": result.interval,
            }
            for result in found.trivial
        },
        "controls": {result.control.name: {**_control(result), "why": why(result)} for result in found.controls}
        if found.controls
        else None,
        "generation": _generation(generation) if generation else None,
        "arithmetic": _arithmetic(generation) if generation else None,
        "drafters": [_drafter(drafter) for drafter in found.drafters] or None,
    }
    plain: dict[str, Any] = plain_json(report)
    return plain


def _parity(parity: Parity) -> dict[str, Any]:
    return {
        "agrees": parity.agrees,
        "kernels": parity.kernels,
        "float": {**_comparison(parity.float), "projected": _comparison(parity.float_projected)},
        "emulated": {**_comparison(parity.emulated), "projected": _comparison(parity.emulated_projected)},
        "emulated_alone": _comparison(parity.emulated_alone),
        "followed_roundings": dataclasses.asdict(parity.followed),
        "matrices": dict(parity.kinds),
        "rounded_attention": parity.rounded_attention,
        "weights": {
            "exact": len(parity.weights.exact),
            "rounded": len(parity.weights.rounded),
            "different": list(parity.weights.different),
        },
        "first_apart": parity.first_apart,
        "roles": {
            role.role: {"float": _comparison(role.float), "emulated": _comparison(role.emulated)}
            for role in parity.roles
        },
        "cases": list(parity.cases),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return dataclasses.asdict(comparison)


def _agreement(overall: WorkloadFigures, workloads: Mapping[str, WorkloadFigures]) -> dict[str, Any]:
    return {**_workload(overall), "workloads": {name: _workload(figures) for name, figures in workloads.items()}}


def _workload(figures: WorkloadFigures) -> dict[str, Any]:
    return {
        "texts": figures.texts,
        "n": figures.anchors,
        "mean_accepted_length": figures.mean_accepted_length,
        "mean_accepted_length_ci95": figures.mean_accepted_interval,
        "steps": _steps(figures),
    }


def _steps(figures: WorkloadFigures) -> list[dict[str, Any]]:
    return [
        {
            "step": index + 1,
            **{name: proportion.value for name, proportion in named.items()},
            "n": step.top1.trials,
            "n_conditional": step.conditional.trials,
            "ci95": {name: proportion.interval for name, proportion in named.items()},
        }
        for index, step in enumerate(figures.steps)
        for named in [_named(step)]
    ]


def _named(step: Any) -> dict[str, Share]:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}


def _control(result: ControlResult) -> dict[str, Any]:
    figures = result.figures
    return {
        "what": result.control.what,
        "suspect": result.control.suspect,
        "skipped": result.skipped,
        "standing": result.standing,
        "difference": result.difference,
        "difference_ci95": result.interval,
        "changed": result.changed,
        "better": result.better,
        "worse": result.worse,
        "mean_accepted_length": figures.mean_accepted_length if figures else None,
        "mean_accepted_length_ci95": figures.mean_accepted_interval if figures else None,
        "steps": _steps(figures) if figures else [],
    }


def _generation(generation: GenerationResult) -> dict[str, Any]:
    return {result.name: _length(result) for result in generation.lengths}


def _arithmetic(generation: GenerationResult) -> dict[str, Any]:
    return {
        "base_ms": generation.base_ms,
        "best_draft_steps": generation.best_drafts,
        "predicted_speedup": generation.predicted_speedup,
        "break_even_draft_steps": generation.break_even_drafts,
        "timed_prompts": generation.timed,
        "speedups": {
            result.name: {
                "predicted": result.predicted_speedup(generation.base_ms),
                "measured": result.measured_speedup,
            }
            for result in generation.lengths
        },
    }


def _drafter(drafter: DrafterFigures) -> dict[str, Any]:
    facts = drafter.facts
    head = facts.ordered_head
    return {
        "name": facts.name,
        "format": facts.format,
        "made": facts.made,
        "mode": facts.mode,
        "ordered_head": dataclasses.asdict(head) if head else None,
        "bytes_a_step": _reads(facts.reads.bytes),
        "parameters_a_step": _reads(facts.reads.parameters),
        "change": _change(drafter.change),
        "changes": {name: _change(change) for name, change in drafter.changes.items()},
        "agreement": _agreement(drafter.agreement, drafter.workloads),
        "generation": _generation(drafter.generation),
        "arithmetic": _arithmetic(drafter.generation),
    }


def _reads(reads: Reads) -> dict[str, int]:
    return {**dataclasses.asdict(reads), "total": reads.total}


def _change(change: Change) -> dict[str, Any]:
    return {"mean": change.mean, "ci95": change.interval}


def _length(result: DraftLengthResult) -> dict[str, Any]:
    return {
        "tree": result.tree,
        "paths": result.paths,
        "drafts": result.drafts,
        "depth": result.depth,
        "accepted": result.accepted,
        "drafted": result.drafted,
        "rounds": result.rounds,
        "acceptance": result.acceptance,
        "mean_accepted_length": result.mean_accepted_length,
        "mean_accepted_length_ci95": result.mean_accepted_interval,
        "expected_mean_accepted_length": result.expected,
        "chosen_on": result.chosen_on,
        "mean_accepted_length_elsewhere": result.elsewhere,
        "steps": [
            {
                "step": index + 1,
                "accepted": accepted,
                "conditional": conditional.value,
                "unconditional": unconditional.value,
                "n": unconditional.trials,
                "n_conditional": conditional.trials,
            }
            for index, (accepted, conditional, unconditional) in enumerate(
                zip(result.accepted_by_step, result.conditional, result.unconditional, strict=True)
            )
        ],
        "identical": result.identical,
        "identical_prompts": result.identical_prompts,
        "prompts": result.prompts,
        "divergences": [dataclasses.asdict(divergence) for divergence in result.divergences],
        "base_tokens_per_s": result.base_tokens_per_s,
        "speculative_tokens_per_s": result.speculative_tokens_per_s,
        "verify_ms": result.verify_ms,
        "draft_ms": result.draft_ms,
    }
