"""The report directory: ``report.json``, ``report.md`` and the figures, there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mtp_extract.checkpoint.staging import staged_directory
from mtp_extract.markdown import plain
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.report.figures import draw_figures
from mtp_extract.validate.report.tables import FIGURES, PAGE, REPORT, measurements, setting
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
    page = [f"# Validation of {plain(report['drafter'])}", f"**{plain(report['verdict'])}**"]
    if report["findings"]:
        page += ["Findings:", _listed(report["findings"])]
    for table in (setting(report), *measurements(report)):
        page.append(table.markdown())
        if table.figure in figures:
            page.append(f"![{FIGURES[table.figure]}]({table.figure}.png)")
    if report["notes"]:
        page += ["## Notes", _listed(report["notes"])]
    return "\n\n".join(page) + "\n"


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"- {plain(item)}" for item in items)
