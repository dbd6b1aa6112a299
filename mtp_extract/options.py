"""Options that several commands share, and the bounds of every one, held where a plan is made.

A plan is a frozen dataclass of what a function is asked to do. Fields that are annotated with a ``typer.Option`` or
``typer.Argument`` are options of the function's command, too (``cli/_command.py``), as in ``serving/plan.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import ge, le
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from msgspec import Meta
from typer.models import ParameterInfo

from mtp_extract.errors import MtpExtractError, either, escape, nearest


def key_from(variable: str) -> str:
    """The key that the environment variable holds.

    Raises:
        MtpExtractError: it holds none.
    """
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        content = "something else" if key else "none"
        raise MtpExtractError(
            f"expected a key, one ASCII word, in the environment variable {escape(variable)}, found {content}. Set it.",
            remedies=("key",),
        )
    return key


ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        help="Environment variable that holds the server's key.",
        metavar="VARIABLE",
        parser=key_from,
    ),
]
ServedModel = Annotated[
    str | None, typer.Option(help="Name of the model on the server; needed if it serves several.", metavar="NAME")
]
Workloads = Annotated[
    Path | None, typer.Option(help="Prompts as .txt or .jsonl; by default about 100 of ours.", metavar="FILE")
]
Device = Annotated[
    str, typer.Option(help="Device: auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs.", metavar="DEVICE")
]
"""See :func:`~mtp_extract.evaluation.base_model.load_base`."""
BASE = typer.Option("--base", help="The base model: a directory, or an id of the Hugging Face Hub.", metavar="MODEL")
ChatTemplate = Annotated[bool, typer.Option(help="Apply the base's chat template, if it has one.")]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace an older report.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that mtp-extract wrote there.")]


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers from 1, between commas.

    Raises:
        BadParameter: something else is there.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"expected whole numbers from 1, such as 1,2,4,8, found {text!r}.")
    return numbers


def check_values(plan: Any) -> None:
    """Hold every value of ``plan`` against the bounds and choices of its field; and whether all of them go together.

    Bounds are those of a ``typer.Option``, or of a ``msgspec.Meta`` where a field is no option; None is always in them.
    What does not go together says ``plan.wrong()``, where it has that: what was expected, and the fields to change.

    Raises:
        MtpExtractError: a number is out of bounds, or fields do not go together.
        ValueError: a name is none of the choices.
    """
    for name, hint in get_type_hints(type(plan), include_extras=True).items():
        field = getattr(plan, name)
        values = field if isinstance(field, (list, tuple)) else (field,)
        kind, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
        choices = [choice for literal in literals for choice in get_args(literal)]
        least, most = _bounds(annotations)
        for value in values:
            if value is None:
                continue
            if choices and value not in choices:
                raise ValueError(f"{name} {escape(value)!r}: expected {either(choices)}.{nearest(value, choices)}")
            _check_bounds(name, value, least, most)
    for expected, *remedies in getattr(plan, "wrong", list)():
        raise MtpExtractError(f"expected {expected}", remedies=tuple(remedies))


def _bounds(annotations: Sequence[object]) -> tuple[Any, Any]:
    """The least and the most that a field may be, by the annotation of typer, else that of msgspec; None for no end."""
    for annotation in annotations:
        if isinstance(annotation, ParameterInfo):
            return annotation.min, annotation.max
    for annotation in annotations:
        if isinstance(annotation, Meta):
            return annotation.ge, annotation.le
    return None, None


def _check_bounds(name: str, value: Any, least: Any, most: Any) -> None:
    for bound, fits, word, advice in ((least, ge, "least", "Raise"), (most, le, "most", "Lower")):
        # NaN is refused by either bound: it compares with none.
        if bound is not None and not fits(value, bound):
            message = f"expected {name} of at {word} {bound}, found {escape(value)}. {advice} it."
            raise MtpExtractError(message, remedies=(name,))
