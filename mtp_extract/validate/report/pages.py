"""The report directory: ``report.json``, ``pair.json``, two pages and the figures, there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_extract.io.place import Inputs, staged
from mtp_extract.report.columns import Column, Table, decimal, item
from mtp_extract.report.figures import draw_figures
from mtp_extract.report.page import page
from mtp_extract.report.svg import inline
from mtp_extract.report.tables import FIGURES, PAGE, PAIR, REPORT, REPORT_LISTED, WEB_PAGE, measurements, method, words
from mtp_extract.report.web import web_page
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.report.pair import pair_as_json
from mtp_extract.validate.result import Validation


def write_report(validation: Validation, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    report, pair = as_json(validation), pair_as_json(validation)
    tables = list(_tables(report, pair))
    with staged(target, overwrite=overwrite, inputs=inputs, listed=REPORT_LISTED) as stage:
        figures = draw_figures(report, stage)
        for name, document in ((REPORT, report), (PAIR, pair)):
            if document is not None:
                (stage / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        (stage / PAGE).write_text(page(_title(report), report, tables, figures), encoding="utf-8")
        drawn = {
            name: inline((stage / f"{name}.svg").read_text(encoding="utf-8"), name, FIGURES[name]) for name in figures
        }
        (stage / WEB_PAGE).write_text(web_page(_title(report), report, tables, drawn), encoding="utf-8")
        return sorted(path.name for path in stage.iterdir())


def markdown(validation: Validation, figures: Sequence[str] = ()) -> str:
    """The report as a page: verdict first, then each measurement as a table. ``figures`` are those that were drawn."""
    report = as_json(validation)
    return page(_title(report), report, _tables(report, pair_as_json(validation)), figures)


def _title(report: Mapping[str, Any]) -> str:
    return f"Validation of {report['drafter']}"


def _tables(report: Mapping[str, Any], pair: Mapping[str, Any] | None) -> Iterator[Table]:
    yield from measurements(report)
    if pair is not None:
        yield buffers(pair)
    yield setting(report)


def setting(report: Mapping[str, Any]) -> Table:
    base, source = report["base"], report["source"]
    rows = [("drafter", report["drafter"])]
    if source:
        rows.append(("file", source))
    if base:
        rows += [
            ("base", f"{base['name']} ({base['dtype']}, on {', '.join(base['devices'])})"),
            ("drafter computes in", base["drafter_dtype"]),
            ("chat template", "applied" if base["chat_template"] else "not applied"),
        ]
    rows += [(name.replace("_", " "), words(value)) for name, value in report["settings"].items() if value != []]
    return Table(title="Setting", columns=("", ""), rows=tuple(rows))


_BUFFERS: Sequence[Column] = (
    ("buffer", item("buffer")),
    ("what", item("what")),
    ("shape", lambda tensors: str(tensors["shape"])),
    ("axes", lambda tensors: ", ".join(tensors["axes"])),
    ("dtype", item("dtype")),
    ("copies", item("copies")),
    ("bytes", decimal("bytes", ",")),
)


def buffers(pair: Mapping[str, Any]) -> Table:
    """What a round holds, of the content of a ``pair.json``."""
    return Table.of(
        f"Buffers of a {method(pair['verify']['drafts'])}, batch of one",
        _BUFFERS,
        [{**tensors, "buffer": name} for name, held in pair["buffers"].items() for tensors in held["tensors"]],
        about="As they were seen while the pair continued the longest text, each at its largest. T: tokens of one "
        "forward of the base.",
        detail=True,
    )
