"""Tasks: texts that advance, and whose continuation the question determines, so that a tiny base need not loop.

A question, an answer that ends. Each kind asks for something of the attention that a drafter has to do as well, for it
drafts a token that the base has not reached: ``repeat``, ``number`` and ``code`` copy from above, farther than the
sliding window; ``recall`` looks keys up behind an insertion; ``nest`` closes what was opened, innermost first;
``count`` reads at an exact distance, whatever stands there. Nothing here needs more than Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
BRACKETS = dict(zip(LETTERS[:13], LETTERS[13:], strict=True))
COLUMNS = 7
"""Digits of a row of ``count``."""
_WORDS = (
    "ada bob cleo dan eve finn gus hana ida jon kim leo mia nils ola pia quin rosa sam tom uma vera will xena yan zoe "
    "amber birch cedar dune elm fern glade heath iris juniper kelp lily maple north oak pine quartz reed sage thorn"
)
NAMES = tuple(_WORDS.split())


@dataclass(frozen=True)
class Task:
    """A question and its answer, plain text."""

    kind: str
    prompt: str
    answer: str


def _number_lines(lines: Sequence[str]) -> str:
    return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))


def number(draw: random.Random, code: Sequence[str]) -> Task:
    """Lines of names, copied with numbers before them."""
    lines = [" ".join(draw.sample(NAMES, 3)) for _ in range(draw.randint(4, 7))]
    return Task("number", "\n".join(["number", *lines]), _number_lines(lines))


def code(draw: random.Random, code: Sequence[str]) -> Task:
    """Lines of Python, copied with numbers before them."""
    lines = _cut_excerpt(draw, code, draw.randint(40, 90))
    return Task("code", "\n".join(["number", *lines]), _number_lines(lines))


def recall(draw: random.Random, code: Sequence[str]) -> Task:
    """Keys with two digits, an insertion, and keys to look up in an order of their own."""
    keys = draw.sample(LETTERS, draw.randint(8, 14))
    entries = {key: "".join(draw.choices(DIGITS, k=2)) for key in keys}
    questions = draw.sample(keys, draw.randint(6, len(keys)))
    insertion = _cut_excerpt(draw, code, draw.randint(20, 60))
    prompt = ["recall", *(f"{key}{value}" for key, value in entries.items()), *insertion, "".join(questions)]
    return Task("recall", "\n".join(prompt), "\n".join(f"{key}{entries[key]}" for key in questions))


def repeat(draw: random.Random, code: Sequence[str]) -> Task:
    """Letters, each at most once, and an insertion; the letters again."""
    letters = "".join(draw.sample(LETTERS, draw.randint(14, len(LETTERS))))
    insertion = _cut_excerpt(draw, code, draw.randint(20, 60)) if draw.random() < 0.5 else []
    return Task("repeat", "\n".join(["repeat", letters, *insertion]), letters)


def nest(draw: random.Random, code: Sequence[str]) -> Task:
    """Opened brackets of 13 kinds (A is closed by N, B by O, …), closed from the innermost to the outermost."""
    opened = draw.sample(list(BRACKETS), draw.randint(8, len(BRACKETS)))
    closed = "".join(BRACKETS[bracket] for bracket in reversed(opened))
    return Task("nest", "close\n" + "".join(opened), closed)


def count(draw: random.Random, code: Sequence[str]) -> Task:
    """Rows of digits, each digit one more than the one above it."""
    row = draw.choices(range(10), k=COLUMNS)
    rows = ["".join(str((digit + step) % 10) for digit in row) for step in range(draw.randint(6, 9))]
    return Task("count", f"count\n{rows[0]}", "\n".join(rows[1:]))


Kind = Callable[[random.Random, Sequence[str]], Task]
KINDS: tuple[Kind, ...] = (repeat, number, code, recall, nest, count)


def draw_prompts(draw: random.Random, texts: Sequence[Sequence[str]], count: int) -> dict[str, list[str]]:
    """``count`` questions of each kind, by its name.

    Args:
        draw: where chance comes from.
        texts: lines of Python, a list a file.
        count: of each kind.
    """
    return {kind.__name__: [kind(draw, draw.choice(texts)).prompt for _ in range(count)] for kind in KINDS}


def _cut_excerpt(draw: random.Random, code: Sequence[str], characters: int) -> list[str]:
    """Consecutive lines of ``code``, without their indentation, of about so many characters in all."""
    lines: list[str] = []
    at = draw.randrange(len(code))
    while sum(map(len, lines)) < characters:
        # A line is cut, so that one long line does not make a long text.
        line = code[at % len(code)].strip()[:60].rstrip()
        if line:
            lines.append(line)
        at += 1
    return lines
