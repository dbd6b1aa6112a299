"""Pairs that do not belong together, and prompts in every form: errors say what to do."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.random_pairs import Pair, random_base, random_drafter
from tokenizers.processors import TemplateProcessing

from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.loop import SpeculativeGenerator

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]


def reshape(pair: Pair, **changes: Any) -> tuple[Any, ...]:
    return pair.base, MtpDrafter(dataclasses.replace(pair.drafter.config, **changes))


def give_one_head(pair: Pair) -> tuple[Any, ...]:
    layers = tuple(dataclasses.replace(layer, num_kv_heads=1) for layer in pair.drafter.config.layers)
    return reshape(pair, layers=layers)


def change_base(pair: Pair, **config: Any) -> tuple[Any, ...]:
    base = random_base()
    vars(base.config).update(config)
    return base, pair.drafter


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(reshape, vocab_size=500), "vocabulary of 500, found 512. Give the base model"),
        (partial(reshape, backbone_hidden_size=60), "backbone width 60, found 64. Give the base"),
        (give_one_head, "sliding_attention: K and V of 1 head of 32, found 2 heads of 32"),
        (
            lambda pair: (random_base(layer_types=["full_attention"] * 5), random_drafter(random_base())),
            "K and V of type sliding_attention, found none",
        ),
        (lambda pair: (torch.nn.Linear(2, 2), pair.drafter), r"expected a Gemma 4 base model.*found Linear"),
        (partial(change_base, layer_types=["linear_attention", "full_attention"]), "found linear_attention"),
        (partial(change_base, _attn_implementation_internal="flash_attention_2"), "sdpa, found flash_attention_2"),
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


@pytest.mark.parametrize("messages", [HELLO, TURNS])
def test_messages_are_written_by_the_template(pair: Pair, messages: list[dict[str, str]]) -> None:
    official = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    result = pair.generator.generate(messages, max_new_tokens=4)
    assert result.prompt_tokens == tuple(official)
    assert result.prompt_tokens.count(pair.tokenizer.bos_token_id) == 1
    assert result.tokens == pair.alone(result.prompt_tokens, 4)


def test_parts_are_one_text_for_a_template_that_wants_a_string(pair: Pair) -> None:
    """And null is none; in Jinja they would be Python's own words for them."""
    codec = pair.generator.codec
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert codec.encode([{"role": "user", "content": parts}]) == codec.encode([{"role": "user", "content": "hel\nlo"}])
    called = [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}]
    assert codec.encode(called) == codec.encode([*HELLO, {"role": "assistant", "content": ""}])
    for kind in ("image_url", "input_audio"):
        with pytest.raises(PairError, match=f"found: content with a part that is no text but {kind}"):
            codec.encode([{"role": "user", "content": [*parts, {"type": kind}]}])


def test_text_is_a_message_when_asked(pair: Pair) -> None:
    codec = pair.generator.codec
    assert codec.encode("hello", chat_template=True) == codec.encode(HELLO)
    assert codec.encode("hello") == (2, *pair.tokenizer("hello")["input_ids"])
    assert pair.generator.generate("hello", chat_template=True, max_new_tokens=1).prompt_tokens == codec.encode(HELLO)


def test_text_begins_with_one_bos_whatever_the_tokenizer_does(pair: Pair) -> None:
    plain = Codec(pair.tokenizer, 512)
    opening = copy.deepcopy(pair.tokenizer)
    opening.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    ids = tuple(pair.tokenizer("hello")["input_ids"])
    for codec in (plain, Codec(opening, 512)):
        assert codec.encode("hello") == codec.encode("<bos>hello") == (2, *ids)
        assert codec.encode((2, *ids)) == (2, *ids)
        assert codec.encode(ids) == ids
        assert codec.encode(HELLO).count(2) == 1
        assert codec.encode_continuation("hello") == ids


def test_messages_that_cannot_be_written(pair: Pair) -> None:
    with pytest.raises(PairError, match="expected a tokenizer with a chat template for messages"):
        Codec(None, 512).encode(HELLO)
    strict = copy.deepcopy(pair.tokenizer)
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{% for", "{{ 'a' + 1 }}"):
        strict.chat_template = template
        with pytest.raises(PairError, match="expected messages that the base's chat template takes, found: ") as caught:
            Codec(strict, 512).encode(HELLO)
        assert len(str(caught.value)) < 500
    strict.chat_template = None
    with pytest.raises(PairError, match="expected a tokenizer with a chat template for messages"):
        Codec(strict, 512).encode(HELLO)


def test_ids_are_taken_as_given(pair: Pair) -> None:
    given: Any = torch.tensor([2, 3])
    assert pair.generator.generate(given, max_new_tokens=2).prompt_tokens == (2, 3)
    for odd in (-1, 512):
        with pytest.raises(PairError, match=f"expected tokens below 512, found {odd}"):
            pair.generator.generate([2, odd])
