"""Validation: is a checkpoint the drafter of its file, and does it draft what its base would say?

::

    from mtp_extract.validate import Plan, run_validation, write_report

    found = run_validation(Plan(Path("DIR"), base="google/gemma-4-E4B-it", source="gemma-4-E4B-it.litertlm"))
    write_report(found, Path("report"))

``identity`` answers the first question: config, tensors and what both compute, derived from the file anew; ``parity``
adds what transformers and Google's interpreter make of it. The second is measured: ``agreement`` (teacher-forced over
the base's own text), ``controls`` (the same with one thing broken), ``trivial`` (what needs no drafter), ``generation``
(speculative decoding). ``run`` puts them together, ``report`` writes them down.

Names are imported when they are first used: torch, transformers and ai-edge-litert come with the extra
``validate``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_extract.validate.acceptance.controls import CONTROLS
    from mtp_extract.validate.parity.compare import measure_parity
    from mtp_extract.validate.report.document import as_json
    from mtp_extract.validate.report.pages import markdown, write_report
    from mtp_extract.validate.result import Validation
    from mtp_extract.validate.run import Plan, run_validation, sample_plan

__all__ = [
    "CONTROLS",
    "Plan",
    "Validation",
    "as_json",
    "markdown",
    "measure_parity",
    "run_validation",
    "sample_plan",
    "write_report",
]

_HOMES = {
    "CONTROLS": "acceptance.controls",
    "Plan": "run",
    "Validation": "result",
    "as_json": "report.document",
    "markdown": "report.pages",
    "measure_parity": "parity.compare",
    "run_validation": "run",
    "sample_plan": "run",
    "write_report": "report.pages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
