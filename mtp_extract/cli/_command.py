"""How a command is made of a function and its plan, and how it is run.

Its options are the parameters of the function and the fields of its plan. Errors become one line on stderr and an exit
status, never a traceback, unless ``MTP_EXTRACT_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import errno
import gc
import inspect
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.main import get_command
from typer.models import ParameterInfo

from mtp_extract._version import __version__
from mtp_extract.cli import terminal
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.threads import Interrupted, forget_interruptions, interrupt
from mtp_extract.options import check_values

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of the context of every command."""

AsJson = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mtp-extract {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)]
_VERSION = inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Version)

Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print the proof, sizes and files, too.")]

_DEBUG = "MTP_EXTRACT_DEBUG"
_LONGEST_MESSAGE = 4000
_OUT_OF_MEMORY = (
    "out of memory. If you trust the file, close other programs or use a machine with more; a damaged file may ask for "
    "any amount."
)


# --- made


def program(
    command: Callable[..., None],
    examples: Mapping[str, str],
    *,
    kept: str = "nothing was kept",
    is_short: bool = False,
    no_arguments_is_help: bool = True,
) -> tuple[typer.Typer, Callable[..., None]]:
    """A program of one command: as typer has it, and the function that runs it and exits.

    Args:
        command: annotated as typer wants it; a parameter that is a plan stands for the fields of the plan that are.
        examples: for its help: a command line → what that does.
        kept, is_short: as :func:`run` explains them.
        no_arguments_is_help: whether the command by itself prints its help; else it has all it needs.
    """
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    settings: dict[str, Any] = {
        "context_settings": SETTINGS,
        "no_args_is_help": no_arguments_is_help,
        "epilog": epilog_of(examples),
    }
    app.command(**settings)(_taking_fields(command))
    return app, partial(run, app, kept=kept, is_short=is_short)


def epilog_of(examples: Mapping[str, str]) -> str:
    """An epilog of examples, as they are: typer folds no paragraph that begins with a backspace."""
    return "\n".join(["\b\nExamples:", *(f"  {line}\n      {what}" for line, what in examples.items())])


def _taking_fields(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, called with the fields of its plans in place of the plans."""
    parameters = inspect.signature(command, eval_str=True).parameters
    plans = {name: list(_fields(one.annotation)) for name, one in parameters.items() if is_dataclass(one.annotation)}
    shown = [option for name, one in parameters.items() for option in plans.get(name, [one])] + [_VERSION]

    def run(**given: Any) -> None:
        values = {name: value for name, value in given.items() if name != _VERSION.name}
        for name, options in plans.items():
            told = {option.name: values.pop(option.name) for option in options}
            values[name] = _made(parameters[name].annotation, told, {option.name: _flag(option) for option in options})
        command(**values)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in shown]
    )
    run.__annotations__ = {option.name: option.annotation for option in shown}
    run.__doc__ = command.__doc__
    return run


def _fields(plan: Any) -> Iterator[inspect.Parameter]:
    """The fields of ``plan`` that are annotated for typer, as parameters that it takes."""
    for field in inspect.signature(plan, eval_str=True).parameters.values():
        kind, *told = get_args(field.annotation) if get_origin(field.annotation) is Annotated else (None,)
        info, default = next((one for one in told if isinstance(one, ParameterInfo)), None), field.default
        if info is None:
            continue
        if default is inspect.Parameter.empty and type(None) in get_args(kind):
            default = None
        if info.parser is not None:
            # What is parsed is one word, by default too.
            kind, default = str | None, ",".join(map(str, default)) if isinstance(default, tuple) else default
        elif get_origin(kind) is Sequence:
            kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
        yield field.replace(default=default, annotation=Annotated[kind, info])


def _flag(option: inspect.Parameter) -> str:
    """How ``option`` is spelled."""
    made = option.annotation.__metadata__[0]
    # What typer is given first it takes for a default, until it reads the annotation.
    flags = [flag for flag in (made.default, *(made.param_decls or ())) if isinstance(flag, str)]
    return max(flags or [f"--{option.name.replace('_', '-')}"], key=len)


def _made(plan: Any, told: Mapping[str, Any], flags: Mapping[str, str]) -> Any:
    """``plan`` of what typer parsed; wrong usage where a value is out of bounds."""
    try:
        made = plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})
        check_values(made)
    except MtpExtractError as error:
        hint = ", ".join(f"'{flags[name]}'" for name in error.remedies if flags.get(name, "")[:2] == "--")
        raise typer.BadParameter(str(error), param_hint=hint or None) from None
    except ValueError as error:
        # Its message begins with the field's name.
        raise typer.BadParameter(re.sub(r"^\w+", lambda name: flags.get(name[0], name[0]), str(error))) from None
    return made


# --- run


def command_line() -> str:
    """What was typed, for a report that others read: of a path that is here its name alone, as its place is private."""
    words = [os.path.basename(sys.argv[0])]
    for argument in sys.argv[1:]:
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
        kept: what is left when it is interrupted.
        is_short: whether it is done in less than a second and uses NumPy for tables only.
        called: what the user called it by, and
        arguments: what followed that; both of this process by default.
    """
    if is_short:
        # OpenBLAS starts a thread per core when NumPy is imported, and each spins for tens of milliseconds.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # What is collected would be freed at the end anyway.
        gc.disable()
    signal.signal(signal.SIGTERM, interrupt)
    # A terminal that closes; not where `nohup` has it ignored.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, interrupt)
    # A shell that starts a job in the background has it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, and leads nowhere
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    status = 0
    try:
        try:
            app(args=arguments, prog_name=called)
        except SystemExit:
            sys.stdout.flush()
            raise
    except MtpExtractError as error:
        status = _failed(_naming_options(error, app))
    except Interrupted as stop:
        status = _failed(f"interrupted; {kept}.", 128 + int(stop.args[0]))
    except MemoryError:
        status = _failed(_OUT_OF_MEMORY)
    except OSError as error:
        # No permission on the way to a file, a name that is too long, a disk that fails: the system says it.
        where = "a file or standard output" if error.filename is None else escape(error.filename)
        # The reader of our output went away, as `| head` does: nothing is to be said.
        status = 1 if error.errno == errno.EPIPE else _failed(f"{where}: {error.strerror or error}.")
        if error.filename is None:
            _give_up_stdout()
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends in one line
        what = f"{type(error).__name__}: {escape(error)}".removesuffix(": ")
        report = "This is a fault of mtp-extract: please report it, with what is shown when"
        status = _failed(f"{what}. {report} {_DEBUG}=1 is set.")
    forget_interruptions()
    sys.exit(status)


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str, status: int = 1) -> int:
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    if os.environ.get(_DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:
        # What went wrong is worth more than that this cannot be printed.
        _give_up_stdout()
    terminal.error(message)
    return status


def _naming_options(error: MtpExtractError, app: typer.Typer) -> str:
    """The message, with the options of ``app`` for the arguments that would help: "… choose another place (--out)."."""
    options = {parameter.name: max(parameter.opts, key=len) for parameter in get_command(app).params}
    # Of a command that writes nothing but a report, that is what may be put elsewhere.
    options.setdefault("out", options.get("report", ""))
    remedies = (remedy.partition("=") for remedy in error.remedies)
    named = [f"{options[name]} {value}".rstrip() for name, _, value in remedies if options.get(name, "")[:2] == "--"]
    text = str(error)
    return f"{text.removesuffix('.')} ({', '.join(named)}){'.' * text.endswith('.')}" if named else text
