"""A command's options, made of what it is asked to do: the fields of its plan, and parameters of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mtp_extract.cli._help import version_option
from mtp_extract.errors import either, escape, nearest
from mtp_extract.options import About, about

_REQUIRED = inspect.Parameter.empty
_NAME = re.compile(r"(\w*)(.*)", re.DOTALL)


def planned(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, for typer to call with options in place of its parameters.

    A parameter that is annotated with an :class:`~mtp_extract.options.About` becomes an option, or an argument where
    it has neither default nor names. One that is a dataclass becomes an option for each of its fields that says so,
    those of dataclasses that are defaults in it among them; fields of one name are one option, which stands where the
    last of them does. ``Annotated[dict, Plan]`` is the same for a plan that the command has something to add to: it is
    given the values by name. What is annotated as typer has it stays as it is.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    shown: dict[str, inspect.Parameter] = {}
    spelled: dict[str, str] = {}
    for name, parameter in parameters.items():
        for option, spelling in _options(name, parameter.annotation, parameter.default):
            shown.pop(option.name, None)
            shown[option.name], spelled[option.name] = option, spelling

    shown["version"] = inspect.Parameter(
        "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, version_option()]
    )

    def run(**given: Any) -> None:
        try:
            values = {name: _value(name, parameter.annotation, given) for name, parameter in parameters.items()}
        except ValueError as error:
            # A plan says which of its fields is wrong, and knows no option.
            name, rest = _NAME.match(str(error)).groups()  # type: ignore[union-attr]
            raise typer.BadParameter(f"{spelled[name]}{rest}" if name in given else str(error)) from None
        command(**values)

    run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in shown.items()}
    run.__doc__ = command.__doc__
    return run


def _options(name: str, hint: Any, default: Any) -> Iterator[tuple[inspect.Parameter, str]]:
    """Each as typer reads it, and what a user knows it by."""
    if (told := about(hint)) is not None:
        yield _option(name, get_args(hint)[0], default, told)
    elif (plan := _plan(hint)) is not None:
        for field in _described(plan):
            yield from _options(*field)
    else:
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint), name


def _option(name: str, kind: Any, default: Any, told: About) -> tuple[inspect.Parameter, str]:
    """As typer reads it: yes or no, or words; what they say is read here, so that what is wrong is said here."""
    item, several = _item(kind), _several(kind)
    flag, required = _flag(name), default is _REQUIRED
    stands = told.metavar or "|".join(told.choices) or _KINDS.get(item, "")
    wide = len(stands) > _WIDEST
    listed = f"One of {either(told.choices)}." if wide and told.choices[0] not in told.help else ""
    more: dict[str, Any] = {"metavar": ("NAME" if wide else stands) or None, "show_default": False}
    more["help"] = " ".join(part for part in (told.help, listed, _limits(item, default, told)) if part)
    if told.choices:
        more["autocompletion"] = _completing(told.choices)
    if required and not told.names:
        made, spelled = typer.Argument(**more), more["metavar"]
        default = _REQUIRED if item is kind else None
    else:
        names = told.names or (f"{flag}/--no-{flag[2:]}" if item is bool and default else flag,)
        made, spelled = typer.Option(*names, **more), max(names, key=len).partition("/")[0]
    if several and told.parse is None:
        item, default = list[str], None
    elif item is not bool:
        item = str
        if default not in (None, _REQUIRED):
            default = _as_typed(default)
    annotation: Any = Annotated[item | None if default is None else item, made]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation), spelled


_KINDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What stands for a value whose field says nothing better."""
_WIDEST = 40  # columns of choices
_WORDS = {int: "a whole number", float: "a number"}


def _as_typed(value: Any) -> str:
    """``value`` as a user would write it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _completing(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def beginning(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return beginning


def _bounds(told: About) -> str:
    if told.least is None or told.most is None:
        return f"at least {told.least}" if told.least is not None else f"at most {told.most}" if told.most else ""
    return f"{told.least:g} to {told.most:g}"


def _limits(item: Any, default: Any, told: About) -> str:
    """What stands behind the help of an option: [required], or its default and bounds."""
    if default is _REQUIRED:
        return "[required]" if told.names else ""
    said = ""
    if item is bool:
        # Of two names, the one that is meant where none is given.
        pair = next((name for name in told.names if "/" in name), None)
        if pair is not None or default:
            said = f"default: {(pair.split('/')[not default] if pair else 'yes').lstrip('-')}"
    elif default not in (None, ()):
        said = f"default: {_as_typed(default)}"
    said = "; ".join(part for part in (said, _bounds(told)) if part)
    return f"[{said}]" if said else ""


def _value(name: str, hint: Any, given: Mapping[str, Any]) -> Any:
    """What a field or parameter is given, made of what typer found.

    Raises:
        ValueError: it cannot be that; begins with the name.
    """
    if (plan := _plan(hint)) is not None:
        values = {field: _value(field, kind, given) for field, kind, _ in _described(plan)}
        return plan(**values) if plan is hint else values
    value = given[name]
    if (told := about(hint)) is None or value is None or isinstance(value, bool):
        return () if told is not None and value is None and _several(get_args(hint)[0]) and not told.parse else value
    if told.parse is not None:
        try:
            made = told.parse(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if isinstance(made, tuple) and (beyond := [one for one in made if not _within(told, one)]):
            raise ValueError(f"{name}: expected {_bounds(told)}, found {beyond[0]}.")
        return made
    kind = get_args(hint)[0]
    if _several(kind):
        return tuple(_read(name, _item(kind), told, one) for one in value)
    return _read(name, _item(kind), told, value)


def _read(name: str, item: Any, told: About, text: str) -> Any:
    """The value that a user typed.

    Raises:
        ValueError: it is none of the choices, no number, or out of bounds; begins with the name.
    """
    if told.choices:
        if text not in told.choices:
            raise ValueError(f"{name} {escape(text)!r}: expected {either(told.choices)}.{nearest(text, told.choices)}")
        return text
    try:
        value = item(text)
    except ValueError:
        value = float("nan")
    # A number that is none lies within no bounds.
    if item in _WORDS and not _within(told, value):
        kind = f"{_WORDS[item]} {'of ' if _bounds(told) else ''}{_bounds(told)}".rstrip()
        raise ValueError(f"{name}: expected {kind}, found {escape(text)!r}.")
    return value


def _within(told: About, value: float) -> bool:
    return (-inf if told.least is None else told.least) <= value <= (inf if told.most is None else told.most)


def _described(plan: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default of each field that a user is asked for."""
    hints = get_type_hints(plan, include_extras=True)
    for field in fields(plan):
        hint = hints[field.name]
        default = _REQUIRED if field.default is MISSING else field.default
        if about(hint) is not None or is_dataclass(default):
            yield field.name, hint, default


def _plan(hint: Any) -> Any:
    """The dataclass that an annotation is, or has beside a dict; None where there is none."""
    return next(
        (kind for kind in (hint, *getattr(hint, "__metadata__", ())) if isinstance(kind, type) and is_dataclass(kind)),
        None,
    )


def given(context: typer.Context, *names: str) -> list[str]:
    """Those of the options with these names that the user gave, as they are spelled."""
    flags = {option.name: max(option.opts, key=len) for option in context.command.params}
    # typer 0.29 has a click of its own, and no public name for where a value came from.
    sources = {name: getattr(context.get_parameter_source(name), "name", None) for name in names}
    return [flags[name] for name, source in sources.items() if source == "COMMANDLINE"]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _several(kind: Any) -> bool:
    return get_origin(kind) in (Sequence, tuple)


def _item(kind: Any) -> Any:
    """The type of a value, or of each of several; without the None that it may also be."""
    return next((item for item in get_args(kind) if item is not type(None)), kind)
