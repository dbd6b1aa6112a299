"""How the commands print: lines, tables, sizes, and how far they are.

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
"""Characters of a line where it goes to a file."""
_SHORT = 16
"""Characters of a cell that stays on one line: a number with its unit, an interval."""
_BAR = 20
"""Columns of a bar."""
_REMEMBERED = 3600.0
"""Seconds of work by which the time left is estimated: a batch may take minutes."""
_WORTH_SHOWING = 1 << 26
"""Bytes."""
_LINES = 20
"""Of progress, where there is no terminal to redraw one on."""


def _line(stream: TextIO, text: str) -> None:
    """``text`` on ``stream``, with "?" for what its encoding lacks."""
    encoding = stream.encoding or "utf-8"
    stream.write((text + "\n").encode(encoding, "replace").decode(encoding))


def say(text: str) -> None:
    """A line on stdout; on a terminal that is narrower, it goes on in the next between words, further to the right."""
    _line(sys.stdout, _wrap(text, _room()))


def say_unbroken(text: str) -> None:
    """A line on stdout as it is, however long, for who copies it: a shell runs what stands on each line by itself."""
    _line(sys.stdout, text)


def _wrap(text: str, width: int) -> str:
    """``text`` broken between words; what continues a line is indented further."""
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
    """A line of untrusted text on stdout, all of it: a long text is not a long name."""
    say(escape(text, longest=len(text)))


def say_notes(notes: Iterable[str]) -> None:
    """What is worth knowing and no error, a line each."""
    for note in notes:
        say_all(f"Note: {note}")


def say_report(record: object, parts: Iterable[ReportTable], *, as_json: bool) -> None:
    """``record`` as JSON; or its verdict with its findings, ``parts`` and its notes."""
    from mtp_extract.report.page import plain_json

    report = plain_json(record)
    if as_json:
        write_json(report)
        return
    say_all(report["verdict"])
    for finding in report["findings"]:
        say_all(f"Finding: {finding}")
    for part in parts:
        say(part.title)
        table(part.rows, part.columns if any(part.columns) else ())
    say_notes(report["notes"])


def write_json(value: Any) -> None:
    """``value`` as JSON on stdout."""
    _line(sys.stdout, json.dumps(value, indent=2, ensure_ascii=True, default=str))


def error(message: str) -> None:
    """An error on stderr."""
    sys.stdout.flush()
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else _UNBOUNDED
    _line(sys.stderr, _wrap(f"error: {message}", width))
    sys.stderr.flush()


def doing(what: str) -> None:
    """On stderr, what a long run is at."""
    _line(sys.stderr, f"{escape(what)} …")
    sys.stderr.flush()


def size(count: float) -> str:
    """A number of bytes for people: 45.1 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def table(
    rows: Sequence[Sequence[object]], head: Sequence[str] = (), indent: str = "  ", longest: int = LONGEST_NAME
) -> None:
    """``rows`` in columns that fit the terminal; numbers to the right. Cells are cut after ``longest`` characters.

    No word and no number is broken in two: where the columns do not fit, each row is a list of its own, a cell a line.
    None and False are shown as a dash, True as "yes", and of floats three digits.
    """
    if not rows:
        return
    # Half a tenth of a second to import: for who sees it alone.
    from rich.console import Console

    cells = [[escape(_cell(cell), longest) for cell in row] for row in rows]
    titles = head or [""] * len(rows[0])
    console = Console(width=_room(indent), file=io.StringIO(), force_terminal=False)
    if _least_width([titles, *cells]) > console.width:
        _list_rows(cells, head, indent)
        return
    are_numbers = [all(isinstance(cell, (int, float)) for cell in column) for column in zip(*rows, strict=True)]
    with console.capture() as shown:
        console.print(_grid(cells, titles, are_numbers, show_head=bool(head)))
    for line in shown.get().splitlines():
        _line(sys.stdout, (indent + line).rstrip().replace("\N{NO-BREAK SPACE}", " "))


def _grid(
    cells: Sequence[Sequence[str]], titles: Sequence[str], are_numbers: Sequence[bool], *, show_head: bool
) -> Grid:
    """The columns; a number stands to the right, and a short cell on one line."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, show_header=show_head, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title, is_number in zip(titles, are_numbers, strict=True):
        grid.add_column(Text(title), justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        grid.add_row(*(Text(cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) <= _SHORT else cell) for cell in row))
    return grid


def _least_width(rows: Sequence[Sequence[str]]) -> int:
    """Of columns in which only long cells go on in another line, and between words."""
    widths = [
        max(len(word) for cell in column for word in ([cell] if len(cell) <= _SHORT else cell.split()))
        for column in zip(*rows, strict=True)
    ]
    return sum(widths) + 2 * (len(widths) - 1)


def _list_rows(rows: Sequence[Sequence[str]], head: Sequence[str], indent: str) -> None:
    """Each of ``rows`` as its first cell, and below it the others, if not empty, with the titles of their columns."""
    for first, *others in rows:
        _line(sys.stdout, f"{indent}{first}")
        for title, cell in zip(head[1:] or [""] * len(others), others, strict=True):
            if cell:
                say(f"{indent}  {title}: {cell}" if title else f"{indent}  {cell}")


def _cell(value: object) -> object:
    if value is None or isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={one}" for key, one in value.items() if one is not None)
    return f"{value:.3g}" if isinstance(value, float) else list(value) if isinstance(value, tuple) else value


def _room(indent: str = "") -> int:
    """Characters beside ``indent`` on a line of stdout; no bound where it is no terminal and COLUMNS does not say."""
    if not os.environ.get("COLUMNS", "").isdecimal() and not sys.stdout.isatty():
        return _UNBOUNDED
    return max(shutil.get_terminal_size().columns - len(indent), 1)


# --- how far a run is


class TerminalReporter(AbstractContextManager["TerminalReporter"], Reporter):
    """Shows what it is told, by a bar on a terminal, else by lines; nothing is left of the bar when its block ends."""

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
