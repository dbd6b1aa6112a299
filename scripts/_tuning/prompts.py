"""Prompts for a base that was trained on the Python standard library, and the same in another language."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["LAB", "prompts_of", "read", "translated"]

LAB = ("class Foo(object):", "def main():\n", "import os\n", '    """Return the ')
"""What transformers' own loop is run on; nothing is trained on these."""

_SHORTEST_FILE = 10
_LINES = (1, 2, 3)
_LONGEST = 120


def prompts_of(
    files: Mapping[str, str], count: int, seed: int = 0, change: Callable[[str], str] = str
) -> list[dict[str, str]]:
    """``count`` different prompts, each a few lines of one of ``files`` (by name), which is its source.

    Args:
        files: name → text.
        count: how many.
        seed: the same gives the same prompts.
        change: made of each.

    Raises:
        ValueError: there are not as many.
    """
    choice = random.Random(seed)
    lines = {name: text.splitlines(keepends=True) for name, text in sorted(files.items())}
    names = [name for name, found in lines.items() if len(found) >= _SHORTEST_FILE]
    taken = {text.strip() for text in LAB}
    rows: list[dict[str, str]] = []
    for _ in range(100 * count):
        if len(rows) == count:
            return rows
        name = choice.choice(names)
        first = choice.randrange(len(lines[name]) - max(_LINES))
        text = "".join(lines[name][first : first + choice.choice(_LINES)])[:_LONGEST]
        if text.strip() and text.strip() not in taken:
            taken.add(text.strip())
            rows.append({"prompt": change(text), "source": name, "workload": "standard library"})
    raise ValueError(f"expected {count} different prompts in {len(names)} files, found {len(rows)}")


_WORDS = {
    "def": "function",
    "self": "this",
    "None": "null",
    "True": "true",
    "False": "false",
    "and": "&&",
    "or": "||",
    "not": "!",
    "elif": "else if",
    "except": "catch",
    "raise": "throw",
    "import": "require",
    "class": "export class",
    "is": "===",
    "print": "console.log",
    "str": "String",
    "len": "size",
}
_SIGNS = ((":\n", " {\n"), ("#", "//"), ('"""', "/**"), ("'", '"'), ("    ", "  "))


def translated(code: str) -> str:
    """Python as if it were another language: words, signs, indentation, and names in camelCase. It need not run."""
    for sign, other in _SIGNS:
        code = code.replace(sign, other)
    code = re.sub(r"(?<=[a-z0-9])_([a-z])", lambda found: found[1].upper(), code)
    return re.sub(r"[A-Za-z]+", lambda found: _WORDS.get(found[0], found[0]), code)


def read(paths: list[Path], root: Path) -> dict[str, str]:
    """Texts by path below ``root``, without what is no UTF-8."""
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8", errors="ignore") for path in paths}
