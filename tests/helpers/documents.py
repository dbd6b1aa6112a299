"""The pages that users read: their fenced blocks, the commands in them, what those printed, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = "…"
"""A line of a block that stands for any number of lines."""


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is that of its first line."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    at: Block
    text: str  # without the prompt, continued lines in one
    shown: tuple[str, ...] | None = None  # what the block says that it prints; None where it says nothing

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], found[3]) for found in _FENCE.finditer(text)]


def commands(block: Block) -> Iterator[Command]:
    """Those of a ``sh`` block, one a line; of a ``console`` block what follows ``$ ``, and under it what it prints."""
    text = re.sub(r" *\\\n *", " ", block.text)
    if block.language == "sh":
        yield from (Command(block, line) for line in text.splitlines() if shlex.split(line, comments=True))
    elif block.language == "console":
        before, *entered = re.split(r"^\$ ", text, flags=re.MULTILINE)
        assert not before, f"{block}: expected a prompt"
        for line, *shown in map(str.splitlines, entered):
            yield Command(block, line, tuple(shown))


def unlike(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """Where what a page shows is not what was printed; None where it is.

    Numbers that differ between machines (sums, differences in the last bits) are not compared.
    """
    pattern = "".join("(?:.*\n)*" if line == LEFT_OUT else re.escape(_plain(line)) + "\n" for line in shown)
    if re.fullmatch(pattern, "".join(_plain(line) + "\n" for line in printed)):
        return None
    return "shown:\n" + "\n".join(shown) + "\nprinted:\n" + "\n".join(printed)


def _plain(line: str) -> str:
    """Without what differs between machines and releases."""
    line = re.sub(r"\b[0-9a-f]{64}\b", "SUM", line)
    line = re.sub(r"[\d.]+e[-+]\d+", "SMALL", line)
    return re.sub(r" +", " ", line).rstrip()


def links(page: Path) -> list[str]:
    """Where the links and pictures of ``page`` lead."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "CODE", text))


def anchors(page: Path) -> set[str]:
    """Those of the headings of ``page``, as a code host and the site make them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
