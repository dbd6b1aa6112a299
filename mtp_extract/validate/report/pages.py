"""The report directory: ``report.json``, ``pair.json``, two pages and the figures, there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_extract.io.place import Inputs, staged
from mtp_extract.report.columns import Column, Table, decimal, item
from mtp_extract.report.figures import DRAWINGS
from mtp_extract.report.page import Page
from mtp_extract.report.tables import FIGURES, PAIR, REPORT_LISTED, measurements, method, words
from mtp_extract.report.web import write_pages
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.report.head import headlines
from mtp_extract.validate.report.pair import pair_as_json
from mtp_extract.validate.result import Validation


def write_report(validation: Validation, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    report, pair = as_json(validation), pair_as_json(validation)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=REPORT_LISTED) as stage:
        if pair is not None:
            (stage / PAIR).write_text(json.dumps(pair, indent=2) + "\n", encoding="utf-8")
        return write_pages(page_of(report, pair), stage, "report")


def page_of(report: Mapping[str, Any], pair: Mapping[str, Any] | None = None) -> Page:
    """The page of a ``report.json``, and the ``pair.json`` beside it."""
    base, source = report["base"], report["source"]
    parts = [f"Beside {base['name']}, in {base['dtype']} on {', '.join(base['devices'])}"] if base else []
    about = "; ".join((*parts, *([f"against {source}"] if source else [])))
    return Page(
        f"Validation of {report['drafter']}",
        about[:1].upper() + about[1:],
        report,
        headlines(report),
        list(_tables(report, pair)),
        FIGURES,
        DRAWINGS,
    )


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
    return Table(title="Setting", columns=("", ""), rows=tuple(rows), what="What a second run needs.")


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
        what="What a round holds in memory, as seen over the longest text; T: tokens of one forward of the base.",
        detail=True,
    )
