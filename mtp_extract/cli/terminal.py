"""Print lines, tables, sizes and progress.

Results go to stdout; errors and progress to stderr. Names read from files are escaped before they reach a terminal; in
JSON they are strings like any other.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TextIO

from mtp_extract.errors import LONGEST_NAME, escape
from mtp_extract.progress import BYTES, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table as Grid

    from mtp_extract.report.page import ReportTable

_UNBOUNDED = 1 << 16
"""Characters per line of output that goes to a file or a pipe."""
_SHORT = 16
"""Characters up to which a cell stays on one line: a number with its unit, an interval."""
_BAR = 20
"""Columns of a progress bar."""
_REMEMBERED = 3600.0
"""Seconds of work from which the time left is estimated: a batch may take minutes."""
_WORTH_SHOWING = 1 << 26
"""Bytes from which progress is shown."""
_LINES = 20
"""Lines of progress if there is no terminal to redraw one on."""


def _write_line(stream: TextIO, text: str) -> None:
    """Write a line to ``stream``, with "?" for characters that its encoding lacks."""
    encoding = stream.encoding or "utf-8"
    stream.write((text + "\n").encode(encoding, "replace").decode(encoding))


def say(text: str) -> None:
    """Print a line on stdout; a narrow terminal gets it broken between words, continued lines indented."""
    _write_line(sys.stdout, _wrap(text, _measure_line()))


def say_unbroken(text: str) -> None:
    """Print a line on stdout unbroken, for copying: a shell would run each line of a broken command by itself."""
    _write_line(sys.stdout, text)


def _wrap(text: str, width: int) -> str:
    """Break ``text`` between words; continued lines are indented further."""
    indent = text[: len(text) - len(text.lstrip())] + "  "
    return textwrap.fill(
        text,
        width,
        subsequent_indent=indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say_all(text: str) -> None:
    """Print a line of untrusted text on stdout, escaped but not shortened."""
    say(escape(text, longest=len(text)))


def say_notes(notes: Iterable[str]) -> None:
    """Print notes, a line each."""
    for note in notes:
        say_all(f"Note: {note}")


def say_report(record: object, parts: Iterable[ReportTable], *, as_json: bool) -> None:
    """Print ``record`` as JSON; or its verdict, its findings, the tables in ``parts`` and its notes."""
    from mtp_extract.report.page import convert_to_json

    report = convert_to_json(record)
    if as_json:
        write_json(report)
        return
    say_all(report["verdict"])
    for finding in report["findings"]:
        say_all(f"Finding: {finding}")
    for part in parts:
        say(part.title)
        say_table(part.rows, part.columns if any(part.columns) else ())
    say_notes(report["notes"])


def write_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    _write_line(sys.stdout, json.dumps(value, indent=2, ensure_ascii=True, default=str))


def say_error(message: str) -> None:
    """Print an error on stderr."""
    sys.stdout.flush()
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else _UNBOUNDED
    _write_line(sys.stderr, _wrap(f"error: {message}", width))
    sys.stderr.flush()


def say_progress(text: str) -> None:
    """Print on stderr what a long run is doing."""
    _write_line(sys.stderr, f"{escape(text)} …")
    sys.stderr.flush()


def format_size(count: float) -> str:
    """Format a number of bytes for people: 45.1 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def say_table(
    rows: Sequence[Sequence[object]], head: Sequence[str] = (), indent: str = "  ", longest: int = LONGEST_NAME
) -> None:
    """Print ``rows`` in columns that fit the terminal, numbers to the right, cells of at most ``longest`` characters.

    No word and no number is broken in two: if the columns do not fit, each row becomes a list, one cell per line. None
    and False are shown as a dash, True as "yes", floats with three digits.
    """
    if not rows:
        return
    # Takes 50 ms to import, which commands without a table need not spend.
    from rich.console import Console

    cells = [[escape(_format_cell(cell), longest) for cell in row] for row in rows]
    titles = head or [""] * len(rows[0])
    console = Console(width=_measure_line(indent), file=io.StringIO(), force_terminal=False)
    if _compute_least_width([titles, *cells]) > console.width:
        _list_rows(cells, head, indent)
        return
    are_numbers = [all(isinstance(cell, (int, float)) for cell in column) for column in zip(*rows, strict=True)]
    with console.capture() as shown:
        console.print(_build_grid(cells, titles, are_numbers, show_head=bool(head)))
    for line in shown.get().splitlines():
        _write_line(sys.stdout, (indent + line).rstrip().replace("\N{NO-BREAK SPACE}", " "))


def _build_grid(
    cells: Sequence[Sequence[str]], titles: Sequence[str], are_numbers: Sequence[bool], *, show_head: bool
) -> Grid:
    """Build the columns; numbers stand to the right, short cells on one line."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, show_header=show_head, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title, is_number in zip(titles, are_numbers, strict=True):
        grid.add_column(Text(title), justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        grid.add_row(*(Text(cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) <= _SHORT else cell) for cell in row))
    return grid


def _compute_least_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the width of the columns if only long cells are continued on another line, between words."""
    widths = [
        max(len(word) for cell in column for word in ([cell] if len(cell) <= _SHORT else cell.split()))
        for column in zip(*rows, strict=True)
    ]
    return sum(widths) + 2 * (len(widths) - 1)


def _list_rows(rows: Sequence[Sequence[str]], head: Sequence[str], indent: str) -> None:
    """Print the first cell of each row, and below it the other cells that are not empty, with their columns' titles."""
    for first, *others in rows:
        _write_line(sys.stdout, f"{indent}{first}")
        for title, cell in zip(head[1:] or [""] * len(others), others, strict=True):
            if cell:
                say(f"{indent}  {title}: {cell}" if title else f"{indent}  {cell}")


def _format_cell(value: object) -> object:
    if value is None or isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={entry}" for key, entry in value.items() if entry is not None)
    return f"{value:.3g}" if isinstance(value, float) else list(value) if isinstance(value, tuple) else value


def _measure_line(indent: str = "") -> int:
    """Return how many characters fit on a line of stdout after ``indent``; without terminal and COLUMNS, any number."""
    if not os.environ.get("COLUMNS", "").isdecimal() and not sys.stdout.isatty():
        return _UNBOUNDED
    return max(shutil.get_terminal_size().columns - len(indent), 1)


# --- progress


class TerminalReporter(AbstractContextManager["TerminalReporter"], Reporter):
    """Shows progress as a bar on a terminal, which its block removes in the end; elsewhere as lines."""

    def __init__(self, *, quiet: bool = False, print_result: Callable[[Any], None] = lambda result: None) -> None:
        """Begin to show progress.

        Args:
            quiet: show nothing, as when JSON is printed.
            print_result: prints a result that was measured, once the bar is gone.
        """
        self._quiet = quiet
        self._print_result = print_result
        self._bar: Progress | None = None
        self._stack = ExitStack()
        self._lines = 0  # printed so far, if there is no terminal
        self._one_at_a_time = threading.Lock()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen."""
        self._stack.close()
        self._bar = None

    def say(self, text: str) -> None:
        """Print what begins."""
        if not self._quiet:
            say_progress(text)

    def report_progress(self, part: str, number: int, total: int, unit: str = "") -> None:
        """Redraw the bar, or print a line if there is no terminal; a small number of bytes is not shown."""
        if self._quiet or (unit == BYTES and total < _WORTH_SHOWING):
            return
        if unit == BYTES:
            line = f"{format_size(number)} of {format_size(total)}"
        elif unit:
            line = f"{part}: {unit} {number} of {total}"
        else:
            line = part
        if sys.stderr.isatty():
            with self._one_at_a_time:
                self._draw(escape(line), number, total)
        elif unit != BYTES and (lines := _LINES * number // total) != self._lines:
            self._lines = lines
            say_progress(line)

    def report_result(self, result: Any) -> None:
        """Take the bar off the screen, where the result's first line begins, and print the result."""
        self.close()
        self._print_result(result)

    def _draw(self, line: str, number: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(_make_bar())
        task = self._bar.task_ids[0] if self._bar.task_ids else self._bar.add_task(line, total=total)
        if number < self._bar.tasks[0].completed:
            self._bar.reset(task)  # another part of the work began, at another pace
        self._bar.update(task, completed=number, total=total, description=line)


def _make_bar() -> Progress:
    """Make a bar on stderr with a line beside it, which vanishes in the end."""
    # Takes 50 ms to import, which runs without a bar need not spend.
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
