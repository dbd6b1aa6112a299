"""What each command may take: ``budgets.json``, and a measurement held against it.

A budget is a number, and shares of the base's and the bundle's bytes on top; of time, seconds, and seconds a gigabyte
of the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .measure import Measured

TABLE = Path(__file__).parent / "budgets.json"


@dataclass(frozen=True)
class Sizes:
    """Bytes of the pair that is rehearsed with."""

    base: int
    bundle: int


def allowed(kind: str, sizes: Sizes, table: Path = TABLE) -> dict[str, float]:
    """What a command of ``kind`` may take: ``cpu_s``, and bytes of ``host``, ``device``, ``read`` and ``written``.

    Raises:
        KeyError: the table has no such command.
    """
    read = json.loads(table.read_text(encoding="utf-8"))
    terms: Mapping[str, Mapping[str, float]] = {**read["any"], **read["commands"][kind]}
    return {
        what: of.get("fixed", 0.0)
        + sizes.base * of.get("base", 0.0) / (1e9 if what == "cpu_s" else 1)
        + sizes.bundle * of.get("bundle", 0.0) / (1e9 if what == "cpu_s" else 1)
        for what, of in terms.items()
    }


def exceeded(measured: Measured, most: Mapping[str, float]) -> list[str]:
    """What of ``measured`` is more than ``most``, in words."""
    found = {what: getattr(measured, what) for what in most}
    return [
        f"{what} {shown(what, found[what])} of at most {shown(what, most[what])}"
        for what in most
        if found[what] > most[what]
    ]


def shown(what: str, number: float) -> str:
    """A figure for people."""
    return f"{number:.1f} s" if what.endswith("_s") else f"{number / 1e6:,.0f} MB"
