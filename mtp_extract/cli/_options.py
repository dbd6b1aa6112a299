"""Options that several commands have, and the kinds of values that click does not know."""

from __future__ import annotations

import os
from pathlib import Path

from click import BadParameter, Choice, Context, Option, Parameter, ParamType
from click import Path as PathType

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.formats import ENGINES, EVERY, FORMATS, choices
from mtp_extract.pipeline.plan import DTYPE_NAMES, RULE_NAMES

PATH = PathType(path_type=Path)


class WholeNumbers(ParamType[tuple[int, ...], str]):
    """Numbers from 1, between commas."""

    name = "numbers"

    def convert(self, value: str, param: Parameter | None, ctx: Context | None) -> tuple[int, ...]:
        """The numbers that are written in ``value``."""
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            raise BadParameter(f"expected whole numbers from 1, such as 1,2,4,8, found {value!r}.", ctx, param)
        return numbers


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


def _key_of(ctx: Context, option: Parameter, variable: str | None) -> str | None:
    return None if variable is None else key_from(variable)


API_KEY = Option(
    ["--api-key-env", "key"],
    metavar="VARIABLE",
    callback=_key_of,
    help="Environment variable that holds the server's key.",
)
MODEL = Option(["--model"], metavar="NAME", help="Name of the model on the server; needed if it serves several.")
PROMPTS = Option(
    ["--prompts"], type=PATH, metavar="FILE", help="Prompts as .txt or .jsonl; by default about 100 of ours."
)
DEVICE = Option(
    ["--device"],
    default="auto",
    metavar="DEVICE",
    help="Device: auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs.",
)
CHAT_TEMPLATE = Option(
    ["--chat-template/--no-chat-template"], default=True, help="Apply the base's chat template, if it has one."
)
OVERWRITE = Option(["--overwrite"], is_flag=True, help="Replace a checkpoint that mtp-extract wrote there.")
AS_JSON = Option(["--json", "print_json"], is_flag=True, help="Print the whole result as JSON.")


def base_option(*, required: bool) -> Option:
    """The base, of a command that always needs one, or of one that may do without."""
    about = "The base model: a directory, or an id of the Hugging Face Hub."
    return Option(["--base"], required=required, metavar="MODEL", help=about)


# --- how a checkpoint is to be written


def _complete_format(ctx: Context, option: Parameter, incomplete: str) -> list[str]:
    return [name for name in choices() if name.startswith(incomplete)]


_FORMATS = "; ".join(f"{name} ({listed.about})" for name, listed in EVERY.items())
_RULES = "; ".join(
    f"{name}: {', '.join(listed.rules)}" for name, listed in FORMATS.items() if listed.rules and not listed.read_as
)

WRITING = (
    Option(
        ["--for", "format"],
        metavar="NAME",
        shell_complete=_complete_format,
        help=f"Engine that is to load it: {', '.join(ENGINES)}. Or a format: {_FORMATS}.",
    ),
    Option(
        ["--dtype"],
        type=Choice(DTYPE_NAMES),
        help="Type of the numbers; f32 is exact. By default the format's usual one.",
    ),
    Option(["--codes"], is_flag=True, help="Write the stored integers, scales and zero points too."),
    Option(
        ["--quantize"],
        type=Choice(RULE_NAMES),
        help=f"Round matrices that have no integers to integers, by a rule of the format ({_RULES}; its usual one "
        "first).",
    ),
)
"""The fields of a WritingPlan."""
