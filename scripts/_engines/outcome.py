"""What an engine did with a drafter, as data."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COLUMNS", "Outcome", "cells", "from_json", "last_line", "run", "shortfalls"]

COLUMNS = ("engine", "version", "format", "loads", "text identical", "accepted", "note")


@dataclass(frozen=True)
class Outcome:
    """One row of the table.

    Attributes:
        identical: whether greedy text with the drafter is the base's own; None where no text was made.
        drafted, accepted: tokens; None where the engine does not say.
        note: why it does not load, or what else is to be known.
    """

    engine: str
    format: str
    version: str = ""
    loads: bool | None = None
    identical: bool | None = None
    drafted: int | None = None
    accepted: int | None = None
    note: str = ""


def from_json(engine: str, format_: str, printed: str) -> Outcome:
    """The last line that a ``run_*.py`` printed: ``version``, and what there is of the other fields.

    Raises:
        ValueError: it is no such line.
    """
    lines = printed.strip().splitlines()
    found: Mapping[str, Any] = json.loads(lines[-1]) if lines else {}
    if "version" not in found:
        raise ValueError(f"{engine}: expected a line of JSON with a version, found {printed[-200:]!r}.")
    known = {name: found[name] for name in ("version", "identical", "drafted", "accepted", "note") if name in found}
    return Outcome(engine, format_, loads=True, **known)


def last_line(text: str) -> str:
    """The last line of ``text`` that says something: that of a traceback is the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The finished ``command``, with what it printed."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)


def cells(outcome: Outcome) -> list[str]:
    """``outcome`` under :data:`COLUMNS`."""
    words = {True: "yes", False: "no", None: "–"}
    accepted = "–" if outcome.drafted is None else f"{outcome.accepted} of {outcome.drafted}"
    answers = (words[outcome.loads], words[outcome.identical])
    return [outcome.engine, outcome.version or "–", outcome.format, *answers, accepted, outcome.note]


def shortfalls(outcomes: Iterable[Outcome]) -> list[str]:
    """What went wrong: no load, another text, or another acceptance than the engine's first row, the F32 checkpoint."""
    found = []
    first: dict[str, Outcome] = {}
    for outcome in outcomes:
        name = f"{outcome.engine}, {outcome.format}"
        if outcome.loads is False:
            found.append(f"{name}: it does not load: {outcome.note}")
        if outcome.identical is False:
            found.append(f"{name}: the text is not the base's own")
        if outcome.drafted is None:
            continue
        reference = first.setdefault(outcome.engine, outcome)
        expected, seen = ((o.accepted, o.drafted) for o in (reference, outcome))
        if seen != expected:
            found.append(
                f"{name}: expected {expected[0]} of {expected[1]} accepted, as with {reference.format}, "
                f"found {seen[0]} of {seen[1]}"
            )
    return found
