"""What every report has: JSON of JSON's own types, and a page of tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtp_extract.report.columns import Table
from mtp_extract.report.markdown import listed, plain
from mtp_extract.report.tables import FIGURES


def plain_json(value: Any) -> Any:
    """``value`` with JSON's own types only, None where a number does not exist."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def page(
    title: str,
    report: Mapping[str, Any],
    tables: Iterable[Table],
    figures: Sequence[str] = (),
    captions: Mapping[str, str] = FIGURES,
) -> str:
    """A report in Markdown: verdict and findings first, then ``tables``, with those of their ``figures`` there are."""
    parts = [f"# {plain(title)}", f"**{plain(report['verdict'])}**"]
    if report["findings"]:
        parts += ["Findings:", listed(report["findings"])]
    for table in tables:
        parts.append(table.markdown())
        if shown := [f"![{captions[name]}]({name}.png)" for name in table.figures if name in figures]:
            parts.append(" ".join(shown))
    if report["notes"]:
        parts += ["## Notes", listed(report["notes"])]
    return "\n\n".join(parts) + "\n"
