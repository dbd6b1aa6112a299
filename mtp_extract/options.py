"""What a field of a plan means to a user, stated once: in the annotation of the field.

A plan is a frozen dataclass of what a function is asked to do. The command of that function makes its options of the
fields (``cli/_command.py``), and the function holds the same bounds against what Python code gives it::

    @dataclass(frozen=True)
    class BenchPlan:
        url: Annotated[str, About("The server.", metavar="URL")]
        concurrency: Annotated[int, About("Requests at a time.", least=1)] = 1
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from mtp_extract.errors import MtpExtractError, either, escape, nearest


@dataclass(frozen=True)
class About:
    """What a user is told of a field, and which values it takes."""

    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    """On the command line; by default an argument where the field has no default, and else ``--`` and its name."""
    least: float | None = None
    most: float | None = None
    """The bounds of a number, or of each of several."""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    """Makes the value of what the user types, of a sequence all of it at once; raises ValueError for wrong usage."""
    option: bool = True
    """Whether the command has it; else it is for Python alone."""


def key_from(variable: str) -> str:
    """The key that the environment variable holds.

    Raises:
        MtpExtractError: it holds none.
    """
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        found = "something else" if key else "none"
        raise MtpExtractError(
            f"expected a key, one ASCII word, in the environment variable {escape(variable)}, found {found}. Set it.",
            remedies=("key",),
        )
    return key


# What more than one plan asks for.
ApiKey = Annotated[
    str | None,
    About(
        "The environment variable that holds the servers' key.",
        metavar="VARIABLE",
        names=("--api-key-env",),
        parse=key_from,
    ),
]
ServedModel = Annotated[str | None, About("As the server calls it; needed where it serves several.", metavar="NAME")]
Baseline = Annotated[
    str | None, About("The same server started without a drafter, asked in turn with the first.", metavar="URL")
]
Workloads = Annotated[
    Path | None,
    About("Prompts as .txt or .jsonl; by default about 100 of ours.", metavar="FILE"),
]
Device = Annotated[str, About("auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs.", metavar="DEVICE")]
"""See :func:`~mtp_extract.evaluate.base_model.load_base`."""
BASE = About("The base model: a directory, or an id of the Hugging Face Hub.", names=("--base",), metavar="MODEL")
ChatTemplate = Annotated[bool, About("Apply the base's chat template, if it has one.")]
Replace = Annotated[bool, About("Replace an older report.")]
Overwrite = Annotated[bool, About("Replace what is there, if it is such a checkpoint.")]


def check_other(baseline: str | None, url: str | None) -> None:
    """Raise ValueError where the baseline is the server itself."""
    if baseline is not None and url is not None and baseline.rstrip("/") == url.rstrip("/"):
        raise ValueError(f"baseline: expected another server than {escape(url)}, started without a drafter.")


def about(hint: Any) -> About | None:
    """The :class:`About` in an annotation; None where it has none."""
    return next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, About)), None)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers from 1, between commas.

    Raises:
        ValueError: something else is there.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"expected whole numbers from 1, such as 1,2,4,8, found {text!r}.")
    return numbers


def check_values(plan: Any) -> None:
    """Hold every value of ``plan`` against the bounds and choices of its field; None is always one.

    Raises:
        MtpExtractError: a number is out of bounds.
        ValueError: a name is none of the choices.
    """
    hints = get_type_hints(type(plan), include_extras=True)
    for name, told in ((field.name, about(hints[field.name])) for field in fields(plan)):
        given = getattr(plan, name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if told is None or value is None:
                continue
            if told.choices and value not in told.choices:
                near = nearest(value, told.choices)
                raise ValueError(f"{name} {escape(value)!r}: expected {either(told.choices)}.{near}")
            # A number that is none lies within no bounds.
            for bound, holds, what, do in (
                (told.least, told.least is None or value >= told.least, "at least", "raise it"),
                (told.most, told.most is None or value <= told.most, "at most", "lower it"),
            ):
                if not holds:
                    raise MtpExtractError(
                        f"expected {name} of {what} {bound}, found {escape(value)}; {do}", remedies=(name,)
                    )
