"""Prompts in every form, stop strings wherever they fall, and streams that join to the text."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from helpers.random_pairs import Pair
from tokenizers.processors import TemplateProcessing

from mtp_extract.errors import MtpExtractError, PairError
from mtp_extract.speculate.adaptive import AdaptiveDrafts, DraftLength
from mtp_extract.speculate.codec import Codec, Encoded
from mtp_extract.speculate.generate import Options
from mtp_extract.speculate.sampling import Sampling

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
TOKENS = 60


@pytest.mark.parametrize("messages", [HELLO, TURNS])
def test_messages_are_written_by_the_template(pair: Pair, messages: list[dict[str, str]]) -> None:
    official = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    result = pair.generator.generate(messages, max_new_tokens=4)
    assert result.prompt_tokens == tuple(official)
    assert (result.bos, result.prompt_tokens.count(pair.tokenizer.bos_token_id)) == ("template", 1)
    assert result.tokens == pair.alone(result.prompt_tokens, 4)


def test_text_is_a_message_when_asked(pair: Pair) -> None:
    generator = pair.generator
    asked = generator.generate("hello", chat_template=True, max_new_tokens=4)
    assert asked.prompt_tokens == generator.generate(HELLO, max_new_tokens=4).prompt_tokens
    assert asked.bos == "template"
    assert generator.generate("hello", max_new_tokens=4).prompt_tokens == tuple(pair.tokenizer("hello")["input_ids"])
    [streamed, *_] = generator.stream("hello", Options(max_new_tokens=4, chat_template=True))
    assert streamed.tokens == asked.tokens[:1]


def test_bos_is_as_the_tokenizer_says_and_once(pair: Pair) -> None:
    plain = Codec(pair.tokenizer, 512)
    opening = copy.deepcopy(pair.tokenizer)
    opening.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    ids = tuple(pair.tokenizer("hello")["input_ids"])
    assert plain.encode("hello") == Encoded(ids, None)
    for codec in (plain, Codec(opening, 512)):
        assert codec.encode("<bos>hello") == Encoded((2, *ids), "prompt")
        assert codec.encode((2, *ids)) == Encoded((2, *ids), "prompt")
        assert codec.encode(ids) == Encoded(ids, None)
        assert codec.encode(HELLO).tokens.count(2) == 1
    assert Codec(opening, 512).encode("hello") == Encoded((2, *ids), "tokenizer")


TEMPLATES = {
    "a loop in a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a sum that is never done": "{{ 9 ** (9 ** 9) }}",
    "a text that doubles": "{% set n = namespace(t=9) %}{% for a in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "more than there is room for": "{{ 'a' * 99999999999 }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a range that is refused": "{% for a in range(10 ** 9) %}{% endfor %}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_does_not_end(pair: Pair, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a program, which its writer may have made to hang."""
    monkeypatch.setattr("mtp_extract.speculate.codec._SECONDS", 1)
    endless = copy.deepcopy(pair.tokenizer)
    endless.chat_template = TEMPLATES[case]
    with pytest.raises(PairError, match="expected messages that the base's chat template takes, found: ") as caught:
        Codec(endless, 512).encode_all(["hello", HELLO], chat_template=True)
    assert len(str(caught.value)) < 500


def test_a_template_changes_nothing_here(pair: Pair) -> None:
    """It is applied in another process: to all prompts in one."""
    written: list[object] = []
    codec = Codec(copy.deepcopy(pair.tokenizer), 512)
    apply = codec.tokenizer.apply_chat_template
    codec.tokenizer.apply_chat_template = lambda *a, **k: (written.append(a), f"{len(written)} {apply(*a, **k)}")[1]
    found = codec.encode_all([HELLO, [2, 3], "hello", HELLO, Encoded((5,), None)])
    assert written == []
    assert [found[1].tokens, found[4].tokens] == [(2, 3), (5,)]
    assert codec.decode(found[0].tokens[:1]) == "1"
    assert codec.decode(found[3].tokens[:1]) == "2"


def test_messages_that_cannot_be_written(pair: Pair) -> None:
    codec = Codec(pair.tokenizer, 512)
    with pytest.raises(PairError, match=r"expected messages with role and content, found \{'role': 'user'\}"):
        codec.encode([{"role": "user"}])
    with pytest.raises(PairError, match="expected messages with role and content, found 7"):
        codec.encode([*HELLO, 7])  # type: ignore[list-item]
    with pytest.raises(PairError, match="expected a tokenizer for messages, found none"):
        Codec(None, 512).encode(HELLO)
    strict = copy.deepcopy(pair.tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PairError, match="takes, found: roles must alternate"):
        Codec(strict, 512).encode(HELLO)
    strict.chat_template = None
    with pytest.raises(PairError, match="expected a tokenizer with a chat template for messages"):
        Codec(strict, 512).encode(HELLO)
    with pytest.raises(PairError, match="expected a tokenizer with a chat template"):
        Codec(strict, 512).encode("hello", chat_template=True)


def test_fractions_are_no_tokens(pair: Pair) -> None:
    for ids in ([2.5], [float("nan")], [True], ["2"], [-1]):
        with pytest.raises(MtpExtractError, match="expected a token to be a whole number of at least 0"):
            pair.generator.generate(ids)  # type: ignore[arg-type]
    assert pair.generator.generate(torch.tensor([2, 3]), max_new_tokens=2).prompt_tokens == (2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_a_stop_string_ends_the_text_wherever_it_falls(pair: Pair, drafts: int) -> None:
    """Inside a token, over several, at the first one: the text ends before it, the tokens with it."""
    generator, prompt = pair.generator, pair.prompts()[1]
    tokens = pair.alone(prompt, TOKENS)
    whole = pair.tokenizer.decode(tokens)
    spans = set()
    for at in range(0, len(whole) - 8, 5 if drafts == 4 else 11):
        stop = whole[at : at + 1 + at % 6]
        first = whole.index(stop)
        needed = next(n for n in range(1, TOKENS + 1) if stop in pair.tokenizer.decode(tokens[:n]))
        begun = next(n for n in range(1, TOKENS + 1) if len(pair.tokenizer.decode(tokens[:n])) > first)
        spans.add(needed - begun)
        options = Options(max_new_tokens=TOKENS, drafts=drafts, stop=["never", stop])
        [result] = generator.generate_batch([prompt], options)
        assert (result.text, result.tokens) == (whole[:first], tokens[:needed])
        assert result.finish_reason == "stop"
        assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds)
        assert "".join(chunk.text for chunk in generator.stream(prompt, options)) == result.text
    assert len(spans) > 2, "stop strings of one token and of several"


def test_a_stop_string_that_never_comes_is_given_out(pair: Pair) -> None:
    """A beginning is held back; when something else follows, or nothing, it is text."""
    generator, prompt = pair.generator, pair.prompts()[0]
    whole = generator.generate(prompt, max_new_tokens=TOKENS)
    assert whole.text is not None
    options = Options(max_new_tokens=TOKENS, stop=whole.text[-3:] + "!")
    chunks = list(generator.stream(prompt, options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].text.endswith(whole.text[-3:])


def test_a_special_token_stops_by_its_name(pair: Pair) -> None:
    generator = pair.generator
    logits = generator.base.logits

    def turning(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden)
        out[..., 6] = 1e3
        return out

    generator.base.logits = turning  # type: ignore[method-assign]
    name = pair.tokenizer.convert_ids_to_tokens(6)
    result = generator.generate(pair.prompts()[0], stop=name, stop_token_ids=[])
    assert (result.tokens, result.text, result.finish_reason) == ((6,), "", "stop")


def test_stop_strings_need_a_tokenizer(pair: Pair) -> None:
    bare = type(pair.generator)(pair.base, pair.drafter)
    with pytest.raises(PairError, match="expected a tokenizer for stop strings"):
        bare.generate([2, 3], stop="x")


def byte_fallback() -> Any:
    """As Gemma's: pieces, and what is none of them in single bytes, a run of which is shown as one."""
    pieces = ["<unk>", "<eos>", *(f"<0x{n:02X}>" for n in range(256)), "▁a", "b", "é", "▁", "\n", ",", "▁,"]
    model = tokenizers.models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", clean_up_tokenization_spaces=True
    )


def byte_level() -> Any:
    """As GPT-2's: every piece is a string of bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<eos>", *alphabet, *(a + b for a, b in itertools.pairwise(alphabet))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_what_is_settled_stays(make: Any) -> None:
    """Random tokens, half of them bytes of real characters: nothing that was given out is ever taken back."""
    tokenizer = make()
    codec = Codec(tokenizer, len(tokenizer))
    numbers = random.Random(0)
    spelled = "äß€🙂한\n, a"
    table = tokenizer.get_vocab()
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = 0
    for _ in range(400):
        tokens: list[int] = []
        while len(tokens) < 24:
            if numbers.random() < 0.6:
                character = numbers.choice(spelled)
                fallback = [f"<0x{byte:02X}>" for byte in character.encode()]
                names = fallback if make is byte_fallback else level.pre_tokenize_str(character)[0][0]
                tokens += [table[name] for name in names]
            else:
                tokens.append(numbers.randrange(len(tokenizer)))
        stop = [numbers.choice(["ab", "🙂\n", ", a", "zzz"])]
        end = next((n for n in range(1, len(tokens) + 1) if codec.ended(tokens[:n], stop)), len(tokens))
        whole = codec.decode(tokens[:end], stop)
        assert whole is not None
        given = ""
        for n in range(1, end):
            settled = codec.settled(tokens[:n], stop)
            assert settled.startswith(given)
            given = settled
        assert whole.startswith(given)
        shown += len(given)
    assert shown > 400, "not all is held back"


@pytest.mark.parametrize("temperature", [1e-8, 1e-38, 1e-45, 5e-324])
def test_near_zero_is_greedy(pair: Pair, temperature: float) -> None:
    prompt = pair.prompts()[0]
    expected = pair.alone(prompt, 30)
    for more in ({}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}):
        result = pair.generator.generate(prompt, max_new_tokens=30, temperature=temperature, **more)
        assert result.tokens == expected


def test_cold_and_warm_meet() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 0.01
    cold, warm = (Sampling(t).probabilities(logits) for t in (9.999e-4, 1.0001e-3))
    torch.testing.assert_close(cold, warm, atol=2e-3, rtol=0)
    assert torch.isfinite(Sampling(1e-45).probabilities(logits * 1e30)).all()


@pytest.mark.parametrize("wrong", [2.5, float("nan"), float("inf"), -1, "3", None, True, 1e3])
def test_counts_are_whole_numbers(wrong: Any) -> None:
    makes = [
        lambda: Options(max_new_tokens=wrong),
        lambda: Options(drafts=wrong),
        lambda: Options(stop_token_ids=[wrong]),
        lambda: AdaptiveDrafts(most=wrong),
        lambda: AdaptiveDrafts(least=wrong),
        lambda: DraftLength(wrong),
        *([lambda: Sampling(1.0, top_k=wrong)] if wrong is not None else []),
    ]
    for make in makes:
        with pytest.raises(MtpExtractError, match=r"expected .* to be a whole number of at least"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Options(max_new_tokens=0),
        lambda: Options(seed=0.5),
        lambda: Options(stop=""),
        lambda: Options(stop=["a", ""]),
        lambda: Options(stop=[3]),
        lambda: Options(stop_token_ids="ab"),
        lambda: Options(stop_token_ids=5),
        lambda: Sampling("warm"),
        lambda: Sampling(1.0, top_p="all"),
        lambda: Sampling(float("nan")),
        lambda: Sampling(1.0, top_p=float("nan")),
    ],
)
def test_other_options_out_of_range(make: Any) -> None:
    with pytest.raises(MtpExtractError, match="expected"):
        make()


def test_any_whole_seed(pair: Pair) -> None:
    for seed in (-5, 0, 1 << 62, 1 << 80):
        drawn = [pair.generator.generate((2, 3), max_new_tokens=3, temperature=1, seed=seed) for _ in range(2)]
        assert drawn[0].tokens == drawn[1].tokens
        assert len(drawn[0].tokens) == 3 or drawn[0].finish_reason == "stop"
