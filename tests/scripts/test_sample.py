"""``scripts/build_sample.py``: what its base is trained on, and what it made.

Answers are right, far from what they repeat, and no loops; documents are what a user of the base sends; the sample has
Google's names on the drafter, and a shape that every engine loads.
"""

from __future__ import annotations

import random
import re
from itertools import islice, pairwise
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
    documents = corpus.documents(tokenizer, ["\n".join(CODE)], 64, 192, random.Random(2))
    drawn = [list(islice(corpus.batches(documents, 4, torch.Generator().manual_seed(3)), 17)) for _ in range(2)]
    assert all(torch.equal(a, b) for left, right in zip(*drawn, strict=True) for a, b in zip(left, right, strict=True))
    seen = [tuple(ids[weights > 0].tolist()) for batch in drawn[0][:16] for ids, weights in zip(*batch, strict=True)]
    assert sorted(seen) == sorted(document.ids for document in documents)
    for ids, weights in drawn[0]:
        assert bool((ids[:, 0] == corpus.BOS).all())
        assert ids.shape == weights.shape


def _names(bundle: Path) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """By role, what the constant is called, and the result of the norm's composite that reads it."""
    with mtp_extract.open(bundle) as opened:
        roles = opened.drafter().walk.roles
        return {role.role: (role.tensor.name if role.tensor else None, role.known_as[-1:]) for role in roles}


def test_its_names_are_those_that_jax2tf_wrote(sample: Path) -> None:
    """The first pair was exported as the published drafters were. Layer scalars have no name of their own there."""
    expected, found = _names(sample), _names(sample_bundle())
    scalars = {role for role in expected if role.endswith("layer_scalar")}
    assert {role: names for role, names in found.items() if role not in scalars} == {
        role: names for role, names in expected.items() if role not in scalars
    }
    with mtp_extract.open(sample_bundle()) as opened:
        assert set(opened.drafter().names.unrecognised) == scalars
        assert len(opened.drafter().names.confirmed) == 44


def test_llama_cpp_loads_it() -> None:
    """It refuses a drafter as wide as its base, and its blocks hold 32 weights of a row."""
    with mtp_extract.open(sample_bundle()) as opened:
        config = opened.drafter().config
    assert config.backbone_hidden_size > config.hidden_size
    assert config.hidden_size % 32 == 0
