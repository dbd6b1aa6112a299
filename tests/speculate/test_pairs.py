"""Pairs that do not belong together, and prompts that cannot be fed: errors that say what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.random_pairs import Pair, random_base, random_drafter

from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base, check_pair


def drafter_like(pair: Pair, **changes: Any) -> MtpDrafter:
    return MtpDrafter(dataclasses.replace(pair.drafter.config, **changes))


def test_the_sample_fits(pair: Pair) -> None:
    check_pair(pair.generator.base, pair.drafter, pair.tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 500}, "vocabulary of 500, found 512; give the base model"),
        ({"backbone_hidden_size": 60}, "backbone width 60, found 64; give the base"),
    ],
)
def test_vocabulary_and_width(pair: Pair, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PairError, match=message):
        SpeculativeGenerator(pair.base, drafter_like(pair, **changes), pair.tokenizer)


def test_shape_of_k_and_v(pair: Pair) -> None:
    layers = tuple(dataclasses.replace(layer, num_kv_heads=1) for layer in pair.drafter.config.layers)
    with pytest.raises(PairError, match="sliding_attention: K and V of 1 heads of 32, found 2 heads of 32"):
        SpeculativeGenerator(pair.base, drafter_like(pair, layers=layers))


def test_a_base_without_the_layer_type() -> None:
    base = random_base(layer_types=["full_attention"] * 5)
    drafter = random_drafter(random_base())
    with pytest.raises(PairError, match="K and V of type sliding_attention, found none"):
        SpeculativeGenerator(base, drafter)


def test_a_drafter_in_place_of_the_base(pair: Pair) -> None:
    from transformers import AutoConfig, Gemma4AssistantForCausalLM

    text = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "vocab_size": 512}
    text |= {"hidden_size": 64, "intermediate_size": 64, "hidden_size_per_layer_input": 0, "head_dim": 8}
    text |= {"vocab_size_per_layer_input": 0, "num_attention_heads": 4, "num_kv_shared_layers": 2}
    config = AutoConfig.for_model("gemma4_assistant", text_config={"model_type": "gemma4_text", **text})
    with pytest.raises(PairError, match="K and V of type sliding_attention, found none"):
        SpeculativeGenerator(Gemma4AssistantForCausalLM(config), pair.drafter)


def test_something_else_in_place_of_the_base(pair: Pair) -> None:
    with pytest.raises(PairError, match=r"expected a Gemma 4 base model.*found Linear"):
        SpeculativeGenerator(torch.nn.Linear(2, 2), pair.drafter)


def test_other_layer_types() -> None:
    base = random_base()
    base.config.layer_types = ["linear_attention", *base.config.layer_types[1:]]
    with pytest.raises(PairError, match="found linear_attention"):
        Base(base)


def test_attention_without_masks() -> None:
    base = random_base()
    base.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(PairError, match=r"found flash_attention_2.*attn_implementation='sdpa'"):
        Base(base)


def test_tokenizer_of_another_model(pair: Pair) -> None:
    class Large:
        def __len__(self) -> int:
            return 600

    with pytest.raises(PairError, match="tokenizer of at most 512 tokens, found 600; give the base model's own"):
        SpeculativeGenerator(pair.base, pair.drafter, Large())


def test_prompts(pair: Pair) -> None:
    generator = SpeculativeGenerator(pair.base, pair.drafter)
    with pytest.raises(PairError, match="expected a tokenizer for text, found none"):
        generator.generate("text")
    with pytest.raises(PairError, match="expected a prompt of at least one token"):
        generator.generate([])
    with pytest.raises(PairError, match="expected tokens below 512, found 512"):
        generator.generate([3, 512])
    result = generator.generate([2, 3], max_new_tokens=5)
    assert result.text is None
    assert len(result.tokens) == 5
