"""The options of a command: its own parameters and the fields of its plan, each as typer has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from mtp_extract._version import __version__
from mtp_extract.options import About, about

_STANDS_FOR = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def planned(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, for typer to call with options in place of its parameters.

    A parameter that is annotated with an :class:`~mtp_extract.options.About` becomes an option, or an argument where
    it has neither default nor names. A parameter that is a dataclass becomes an option for each of its fields that has
    an About.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    shown: dict[str, inspect.Parameter] = {}
    for name, parameter in parameters.items():
        for option in _options(name, parameter.annotation, parameter.default):
            shown[option.name] = option
    shown["version"] = _parameter("version", bool, False, version_option())

    def run(**given: Any) -> None:
        try:
            values = {name: _value(name, parameter.annotation, given) for name, parameter in parameters.items()}
        except ValueError as error:
            raise typer.BadParameter(_spelled(str(error), shown)) from None
        command(**values)

    run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in shown.items()}
    run.__doc__ = command.__doc__
    return run


def given(context: typer.Context, *names: str) -> list[str]:
    """Those of the options with these names that the user gave, as they are spelled."""
    flags = {option.name: max(option.opts, key=len) for option in context.command.params}
    # typer 0.29 has a click of its own, and no public name for where a value came from.
    sources = {name: getattr(context.get_parameter_source(name), "name", None) for name in names}
    return [flags[name] for name, source in sources.items() if source == "COMMANDLINE"]


def _options(name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
    if (told := about(hint)) is not None:
        yield _option(name, get_args(hint)[0], default, told)
    elif is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            if (told := about(hints[field.name])) is not None and told.option:
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                yield _option(field.name, get_args(hints[field.name])[0], default, told)
    else:
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _option(name: str, kind: Any, default: Any, told: About) -> inspect.Parameter:
    """One option or argument of typer's."""
    item = next((one for one in get_args(kind) if one not in (type(None), ...)), kind)
    # Of choices typer shows all where nothing stands for them.
    stands_for = None if told.choices else _STANDS_FOR.get(item)
    more: dict[str, Any] = {"help": told.help, "metavar": told.metavar or stands_for}
    more |= {"min": told.least, "max": told.most} if item in (int, float) and told.parse is None else {}
    required = default is inspect.Parameter.empty
    if told.choices:
        kind = Literal[told.choices] | None if default is None else Literal[told.choices]
    elif told.parse is not None:
        # Typer would parse the default, too: the plan's own holds where nothing is given.
        shown = f"  [default: {','.join(map(str, default))}]" if default else ""
        more |= {"parser": told.parse, "show_default": False, "help": told.help + shown}
        kind, default = str | None, None
    elif item is not kind and type(None) not in get_args(kind):
        kind, default = list[item] | None, None  # type: ignore[valid-type]
    if required and not told.names:
        return _parameter(name, kind, None if type(None) in get_args(kind) else default, typer.Argument(**more))
    flag = f"--{name.replace('_', '-')}"
    names = told.names or ((f"{flag}/--no-{flag[2:]}",) if kind is bool and default else (flag,))
    return _parameter(name, kind, default, typer.Option(*names, **more))


def _parameter(name: str, kind: Any, default: Any, made: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


def _value(name: str, hint: Any, given: Mapping[str, Any]) -> Any:
    """What a parameter is given: the value of its option, or a plan of the values of its options."""
    if not is_dataclass(hint):
        return given[name]
    values = {}
    for option in _options(name, hint, None):
        value = given[option.name]
        # Where nothing was given, the plan's own default holds.
        if value is not None or _required(hint, option.name):
            values[option.name] = tuple(value) if isinstance(value, list) else value
    return hint(**values)  # type: ignore[operator]


def _required(plan: Any, name: str) -> bool:
    return any(field.name == name and field.default is MISSING for field in fields(plan))


def _spelled(message: str, shown: Mapping[str, inspect.Parameter]) -> str:
    """``message`` with the option's name in place of the field's, which it begins with."""
    name = message.partition(":")[0].partition(" ")[0]
    if name not in shown:
        return message
    made = shown[name].annotation.__metadata__[0]
    # What typer is given first it takes for a default, until it reads the annotation.
    flags = [flag for flag in (made.default, *(made.param_decls or ())) if isinstance(flag, str)] or [name.upper()]
    return f"{max(flags, key=len)}{message.removeprefix(name)}"


def version_option() -> Any:
    """``--version``, as typer has it."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"mtp-extract {__version__}")
            raise typer.Exit

    return typer.Option("--version", help="Print the version.", is_eager=True, callback=show)
