"""Options that several commands have."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from mtp_extract.errors import MtpExtractError, PlanError, escape
from mtp_extract.formats import ALL_FORMATS, ENGINES, MTP_FORMATS, list_choices
from mtp_extract.pipeline.plan import DtypeName, RuleName


def read_key(variable: str) -> str:
    """Read a key from the environment variable; raise MtpExtractError if it holds none."""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        content = "something else" if key else "none"
        raise MtpExtractError(
            f"expected a key, one ASCII word, in the environment variable {escape(variable)}, found {content}. Set it.",
            remedies=("key",),
        )
    return key


def parse_whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse numbers from 1, with commas between; raise PlanError, which names the argument ``name``, otherwise."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise PlanError(f"expected whole numbers from 1, such as 1,2,4,8, found {text!r}.", remedies=(name,))
    return numbers


def check_device(name: str) -> str:
    """Return ``name``; raise BadParameter if it is none of the devices that base and drafter run on."""
    if not re.fullmatch(r"auto|balanced|(cpu|cuda|mps)(:\d+)?", name):
        raise typer.BadParameter(f"expected auto, balanced, cpu, cuda, cuda:N or mps, found {escape(name)!r}.")
    return name


BASE = typer.Option("--base", metavar="MODEL", help="The base model: a directory, or an id of the Hugging Face Hub.")
"""Shared by commands that always need a base and by those that can do without."""
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key-env", metavar="VARIABLE", parser=read_key, help="Environment variable that holds the server's key."
    ),
]
ServedModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the model on the server; needed if it serves several.")
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Prompts as .txt or .jsonl; by default about 100 of ours."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        callback=check_device,
        help="Device: auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs.",
    ),
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat-template/--no-chat-template", help="Apply the base's chat template, if it has one.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that mtp-extract wrote there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]


# --- format and type of a written checkpoint


_FORMATS = "; ".join(f"{name} ({listed.about})" for name, listed in ALL_FORMATS.items())
_RULES = "; ".join(
    f"{name}: {', '.join(listed.rules)}" for name, listed in MTP_FORMATS.items() if listed.rules and not listed.read_as
)

Format = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="NAME",
        autocompletion=lambda incomplete: [name for name in list_choices() if name.startswith(incomplete)],
        help=f"Engine that is to load it: {', '.join(ENGINES)}. Or a format: {_FORMATS}.",
    ),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option("--dtype", help="Type of the numbers; f32 is exact. By default the format's usual one."),
]
Codes = Annotated[bool, typer.Option("--codes", help="Write the stored integers, scales and zero points too.")]
Quantize = Annotated[
    RuleName | None,
    typer.Option(
        "--quantize",
        help=f"Round matrices that have no integers to integers, by a rule of the format ({_RULES}; its usual one "
        "first).",
    ),
]
