"""The documents that the sample's base is trained on are what a user of it sends."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from _sample import corpus, tasks
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mtp_extract.data import sample_base

CODE = ["import os", "def main():", "    return os.name"] * 20


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


def test_capitals_and_digits_are_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer("QKZ41\n", add_special_tokens=False)["input_ids"]) == 6


def test_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    documents = corpus.documents(tokenizer, ["\n".join(CODE)], 64, 192, random.Random(2))
    drawn = [list(islice(corpus.batches(documents, 4, torch.Generator().manual_seed(3)), 17)) for _ in range(2)]
    assert all(torch.equal(a, b) for left, right in zip(*drawn, strict=True) for a, b in zip(left, right, strict=True))
    seen = [tuple(ids[weights > 0].tolist()) for batch in drawn[0][:16] for ids, weights in zip(*batch, strict=True)]
    assert sorted(seen) == sorted(document.ids for document in documents)
    for ids, weights in drawn[0]:
        assert bool((ids[:, 0] == corpus.BOS).all())
        assert ids.shape == weights.shape
