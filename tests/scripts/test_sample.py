"""``scripts/build_sample.py``: what its base is trained on, and what it made.

Answers are right, far from what they repeat, and no loops; documents are what a user of the base sends; the sample has
Google's names on the drafter, and a shape that every engine loads.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from _sample import corpus, tasks
from _sample.tasks import KINDS, Task
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle

CODE = [
    line for path in sorted(Path(tasks.__file__).parent.glob("*.py")) for line in path.read_text("utf-8").splitlines()
]
WINDOW = 16
"""Of the base and drafter that build_sample.py makes."""


def made(kind: str) -> list[Task]:
    draw = random.Random(5)
    (function,) = (function for function in KINDS if function.__name__ == kind)
    return [function(draw, CODE) for _ in range(50)]


@pytest.mark.parametrize("kind", [function.__name__ for function in KINDS])
def test_a_seed_decides(kind: str) -> None:
    assert made(kind) == made(kind)
    assert len({task.prompt for task in made(kind)}) > 45
    assert {task.kind for task in made(kind)} == {kind}


def numbered(lines: list[str]) -> str:
    return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))


def recalled(lines: list[str]) -> str:
    values = {line[0]: line for line in lines[:-1] if re.fullmatch(r"[A-Z]\d\d", line)}
    return "\n".join(values[key] for key in lines[-1])


SOLVED: dict[str, Callable[[list[str]], str]] = {
    "repeat": lambda lines: lines[0],
    "number": numbered,
    "code": numbered,
    "recall": recalled,
    "nest": lambda lines: "".join(tasks.BRACKETS[bracket] for bracket in reversed(lines[0])),
    "count": lambda lines: "".join(str((int(digit) + 1) % 10) for digit in lines[0]),
}
"""By kind of task, the answer; of ``count`` its first row."""


@pytest.mark.parametrize("kind", SOLVED)
def test_an_answer_solves_its_task(kind: str) -> None:
    for task in made(kind):
        lines, rows = task.prompt.splitlines()[1:], task.answer.splitlines()
        if kind == "count":
            assert rows == [SOLVED[kind]([above]) for above in (lines[0], *rows[:-1])]
        else:
            assert task.answer == SOLVED[kind](lines)


def test_keys_are_recalled_from_beyond_the_window() -> None:
    distances = []
    for task in made("recall"):
        for answer in task.answer.splitlines():
            since = task.prompt[task.prompt.index(f"\n{answer}\n") + 1 :] + task.answer[: task.answer.index(answer)]
            # Capitals, digits and ends of lines are tokens of their own; whatever else there is makes it more.
            distances.append(len(re.findall(r"[A-Z0-9\n]", since)))
    assert sum(distance > WINDOW for distance in distances) > 0.95 * len(distances)
    assert max(distances) > 4 * WINDOW


@pytest.mark.parametrize("kind", ["repeat", "number", "recall", "nest", "count"])
def test_no_answer_is_a_loop(kind: str) -> None:
    runs = [[task.answer[at : at + 8] for at in range(len(task.answer) - 7)] for task in made(kind)]
    assert sum(len(run) - len(set(run)) for run in runs) < 0.1 * sum(map(len, runs))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    read = AutoTokenizer.from_pretrained(sample_base())
    assert isinstance(read, PreTrainedTokenizerFast)
    return read


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_a_task_is_a_turn_of_a_chat(tokenizer: PreTrainedTokenizerFast, kind: tasks.Kind) -> None:
    task = kind(random.Random(1), CODE)
    document = corpus.encode_task(tokenizer, task)
    messages = [{"role": "user", "content": task.prompt}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = document.ids[len(asked) :]
    assert list(document.ids[: len(asked)]) == asked
    assert tokenizer.decode(list(answer[:-2])) == task.answer
    assert answer[-2:] == (corpus.TURN_END, corpus.EOS)
    assert document.weights == (corpus.QUESTION_WEIGHT,) * len(asked) + (1.0,) * len(answer)


def test_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    documents = corpus.draw_documents(tokenizer, ["\n".join(CODE)], 64, 192, random.Random(2))
    drawn = [list(islice(corpus.draw_batches(documents, 4, torch.Generator().manual_seed(3)), 17)) for _ in range(2)]
    assert all(torch.equal(a, b) for left, right in zip(*drawn, strict=True) for a, b in zip(left, right, strict=True))
    seen = [tuple(ids[weights > 0].tolist()) for batch in drawn[0][:16] for ids, weights in zip(*batch, strict=True)]
    assert sorted(seen) == sorted(document.ids for document in documents)
    for ids, weights in drawn[0]:
        assert bool((ids[:, 0] == corpus.BOS).all())
        assert ids.shape == weights.shape


def _names(bundle: Path) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """By role, what the constant is called, and the result of the norm's composite that reads it."""
    with mtp_extract.open(bundle) as opened:
        roles = opened.read_drafter().structure.roles
        return {role.role: (role.tensor.name if role.tensor else None, role.known_as[-1:]) for role in roles}


def test_its_names_are_those_that_jax2tf_wrote(sample: Path) -> None:
    """The first pair was exported as the published drafters were. Layer scalars have no name of their own there."""
    expected, found = _names(sample), _names(sample_bundle())
    scalars = {role for role in expected if role.endswith("layer_scalar")}
    assert {role: names for role, names in found.items() if role not in scalars} == {
        role: names for role, names in expected.items() if role not in scalars
    }
    with mtp_extract.open(sample_bundle()) as opened:
        assert set(opened.read_drafter().names.unrecognised) == scalars
        assert len(opened.read_drafter().names.confirmed) == 44


def test_llama_cpp_loads_it() -> None:
    """It refuses a drafter as wide as its base, and its blocks hold 32 weights of a row."""
    with mtp_extract.open(sample_bundle()) as opened:
        config = opened.read_drafter().config
    assert config.backbone_hidden_size > config.hidden_size
    assert config.hidden_size % 32 == 0
