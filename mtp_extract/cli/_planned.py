"""A command's options, made of what it is asked to do: the fields of its plan, and parameters of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mtp_extract.options import About, about

_REQUIRED = inspect.Parameter.empty


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
    for name, parameter in parameters.items():
        for option in _options(name, parameter.annotation, parameter.default):
            shown.pop(option.name, None)
            shown[option.name] = option

    def run(**given: Any) -> None:
        try:
            values = {name: _value(name, parameter.annotation, given) for name, parameter in parameters.items()}
        except ValueError as error:
            # A plan says which of its fields is wrong, and knows no option.
            name, _, rest = str(error).partition(" ")
            raise typer.BadParameter(f"{_flag(name)} {rest}" if name in given else str(error)) from None
        command(**values)

    run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in shown.items()}
    run.__doc__ = command.__doc__
    return run


def _options(name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
    if (told := about(hint)) is not None:
        yield _option(name, get_args(hint)[0], default, told)
    elif (plan := _plan(hint)) is not None:
        for field in _described(plan):
            yield from _options(*field)
    else:
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _option(name: str, kind: Any, default: Any, told: About) -> inspect.Parameter:
    """As typer reads it."""
    item, several = _item(kind), _several(kind)
    more: dict[str, Any] = {"help": told.help, "metavar": told.metavar}
    if told.parse is None:
        more |= {"min": told.least, "max": told.most}
    if default is _REQUIRED and not told.names:
        made = typer.Argument(**more)
        default = _REQUIRED if item is kind else None
    else:
        flag = _flag(name)
        made = typer.Option(*(told.names or (f"{flag}/--no-{flag[2:]}" if item is bool and default else flag,)), **more)
    if told.choices:
        item = Enum(name, {choice: choice for choice in told.choices}, type=str)  # type: ignore[misc,no-redef]
        default = default if default in (None, _REQUIRED) else item(default)
    elif told.parse is not None:
        item = str
        if default not in (None, _REQUIRED):
            default = ",".join(map(str, default)) if several else str(default)
    elif several:
        item, default = list[item], None  # type: ignore[valid-type]
    annotation: Any = Annotated[item | None if default is None else item, made]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(name: str, hint: Any, given: Mapping[str, Any]) -> Any:
    """What a field or parameter is given, made of what typer found.

    Raises:
        ValueError: it cannot be that.
    """
    if (plan := _plan(hint)) is not None:
        values = {field: _value(field, kind, given) for field, kind, _ in _described(plan)}
        return plan(**values) if plan is hint else values
    value = given[name]
    if (told := about(hint)) is None:
        return value
    if told.parse is not None:
        return None if value is None else told.parse(value)
    if _several(get_args(hint)[0]):
        return tuple(value or ())
    return value.value if isinstance(value, Enum) else value


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
