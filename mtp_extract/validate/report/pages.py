"""The report directory: ``report.json``, ``report.md`` and the figures, there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mtp_extract.checkpoint.staging import staged_directory
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.report.figures import draw_figures
from mtp_extract.validate.report.page import page
from mtp_extract.validate.report.tables import PAGE, REPORT, measurements, setting
from mtp_extract.validate.result import Validation

__all__ = ["markdown", "write_report"]


def write_report(validation: Validation, target: Path, *, overwrite: bool = False) -> list[str]:
    """Write the report; names of its files.

    Raises:
        OutputError: it cannot be written there.
    """
    with staged_directory(target, overwrite, REPORT) as stage:
        figures = draw_figures(validation, stage)
        (stage / REPORT).write_text(json.dumps(as_json(validation), indent=2) + "\n", encoding="utf-8")
        (stage / PAGE).write_text(markdown(validation, figures), encoding="utf-8")
        return sorted(path.name for path in stage.iterdir())


def markdown(validation: Validation, figures: Sequence[str] = ()) -> str:
    """The report as a page: verdict first, then each measurement as a table. ``figures`` are those that were drawn."""
    report = as_json(validation)
    return page(f"Validation of {report['drafter']}", report, (setting(report), *measurements(report)), figures)
