"""How to serve a drafter: of ``serving.md`` beside this file, the blocks for the engines that load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.formats import architecture_in, engines_for

_LONGEST_PATH = 1 << 12
"""Characters: of a path that is shortened a command would find nothing."""


def describe_serving(record: Mapping[str, Any], base: str, *, again: str) -> str:
    """A block with the command of each engine that loads a directory, in Markdown.

    Args:
        record: the content of ``extraction.json``.
        base: id of the base on the Hub, or what stands for it.
        again: the command that writes the directory in another format, which is to be named.
    """
    weights = (name for name in record["files"] if name.endswith(".gguf"))
    names = list_block_names(record)
    values = {"BASE_MODEL": base, "AGAIN": again, "WEIGHTS": quote_shell_word(f"DRAFTER/{next(weights, '')}")}
    blocks = "\n".join(block for name, block in _read_blocks().items() if name in names).rstrip()
    return re.sub("|".join(values), lambda name: values[name[0]], blocks)


def list_block_names(record: Mapping[str, Any]) -> Sequence[str]:
    """The names of the blocks that say how to serve what ``record`` describes."""
    layout = record["layout"]
    return architecture_in(layout).serving(engines_for(layout), record["geometry"])


def next_command(engine: str, record: Mapping[str, Any], directory: object) -> str | None:
    """What serves the drafter in ``directory`` with ``engine``, as its block has it, on one line; None without one."""
    if engine not in list_block_names(record) or (block := _read_blocks().get(engine)) is None:
        return None
    lines = [line for line in re.sub(r"\\\n +", "", block).splitlines() if line and line[0] not in "#`"]
    # What comes before the drafter is loaded, a reader who serves a base has done already.
    first = next(number for number, line in enumerate(lines) if "DRAFTER" in line or "WEIGHTS" in line)
    text = "; ".join(lines[first : first + 2]).replace("WEIGHTS", "DRAFTER/mtp-*.gguf")
    # Between double quotes it is a string of Python, or of JSON within a word of a shell's.
    string = json.dumps(escape(directory, _LONGEST_PATH), ensure_ascii=False)
    if "```sh" in block:
        string = string.replace("'", "'\\''")
    return text.replace('"DRAFTER"', string).replace("DRAFTER", quote_shell_word(directory))


def _read_blocks() -> dict[str, str]:
    """By the engine, or what else it is for."""
    text = (Path(__file__).parent / "serving.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def quote_shell_word(text: object) -> str:
    """``text`` as one shell word within a fenced block, which a backtick could end."""
    word = escape(text, _LONGEST_PATH).replace("`", "")
    return word if re.fullmatch(r"[\w/:@.+%=,-]+", word) else "'" + word.replace("'", "'\\''") + "'"
