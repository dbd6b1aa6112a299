"""What the sample's base is trained on: answers are right, far from what they repeat, and no loops."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from _sample import tasks
from _sample.tasks import KINDS, Task

CODE = [
    line for path in sorted(Path(tasks.__file__).parent.glob("*.py")) for line in path.read_text("utf-8").splitlines()
]
WINDOW = 16
"""Of the base and drafter that build_sample.py makes."""


def made(kind: str, count: int = 50) -> list[Task]:
    draw = random.Random(5)
    (function,) = (function for function in KINDS if function.__name__ == kind)
    return [function(draw, CODE) for _ in range(count)]


def fewest_tokens(text: str) -> int:
    """Capitals, digits and ends of lines are tokens of their own; whatever else there is makes it more."""
    return len(re.findall(r"[A-Z0-9\n]", text))


@pytest.mark.parametrize("kind", [function.__name__ for function in KINDS])
def test_a_seed_decides(kind: str) -> None:
    assert made(kind) == made(kind)
    assert len({task.prompt for task in made(kind)}) > 45
    assert {task.kind for task in made(kind)} == {kind}


def test_letters_are_repeated() -> None:
    for task in made("repeat"):
        assert task.answer == task.prompt.splitlines()[1]
        assert len(set(task.answer)) == len(task.answer) >= 14


@pytest.mark.parametrize("kind", ["number", "code"])
def test_lines_are_numbered(kind: str) -> None:
    for task in made(kind):
        lines = task.prompt.splitlines()[1:]
        assert task.answer.splitlines() == [f"{index + 1} {line}" for index, line in enumerate(lines)]
    assert all(line in " ".join(map(str.strip, CODE)) for task in made("code") for line in task.prompt.splitlines()[1:])


def test_keys_are_recalled_from_beyond_the_window() -> None:
    distances = []
    for task in made("recall"):
        *_, asked = task.prompt.splitlines()
        found = dict(re.findall(r"^([A-Z])(\d\d)$", task.prompt, re.MULTILINE))
        assert task.answer == "\n".join(key + found[key] for key in asked)
        for key in asked:
            before = task.prompt[task.prompt.index(f"\n{key}{found[key]}\n") + 1 :]
            distances.append(fewest_tokens(before) + fewest_tokens(task.answer[: task.answer.index(key)]))
    assert sum(distance > WINDOW for distance in distances) > 0.95 * len(distances)
    assert max(distances) > 4 * WINDOW


def test_what_was_opened_last_is_closed_first() -> None:
    for task in made("nest"):
        opened = list(task.prompt.splitlines()[1])
        for bracket in task.answer:
            assert tasks.BRACKETS[opened.pop()] == bracket
        assert not opened


def test_rows_count_within_the_window() -> None:
    for task in made("count"):
        rows = [task.prompt.splitlines()[1], *task.answer.splitlines()]
        for above, row in pairwise(rows):
            assert [(int(digit) + 1) % 10 for digit in above] == [int(digit) for digit in row]
        assert len(rows[0]) + 1 < WINDOW


@pytest.mark.parametrize("kind", ["repeat", "number", "recall", "nest", "count"])
def test_no_answer_is_a_loop(kind: str) -> None:
    runs = [[task.answer[at : at + 8] for at in range(len(task.answer) - 7)] for task in made(kind)]
    assert sum(len(run) - len(set(run)) for run in runs) < 0.1 * sum(map(len, runs))


def test_prompts_are_questions_of_every_kind() -> None:
    found = tasks.prompts(random.Random(3), [CODE], 4)
    assert list(found) == [function.__name__ for function in KINDS]
    assert all(len(set(questions)) == 4 for questions in found.values())
    assert found == tasks.prompts(random.Random(3), [CODE], 4)
