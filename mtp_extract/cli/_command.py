"""Make a command from a function, its options and examples, and run it.

Errors become one line on stderr and an exit status, never a traceback, unless ``MTP_EXTRACT_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from mtp_extract._version import __version__
from mtp_extract.cli import terminal
from mtp_extract.errors import MtpExtractError, PlanError, escape
from mtp_extract.io.threads import Interrupted, forget_interruptions, interrupt

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of the context of every command."""

_DEBUG = "MTP_EXTRACT_DEBUG"
_LONGEST_MESSAGE = 4000
_OUT_OF_MEMORY = (
    "out of memory. If you trust the file, close other programs or use a machine with more; a damaged file may ask for "
    "any amount."
)


# --- make


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mtp-extract {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, expose_value=False, callback=_show_version, help="Print the version."),
]
"""The option that every command has."""


class _Command(TyperCommand):
    """A command that reports a PlanError as wrong usage, and expands ``~/`` to the user's home."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        return super().parse_args(ctx, [_expand_home(word) for word in args])

    def invoke(self, ctx: Any) -> Any:
        """Call the function; raise BadParameter for a PlanError."""
        try:
            return super().invoke(ctx)
        except PlanError as error:
            named = [flag for name in error.remedies if (flag := find_flag(self, name))]
            # A message may begin with the name of a field; users know the option by its flag.
            message = re.sub(r"^\w+", lambda name: find_flag(self, name[0]) or name[0], str(error))
            hint = ", ".join(f"'{flag}'" for flag in named)
            raise typer.BadParameter(message, ctx, param_hint=hint or None) from None


def _expand_home(word: str) -> str:
    """Replace ``~/`` by the user's home; in ``--out=~/DIR`` bash does not, and a folder named ``~`` would be made."""
    return re.sub(r"^(--[\w-]+=)?~(?=/|$)", lambda start: (start[1] or "") + os.path.expanduser("~"), word)


def find_flag(command: TyperCommand, name: str) -> str | None:
    """Return the flag of ``command`` for the argument ``name`` of its function; None if there is no such option."""
    for parameter in command.params:
        if parameter.name == name and parameter.param_type_name == "option":
            return max(parameter.opts, key=len)
    return None


def make_command(
    function: Callable[..., None], examples: Mapping[str, str], *, no_arguments_is_help: bool = True, **how: Any
) -> tuple[typer.Typer, Callable[..., None]]:
    """Make a command of ``function``, whose docstring is its help, and the function that runs it.

    Args:
        examples: command line → what it does, for the help.
        no_arguments_is_help: print the help if the command is called without arguments.
        how: arguments of :func:`run`.
    """
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    decorate = app.command(
        cls=_Command, context_settings=SETTINGS, epilog=format_examples(examples), no_args_is_help=no_arguments_is_help
    )
    decorate(function)
    return app, partial(run, app, **how)


def format_examples(examples: Mapping[str, str]) -> str:
    """Format examples as an epilog; typer does not rewrap a paragraph that begins with a backspace."""
    return "\n".join(["\b\nExamples:", *(f"  {line}\n      {purpose}" for line, purpose in examples.items())])


# --- run


def describe_command_line() -> str:
    """Return the command line for a report; of a path of this machine only the name, since others will read it."""
    words = [os.path.basename(sys.argv[0])]
    for argument in map(_expand_home, sys.argv[1:]):
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        is_path = os.path.isabs(value) or os.path.lexists(value)
        words.append(f"{flag}{equals}{os.path.basename(os.path.normpath(value)) if is_path else value}")
    return shlex.join(words)


def run(
    app: typer.Typer,
    *,
    kept: str = "nothing was kept",
    is_short: bool = False,
    called: str | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run ``app`` and exit: 0, 1 for an error of ours, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        app: the command.
        kept: what to say is kept if the command is interrupted.
        is_short: whether it takes less than a second and uses NumPy for tables only.
        called: name by which the user called it; by default that of this process.
        arguments: words that followed the name; by default those of this process.
    """
    if is_short:
        # OpenBLAS starts a thread per core when NumPy is imported, and each spins for tens of milliseconds.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # The process ends before collecting garbage would pay.
        gc.disable()
    _handle_signals()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported, later
    status = 0
    try:
        try:
            app(args=arguments, prog_name=called)
        except SystemExit:
            sys.stdout.flush()
            raise
    except Interrupted as stop:
        status = _fail(f"interrupted; {kept}.", 128 + int(stop.args[0]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends in one line
        status = _report_error(error, app)
    forget_interruptions()
    sys.exit(status)


def _handle_signals() -> None:
    """Raise Interrupted at Ctrl-C, SIGTERM and SIGHUP, unless the command was started with the signal ignored."""
    signal.signal(signal.SIGTERM, interrupt)
    # `nohup` ignores SIGHUP; a shell starts its background jobs with SIGINT ignored.
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, interrupt)


def _report_error(error: Exception, app: typer.Typer) -> int:
    """Say in one line what went wrong, and return the exit status of ``app``."""
    if isinstance(error, MtpExtractError):
        return _fail(_add_options(error, app))
    if isinstance(error, MemoryError):
        return _fail(_OUT_OF_MEMORY)
    if isinstance(error, OSError):
        return _report_system_error(error)
    description = f"{type(error).__name__}: {escape(error)}".removesuffix(": ")
    report = "This is a fault of mtp-extract: please report it, with what is shown when"
    return _fail(f"{description}. {report} {_DEBUG}=1 is set.")


def _report_system_error(error: OSError) -> int:
    """Report a missing permission, a name that is too long, a failing disk, in the system's words."""
    name = "a file or standard output" if error.filename is None else escape(error.filename)
    # The reader of our output went away, as `| head` does: that is no error to report.
    status = 1 if error.errno == errno.EPIPE else _fail(f"{name}: {error.strerror or error}.")
    if error.filename is None:
        _give_up_stdout()
    return status


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int = 1) -> int:
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    if os.environ.get(_DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:
        # The error that is reported matters more than output that cannot be flushed.
        _give_up_stdout()
    terminal.say_error(message)
    return status


def _add_options(error: MtpExtractError, app: typer.Typer) -> str:
    """Add the options of ``app`` that would help to the message: "… choose another place (--out)."."""
    command: Any = get_command(app)
    named = []
    for remedy in error.remedies:
        name, _, value = remedy.partition("=")
        # A command that writes nothing but a report has --report for the place of its output.
        flag = find_flag(command, name) or (find_flag(command, "report") if name == "out" else None)
        if flag is not None:
            named.append(f"{flag} {value}".rstrip())
    if not named:
        return str(error)
    text = str(error)
    end = "." if text.endswith(".") else ""
    return f"{text.removesuffix('.')} ({', '.join(named)}){end}"
