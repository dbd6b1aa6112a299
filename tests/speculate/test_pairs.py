"""Pairs that do not belong together, and prompts that cannot be fed: errors that say what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.random_pairs import Pair, random_base, random_drafter

from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError
from mtp_extract.speculate.loop import SpeculativeGenerator


def shaped(**changes: Any) -> Callable[[Pair], tuple[Any, ...]]:
    return lambda pair: (pair.base, MtpDrafter(dataclasses.replace(pair.drafter.config, **changes)))


def one_head(pair: Pair) -> tuple[Any, ...]:
    layers = tuple(dataclasses.replace(layer, num_kv_heads=1) for layer in pair.drafter.config.layers)
    return shaped(layers=layers)(pair)


def odd_base(**config: Any) -> Callable[[Pair], tuple[Any, ...]]:
    def make(pair: Pair) -> tuple[Any, ...]:
        base = random_base()
        vars(base.config).update(config)
        return base, pair.drafter

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shaped(vocab_size=500), "vocabulary of 500, found 512. Give the base model"),
        (shaped(backbone_hidden_size=60), "backbone width 60, found 64. Give the base"),
        (one_head, "sliding_attention: K and V of 1 heads of 32, found 2 heads of 32"),
        (
            lambda pair: (random_base(layer_types=["full_attention"] * 5), random_drafter(random_base())),
            "K and V of type sliding_attention, found none",
        ),
        (lambda pair: (torch.nn.Linear(2, 2), pair.drafter), r"expected a Gemma 4 base model.*found Linear"),
        (odd_base(layer_types=["linear_attention", "full_attention"]), "found linear_attention"),
        (odd_base(_attn_implementation_internal="flash_attention_2"), "sdpa, found flash_attention_2"),
    ],
)
def test_what_does_not_fit_is_refused(pair: Pair, make: Callable[[Pair], tuple[Any, ...]], message: str) -> None:
    with pytest.raises(PairError, match=message):
        SpeculativeGenerator(*make(pair))


def test_without_a_tokenizer(pair: Pair) -> None:
    generator = SpeculativeGenerator(pair.base, pair.drafter)
    for prompt, message in (("text", "expected a tokenizer for text, found none"), ([], "at least one token")):
        with pytest.raises(PairError, match=message):
            generator.generate(prompt)  # type: ignore[arg-type]
    result = generator.generate([2, 3], max_new_tokens=5)
    assert result.text is None and len(result.tokens) == 5
