"""How the commands show on stderr how far they are: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from mtp_extract.cli.terminal import doing, size
from mtp_extract.errors import escape
from mtp_extract.progress import BYTES, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress

_BAR = 20
"""Columns of a bar."""
_REMEMBERED = 3600.0
"""Seconds of work by which the time left is estimated: a batch may take minutes."""
_WORTH_SHOWING = 1 << 26
"""Bytes."""
_LINES = 20
"""Of progress, where there is no terminal to redraw one on."""


class TerminalReporter(AbstractContextManager["TerminalReporter"], Reporter):
    """Shows what it is told, until its ``with`` block ends: then nothing is left of the bar."""

    def __init__(self, *, quiet: bool = False, print_result: Callable[[Any], None] = lambda result: None) -> None:
        """Begin to show.

        Args:
            quiet: show nothing, as where JSON is printed.
            print_result: prints a result that was measured, when the bar is gone.
        """
        self._quiet = quiet
        self._print_result = print_result
        self._bar: Progress | None = None
        self._stack = ExitStack()
        self._lines = 0  # that were printed, where there is no terminal
        self._one_at_a_time = threading.Lock()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen."""
        self._stack.close()
        self._bar = None

    def say(self, text: str) -> None:
        """Print what is begun."""
        if not self._quiet:
            doing(text)

    def done(self, part: str, number: int, total: int, unit: str = "") -> None:
        """Redraw the bar, or print a line where there is no terminal; of bytes only many are worth showing."""
        if self._quiet or (unit == BYTES and total < _WORTH_SHOWING):
            return
        if unit == BYTES:
            line = f"{size(number)} of {size(total)}"
        elif unit:
            line = f"{part}: {unit} {number} of {total}"
        else:
            line = part
        if sys.stderr.isatty():
            with self._one_at_a_time:
                self._draw(escape(line), number, total)
        elif unit != BYTES and (lines := _LINES * number // total) != self._lines:
            self._lines = lines
            doing(line)

    def measured(self, result: Any) -> None:
        """Print a result; the bar may still stand where its first line would begin."""
        self.close()
        self._print_result(result)

    def _draw(self, line: str, number: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(_bar())
        task = self._bar.task_ids[0] if self._bar.task_ids else self._bar.add_task(line, total=total)
        if number < self._bar.tasks[0].completed:
            self._bar.reset(task)  # another part of the work, at another pace
        self._bar.update(task, completed=number, total=total, description=line)


def _bar() -> Progress:
    """A bar on the terminal that stderr is, with a line beside it; in the end nothing is left of it."""
    # Half a tenth of a second to import: for who sees it alone.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    return Progress(
        BarColumn(_BAR, table_column=Column(min_width=_BAR)),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True, highlight=False),
        speed_estimate_period=_REMEMBERED,
        transient=True,
        redirect_stdout=False,
    )
