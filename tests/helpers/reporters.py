"""A reporter that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtp_extract.progress import Reporter


class Recorder(Reporter):
    """What was said, how far each part was, and results that were there before the end; ``stop`` ends the work."""

    def __init__(self, stop: Callable[[], bool] = bool) -> None:
        self.lines: list[str] = []
        self.parts: list[tuple[str, int, int]] = []
        self.results: list[Any] = []
        self._stop = stop

    def say(self, text: str) -> None:
        self.lines.append(text)

    def report_progress(self, part: str, number: int, total: int, unit: str = "") -> None:
        self.parts.append((part, number, total))

    def report_result(self, result: object) -> None:
        self.results.append(result)

    def is_stopped(self) -> bool:
        return self._stop()
