"""How to serve a drafter: selects and fills the engines' blocks of ``serving.md`` beside this file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.formats import find_format_architecture, list_engines_for

_LONGEST_PATH = 1 << 12
"""Characters; a path in a command must not be shortened."""


def describe_serving(record: Mapping[str, Any], base: str, *, again: str) -> str:
    """Return the Markdown blocks with the commands of the engines that load a directory.

    Args:
        record: the content of ``extraction.json``.
        base: id of the base on the Hub, or a placeholder.
        again: the command that writes the directory in another format, without that format.
    """
    weights = (name for name in record["files"] if name.endswith(".gguf"))
    names = list_block_names(record)
    values = {"BASE_MODEL": base, "AGAIN": again, "WEIGHTS": quote_shell_word(f"DRAFTER/{next(weights, '')}")}
    blocks = "\n".join(block for name, block in _read_blocks().items() if name in names).rstrip()
    return re.sub("|".join(values), lambda name: values[name[0]], blocks)


def list_block_names(record: Mapping[str, Any]) -> Sequence[str]:
    """List the names of the blocks for the checkpoint that ``record`` describes."""
    layout = record["layout"]
    return find_format_architecture(layout).serving(list_engines_for(layout), record["geometry"])


def format_next_command(engine: str, record: Mapping[str, Any], directory: object) -> str | None:
    """Return the command of ``engine`` for the drafter in ``directory``, on one line; None if it has no block."""
    if engine not in list_block_names(record) or (block := _read_blocks().get(engine)) is None:
        return None
    lines = [line for line in re.sub(r"\\\n +", "", block).splitlines() if line and line[0] not in "#`"]
    # Skip the lines before the drafter's: a reader who serves a base has run them.
    first = next(number for number, line in enumerate(lines) if "DRAFTER" in line or "WEIGHTS" in line)
    text = "; ".join(lines[first : first + 2]).replace("WEIGHTS", "DRAFTER/mtp-*.gguf")
    # In double quotes it is a Python string, or a JSON string within a shell word.
    string = json.dumps(escape(directory, _LONGEST_PATH), ensure_ascii=False)
    if "```sh" in block:
        string = string.replace("'", "'\\''")
    return text.replace('"DRAFTER"', string).replace("DRAFTER", quote_shell_word(directory))


def _read_blocks() -> dict[str, str]:
    """Read the blocks of ``serving.md`` by name: an engine, or another use."""
    text = (Path(__file__).parent / "serving.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def quote_shell_word(text: object) -> str:
    """Quote ``text`` as one shell word; without backticks, which could end a fenced block."""
    word = escape(text, _LONGEST_PATH).replace("`", "")
    return word if re.fullmatch(r"[\w/:@.+%=,-]+", word) else "'" + word.replace("'", "'\\''") + "'"
