"""What every report has: plain JSON, and a page of large figures, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mtp_extract.report import markdown
from mtp_extract.report.columns import Table
from mtp_extract.report.drawing import Draw
from mtp_extract.report.markdown import listed, plain


def plain_json(value: Any) -> Any:
    """``value`` with JSON's own types only, None where a number does not exist."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


NOT_MEASURED = "not measured"


class Headline(NamedTuple):
    """A large figure at the head of a page."""

    name: str
    value: str
    """The figure, or in a word or two that there is none."""
    of: str
    """What it was measured over, with its interval; or why it was not."""
    means: str
    """What ``name`` means, in a line."""
    standing: Literal["", "good", "bad", "none"] = ""


TOKENS_A_ROUND = "Drafts that stand in a round, and the base's own token; 1 without a drafter."


def measured(name: str, value: float | str | None, form: str, of: str, why_not: str, means: str) -> Headline:
    """A figure ``of`` something, formatted by ``form``; where ``value`` is None, that there is none and ``why_not``."""
    if value is None:
        return Headline(name, NOT_MEASURED, why_not, means, "none")
    return Headline(name, form.format(value), of, means)


def within(interval: Sequence[float] | None, form: str = ".2f") -> str:
    """A 95 % interval in words, or that there is none."""
    return f"95 %: {interval[0]:{form}}–{interval[1]:{form}}" if interval else "no interval"


def pages_of(name: str, pictures: Iterable[str]) -> frozenset[str]:
    """Names of all files that a report ``name`` may have, of whose ``pictures`` some may not be drawn."""
    drawn = (f"{picture}.{ending}" for picture in pictures for ending in ("png", "svg"))
    return frozenset({f"{name}.json", f"{name}.md", f"{name}.html", *drawn})


@dataclass(frozen=True)
class Page:
    """A report as a reader sees it."""

    title: str
    about: str
    """What was measured beside what, in a line."""
    report: Mapping[str, Any]
    """With ``verdict``, ``findings``, ``notes`` and ``tool``."""
    headlines: Sequence[Headline]
    tables: Sequence[Table]
    """Those that matter first stand first and open."""
    captions: Mapping[str, str]
    """Of every picture that there may be, by name."""
    drawings: Mapping[str, Draw]
    """How each is drawn."""

    def markdown(self, drawn: Sequence[str] = ()) -> str:
        """In Markdown, with those pictures of its tables that were ``drawn``."""
        heads = [[plain(cell) for cell in (head.name, head.value, head.of, head.means)] for head in self.headlines]
        rows = ([name, f"**{value}**", of, means] for name, value, of, means in heads)
        parts = [f"# {plain(self.title)}", markdown.paragraph(self.about), markdown.table(["", "", "", ""], rows)]
        parts.append(f"**{plain(self.report['verdict'])}**")
        if self.report["findings"]:
            parts += ["Findings:", listed(self.report["findings"])]
        for table in self.tables:
            parts.append(table.markdown())
            if shown := [f"![{self.captions[name]}]({name}.png)" for name in table.figures if name in drawn]:
                parts.append(" ".join(shown))
        if self.report["notes"]:
            parts += ["## Notes", listed(self.report["notes"])]
        return "\n\n".join(part for part in parts if part) + "\n"
